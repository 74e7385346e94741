"""``rmsnorm_fp4quant_with_norm``: as ``rmsnorm_fp4quant``, and the norm itself."""

import torch

from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signatures import FP4_NORM
from torch_cute_ops.runtime.dispatch import is_plain_eager

_quant = RowQuant("rmsnorm_fp4quant_with_norm", FP4_NORM, normalises=True, third="norm")


def rmsnorm_fp4quant_with_norm(
    input: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMS-normalise each row of ``input``, quantise it to FP4 blocks, and return the norm too, in one pass over memory.

    ``y`` and ``scale`` are those of :func:`rmsnorm_fp4quant`, made from the norm in fp32, not from the rounded one.

    Args:
        input: (..., H), bfloat16, float16 or float32; H a multiple of ``block_size``. Rows may be strided; the kernel
            reads them in place where their addresses are multiples of 16 bytes and from a copy where not.
        weight: (H,), in the input dtype or float32.
        global_scale: one float32 element that multiplies values before they are encoded, usually 2688 / amax of the
            tensor; NVFP4 only. ``None`` means 1.
        eps: added to the mean square.
        block_size: 16 for NVFP4, 32 for MXFP4.
        scale_format: ``"e4m3"`` (block 16) or ``"ue8m0"`` (block 32); ``None`` follows the block size.
        scale_layout: ``"linear"``, ``"128x4"`` (cuBLAS and tcgen05) or ``"8x4"``.
        out: tensors to write ``(y, scale, norm)`` into.

    Returns:
        ``y``: (..., H/2) uint8, two e2m1 codes a byte, element 0 in the low nibble.
        ``scale``: float8_e4m3fn (NVFP4) or uint8 (MXFP4). Linear: (..., H/block_size). Tiled: (⌈M/128⌉·128 or ⌈M/8⌉·8,
        ⌈H/block_size/4⌉·4) over the M flattened rows, padding written as zero.
        ``norm``: (..., H) in the input dtype.

    Raises:
        ValueError: for a wrong shape, device, format or layout, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
    if is_plain_eager(out, input, weight, global_scale):
        choices = (block_size, scale_format, scale_layout)
        return _quant.run(input, None, weight, global_scale, eps, choices, out)
    args = (input, weight, global_scale, eps, block_size, scale_format, scale_layout)
    if out is None:
        return torch.ops.cute.rmsnorm_fp4quant_with_norm.default(*args)
    y, scale, norm = out
    torch.ops.cute.rmsnorm_fp4quant_with_norm.out(*args, y=y, scale=scale, norm=norm)
    return out


OP = _quant.spec(rmsnorm_fp4quant_with_norm)
