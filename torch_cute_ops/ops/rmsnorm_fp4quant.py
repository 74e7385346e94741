"""``rmsnorm_fp4quant``: RMSNorm and FP4 quantisation of each row, in one pass."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP4ScaleLayout, ScaleFormat


@define(RowQuant(normalises=True), "y", "scale")
def rmsnorm_fp4quant(
    input: Tensor,
    weight: Tensor,
    global_scale: Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    scale_layout: FP4ScaleLayout = "128x4",
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS-normalise each row of ``input`` and quantise it to FP4 blocks, in one pass over memory.

    ``norm = v / sqrt(mean(v²) + eps) · weight`` over the last dimension in fp32 (Zhang and Sennrich 2019, eq. 4), then
    quantised as :func:`fp4_quantize` does, with no rounding to the input dtype in between.

    Args:
        input: (..., H), bfloat16, float16 or float32; H a multiple of ``block_size``. Rows may be strided; the kernel
            reads them in place where their addresses are multiples of 16 bytes and from a copy where not.
        weight: (H,), in the input dtype or float32.
        eps: added to the mean square.
        global_scale, block_size, scale_format, scale_layout: as for :func:`fp4_quantize`.
        out: tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., H/2) uint8, packed as by :func:`fp4_quantize`.
        ``scale``: float8_e4m3fn (NVFP4) or uint8 (MXFP4), laid out as by :func:`fp4_quantize`.

    Raises:
        ValueError: for a wrong shape, device, format or layout, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
