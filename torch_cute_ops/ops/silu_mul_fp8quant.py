"""``silu_mul_fp8quant``: SwiGLU's gate and FP8 quantisation of each row, in one pass."""

import torch

from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signatures import FP8
from torch_cute_ops.runtime.dispatch import is_plain_eager

_quant = RowQuant("silu_mul_fp8quant", FP8, source="silu_mul")


def silu_mul_fp8quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    granularity: str = "token",
    scale_layout: str = "row",
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate each row of ``input`` as SwiGLU does and quantise it to FP8, in one pass over memory.

    ``silu(a) · b`` with ``a`` the first half of each row of ``input``, ``b`` the second, and
    ``silu(a) = a / (1 + exp(-a))``, in fp32 (SwiGLU: Shazeer 2020, eq. 6), then quantised as :func:`rmsnorm_fp8quant`
    does, with no rounding to the input dtype in between.

    Args:
        input: (..., 2I), bfloat16, float16 or float32. Rows may be strided; the kernel reads them in place where their
            addresses are multiples of 16 bytes, and from a copy where not, or where I is no multiple of 16.
        scale: one float32 element, the scale of the whole tensor: granularity ``"tensor"``, and only that.
        granularity: what shares a scale: ``"tensor"`` (``scale`` is given), ``"token"`` (each row) or ``"block128"``
            (each 128 elements of a row, of which I must be a multiple).
        scale_layout: ``"row"``, or for blocks ``"column"``, as TMA wants them.
        out: tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., I) float8_e4m3fn.
        ``scale``: float32; (1,), (..., 1), (..., I/128), or, by columns, (I/128, M) over the M flattened rows.

    Raises:
        ValueError: for a wrong shape, device, format or layout, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
    if is_plain_eager(out, input, scale):
        choices = (granularity, scale_layout)
        return _quant.run(input, None, None, scale, 0.0, choices, out)
    args = (input, scale, granularity, scale_layout)
    if out is None:
        return torch.ops.cute.silu_mul_fp8quant.default(*args)
    y, scale_out = out
    torch.ops.cute.silu_mul_fp8quant.out(*args, y=y, scale_out=scale_out)
    return out


OP = _quant.spec(silu_mul_fp8quant)
