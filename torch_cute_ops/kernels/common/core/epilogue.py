"""Device code of a GEMM's epilogue: alpha, bias, factors of experts, and activation functions."""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import cutlass.cute as cute
import torch
from cutlass import Float32, Uint32

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, unpack
from torch_cute_ops.runtime.argspec import Dim, TensorArg

GELU_TANH: Final = (math.sqrt(8 / math.pi), math.sqrt(8 / math.pi) * 0.044715)
"""Coefficients of x and x³ in the argument of the sigmoid by which ``gelu_tanh_mul`` computes tanh."""
GELU_SLOPE: Final = 0.305
GELU_POLYNOMIAL: Final = (
    *(0.03663886338472366, -0.15274614095687866, 0.18531501293182373, -0.037620749324560165),
    *(0.12084043025970459, 0.10347368568181992, 0.12245867401361465, 0.12164025008678436),
)
"""Coefficients of the polynomial P in ``gelu_mul``, highest power first. Evaluated in fp32, P(1) is exactly 0.5, so
that gates near zero are multiplied by exactly 0.5."""
HALF_LOG2E: Final = (-0.7213475108146667, -0.7213475204444817 + 0.7213475108146667)
"""-log2(e)/2 as the sum of two numbers: its fp32 approximation, and the error of this approximation."""

Finish = Callable[..., Float32]
"""Function of an accumulator, a column and a row scale that applies the epilogue. The column is counted from the first
column whose alpha and bias were loaded. The row scale is None if the epilogue has no row scales. The result is not
rounded."""
TileEpilogue = Callable[..., Finish]
"""Function of ``column``, ``count`` and, optionally, a constant ``after``. It loads alpha and bias of the ``count``
columns from ``column + after`` on, and returns a ``Finish`` for these columns."""


class ColumnTerms(NamedTuple):
    """Alpha and bias of neighbouring columns, loaded into registers.

    Attributes:
        alpha: fp32 factors, one per column, or None if alpha does not depend on the column.
        bias: fp32 addends, one per column, or None without a bias.
    """

    alpha: list | None
    bias: list | None


class EpilogueOps:
    """Device code that loads alpha and bias, and applies them to accumulators.

    A thread that stores results calls ``factor`` and ``terms`` once per tile, after ``griddepcontrol.wait``. It then
    calls ``finisher`` and applies the returned function to each accumulator.
    """

    def __init__(self, epilogue: Epilogue):
        self.epilogue = epilogue
        self.out_dtype = DSL_DTYPES[epilogue.out_dtype]

    def arguments(self, n: Dim, experts: Dim | None = None) -> tuple[TensorArg | None, TensorArg | None]:
        """Return descriptions of the arguments alpha and bias. ``experts`` is None unless the GEMM is grouped."""
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

    def row_scale_argument(self, m: Dim) -> TensorArg | None:
        """Return the description of the argument for the rows' scales, or None if the epilogue uses no row scales."""
        return TensorArg("Float32", (m,), (1,), align=4) if self.epilogue.has_row_scale else None

    def factor(self, alpha, expert=None) -> Float32 | None:
        """Return the factor for all accumulators of a tile, or None if alpha is absent or depends on the column."""
        if self.epilogue.alpha not in ("one", "expert"):
            return None
        return alpha[0 if self.epilogue.alpha == "one" else expert]

    def terms(self, alpha, bias, column, count: int, n, expert=None, after: int = 0) -> ColumnTerms:
        """Load alpha and bias of ``count`` columns (1, 2 or 4), starting at ``column + after``.

        ``column`` and ``after`` are multiples of ``count``. Columns ``n`` and above do not exist and are not read.
        ``expert`` is None unless the GEMM is grouped.
        """
        if self.epilogue.alpha not in ("column", "expert_column"):
            alpha = None
        exists = column < n - after
        return ColumnTerms(*(load_terms(vector, expert, column, after, count, exists) for vector in (alpha, bias)))

    def finisher(self, factor: Float32 | None, terms: ColumnTerms, scale: float = 1.0) -> Finish:
        """Return a function ``finish(acc, i, row_scale)`` that applies the epilogue to an accumulator in the i-th
        column of ``terms``.

        The function multiplies by ``scale``, a power of two, and then applies the row's scale, alpha and bias.
        Accumulators of decoded FP4 numbers need ``scale`` (see ``kernels.common.fp4.codes.acc_scale``).
        """

        def finish(total: Float32, i: int, row_scale: Float32 | None = None) -> Float32:
            alpha = factor if terms.alpha is None else terms.alpha[i]
            if scale != 1.0:
                total = ptx.mul_rn(total, Float32(scale))
            if row_scale is not None:
                total = ptx.mul_rn(total, row_scale)
            if alpha is not None:
                total = ptx.mul_rn(total, alpha)
            return total if terms.bias is None else ptx.add_rn(total, terms.bias[i])

        return finish

    def unit_finisher(self, factor: Float32 | None, terms: ColumnTerms, units: list) -> Finish:
        """Return the ``finisher`` for accumulators of a weight whose rows were divided by units. ``units`` holds the
        unit of each column, a power of two."""
        alphas = [factor] * len(units) if terms.alpha is None else terms.alpha
        pairs = zip(alphas, units, strict=True)
        factors = [unit if alpha is None else ptx.mul_rn(alpha, unit) for alpha, unit in pairs]
        return self.finisher(None, terms._replace(alpha=factors))

    def of_tile(self, alpha, bias, n, expert=None) -> TileEpilogue:
        """Return a function that loads alpha and bias of some of a tile's columns, and returns the ``finisher`` for
        these columns. ``expert`` is None unless the GEMM is grouped."""
        factor = self.factor(alpha, expert)
        return lambda column, count, after=0: self.finisher(
            factor, self.terms(alpha, bias, column, count, n, expert, after)
        )


def load_row_scale(row_scale: cute.Tensor, row, m, after: int = 0) -> Float32:
    """Load the scale of row ``row + after``. Rows ``m`` and above do not exist, and are not read."""
    (word,) = ptx.load_if(row_scale.iterator + row, row < m - after, 1, 4 * after)
    return ptx.float_of(word)


def load_terms(vector: cute.Tensor | None, expert, column, after: int, count: int, exists) -> list | None:
    """Load neighbouring elements of a vector with one element per column, as fp32. If ``expert`` is not None,
    ``vector`` contains one row per expert.

    Elements that do not exist are returned as zero. The loads are predicated instead of branched over: in large tiles,
    FP8 GEMMs store one result while MMAs compute the next, and ptxas does not overlap MMAs with branches. Each load is
    only one or two words wide. Loads of four words need aligned groups of four registers, of which the accumulators
    leave few, and made the kernels with these tiles spill.
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


def factors_argument(m: Dim) -> TensorArg:
    """Return the description of an argument for factors: (M, experts) float32, any strides."""
    strides = (Dim("alpha_stride", bits=64), Dim("alpha_column_stride", bits=64))
    return TensorArg("Float32", (m, Dim("experts")), strides, align=4)


def biases_argument(dtype: torch.dtype | None, n: Dim) -> TensorArg | None:
    """Return the description of an argument for biases, (experts, N), or None if ``dtype`` is None."""
    return None if dtype is None else TensorArg(DSL_DTYPES[dtype].__name__, (Dim("experts"), n), (n, 1), align=16)


def factor_counts(factor):
    """Return True if GEMMs compute a (token, expert) pair with this factor. They skip pairs with factors 0 and -0, but
    compute pairs with NaN."""
    return (ptx.bits_of(factor) & Uint32(0x7FFFFFFF)) != Uint32(0)


def silu_mul(gate: Float32, up: Float32) -> Float32:
    """Return ``gate / (1 + exp(-gate)) * up`` (Hendrycks and Gimpel 2016; Shazeer 2020, "SwiGLU").

    The result is accurate to a few fp32 ulps if ``gate`` is positive. If ``gate`` is negative, the result is accurate
    to about ``|gate|`` ulps, because the exponent is rounded. For a gate below -88.7, ``exp(-gate)`` overflows and the
    result is zero.
    """
    return ptx.mul_rn(_gated(gate, gate), up)


def swiglu(gate: Float32, up: Float32, alpha: Float32, beta: Float32, limit: Float32) -> Float32:
    """Return ``g * sigmoid(alpha * g) * (u + beta)`` with ``g = min(gate, limit)`` and ``u = clip(up, -limit, limit)``.

    This is the general SwiGLU gate. For example, gpt-oss uses alpha 1.702, beta 1 and limit 7. A limit of +inf disables
    the clamps. NaN passes the clamps unchanged. The result is as accurate as the result of ``silu_mul`` for the gate
    ``alpha * g``. For finite ``g``, no step divides infinity by infinity.
    """
    clamped = ptx.min_nan(gate, limit)
    factor = ptx.max_nan(ptx.min_nan(up, limit), -limit) + beta
    return ptx.mul_rn(_gated(clamped, ptx.mul_rn(clamped, alpha)), factor)


def gelu_tanh_mul(gate: Float32, up: Float32) -> Float32:
    """Return ``gelu(gate) * up`` with GELU's approximation by tanh (Hendrycks and Gimpel 2016).

    ``(1 + tanh(z)) / 2`` equals ``sigmoid(2 z)``, so the result is ``gate * sigmoid(s) * up`` with ``s = gate * (2
    sqrt(2/pi) + 2 sqrt(2/pi) * 0.044715 * gate²)``. ``s`` is computed in the same steps, with the same roundings, as in
    the reference. For a given ``s``, the result is as accurate as the result of ``silu_mul``.
    """
    factor = ptx.add_rn(ptx.mul_rn(ptx.mul_rn(gate, gate), Float32(GELU_TANH[1])), Float32(GELU_TANH[0]))
    return ptx.mul_rn(_gated(gate, ptx.mul_rn(gate, factor)), up)


def gelu_mul(gate: Float32, up: Float32) -> Float32:
    """Return ``gate * Phi(gate) * up``, where Phi is the normal distribution function (GELU; Hendrycks and Gimpel
    2016).

    With ``t = 1 / (1 + 0.305 |x|)``, ``Phi(-|x|)`` is ``t * P(t) * exp(-x²/2)``. The polynomial ``P`` was fitted for
    ``|x|`` up to 14.5, with a relative error of at most 2^-23.0; for larger ``|x|`` the exponential is 0. For negative
    ``x`` no terms cancel, unlike in ``(1 + erf(x / sqrt(2))) / 2``. The relative error of the result grows with ``x²``,
    because ``x²`` is rounded; docs/numerics.md, "Gate", gives the measured errors.
    """
    size = ptx.max_abs_nan(Float32(0.0), gate)
    t = ptx.rcp_approx(ptx.fma_rn(size, Float32(GELU_SLOPE), Float32(1.0)))
    ratio = Float32(GELU_POLYNOMIAL[0])
    for coefficient in GELU_POLYNOMIAL[1:]:
        ratio = ptx.fma_rn(ratio, t, Float32(coefficient))
    square = ptx.mul_rn(gate, gate)
    # Multiply by -log2(e)/2 as a sum of two fp32 numbers. A single fp32 number would add a relative error of up to
    # 2^-20.
    exponent = ptx.fma_rn(square, Float32(HALF_LOG2E[0]), ptx.mul_rn(square, Float32(HALF_LOG2E[1])))
    below = ptx.mul_rn(ptx.mul_rn(ratio, t), ptx.ex2_approx(exponent))
    phi = ptx.select(gate < Float32(0.0), below, ptx.add_rn(Float32(1.0), -below))
    return ptx.mul_rn(ptx.mul_rn(gate, phi), up)


def relu2_mul(gate: Float32, up: Float32) -> Float32:
    """Return ``max(gate, 0)² * up`` (squared ReLU; So et al. 2021). NaN passes the maximum unchanged."""
    positive = ptx.max_nan(gate, Float32(0.0))
    return ptx.mul_rn(ptx.mul_rn(positive, positive), up)


GATES: Final[dict[str, Callable[[Float32, Float32], Float32]]] = {
    "silu": silu_mul,
    "gelu_tanh": gelu_tanh_mul,
    "gelu": gelu_mul,
    "relu2": relu2_mul,
}
"""Functions that compute the gated result from gate and up, keyed by the name of the gate."""


def _gated(value: Float32, gate: Float32) -> Float32:
    """Return ``value * sigmoid(gate)``."""
    exp = ptx.ex2_approx(ptx.mul_rn(gate, Float32(-math.log2(math.e))))
    return ptx.mul_rn(value, ptx.rcp_approx(exp + Float32(1.0)))
