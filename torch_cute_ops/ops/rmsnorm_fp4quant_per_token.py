"""``rmsnorm_fp4quant_per_token``: RMSNorm and NVFP4 quantisation of each row with a scale per row, in one pass."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP4ScaleLayout


@define(RowQuant(normalises=True, block_size=16), "y", "scale", "row_scale")
def rmsnorm_fp4quant_per_token(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    scale_layout: FP4ScaleLayout = "128x4",
    weight_plus_one: bool = False,
    bias: Tensor | None = None,
    subtract_mean: bool = False,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMS-normalise each row of ``input`` and quantise it to NVFP4 with a scale per row, in one pass over memory.

    Each row ``v`` of ``input`` is processed in fp32, without intermediate rounding to the dtype of ``input``.
    ``amax_row`` and ``amax_block`` are the largest ``|norm|`` of the row and of a block of 16::

        norm = v / sqrt(mean(v²) + eps) · weight
        row_scale = amax_row / 2688           # 2688 = 448 · 6
        g = 1 / row_scale
        scale = e4m3(amax_block · g · (1 / 6))
        code = e2m1(norm · (g / scale))       # so that norm ≈ code · scale · row_scale

    Conversions round to nearest even and saturate. A row with NaN or infinity gets a NaN ``row_scale``, NaN scales and
    zero codes. If ``amax_row`` is below 2688 · 2^-126, ``row_scale``, scales and codes of the row are zero; a block
    whose scale is zero gets zero codes.

    Args:
        input: (..., H) bfloat16, float16 or float32; H is a multiple of 16. Rows may be strided. If they do not start
            at multiples of 16 bytes, the op first copies them.
        weight: (H,) in the dtype of ``input`` or float32: gain of each column; or (0,) for a norm without gains.
        eps: number added to the mean square.
        scale_layout: memory layout of ``scale``: ``"128x4"`` (tiles of 128 rows by 4 blocks, as cuBLAS and tcgen05 read
            them), ``"8x4"`` or ``"linear"`` (row-major).
        weight_plus_one: ``True`` if the gain of each column is ``1 + weight``, added in fp32, as in Gemma's norms.
        bias: (H,) in the dtype of ``weight``, added to ``norm`` in fp32. ``None`` means no bias.
        subtract_mean: ``True`` to subtract the mean of each row first, in fp32, as LayerNorm does.
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
        >>> from torch_cute_ops import fp4_dequantize, rmsnorm_fp4quant_per_token
        >>> x = torch.tensor([[3.0, -3.0] * 8])  # root mean square 3
        >>> y, scale, row_scale = rmsnorm_fp4quant_per_token(x, torch.ones(16))
        >>> assert torch.allclose(fp4_dequantize(y, scale) * row_scale, x / 3)

    References:
        B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4. J. Ba et al., "Layer
        Normalization", 2016, equation 4. NVFP4: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision
        Inference", 2025. Roundings and special values: docs/numerics.md, "Norm" and "A scale per row".
    """
