"""Activation functions on the device."""

import math

from cutlass import Float32

from torch_cute_ops.kernels.common import ptx


def silu_mul(gate: Float32, up: Float32) -> Float32:
    """``gate / (1 + exp(-gate)) * up`` (Hendrycks and Gimpel 2016; Shazeer 2020, "SwiGLU").

    To some fp32 ulps; for a negative gate to about ``|gate|`` ulps, because the exponent is rounded once.
    """
    exp = ptx.ex2_approx(ptx.mul_rn(gate, Float32(-math.log2(math.e))))
    return ptx.mul_rn(ptx.mul_rn(gate, ptx.rcp_approx(exp + Float32(1.0))), up)
