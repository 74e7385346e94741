"""``add_rmsnorm_fp4quant_both_layouts``: as ``add_rmsnorm_fp4quant``, with the scales in two layouts."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import ScaleFormat, UpdatedTensor


@define(RowQuant("add", normalises=True), "y", "scale_128x4", "scale_linear")
def add_rmsnorm_fp4quant_both_layouts(
    input: Tensor,
    residual: UpdatedTensor,
    weight: Tensor,
    global_scale: Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`add_rmsnorm_fp4quant`, writing the scales in the 128x4 and in the linear layout, in the same pass.

    For a layer whose GEMMs read one layout and whose expert dispatch, or another reader of rows, the other.

    Args:
        input, residual: as for :func:`add_rmsnorm_fp4quant`; ``residual`` is updated.
        weight, eps: as for :func:`rmsnorm_fp4quant`.
        global_scale, block_size, scale_format: as for :func:`fp4_quantize`.
        out: tensors to write ``(y, scale_128x4, scale_linear)`` into.

    Returns:
        ``y``: (..., H/2) uint8, two e2m1 codes a byte, element 0 in the low nibble.
        ``scale_128x4``: float8_e4m3fn (NVFP4) or uint8 (MXFP4), (⌈M/128⌉·128, ⌈H/block_size/4⌉·4) over the M flattened
        rows, padding written as zero.
        ``scale_linear``: the same scales, (..., H/block_size).

    Raises:
        ValueError, TypeError: as :func:`add_rmsnorm_fp4quant`.
    """
