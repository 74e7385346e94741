"""``rmsnorm_fp8quant``: RMSNorm and FP8 quantisation of each row, in one pass."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP8Granularity, FP8ScaleLayout


@define(RowQuant(normalises=True), "y", "scale")
def rmsnorm_fp8quant(
    input: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    granularity: FP8Granularity = "token",
    scale_layout: FP8ScaleLayout = "row",
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS-normalise each row of ``input`` and quantise it to FP8, in one pass over memory.

    ``norm = v / sqrt(mean(v²) + eps) · weight`` over the last dimension in fp32 (Zhang and Sennrich 2019, eq. 4), then
    quantised with no rounding to the input dtype in between.

    In fp32, ``scale = amax / 448`` over the row or block, unless it is given, and ``y = e4m3(v / scale)``, rounded to
    nearest even, saturating. What holds NaN or infinity gets a NaN scale and zero codes; what is zero, scale zero.

    Args:
        input: (..., H), bfloat16, float16 or float32. Rows may be strided; the kernel reads them in place where their
            addresses are multiples of 16 bytes, and from a copy where not, or where H is no multiple of 16.
        weight: (H,), in the input dtype or float32.
        eps: added to the mean square.
        scale, granularity, scale_layout: as for :func:`fp8_quantize`.
        out: tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., H) float8_e4m3fn.
        ``scale``: float32, laid out as by :func:`fp8_quantize`.

    Raises:
        ValueError: for a wrong shape, device, format or layout, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
