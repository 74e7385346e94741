"""moe_fc1_fp4: the first GEMM of an expert layer, of NVFP4 activations and NVFP4 weights, with SwiGLU and NVFP4 behind
it."""

from __future__ import annotations

from ..gated_expert_gemms import QuantisedGates


class MoeFc1Fp4(QuantisedGates):
    op = "moe_fc1_fp4"


BENCHMARK = MoeFc1Fp4()
