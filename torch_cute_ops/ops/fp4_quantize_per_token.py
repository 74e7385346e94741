"""``fp4_quantize_per_token``: NVFP4 quantisation of each row with a scale per row."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP4ScaleLayout


@define(RowQuant(block_size=16), "y", "scale", "row_scale")
def fp4_quantize_per_token(
    input: Tensor,
    scale_layout: FP4ScaleLayout = "128x4",
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise ``input`` to NVFP4 blocks along its last dimension, with a scale per row that needs no calibration.

    Each row is quantised in fp32. ``amax_row`` and ``amax_block`` are the largest ``|v|`` of the row and of a block of
    16::

        row_scale = amax_row / 2688           # 2688 = 448 · 6
        g = 1 / row_scale
        scale = e4m3(amax_block · g · (1 / 6))
        code = e2m1(v · (g / scale))          # so that v ≈ code · scale · row_scale

    Conversions round to nearest even and saturate. A row with NaN or infinity gets a NaN ``row_scale``, NaN scales and
    zero codes. If ``amax_row`` is below 2688 · 2^-126, ``row_scale``, scales and codes of the row are zero; a block
    whose scale is zero gets zero codes. CPU and GPU results are equal bit for bit.

    Args:
        input: (..., H) bfloat16, float16 or float32; H is a multiple of 16. Rows may be strided. If they do not start
            at multiples of 16 bytes, the op first copies them.
        scale_layout: memory layout of ``scale``: ``"128x4"`` (tiles of 128 rows by 4 blocks, as cuBLAS and tcgen05 read
            them), ``"8x4"`` or ``"linear"`` (row-major).
        out: contiguous tensors to write ``(y, scale, row_scale)`` into.

    Returns:
        ``y``: (..., H/2) uint8, two e2m1 codes per byte, element 0 in the low nibble.
        ``scale``: float8_e4m3fn. The shape depends on the layout. For M flattened rows: 128x4 (⌈M/128⌉, ⌈H/64⌉, 32, 4,
        4), 8x4 (⌈M/8⌉, ⌈H/64⌉, 8, 4), linear (..., H/16). Padding is zero.
        ``row_scale``: (M,) float32, one scale for each of the M flattened rows.

    Raises:
        ValueError: If a shape, device or layout is wrong, or if an input requires grad while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp4_dequantize, fp4_quantize_per_token
        >>> x = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] * 2])  # codes 0 to 7
        >>> y, scale, row_scale = fp4_quantize_per_token(torch.cat([x, 100 * x]), "linear")
        >>> [f"{byte:02x}" for byte in y[1, :4].tolist()], scale.tolist()
        (['10', '32', '54', '76'], [[448.0], [448.0]])
        >>> assert torch.allclose(fp4_dequantize(y, scale) * row_scale[:, None], torch.cat([x, 100 * x]))

    References:
        NVFP4: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025.
        Roundings and special values: docs/numerics.md, "A scale per row".
    """
