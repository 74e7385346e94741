"""moe_fc2_fp4_weight_only: products of bfloat16 activations and NVFP4 weights, added up over the experts of a token."""

from __future__ import annotations

from typing import ClassVar

from ..experts import ExpertBenchmark


class MoeFc2Fp4WeightOnly(ExpertBenchmark):
    op = "moe_fc2_fp4_weight_only"
    settings: ClassVar = {"activations": "bfloat16", **ExpertBenchmark.settings}


BENCHMARK = MoeFc2Fp4WeightOnly()
