"""``silu_mul_fp4quant``: SwiGLU's gate and FP4 quantisation of each row, in one pass."""

import torch

from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signatures import FP4
from torch_cute_ops.runtime.dispatch import is_plain_eager

_quant = RowQuant("silu_mul_fp4quant", FP4, source="silu_mul")


def silu_mul_fp4quant(
    input: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate each row of ``input`` as SwiGLU does and quantise it to FP4 blocks, in one pass over memory.

    ``silu(a) · b`` with ``a`` the first half of each row of ``input``, ``b`` the second, and
    ``silu(a) = a / (1 + exp(-a))``, in fp32 (SwiGLU: Shazeer 2020, eq. 6), then quantised as :func:`fp4_quantize`
    does, with no rounding to the input dtype in between.

    Args:
        input: (..., 2I), bfloat16, float16 or float32; I a multiple of ``block_size``. Rows may be strided; the kernel
            reads them in place where their addresses are multiples of 16 bytes and from a copy where not.
        global_scale: one float32 element that multiplies values before they are encoded, usually 2688 / amax of the
            tensor; NVFP4 only. ``None`` means 1.
        block_size: 16 for NVFP4, 32 for MXFP4.
        scale_format: ``"e4m3"`` (block 16) or ``"ue8m0"`` (block 32); ``None`` follows the block size.
        scale_layout: ``"linear"``, ``"128x4"`` (cuBLAS and tcgen05) or ``"8x4"``.
        out: tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., I/2) uint8, two e2m1 codes a byte, element 0 in the low nibble.
        ``scale``: float8_e4m3fn (NVFP4) or uint8 (MXFP4). Linear: (..., I/block_size). Tiled: (⌈M/128⌉·128 or ⌈M/8⌉·8,
        ⌈I/block_size/4⌉·4) over the M flattened rows, padding written as zero.

    Raises:
        ValueError: for a wrong shape, device, format or layout, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
    if is_plain_eager(out, input, global_scale):
        choices = (block_size, scale_format, scale_layout)
        return _quant.run(input, None, None, global_scale, 0.0, choices, out)
    args = (input, global_scale, block_size, scale_format, scale_layout)
    if out is None:
        return torch.ops.cute.silu_mul_fp4quant.default(*args)
    y, scale = out
    torch.ops.cute.silu_mul_fp4quant.out(*args, y=y, scale=scale)
    return out


OP = _quant.spec(silu_mul_fp4quant)
