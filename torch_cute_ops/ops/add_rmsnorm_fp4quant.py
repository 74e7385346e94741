"""``add_rmsnorm_fp4quant``: residual addition, RMSNorm and FP4 quantisation of each row, in one pass."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP4ScaleLayout, ScaleFormat, UpdatedTensor


@define(RowQuant("add", normalises=True), "y", "scale")
def add_rmsnorm_fp4quant(
    input: Tensor,
    residual: UpdatedTensor,
    weight: Tensor,
    global_scale: Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    scale_layout: FP4ScaleLayout = "128x4",
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Add ``input`` to ``residual`` in place, RMS-normalise each row of the sum and quantise it to FP4, in one pass.

    The same bits as ``residual += input`` and then :func:`rmsnorm_fp4quant` of it.

    Args:
        input: (..., H), read as by :func:`rmsnorm_fp4quant`.
        residual: like ``input``; it may be strided, and may be ``input`` itself, but no other view of its memory.
            Becomes ``input + residual``, added in fp32 and rounded once to its dtype.
        weight, eps: as for :func:`rmsnorm_fp4quant`.
        global_scale, block_size, scale_format, scale_layout: as for :func:`fp4_quantize`.
        out: tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., H/2) uint8, packed as by :func:`fp4_quantize`.
        ``scale``: float8_e4m3fn (NVFP4) or uint8 (MXFP4), laid out as by :func:`fp4_quantize`.

    Raises:
        ValueError, TypeError: as :func:`rmsnorm_fp4quant`, and for a residual that is not like ``input``.
    """
