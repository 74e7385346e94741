"""moe_fc1_fp4_weight_only: the first GEMM of an expert layer, with bfloat16 activations and NVFP4 weights, followed by
SwiGLU."""

from __future__ import annotations

from typing import ClassVar

from ..gated_expert_gemms import GatedExpertBenchmark


class MoeFc1Fp4WeightOnly(GatedExpertBenchmark):
    op = "moe_fc1_fp4_weight_only"
    settings: ClassVar = {"activations": "bfloat16", **GatedExpertBenchmark.settings}


BENCHMARK = MoeFc1Fp4WeightOnly()
