"""moe_fc1_fp4: the first GEMM of an expert layer, with NVFP4 activations and weights, followed by SwiGLU and NVFP4
quantisation."""

from __future__ import annotations

from ..gated_expert_gemms import QuantisedGates


class MoeFc1Fp4(QuantisedGates):
    op = "moe_fc1_fp4"


BENCHMARK = MoeFc1Fp4()
