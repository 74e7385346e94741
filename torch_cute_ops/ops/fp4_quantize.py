"""``fp4_quantize``: FP4 quantisation of each row."""

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

    Each block of values ``v``, with ``amax = max |v|`` and the global scale ``g``, is quantised in fp32::

        NVFP4, blocks of 16:
            scale = e4m3(amax · g · (1 / 6))
            code = e2m1(v · (g / scale))  # so that v ≈ code · scale / g

        MXFP4, blocks of 32:
            scale = 2^⌈log2(amax / 6)⌉
            code = e2m1(v / scale)        # so that v ≈ code · scale

    Conversions round to nearest even and saturate. A block with NaN or infinity gets the NaN scale and zero codes; a
    block whose scale is zero gets zero codes. For global scales between 2^-100 and 2^100, CPU and GPU results are equal
    bit for bit.

    Args:
        input: (..., H) bfloat16, float16 or float32; H is a multiple of ``block_size``. Rows may be strided. If they do
            not start at multiples of 16 bytes, the op first copies them.
        global_scale: float32 tensor of one element: factor by which values are multiplied before they are encoded. For
            NVFP4 only; usually :func:`nvfp4_global_scale` of the tensor's amax. ``None`` means 1.
        block_size: elements per block scale: 16 for NVFP4, 32 for MXFP4.
        scale_format: format of the block scales: ``"e4m3"`` (blocks of 16) or ``"ue8m0"`` (blocks of 32). ``None``
            means the format for ``block_size``.
        scale_layout: memory layout of ``scale``: ``"128x4"`` (tiles of 128 rows by 4 blocks, as cuBLAS and tcgen05 read
            them), ``"8x4"`` or ``"linear"`` (row-major).
        out: contiguous tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., H/2) uint8, two e2m1 codes per byte, element 0 in the low nibble.
        ``scale``: float8_e4m3fn (NVFP4) or uint8 (MXFP4). The shape depends on the layout. For M flattened rows and
        blocks of B: 128x4 (⌈M/128⌉, ⌈H/B/4⌉, 32, 4, 4), 8x4 (⌈M/8⌉, ⌈H/B/4⌉, 8, 4), linear (..., H/B). Padding is zero.

    Raises:
        ValueError: If a shape, device, format or layout is wrong, or if an input requires grad while gradients are
            enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp4_quantize
        >>> x = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] * 2])  # codes 0 to 7
        >>> y, scale = fp4_quantize(x, scale_layout="linear")
        >>> [f"{byte:02x}" for byte in y[0, :4].tolist()], scale.tolist()
        (['10', '32', '54', '76'], [[1.0]])

    References:
        NVFP4: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025. MXFP4: OCP
        Microscaling Formats (MX) Specification v1.0, 2023; scales are rounded up as in the cuBLAS documentation.
        Roundings and special values: docs/numerics.md, "Quantising to FP4".
    """
