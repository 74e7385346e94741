"""``fp4_quantize``: rows of numbers to FP4 blocks."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP4ScaleLayout, ScaleFormat


@define(RowQuant(), "y", "scale")
def fp4_quantize(
    input: Tensor,
    global_scale: Tensor | None = None,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    scale_layout: FP4ScaleLayout = "128x4",
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise ``input`` to FP4 blocks along its last dimension.

    NVFP4, with ``g`` the global scale, for each block of 16, every operation in fp32: ``scale = e4m3(amax · g / 6)``
    saturating, code ``e2m1(v · (g / scale))``, so that ``v ≈ e2m1 · scale / g``. MXFP4 (OCP MX v1.0), for each block of
    32: ``scale = 2^⌈log2(amax / 6)⌉``, code ``e2m1(v / scale)``. Conversions round to nearest even. A block that holds
    NaN or infinity gets the NaN scale and zero codes; a block whose scale is zero gets zero codes. CPU and GPU agree to
    the bit.

    Args:
        input: (..., H), bfloat16, float16 or float32; H a multiple of ``block_size``. Rows may be strided; the kernel
            reads them in place where their addresses are multiples of 16 bytes and from a copy where not.
        global_scale: one float32 element that multiplies values before they are encoded, usually
            :func:`nvfp4_global_scale` of the tensor's largest magnitude; NVFP4 only. ``None`` means 1.
        block_size: 16 for NVFP4, 32 for MXFP4.
        scale_format: ``"e4m3"`` (block 16) or ``"ue8m0"`` (block 32); ``None`` follows the block size.
        scale_layout: ``"linear"``, ``"128x4"`` (cuBLAS and tcgen05) or ``"8x4"``.
        out: tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., H/2) uint8, two e2m1 codes a byte, element 0 in the low nibble.
        ``scale``: float8_e4m3fn (NVFP4) or uint8 (MXFP4). Linear: (..., H/block_size). Tiled: (⌈M/128⌉·128 or ⌈M/8⌉·8,
        ⌈H/block_size/4⌉·4) over the M flattened rows, padding written as zero.

    Raises:
        ValueError: for a wrong shape, device, format or layout, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
