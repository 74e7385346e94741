"""``add_rmsnorm_fp4quant_per_token``: residual addition, RMSNorm and NVFP4 quantisation with a scale per row."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP4ScaleLayout, UpdatedTensor


@define(RowQuant("add", normalises=True, block_size=16), "y", "scale", "row_scale")
def add_rmsnorm_fp4quant_per_token(
    input: Tensor,
    residual: UpdatedTensor,
    weight: Tensor,
    eps: float = 1e-6,
    scale_layout: FP4ScaleLayout = "128x4",
    weight_plus_one: bool = False,
    bias: Tensor | None = None,
    subtract_mean: bool = False,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add ``input`` to ``residual`` in place, RMS-normalise each row and quantise it to NVFP4 with a scale per row.

    All this takes one pass over memory. The sum is rounded to the dtype of ``residual``; the normalised row (``norm``),
    its scales and its codes are computed in fp32 from the rounded sum. ``amax_row`` and ``amax_block`` are the largest
    ``|norm|`` of the row and of a block of 16::

        residual = residual + input
        norm = residual / sqrt(mean(residual²) + eps) · weight
        row_scale = amax_row / 2688           # 2688 = 448 · 6
        g = 1 / row_scale
        scale = e4m3(amax_block · g · (1 / 6))
        code = e2m1(norm · (g / scale))       # so that norm ≈ code · scale · row_scale

    Conversions round to nearest even and saturate. A row with NaN or infinity gets a NaN ``row_scale``, NaN scales and
    zero codes. If ``amax_row`` is below 2688 · 2^-126, ``row_scale``, scales and codes of the row are zero; a block
    whose scale is zero gets zero codes. If ``residual`` has the dtype of ``input``, the results equal, bit for bit,
    ``residual += input`` followed by :func:`rmsnorm_fp4quant_per_token` of the residual.

    Args:
        input: (..., H) bfloat16, float16 or float32; H is a multiple of 16. Rows may be strided. If they do not start
            at multiples of 16 bytes, the op first copies them.
        residual: (..., H) in the dtype of ``input`` or float32, updated in place to ``input + residual``, computed in
            fp32 and rounded once. ``residual`` may be strided. It may be ``input`` itself, but must not otherwise
            overlap ``input``.
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
        ValueError: If a shape, device or layout is wrong, if ``residual`` overlaps itself or ``input``, or if an input
            requires grad while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import add_rmsnorm_fp4quant_per_token, fp4_dequantize
        >>> x, residual = torch.tensor([[3.0, -1.0] * 8]), torch.tensor([[1.0, -3.0] * 8])
        >>> y, scale, row_scale = add_rmsnorm_fp4quant_per_token(x, residual, torch.ones(16))
        >>> residual[0, :2].tolist()
        [4.0, -4.0]
        >>> assert torch.allclose(fp4_dequantize(y, scale) * row_scale, residual / 4)

    References:
        B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4. J. Ba et al., "Layer
        Normalization", 2016, equation 4. NVFP4: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision
        Inference", 2025. Roundings and special values: docs/numerics.md, "Residual", "Norm" and "A scale per row".
    """
