"""``add_rmsnorm_fp4quant_both_layouts``: as ``add_rmsnorm_fp4quant``, with the scales in two layouts."""

import torch

from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signatures import FP4_ADD_NORM_BOTH_LAYOUTS
from torch_cute_ops.runtime.dispatch import is_plain_eager

_quant = RowQuant(
    "add_rmsnorm_fp4quant_both_layouts",
    FP4_ADD_NORM_BOTH_LAYOUTS,
    source="add",
    normalises=True,
    third="scale_linear",
)


def add_rmsnorm_fp4quant_both_layouts(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`add_rmsnorm_fp4quant`, writing the scales in the 128x4 and in the linear layout, in the same pass.

    For a layer whose products want one layout and whose expert dispatch, or other reader of rows, the other.

    Args:
        input: (..., H), bfloat16, float16 or float32; H a multiple of ``block_size``. Rows may be strided; the kernel
            reads them in place where their addresses are multiples of 16 bytes and from a copy where not.
        residual: like ``input``; it may be strided, and may be ``input`` itself, but no other view of its memory.
            Becomes ``input + residual``, added in fp32 and rounded once to its dtype.
        weight: (H,), in the input dtype or float32.
        global_scale: one float32 element that multiplies values before they are encoded, usually 2688 / amax of the
            tensor; NVFP4 only. ``None`` means 1.
        eps: added to the mean square.
        block_size: 16 for NVFP4, 32 for MXFP4.
        scale_format: ``"e4m3"`` (block 16) or ``"ue8m0"`` (block 32); ``None`` follows the block size.
        out: tensors to write ``(y, scale_128x4, scale_linear)`` into.

    Returns:
        ``y``: (..., H/2) uint8, two e2m1 codes a byte, element 0 in the low nibble.
        ``scale_128x4``: float8_e4m3fn (NVFP4) or uint8 (MXFP4), (⌈M/128⌉·128, ⌈H/block_size/4⌉·4) over the M flattened
        rows, padding written as zero.
        ``scale_linear``: (..., H/block_size).

    Raises:
        ValueError: for a wrong shape, device, format or layout, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
    if is_plain_eager(out, input, residual, weight, global_scale):
        choices = (block_size, scale_format, "128x4")
        return _quant.run(input, residual, weight, global_scale, eps, choices, out)
    args = (input, residual, weight, global_scale, eps, block_size, scale_format)
    if out is None:
        return torch.ops.cute.add_rmsnorm_fp4quant_both_layouts.default(*args)
    y, scale_128x4, scale_linear = out
    torch.ops.cute.add_rmsnorm_fp4quant_both_layouts.out(*args, y=y, scale_128x4=scale_128x4, scale_linear=scale_linear)
    return out


OP = _quant.spec(add_rmsnorm_fp4quant_both_layouts)
