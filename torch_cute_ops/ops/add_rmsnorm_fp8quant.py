"""``add_rmsnorm_fp8quant``: residual addition, RMSNorm and FP8 quantisation of each row, in one pass."""

import torch

from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signatures import FP8_ADD_NORM
from torch_cute_ops.runtime.dispatch import is_plain_eager

_quant = RowQuant("add_rmsnorm_fp8quant", FP8_ADD_NORM, source="add", normalises=True)


def add_rmsnorm_fp8quant(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    granularity: str = "token",
    scale_layout: str = "row",
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``input`` to ``residual`` in place, RMS-normalise each row of the sum and quantise it to FP8, in one pass.

    The same bits as ``residual += input`` and then :func:`rmsnorm_fp8quant` of it.

    Args:
        input: (..., H), bfloat16, float16 or float32. Rows may be strided; the kernel reads them in place where their
            addresses are multiples of 16 bytes, and from a copy where not, or where H is no multiple of 16.
        residual: like ``input``; it may be strided, and may be ``input`` itself, but no other view of its memory.
            Becomes ``input + residual``, added in fp32 and rounded once to its dtype.
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
    if is_plain_eager(out, input, residual, weight, scale):
        choices = (granularity, scale_layout)
        return _quant.run(input, residual, weight, scale, eps, choices, out)
    args = (input, residual, weight, scale, eps, granularity, scale_layout)
    if out is None:
        return torch.ops.cute.add_rmsnorm_fp8quant.default(*args)
    y, scale_out = out
    torch.ops.cute.add_rmsnorm_fp8quant.out(*args, y=y, scale_out=scale_out)
    return out


OP = _quant.spec(add_rmsnorm_fp8quant)
