"""``fp8_quantize``: rows to FP8."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP8Granularity, FP8ScaleLayout


@define(RowQuant(), "y", "scale")
def fp8_quantize(
    input: Tensor,
    scale: Tensor | None = None,
    granularity: FP8Granularity = "token",
    scale_layout: FP8ScaleLayout = "row",
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise ``input`` to FP8 along its last dimension.

    In fp32, ``scale = amax / 448`` over the row or block, unless it is given, and ``y = e4m3(v / scale)``, rounded to
    nearest even, saturating. What holds NaN or infinity gets a NaN scale and zero codes; what is zero, scale zero. CPU
    and GPU agree to the bit.

    Args:
        input: (..., K), bfloat16, float16 or float32. Rows may be strided; the kernel reads them in place where their
            addresses are multiples of 16 bytes, and from a copy where not, or where K is no multiple of 16.
        scale: one float32 element, the scale of the whole tensor: granularity ``"tensor"``, and only that.
        granularity: what shares a scale: ``"tensor"`` (``scale`` is given), ``"token"`` (each row) or ``"block128"``
            (each 128 elements of a row; K a multiple of 64, the last block may have 64 elements).
        scale_layout: ``"row"``, or for blocks ``"column"``, as TMA and the FP8 GEMMs want them.
        out: tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., K) float8_e4m3fn.
        ``scale``: float32; (1,), (..., 1), (..., ⌈K/128⌉), or, by columns, (⌈K/128⌉, M) over the M flattened rows.

    Raises:
        ValueError: for a wrong shape, device, format or layout, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
