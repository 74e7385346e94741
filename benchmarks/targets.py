"""Targets of all benchmarks. `docs/performance.md` lists the targets with the measured values."""

from __future__ import annotations

# --- ops whose speed is limited by memory bandwidth ---

OF_COPY = 0.92
"""Smallest accepted bandwidth, from 2^26 elements on, divided by the bandwidth of a copy of the same number of
bytes."""
NORM_OVER_QUACK = 1.15
ADD_NORM_OVER_QUACK = 1.2
"""Largest accepted time for few rows, divided by the time of QuACK's rmsnorm. QuACK does not quantise. Ops with a
residual are compared with QuACK's rmsnorm with a residual."""
FP4_OVER_INDUCTOR = 5.0
FP8_OVER_INDUCTOR = 2.0
FP8_DECODE_OVER_INDUCTOR = 1.0
"""Smallest speedup over the composition compiled by Inductor."""
PER_TOKEN_OVER_PLAIN = 1.05
"""Largest accepted time of an op that computes a scale per row, divided by the time of the same op without row
scales."""

# --- steps of an expert layer ---

MOE_OF_COPY = 0.88
MOE_DECODE_US = 4.0
"""Largest time in µs with up to 64 tokens."""

# --- steps around attention ---

QKV_OF_COPY = 0.85
QKV_DECODE_US = 3.0
"""Largest time in µs with up to 64 rows, 32 heads of q and 8 heads of k and v."""
QKV_SAVED_US = 2.5
"""Smallest difference in µs to the time of separate steps, with up to 64 rows."""

# --- sums over GPUs ---

ALL_REDUCE_OVER_NCCL = {1: 0.6, 64: 0.7, 1024: 0.9}
"""Largest accepted time of `all_reduce_add_rmsnorm_fp4quant` on two GPUs, divided by the time of NCCL's all-reduce and
`add_rmsnorm_fp4quant`, by rows."""

LAYER_TP_OVER_NCCL = {1: 1.15, 64: 1.15}
"""Smallest speedup of a 70B decoder layer in W4A4 on two GPUs with `all_reduce_add_rmsnorm_fp4quant`, over the layer
with NCCL's all-reduce and `add_rmsnorm_fp4quant`, by rows."""

# --- FP4 GEMMs ---

FP4_DECODE_US = 42.0
"""Largest time in µs with up to 16 rows and a weight of 16,384 × 16,384."""
FP4_ABOVE_FLOOR_US = 3.5
"""Largest difference in µs between the time of a GEMM with one row and the time to read its bytes, with the weights of
a Llama 8B."""
FP4_FEW_ROWS_US = {(1, 4096, 14336): 11.2, (16, 4096, 4096): 7.0, (64, 4096, 4096): 9.5, (64, 4096, 14336): 21.0}
"""Largest time in µs by M, N, K."""
FEW_ROWS_OVER_FP4_PEER = 1.15
OVER_FP4_PEER = 1.0
"""Smallest accepted speedups over the fastest FP4 peer: the first with up to 64 rows, the second with more rows."""
OVER_CUBLAS_BF16 = 0.97
"""Smallest speedup over cuBLAS with bfloat16 operands, from 2,048 rows on."""
CHOICE_MEDIAN, CHOICE_LARGEST = 1.1, 1.25
"""Largest accepted time of "auto" divided by the time of our fastest backend. The first number limits the median over
all cases, and the second number limits the maximum."""
EXPERTS_US = {
    "top-8": {1: 5, 8: 18, 16: 29, 32: 45, 64: 61, 128: 68, 256: 72, 512: 85},
    "dense": {1: 69, 8: 69, 16: 69, 32: 76, 64: 98},
}
"""Largest time in µs of an expert layer's second GEMM, by routing and tokens."""
GATED_EXPERTS_US = {"top-8": {1: 9, 8: 38, 16: 62, 32: 95, 64: 128, 128: 148, 256: 172, 512: 235}}
"""Largest time in µs of an expert layer's first GEMM, with NVFP4 activations and results."""

# --- expert layers ---

EXPERT_LAYER_US = {1: 21, 8: 66, 16: 102, 32: 155, 64: 205, 128: 235, 256: 275, 512: 380}
"""Largest time in µs of DeepSeek-V3's layer with NVFP4 weights on one of eight GPUs, by tokens: routing and both GEMMs,
with activations in FP4 or FP8, whichever is faster."""
SKEWED_OVER_UNIFORM = 1.3
"""Largest time of a layer with skewed routing, divided by the time with uniform routing that reads the same number of
bytes."""
W4A8_LAYER_DECODE, W4A8_LAYER_LARGE = 0.68, 1.06
"""Largest time of an expert layer with NVFP4 weights and FP8 activations, divided by the time with FP8 weights: with up
to 64 tokens, and with 4,096 tokens."""
EXPERT_LAYER_COSINE = {
    ("few", "nvfp4"): 0.98,
    ("few-bf16", "nvfp4"): 0.9999,
    ("few-bf16", "mxfp4"): 0.9999,
    ("many", "nvfp4"): 0.998,
    ("many", "mxfp4"): 0.9985,
}
"""Smallest accepted cosine similarity between the result of an expert layer and the result of a layer with the decoded
weights, by implementation and format."""

# --- decoder layers ---

LAYER_US: dict[str, dict[str, dict[int, float]]] = {
    "8B": {
        "W4A4": {1: 48.0, 8: 50.0, 16: 55.0, 32: 64.0, 64: 84.0},
        "W4A8": {64: 76.0, 128: 90.0, 256: 132.0},
        "FP8": {1: 66.0},
    },
    "70B": {
        "W4A4": {1: 142.0, 16: 152.0, 32: 170.0, 64: 215.0},
        "W4A8": {64: 190.0, 128: 245.0, 256: 425.0},
    },
    "32B": {"W4A4": {1: 88.0, 16: 98.0, 32: 112.0}},
}
"""Largest time of a decoder layer in µs, by model, precision and rows."""
W4A8_OVER_FP8 = {"8B": 1.03, "70B": 1.05}
W4A8_ROWS = (64, 128, 256, 1024)
"""Largest accepted time of a layer in W4A8 divided by the layer's time in FP8 in the same run, by model, and the
numbers of rows to which this target applies."""

# --- served models ---

MODEL_DECODE = {"8B": {1: 2.0, 16: 1.6, 64: 1.3}, "70B": {1: 2.4, 64: 1.7}}
MODEL_GENERATE = {"8B": 1.6}
MODEL_PREFILL = {"16bit": 0.95, "fp8": 1.4}
"""Smallest speedup over bf16: of decode steps by batch size, of `generate()`, and of prefill by format of
activations."""
MODEL_PAGED = {("8B", 1): 0.96}
"""Largest time of a decode step with a paged cache and `qkv_norm_rope_append`, divided by the time with separate steps,
by model and batch size."""
MODEL_LOGITS = 1e-4
"""Largest accepted value of 1 − c, where c is the cosine similarity between our model's logits and the bf16 model's."""
MODEL_GIGABYTES = {"8B": 6.3, "70B": 43.5}
MODEL_PEAK_GIGABYTES = 2.0
"""Largest additional memory in GB while a model is built."""

# --- models served by vLLM ---

VLLM_DECODE = {
    "ours": {
        "marlin": {1: 1.45, 16: 1.3, 64: 1.35, 128: 1.6},
        "humming": {1: 1.5, 16: 1.3, 64: 1.15, 128: 1.15},
        "bf16": {1: 2.0, 16: 1.75, 64: 1.25, 128: 1.1},
    },
    "ours_fp8": {"bf16": {64: 1.4, 128: 1.3}},
}
"""Smallest time of a decode step of Llama-3.1-8B with a peer's kernels, divided by the time with our kernels, by batch
size."""
VLLM_PREFILL = {"ours": 1.0, "ours_fp8": 1.3}
VLLM_PREFILL_TOKENS = 8192
"""Smallest time of a prefill with bf16 weights, divided by the time with our kernels, and the prefill's length."""
VLLM_REQUESTS = 1.8
"""Smallest time of many requests with Marlin, divided by the time with our kernels."""
VLLM_COLD_SECONDS = 4.0
"""Largest accepted difference in seconds between the start times with our kernels and with Marlin, with cold caches."""
VLLM_WARM = 1.05
"""Largest accepted time of a start with warm caches, divided by the time with Marlin."""

# --- FP8 GEMMs ---

FP8_TFLOPS = 1150.0
"""Smallest rate of large FP8 GEMMs in TFLOP/s."""
FP8_OVER_PEER = 0.95
"""Smallest rate of an FP8 GEMM divided by a peer's rate."""
MXFP8_OVER_BLOCK, MXFP8_OVER_BF16 = 0.9, 1.0
"""Smallest rate of an MXFP8 GEMM divided by the rates of our GEMM with FP8 block scales and of torch's
bfloat16 GEMM."""
FP8_DECODE_OF_COPY = 0.80
"""Smallest bandwidth of a grouped FP8 GEMM with few rows per expert, divided by the bandwidth of a copy."""

TOKEN_FEW_ROWS, TOKEN_MANY_ROWS = 1.3, 0.97
"""Smallest accepted rate of GEMMs with per-token scales, divided by torch's rate: first for up to 64 rows, then for
more rows."""

TOKEN_FP4_OVER_PEER = 0.95
"""Smallest accepted rate of GEMMs with per-token scales and an FP4 weight, divided by torch's rate with an FP8
weight."""

FP8_FP4_OVER_FP8 = 0.95
"""Smallest accepted rate of large GEMMs with FP8 activations and an FP4 weight, divided by the rate with an FP8
weight."""
GROUPED_FP8_FP4_OVER_FP8 = 0.93
"""Smallest accepted rate of grouped GEMMs with FP4 weights, divided by the rate with FP8 weights, from 1,024 rows per
expert on."""
GROUPED_FP8_FP4_DECODE = 0.60
"""Largest accepted time of grouped GEMMs with FP4 weights, divided by the time with FP8 weights, for 1 to 16 rows per
expert."""

# --- host ---

OVER_RMS_NORM = 1.35
"""Largest accepted host time of a functional op, divided by the host time of `F.rms_norm`."""
OVER_RAW_CALL_US = 2.5
"""Largest accepted difference in µs between the host time of the Python function with `out` and the host time of a
direct call of the compiled function."""
FIRST_CALL_S = 3.0
"""Largest time in seconds of the first call of a process, with empty caches."""
FIRST_CALL_WARM_S = 0.5
"""Same as `FIRST_CALL_S`, with a filled disk cache."""
