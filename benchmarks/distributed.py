"""`python -m benchmarks distributed`: estimated bytes that collectives transfer, and estimated time of a layer, on
eight H200s. Nothing is measured, because eight GPUs were not available.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from torch_cute_ops.formats import FP8_BLOCK128, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.formats.fp8 import COLUMN
from torch_cute_ops.gemm import cost, select
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.problem import GemmProblem, Operand
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.runtime.arch import ARCHS

from . import report

RANKS: Final = 8
NVLINK: Final = 450e9
"""Bytes per second in each direction of an H200's NVLink. NVIDIA's data sheet gives 900 GB/s for both directions
together. Switches connect every pair of GPUs at this rate."""

OPERANDS: Final = {
    "bf16": (Operand(torch.bfloat16), None),
    "fp8": (Operand(FP8_BLOCK128, COLUMN), Operand(FP8_BLOCK128)),
    "nvfp4": (Operand(NVFP4, SCALE_LAYOUTS["128x4"]),) * 2,
}
"""Operands (activations, weight), keyed by format. bf16 needs no weight operand, because bf16 GEMMs are not ours."""

SUMS: Final = {"float32": 4, "bf16": 2}
"""Size in bytes of one partial sum in the reduce-scatter, by dtype."""
CASES: Final = (("bf16", "bf16"), *((fmt, sums) for fmt in ("fp8", "nvfp4") for sums in SUMS))
"""Pairs of a format of the operands and a dtype of the partial sums, one pair for each line of the table."""

ABOUT = """\
A MODEL, NOT A MEASUREMENT: {ranks} H200s, NVLink at {nvlink:.0f} GB/s in each direction according to the data
sheet. The model assumes that collectives have no latency and that nothing overlaps. The times of GEMMs are estimates of
the cost model that ranks backends. The times of bf16 GEMMs are computed from bytes and operations."""

DECODER = """\
Llama 3 70B with tensor parallelism. Between the layers, the tokens are divided among the ranks. A layer gathers its
tokens twice, in the format of the activations. It scatters partial sums twice, in bf16 (RowParallel's default) or in
float32 (sums=torch.float32). MB count the bytes that one GPU receives, and µs are times of one layer."""

EXPERTS = """\
DeepSeek-V3's {experts} routed experts on {ranks} GPUs, with {topk} experts per token, all equally likely. Rows are sent
to the experts, and results come back in bf16. MB count the bytes that one GPU receives, and µs are times of one
layer."""


class Sizes(NamedTuple):
    """Widths of a dense decoder layer."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int

    def gemms(self, ranks: int) -> tuple[tuple[int, int], ...]:
        """Return N and K of one rank's GEMMs: q, k and v; o; gate and up; down."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head // ranks
        return (
            (qkv, self.hidden),
            (self.hidden, self.heads * self.head // ranks),
            (2 * self.intermediate // ranks, self.hidden),
            (self.hidden, self.intermediate // ranks),
        )


LLAMA_70B: Final = Sizes(8192, 28672, 64, 8, 128)
TOKENS: Final = (64, 512, 4096, 16384)
"""Numbers of tokens of a decoder layer, over all ranks together."""
HIDDEN, EXPERTS_COUNT, TOPK = 7168, 256, 8
"""Sizes of DeepSeek-V3."""
OWN_TOKENS: Final = (16, 64, 128, 512, 4096)
"""Numbers of tokens of an expert layer, per rank."""


class Layer(NamedTuple):
    """Estimates for a decoder layer on one GPU.

    Attributes:
        gathered, scattered: Bytes that the GPU receives in the all-gathers, and in the reduce-scatters.
        wire_us, gemm_us: Times of the collectives and of the GEMMs, in µs.
    """

    gathered: float
    scattered: float
    wire_us: float
    gemm_us: float


def row_bytes(fmt: str, width: int) -> int:
    """Return the number of bytes of one row of activations, scales included."""
    return OPERANDS[fmt][0].row_bytes(width)


def gemm_seconds(fmt: str, n: int, k: int, m: int, target: Target) -> float:
    """Return the estimated time of a GEMM in seconds: the smallest estimate of any backend. For bf16, return the larger
    of two times: to read the operands, and to compute the operations."""
    activations, weight = OPERANDS[fmt]
    if weight is None:
        moved = 2 * (n * k + m * (n + k))
        return max(moved / cost.bytes_per_second(target), cost.tensor_core_seconds(2 * m * n * k, target))
    problem = GemmProblem(activations, weight, n, k, Epilogue(torch.bfloat16, None, None))
    return min(
        backend.estimate(problem, m, tactic, target)
        for backend in select.candidates(problem).values()
        if backend.reason_unsupported(problem, target) is None
        for tactic in backend.tactics(problem, m, target)
    )


def decoder(fmt: str, sums: str, tokens: int, target: Target, sizes: Sizes = LLAMA_70B, ranks: int = RANKS) -> Layer:
    """Estimate a dense decoder layer. `tokens` is the number of tokens of all ranks together."""
    others = (ranks - 1) / ranks
    gathered = 2 * tokens * row_bytes(fmt, sizes.hidden) * others
    scattered = 2 * tokens * sizes.hidden * SUMS[sums] * others
    gemms = sum(gemm_seconds(fmt, n, k, tokens, target) for n, k in sizes.gemms(ranks))
    return Layer(gathered, scattered, (gathered + scattered) / NVLINK * 1e6, gemms * 1e6)


def experts(fmt: str, own_tokens: int, ranks: int = RANKS) -> tuple[float, float, float]:
    """Estimate the all-to-all transfers of an expert layer. Return the bytes of the rows that a GPU receives for its
    experts, the bytes of the results that the GPU receives for its tokens, and the time of both transfers in µs."""
    pairs = own_tokens * TOPK * (ranks - 1) / ranks
    sent, back = pairs * row_bytes(fmt, HIDDEN), pairs * 2 * HIDDEN
    return sent, back, (sent + back) / NVLINK * 1e6


def megabytes(size: float) -> str:
    return report.number(size / 1e6)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks distributed", description=__doc__)
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=RANKS)
    ranks = parser.parse_args(arguments).ranks
    target = cost.usual_targets(ARCHS["sm_90a"])[0]
    print(ABOUT.format(ranks=ranks, nvlink=NVLINK / 1e9))
    print(f"\n{DECODER}\n")
    body = []
    for tokens in TOKENS:
        usual = decoder("bf16", "bf16", tokens, target, ranks=ranks)
        for fmt, sums in CASES:
            layer = decoder(fmt, sums, tokens, target, ranks=ranks)
            total = layer.wire_us + layer.gemm_us
            body.append(
                [
                    *(
                        f"{tokens:,}",
                        fmt,
                        sums,
                        megabytes(layer.gathered),
                        report.number(usual.gathered / layer.gathered),
                    ),
                    *(megabytes(layer.scattered), report.number(layer.wire_us), report.number(layer.gemm_us)),
                    *(report.number(total), f"{layer.wire_us / total:.0%}"),
                ]
            )
    header = ("tokens", "format", "sums", "gathered", "fewer", "scattered", "wire µs", "GEMMs µs", "µs", "of it wire")
    print(report.table(header, body))
    print(f"\n{EXPERTS.format(experts=EXPERTS_COUNT, ranks=ranks, topk=TOPK)}\n")
    body = []
    for own in OWN_TOKENS:
        for fmt in OPERANDS:
            sent, back, us = experts(fmt, own, ranks)
            fewer = report.number(experts("bf16", own, ranks)[0] / sent)
            body.append([f"{own:,}", fmt, megabytes(sent), fewer, megabytes(back), report.number(us)])
    print(report.table(("tokens of a GPU", "format", "rows", "fewer", "results", "wire µs"), body))
    return 0
