"""``rmsnorm_fp8quant``: RMSNorm and FP8 quantisation of each row, in one pass."""

import torch

from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signatures import FP8_NORM
from torch_cute_ops.runtime.dispatch import is_plain_eager

_quant = RowQuant("rmsnorm_fp8quant", FP8_NORM, normalises=True)


def rmsnorm_fp8quant(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    granularity: str = "token",
    scale_layout: str = "row",
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS-normalise each row of ``input`` and quantise it to FP8, in one pass over memory.

    ``norm = v / sqrt(mean(v²) + eps) · weight`` over the last dimension in fp32 (Zhang and Sennrich 2019, eq. 4), then
    quantised with no rounding to the input dtype in between.

    In fp32, ``scale = amax / 448`` over the row or block, unless it is given, and ``y = e4m3(v / scale)``, rounded to
    nearest even, saturating. What holds NaN or infinity gets a NaN scale and zero codes; what is zero, scale zero.

    Args:
        input: (..., H), bfloat16, float16 or float32. Rows may be strided; the kernel reads them in place where their
            addresses are multiples of 16 bytes, and from a copy where not, or where H is no multiple of 16.
        weight: (H,), in the input dtype or float32.
        scale: one float32 element, the scale of the whole tensor: granularity ``"tensor"``, and only that.
        eps: added to the mean square.
        granularity: what shares a scale: ``"tensor"`` (``scale`` is given), ``"token"`` (each row) or ``"block128"``
            (each 128 elements of a row, of which H must be a multiple).
        scale_layout: ``"row"``, or for blocks ``"column"``, as TMA wants them.
        out: tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., H) float8_e4m3fn.
        ``scale``: float32; (1,), (..., 1), (..., H/128), or, by columns, (H/128, M) over the M flattened rows.

    Raises:
        ValueError: for a wrong shape, device, format or layout, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
    if is_plain_eager(out, input, weight, scale):
        choices = (granularity, scale_layout)
        return _quant.run(input, None, weight, scale, eps, choices, out)
    args = (input, weight, scale, eps, granularity, scale_layout)
    if out is None:
        return torch.ops.cute.rmsnorm_fp8quant.default(*args)
    y, scale_out = out
    torch.ops.cute.rmsnorm_fp8quant.out(*args, y=y, scale_out=scale_out)
    return out


OP = _quant.spec(rmsnorm_fp8quant)
