"""``fp4_quantize_four_over_six``: NVFP4 quantisation with the better of two scales per block."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP4ScaleLayout


@define(RowQuant(four_over_six=True, block_size=16), "y", "scale")
def fp4_quantize_four_over_six(
    input: Tensor,
    global_scale: Tensor | None = None,
    scale_layout: FP4ScaleLayout = "128x4",
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise ``input`` to NVFP4 blocks along its last dimension, each with the better of two scales ("4 over 6").

    e2m1 has no number between 4 and 6. So for each block of 16 values ``v``, with ``amax = max |v|`` and the global
    scale ``g``, the op encodes the block twice in fp32, once with ``amax`` near 6 and once with ``amax`` near 4, and
    keeps the encoding with the smaller sum of squared errors::

        sixth = amax · g · (1 / 6)
        for scale in (e4m3(sixth), e4m3(sixth · 1.5)):
            code = e2m1(v · (g / scale))          # so that v ≈ code · scale / g
            error = Σ (code · scale - v · g)²     # equal errors: the first scale

    The result is in the format of :func:`fp4_quantize`, and every op that takes NVFP4 takes it. Conversions round to
    nearest even and saturate. A block with NaN or infinity gets the NaN scale and zero codes; a block whose scale is
    zero gets zero codes. For global scales between 2^-100 and 2^100, CPU and GPU results are equal bit for bit.

    Args:
        input: (..., H) bfloat16, float16 or float32; H is a multiple of 16. Rows may be strided. If they do not start
            at multiples of 16 bytes, the op first copies them.
        global_scale: float32 tensor of one element: factor by which values are multiplied before they are encoded;
            usually :func:`nvfp4_global_scale` of the tensor's amax, with ``four_over_six=True``, so that the larger
            scale of a block fits e4m3 too. ``None`` means 1.
        scale_layout: memory layout of ``scale``: ``"128x4"`` (tiles of 128 rows by 4 blocks, as cuBLAS and tcgen05 read
            them), ``"8x4"`` or ``"linear"`` (row-major).
        out: contiguous tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., H/2) uint8, two e2m1 codes per byte, element 0 in the low nibble.
        ``scale``: float8_e4m3fn. The shape depends on the layout. For M flattened rows: 128x4 (⌈M/128⌉, ⌈H/64⌉, 32, 4,
        4), 8x4 (⌈M/8⌉, ⌈H/64⌉, 8, 4), linear (..., H/16). Padding is zero.

    Raises:
        ValueError: If a shape, device or layout is wrong, or if an input requires grad while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp4_quantize, fp4_quantize_four_over_six
        >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0] * 4, [1.0, 2.0, 4.0, 6.0] * 4])  # both exact with scale 1
        >>> _, scale = fp4_quantize_four_over_six(x, scale_layout="linear")
        >>> scale.tolist(), fp4_quantize(x, scale_layout="linear")[1].tolist()
        ([[1.0], [1.0]], [[0.6875], [1.0]])

    References:
        J. Cook et al., "Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling", 2025. Roundings,
        special values and the global scale: docs/numerics.md, "4 over 6".
    """
