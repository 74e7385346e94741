"""``add_rmsnorm_fp4quant_with_norm_both_layouts``: as ``add_rmsnorm_fp4quant_both_layouts``, with the norm."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import ScaleFormat, UpdatedTensor


@define(RowQuant("add", normalises=True), "y", "scale_128x4", "scale_linear", "norm")
def add_rmsnorm_fp4quant_with_norm_both_layouts(
    input: Tensor,
    residual: UpdatedTensor,
    weight: Tensor,
    global_scale: Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    *,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`add_rmsnorm_fp4quant_both_layouts`, writing the normalised rows too, in the same pass.

    For an expert layer: the GEMMs of its shared experts read the scales in the 128x4 layout, its expert dispatch the
    linear ones, and its router the norm.

    Args:
        input, residual: as for :func:`add_rmsnorm_fp4quant`; ``residual`` is updated.
        weight, eps: as for :func:`rmsnorm_fp4quant`.
        global_scale, block_size, scale_format: as for :func:`fp4_quantize`.
        out: tensors to write ``(y, scale_128x4, scale_linear, norm)`` into.

    Returns:
        ``y``: (..., H/2) uint8, packed as by :func:`fp4_quantize`.
        ``scale_128x4``, ``scale_linear``: float8_e4m3fn (NVFP4) or uint8 (MXFP4), laid out as by
        :func:`add_rmsnorm_fp4quant_both_layouts`.
        ``norm``: (..., H), in the input dtype.

    Raises:
        ValueError, TypeError: as :func:`add_rmsnorm_fp4quant`.
    """
