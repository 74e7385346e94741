"""``silu_mul_fp8quant``: SwiGLU's gate and FP8 quantisation of each row, in one pass."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP8Granularity, FP8ScaleLayout


@define(RowQuant("silu_mul"), "y", "scale")
def silu_mul_fp8quant(
    input: Tensor,
    scale: Tensor | None = None,
    granularity: FP8Granularity = "token",
    scale_layout: FP8ScaleLayout = "row",
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Gate each row of ``input`` as SwiGLU does and quantise it to FP8, in one pass over memory.

    Gated as by :func:`silu_mul_fp4quant`, in fp32: by default ``silu(gate) · up``, where ``gate`` is the first half of
    each row of ``input`` and ``up`` the second. Quantised as :func:`fp8_quantize` does, with no rounding to the input
    dtype in between.

    Args:
        input: (..., 2I), bfloat16, float16 or float32. Rows may be strided; the kernel reads them in place where their
            addresses are multiples of 16 bytes, and from a copy where not, or where I is no multiple of 16.
        scale, granularity, scale_layout: as for :func:`fp8_quantize`, with I for K.
        swiglu_alpha, swiglu_beta, swiglu_limit: the gate's parameters, as for :func:`silu_mul_fp4quant`.
        out: tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., I) float8_e4m3fn.
        ``scale``: float32, laid out as by :func:`fp8_quantize`.

    Raises:
        ValueError: for a wrong shape, device, format or layout, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
