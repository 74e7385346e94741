"""``add_rmsnorm_fp4quant``: residual addition, RMSNorm and FP4 quantisation of each row, in one pass."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP4ScaleLayout, ScaleFormat, UpdatedTensor


@define(RowQuant("add", normalises=True), "y", "scale")
def add_rmsnorm_fp4quant(
    input: Tensor,
    residual: UpdatedTensor,
    weight: Tensor,
    global_scale: Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    scale_layout: FP4ScaleLayout = "128x4",
    weight_plus_one: bool = False,
    bias: Tensor | None = None,
    subtract_mean: bool = False,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Add ``input`` to ``residual`` in place, RMS-normalise each row of the sum and quantise it to FP4, in one pass.

    The sum is rounded to the dtype of ``residual``; the rounded sum is normalised in fp32 and quantised as in
    :func:`fp4_quantize`::

        residual = residual + input
        norm = residual / sqrt(mean(residual²) + eps) · weight

    If ``residual`` has the dtype of ``input``, the results equal, bit for bit, ``residual += input`` followed by
    :func:`rmsnorm_fp4quant` of the residual.

    Args:
        input: (..., H) bfloat16, float16 or float32; H is a multiple of ``block_size``. Rows may be strided. If they do
            not start at multiples of 16 bytes, the op first copies them.
        residual: (..., H) in the dtype of ``input`` or float32, updated in place to ``input + residual``, computed in
            fp32 and rounded once. ``residual`` may be strided. It may be ``input`` itself, but must not otherwise
            overlap ``input``.
        weight: (H,) in the dtype of ``input`` or float32: gain of each column; or (0,) for a norm without gains.
        global_scale: float32 tensor of one element: factor by which values are multiplied before they are encoded. For
            NVFP4 only; usually :func:`nvfp4_global_scale` of the tensor's amax. ``None`` means 1.
        eps: number added to the mean square.
        block_size: elements per block scale: 16 for NVFP4, 32 for MXFP4.
        scale_format: format of the block scales: ``"e4m3"`` (blocks of 16) or ``"ue8m0"`` (blocks of 32). ``None``
            means the format for ``block_size``.
        scale_layout: memory layout of ``scale``: ``"128x4"`` (tiles of 128 rows by 4 blocks, as cuBLAS and tcgen05 read
            them), ``"8x4"`` or ``"linear"`` (row-major).
        weight_plus_one: ``True`` if the gain of each column is ``1 + weight``, added in fp32, as in Gemma's norms.
        bias: (H,) in the dtype of ``weight``, added to ``norm`` in fp32. ``None`` means no bias.
        subtract_mean: ``True`` to subtract the mean of each row first, in fp32, as LayerNorm does.
        out: contiguous tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., H/2) uint8, two e2m1 codes per byte, element 0 in the low nibble.
        ``scale``: float8_e4m3fn (NVFP4) or uint8 (MXFP4). The shape depends on the layout. For M flattened rows and
        blocks of B: 128x4 (⌈M/128⌉, ⌈H/B/4⌉, 32, 4, 4), 8x4 (⌈M/8⌉, ⌈H/B/4⌉, 8, 4), linear (..., H/B). Padding is zero.

    Raises:
        ValueError: If a shape, device, format or layout is wrong, if ``residual`` overlaps itself or ``input``, or if
            an input requires grad while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import add_rmsnorm_fp4quant, fp4_dequantize
        >>> x, residual = torch.tensor([[3.0, -1.0] * 8]), torch.tensor([[1.0, -3.0] * 8])
        >>> y, scale = add_rmsnorm_fp4quant(x, residual, torch.full((16,), 6.0))
        >>> residual[0, :2].tolist()  # the sum
        [4.0, -4.0]
        >>> fp4_dequantize(y, scale)[0, :2].tolist()
        [6.0, -6.0]

    References:
        B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4. J. Ba et al., "Layer
        Normalization", 2016, equation 4. NVFP4: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision
        Inference", 2025. MXFP4: OCP Microscaling Formats (MX) Specification v1.0, 2023; scales are rounded up as in the
        cuBLAS documentation. Roundings and special values: docs/numerics.md, "Residual", "Norm" and "Quantising to
        FP4".
    """
