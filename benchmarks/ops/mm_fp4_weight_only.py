"""mm_fp4_weight_only: the product of bfloat16 activations and an NVFP4 weight."""

from __future__ import annotations

from typing import ClassVar

from ..products import ProductBenchmark


class MmFp4WeightOnly(ProductBenchmark):
    op = "mm_fp4_weight_only"
    settings: ClassVar = {"activations": "bfloat16", **ProductBenchmark.settings}


BENCHMARK = MmFp4WeightOnly()
