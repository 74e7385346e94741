"""``rmsnorm_fp4quant``: RMSNorm and FP4 quantisation of each row, in one pass."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP4ScaleLayout, ScaleFormat


@define(RowQuant(normalises=True), "y", "scale")
def rmsnorm_fp4quant(
    input: Tensor,
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
    """RMS-normalise each row of ``input`` and quantise it to FP4 blocks, in one pass over memory.

    Each row ``v`` of ``input`` is normalised in fp32::

        norm = v / sqrt(mean(v²) + eps) · weight

    ``norm`` is quantised as in :func:`fp4_quantize`, without being rounded to the dtype of ``input`` first.

    Args:
        input: (..., H) bfloat16, float16 or float32; H is a multiple of ``block_size``. Rows may be strided. If they do
            not start at multiples of 16 bytes, the op first copies them.
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
        ValueError: If a shape, device, format or layout is wrong, or if an input requires grad while gradients are
            enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp4_dequantize, rmsnorm_fp4quant
        >>> x = torch.tensor([[3.0, -3.0] * 8])  # root mean square 3
        >>> y, scale = rmsnorm_fp4quant(x, torch.full((16,), 6.0), scale_layout="linear")
        >>> y[0, :3].tolist(), scale.tolist()  # codes 7 and 15 stand for 6 and -6
        ([247, 247, 247], [[1.0]])
        >>> fp4_dequantize(y, scale, scale_layout="linear")[0, :4].tolist()
        [6.0, -6.0, 6.0, -6.0]

    References:
        B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4. J. Ba et al., "Layer
        Normalization", 2016, equation 4. NVFP4: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision
        Inference", 2025. MXFP4: OCP Microscaling Formats (MX) Specification v1.0, 2023; scales are rounded up as in the
        cuBLAS documentation. Roundings and special values: docs/numerics.md, "Norm" and "Quantising to FP4".
    """
