"""Activation functions on the device."""

import math

from cutlass import Float32

from torch_cute_ops.kernels.common.core import ptx


def silu_mul(gate: Float32, up: Float32) -> Float32:
    """``gate / (1 + exp(-gate)) * up`` (Hendrycks and Gimpel 2016; Shazeer 2020, "SwiGLU").

    Accurate to some fp32 ulps, and for a negative gate to about ``|gate|`` ulps, because the exponent is rounded once;
    zero below -88.7, where ``exp(-gate)`` overflows.
    """
    return ptx.mul_rn(_gated(gate, gate), up)


def swiglu(gate: Float32, up: Float32, alpha: Float32, beta: Float32, limit: Float32) -> Float32:
    """``g * sigmoid(alpha * g) * (u + beta)`` with ``g = min(gate, limit)`` and ``u = clip(up, -limit, limit)``.

    The general gate, of gpt-oss for example (alpha 1.702, beta 1, limit 7); +inf is no limit. NaN passes the clamps.
    As accurate as ``silu_mul`` for a gate of ``alpha * g``; no ratio of infinities, whatever the finite ``g``.
    """
    clamped = ptx.min_nan(gate, limit)
    factor = ptx.max_nan(ptx.min_nan(up, limit), -limit) + beta
    return ptx.mul_rn(_gated(clamped, ptx.mul_rn(clamped, alpha)), factor)


def _gated(value: Float32, gate: Float32) -> Float32:
    """``value * sigmoid(gate)``."""
    exp = ptx.ex2_approx(ptx.mul_rn(gate, Float32(-math.log2(math.e))))
    return ptx.mul_rn(value, ptx.rcp_approx(exp + Float32(1.0)))
