"""``add_rmsnorm_fp4quant_with_norm``: as ``add_rmsnorm_fp4quant``, and the norm itself."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP4ScaleLayout, ScaleFormat, UpdatedTensor


@define(RowQuant("add", normalises=True), "y", "scale", "norm")
def add_rmsnorm_fp4quant_with_norm(
    input: Tensor,
    residual: UpdatedTensor,
    weight: Tensor,
    global_scale: Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    scale_layout: FP4ScaleLayout = "128x4",
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`add_rmsnorm_fp4quant`, returning the norm too, in the same pass; an MoE router reads it.

    The same bits as ``residual += input`` and then :func:`rmsnorm_fp4quant_with_norm` of it.

    Args:
        input, residual: as for :func:`add_rmsnorm_fp4quant`; ``residual`` is updated.
        weight, eps: as for :func:`rmsnorm_fp4quant`.
        global_scale, block_size, scale_format, scale_layout: as for :func:`fp4_quantize`.
        out: tensors to write ``(y, scale, norm)`` into.

    Returns:
        ``y``: (..., H/2) uint8, packed as by :func:`fp4_quantize`.
        ``scale``: float8_e4m3fn (NVFP4) or uint8 (MXFP4), laid out as by :func:`fp4_quantize`.
        ``norm``: (..., H) in the input dtype.

    Raises:
        ValueError, TypeError: as :func:`add_rmsnorm_fp4quant`.
    """
