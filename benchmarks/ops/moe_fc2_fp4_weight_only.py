"""moe_fc2_fp4_weight_only: the second GEMM of an expert layer, of bfloat16 activations and NVFP4 weights."""

from __future__ import annotations

from typing import ClassVar

from ..expert_gemms import ExpertGemmBenchmark


class MoeFc2Fp4WeightOnly(ExpertGemmBenchmark):
    op = "moe_fc2_fp4_weight_only"
    settings: ClassVar = {"activations": "bfloat16", **ExpertGemmBenchmark.settings}


BENCHMARK = MoeFc2Fp4WeightOnly()
