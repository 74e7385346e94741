"""mm_fp4_weight_only: GEMM of bfloat16 activations and an NVFP4 weight."""

from __future__ import annotations

from typing import ClassVar

from ..fp4_gemms import FP4GemmBenchmark


class MmFp4WeightOnly(FP4GemmBenchmark):
    op = "mm_fp4_weight_only"
    settings: ClassVar = {"activations": "bfloat16", **FP4GemmBenchmark.settings}


BENCHMARK = MmFp4WeightOnly()
