"""``add_rmsnorm_fp8quant``: residual addition, RMSNorm and FP8 quantisation of each row, in one pass."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP8Granularity, FP8ScaleLayout, UpdatedTensor


@define(RowQuant("add", normalises=True), "y", "scale")
def add_rmsnorm_fp8quant(
    input: Tensor,
    residual: UpdatedTensor,
    weight: Tensor,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    granularity: FP8Granularity = "token",
    scale_layout: FP8ScaleLayout = "row",
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Add ``input`` to ``residual`` in place, RMS-normalise each row of the sum and quantise it to FP8, in one pass.

    The same bits as ``residual += input`` and then :func:`rmsnorm_fp8quant` of it.

    Args:
        input: (..., H), read as by :func:`rmsnorm_fp8quant`.
        residual: as for :func:`add_rmsnorm_fp4quant`; it is updated.
        weight, eps: as for :func:`rmsnorm_fp8quant`.
        scale, granularity, scale_layout: as for :func:`fp8_quantize`.
        out: tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., H) float8_e4m3fn.
        ``scale``: float32, laid out as by :func:`fp8_quantize`.

    Raises:
        ValueError, TypeError: as :func:`rmsnorm_fp8quant`, and for a residual that is not like ``input``.
    """
