"""The epilogue of a GEMM on the device: what ``Epilogue`` says, for sums in registers. Activation functions on the
device."""

import math
from collections.abc import Callable
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, unpack
from torch_cute_ops.runtime.argspec import Dim, TensorArg

# epilogue ops
#
# The epilogue of a GEMM on the device: what ``Epilogue`` says, for sums in registers.

Finish = Callable[[Float32, int], Float32]
"""A function of a sum and of the number ``i`` of its column among some: the result, not yet rounded to its dtype."""
TileEpilogue = Callable[..., Finish]
"""A function of ``column``, ``count`` and, optionally, a constant ``after``: it loads the terms of ``count`` columns
from ``column + after`` on, and returns what finishes sums in them."""


class ColumnTerms(NamedTuple):
    """What a lane has loaded for neighbouring columns, each ``None`` where it does not depend on the column.

    Attributes:
        alpha: factors, fp32.
        bias: addends, fp32.
    """

    alpha: list | None
    bias: list | None


class EpilogueOps:
    """Loads ``alpha`` and the bias, and applies them.

    A thread that stores results calls ``factor`` and ``terms`` once a tile, behind ``griddepcontrol.wait``; the
    function that ``finisher`` makes of them finishes each of its sums.
    """

    def __init__(self, epilogue: Epilogue):
        self.epilogue = epilogue
        self.out_dtype = DSL_DTYPES[epilogue.out_dtype]

    def arguments(self, n: Dim, experts: Dim | None = None) -> tuple[TensorArg | None, TensorArg | None]:
        """``alpha`` and the bias; ``experts`` is given for a grouped GEMM."""
        vector = ((n,), (1,)) if experts is None else ((experts, n), (n, 1))
        alpha = {
            None: None,
            "one": TensorArg("Float32", (1,), (1,), align=4),
            "column": TensorArg("Float32", *vector, align=16),
            "expert": TensorArg("Float32", (experts,), (1,), align=4),
            "expert_column": TensorArg("Float32", *vector, align=16),
        }[self.epilogue.alpha]
        if self.epilogue.bias_dtype is None:
            return alpha, None
        return alpha, TensorArg(DSL_DTYPES[self.epilogue.bias_dtype].__name__, *vector, align=16)

    def factor(self, alpha, expert=None) -> Float32 | None:
        """The factor of all sums of a tile; ``None`` if there is none, or one for each column."""
        if self.epilogue.alpha not in ("one", "expert"):
            return None
        return alpha[0 if self.epilogue.alpha == "one" else expert]

    def terms(self, alpha, bias, column, count: int, n, expert=None, after: int = 0) -> ColumnTerms:
        """Load the terms of ``count`` columns, 1, 2 or 4, from ``column + after`` on, both multiples of ``count``.

        Nothing is read for columns from ``n`` on. ``expert`` is given for a grouped GEMM.
        """
        if self.epilogue.alpha not in ("column", "expert_column"):
            alpha = None
        exists = column < n - after
        return ColumnTerms(*(load_terms(vector, expert, column, after, count, exists) for vector in (alpha, bias)))

    def finisher(self, factor: Float32 | None, terms: ColumnTerms, scale: float = 1.0) -> Finish:
        """The function that finishes sums in the columns of ``terms``: ``scale``, a power of two, first, then alpha and
        bias. ``scale`` is for sums of decoded FP4 numbers (``fp4_weights.acc_scale``)."""

        def finish(total: Float32, i: int) -> Float32:
            alpha = factor if terms.alpha is None else terms.alpha[i]
            if scale != 1.0:
                total = ptx.mul_rn(total, Float32(scale))
            if alpha is not None:
                total = ptx.mul_rn(total, alpha)
            return total if terms.bias is None else ptx.add_rn(total, terms.bias[i])

        return finish

    def of_tile(self, alpha, bias, n, expert=None) -> TileEpilogue:
        """The epilogue of a tile, of ``expert`` in a grouped GEMM."""
        factor = self.factor(alpha, expert)
        return lambda column, count, after=0: self.finisher(
            factor, self.terms(alpha, bias, column, count, n, expert, after)
        )


def load_terms(vector: cute.Tensor | None, expert, column, after: int, count: int, exists) -> list | None:
    """Neighbouring elements of a vector over the columns, or of an expert's, as fp32; zeros, unless they exist.

    Large tiles of FP8 GEMMs are stored while MMAs run. ptxas does not overlap these with branches, so loads are
    predicated; and accumulators leave few registers in aligned fours: with loads of four words those tiles spilled.
    """
    if vector is None:
        return None
    if expert is not None:
        vector = vector[expert, None]
    dtype = vector.element_type
    at = vector.iterator + cute.assume(column, divby=count)
    offset, size = after * dtype.width // 8, count * dtype.width // 8
    if size < 4:
        words = [ptx.load_narrow_if(at, exists, size, offset)]
    else:
        starts = range(0, size, 8)
        words = [word for start in starts for word in ptx.load_if(at, exists, min(size, 8) // 4, offset + start)]
    return unpack(words, dtype)[:count]


# swiglu
#
# Activation functions on the device.


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
