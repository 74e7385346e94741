"""``rmsnorm_fp8quant``: RMSNorm and FP8 quantisation of each row, in one pass."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP8Granularity, FP8ScaleFormat, FP8ScaleLayout


@define(RowQuant(normalises=True), "y", "scale")
def rmsnorm_fp8quant(
    input: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    granularity: FP8Granularity = "token",
    scale_layout: FP8ScaleLayout | None = None,
    interleaved: bool = False,
    weight_plus_one: bool = False,
    bias: Tensor | None = None,
    subtract_mean: bool = False,
    scale_format: FP8ScaleFormat | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS-normalise each row of ``input`` and quantise it to FP8, in one pass over memory.

    Each row ``v`` of ``input`` is processed in fp32, without intermediate rounding to the dtype of ``input``::

        norm = v / sqrt(mean(v²) + eps) · weight
        scale = amax / 448  # of the row or block, unless scale is given
        y = e4m3(norm / scale)

    Codes are rounded to nearest even and saturate. A row or block with NaN or infinity gets a NaN scale and zero codes;
    a zero row or block gets scale zero. Scales that are powers of two are computed as in :func:`fp8_quantize`.

    Args:
        input: (..., H) bfloat16, float16 or float32. Rows may be strided. If they do not start at multiples of 16
            bytes, or H is not a multiple of 16, the op first copies them.
        weight: (H,) in the dtype of ``input`` or float32: gain of each column; or (0,) for a norm without gains.
        scale: float32 tensor of one element, the static scale of the whole tensor. Required with
            ``granularity="tensor"``, otherwise ``None``.
        eps: number added to the mean square.
        granularity: elements that share a scale: ``"tensor"`` (all elements; requires ``scale``), ``"token"`` (one
            row), ``"block128"`` (128 neighbouring elements of a row; H is a multiple of 64, so the last block may
            contain 64 elements), or ``"block32"`` (MXFP8: 32 neighbouring elements of a row; H is a multiple of 32).
        scale_layout: layout of the scales. With granularity ``"block128"``: ``"column"`` (column-major, which GEMMs
            read in place) or ``"row"`` (row-major); ``None`` means the layout of the scales in ``out``, or else
            ``"column"``. With ``"block32"``: ``"128x4"``, ``"8x4"`` or ``"linear"``, as for FP4; ``None`` means
            ``"128x4"``. With ``"token"`` or ``"tensor"``, the argument has no effect.
        interleaved: ``True`` to interleave k of ``y`` for ``mm_fp8_fp4``, as :func:`interleave_k` does. ``granularity``
            must be ``"token"`` or ``"tensor"``.
        weight_plus_one: ``True`` if the gain of each column is ``1 + weight``, added in fp32, as in Gemma's norms.
        bias: (H,) in the dtype of ``weight``, added to ``norm`` in fp32. ``None`` means no bias.
        subtract_mean: ``True`` to subtract the mean of each row first, in fp32, as LayerNorm does.
        scale_format: ``"ue8m0"`` for scales that are powers of two, with ``"block128"`` or ``"block32"``. ``None``
            means ``"ue8m0"`` with ``"block32"``, and float32 scales of any value otherwise.
        out: tensors to write ``(y, scale)`` into. They must be contiguous; block scales may instead be column-major,
            with any distance between columns.

    Returns:
        ``y``: (..., H) float8_e4m3fn, or (..., ⌈H/256⌉, 256) with zeros beyond H if ``interleaved``.
        ``scale``: float32 (1,) with granularity ``"tensor"``, (..., 1) with ``"token"``, (..., ⌈H/128⌉) with
        ``"block128"``; uint8 with ``"block32"``, in the shape of ``scale_layout``, such as (..., H/32) for
        ``"linear"``. Scales of ``"block128"`` are column-major by default: for M flattened rows, a matrix (M,
        ⌈H/128⌉) with strides (1, M).

    Raises:
        ValueError: If a shape, device, format or layout is wrong, or if an input requires grad while gradients are
            enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import rmsnorm_fp8quant
        >>> x = torch.tensor([[3.0, -3.0] * 8])  # root mean square 3
        >>> y, scale = rmsnorm_fp8quant(x, torch.ones(16))
        >>> y[0, :2].float().tolist()
        [448.0, -448.0]
        >>> assert torch.allclose(y.float() * scale, x / 3)

    References:
        B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4. J. Ba et al., "Layer
        Normalization", 2016, equation 4. P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022. Roundings and
        special values: docs/numerics.md, "Norm" and "Quantising to FP8".
    """
