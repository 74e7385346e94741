"""``silu_mul_fp4quant_mm_fp4``: a gate, FP4 quantisation, and the GEMM with an FP4 weight."""

import torch
from torch import Tensor

from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._fp4_gemm import FP4Gemm
from torch_cute_ops.ops._signature import ScaleFormat, WeightScaleLayout


@define(FP4Gemm("16-bit", prologue_gate=True, prologue_quant=True), "out")
def silu_mul_fp4quant_mm_fp4(
    a: Tensor,
    b: Tensor,
    b_scale: Tensor,
    global_scale: Tensor | None = None,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    scale_layout: WeightScaleLayout | None = None,
    backend: str = "auto",
    static_weight: bool = False,
    prefetch: Tensor | None = None,
    gate: Gate = "silu",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Apply a gate, by default SwiGLU's, to activations, quantise the result to FP4 and multiply it by an FP4 weight.

    This is the down projection of a gated MLP, computed from the output of the merged gate and up projection. The gate
    is computed in fp32 and not rounded before it is quantised; sums are accumulated in fp32 and rounded once::

        h = silu(gate) · up  # or gelu(gate) · up, or max(gate, 0)² · up
        q = fp4_quantize(h, global_scale)  # codes times block scales
        out[m, n] = alpha · Σ_k q[m, k] · b[k, n] + bias[n]

    With the same backend and tactic, the result equals :func:`mm_fp4` of :func:`silu_mul_fp4quant` bit for bit. On
    Hopper, up to 8 rows may take a single launch, whose CTAs gate and quantise the rows that they multiply; other calls
    take two launches.

    Args:
        a: (M, 2K) bfloat16 or float16: ``gate`` is the first half of each row, ``up`` the second half.
        b: (K/2, N) uint8 or float4_e2m1fn_x2, two e2m1 codes per byte, element 0 in the low nibble: the transposed view
            ``weight.t()`` of a row-major (N, K/2). A row-major tensor is refused. No check can detect a square weight
            that is stored transposed.
        b_scale: block scales of the weight as an (N, K) matrix: 128x4 (⌈N/128⌉, ⌈K/B/4⌉, 32, 4, 4) as
            :func:`fp4_quantize` writes them, or linear (N, K/B), with B the block size. The dtype is float8_e4m3fn
            (NVFP4), or uint8 or float8_e8m0fnu (MXFP4).
        global_scale: float32 tensor of one element: factor by which values are multiplied before they are encoded. For
            NVFP4 only; usually :func:`nvfp4_global_scale` of the tensor's amax. ``None`` means 1.
        alpha: float32 tensor on the same device, one element or (N,): one factor for all columns, or one factor per
            column. To divide out the global scales, pass ``1 / (global_scale · g_b)``, where ``g_b`` is the global
            scale of ``b``. ``None`` means 1.
        bias: (N,) float32 or the dtype of the result, added in fp32 after ``alpha``.
        out_dtype: dtype of the result: bfloat16, float16 or float32. ``None`` means the dtype of ``a``.
        block_size: elements per block scale: 16 for NVFP4, 32 for MXFP4.
        scale_format: format of the block scales: ``"e4m3"`` (blocks of 16) or ``"ue8m0"`` (blocks of 32). ``None``
            means the format for ``block_size``.
        scale_layout: expected layout of the weight's scales: ``"128x4"`` or ``"linear"``. ``None`` derives the layout
            from the shape. If a layout is given, tiled scales may also have another library's shape: flat (torchao), or
            a padded matrix (FlashInfer, vLLM, cuBLAS). With ``None``, a padded matrix that has the shape of linear
            scales is read as linear scales.
        backend: name of a backend that :func:`backends` lists. ``"auto"`` takes the backend that :func:`autotune`
            measured as fastest, or without measurements the backend with the least estimated time.
        static_weight: promise that ``b`` and ``b_scale`` were written before the previous launch on the stream, and
            have not changed since. The kernel may then read the weight before the previous launch ends.
        prefetch: contiguous matrix of 1-byte elements that a later launch reads, such as the row-major weight of the
            next GEMM. Its rows are a multiple of 16 bytes long. On Hopper, GEMMs with tiles of up to 16 rows load the
            first 8 MB of this matrix into L2 after their own operands. Its contents do not affect the result, and may
            change during the call.
        gate: activation function: ``"silu"``, ``"gelu_tanh"`` (GELU, approximated by tanh as in Gemma), ``"gelu"``
            (GELU with the error function) or ``"relu2"`` (squared ReLU).
        out: contiguous (M, N) tensor to write the result into.

    Returns:
        (M, N) in ``out_dtype``. A row of ``a`` with NaN or infinity gives a row of NaN; a NaN scale of ``b`` gives a
        column of NaN.

    Raises:
        ValueError: If a shape, device, format or layout is wrong; if ``gate`` is unknown; if ``b`` is not a transposed
            view; if the backend is unknown or cannot compute the call (the message gives the reason); or if an input
            requires grad while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp4_quantize, silu_mul_fp4quant_mm_fp4
        >>> gate = torch.full((1, 32), 32.0)  # silu(32) rounds to 32
        >>> up = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] * 4]) / 32
        >>> weight = 6 * torch.eye(8, 32)  # row n takes element n of an activation row, times 6
        >>> b, b_scale = fp4_quantize(weight)
        >>> silu_mul_fp4quant_mm_fp4(torch.cat([gate, up], 1).bfloat16(), b.t(), b_scale).tolist()
        [[0.0, 3.0, 6.0, 9.0, 12.0, 18.0, 24.0, 36.0]]

    References:
        N. Shazeer, "GLU Variants Improve Transformer", 2020, equation 6; clamp and parameters: gpt-oss, OpenAI, 2025.
        NVFP4: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025. MXFP4: OCP
        Microscaling Formats (MX) Specification v1.0, 2023; scales are rounded up as in the cuBLAS documentation.
        Roundings and special values: docs/numerics.md, "Gate", "Quantising to FP4" and "GEMMs".
    """
