"""``fp8_quantize``: FP8 quantisation of each row."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP8Granularity, FP8ScaleFormat, FP8ScaleLayout


@define(RowQuant(), "y", "scale")
def fp8_quantize(
    input: Tensor,
    scale: Tensor | None = None,
    granularity: FP8Granularity = "token",
    scale_layout: FP8ScaleLayout | None = None,
    interleaved: bool = False,
    scale_format: FP8ScaleFormat | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise ``input`` to FP8 along its last dimension.

    Each row or block of values ``v``, with ``amax = max |v|``, is quantised in fp32::

        scale = amax / 448  # of the row or block, unless scale is given
        scale = 2 ** ceil(log2(amax / 448))  # if scales are powers of two, at least 2 ** -127
        y = e4m3(v / scale)

    Codes are rounded to nearest even and saturate. A row or block with NaN or infinity gets a NaN scale and zero codes;
    a zero row or block gets scale zero, or 2 ** -127 if scales are powers of two. CPU and GPU results are equal bit for
    bit.

    Args:
        input: (..., K) bfloat16, float16 or float32. Rows may be strided. If they do not start at multiples of 16
            bytes, or K is not a multiple of 16, the op first copies them.
        scale: float32 tensor of one element, the static scale of the whole tensor. Required with
            ``granularity="tensor"``, otherwise ``None``.
        granularity: elements that share a scale: ``"tensor"`` (all elements; requires ``scale``), ``"token"`` (one
            row), ``"block128"`` (128 neighbouring elements of a row; K is a multiple of 64, so the last block may
            contain 64 elements), or ``"block32"`` (MXFP8: 32 neighbouring elements of a row; K is a multiple of 32).
        scale_layout: layout of the scales. With granularity ``"block128"``: ``"column"`` (column-major, which GEMMs
            read in place) or ``"row"`` (row-major); ``None`` means the layout of the scales in ``out``, or else
            ``"column"``. With ``"block32"``: ``"128x4"``, ``"8x4"`` or ``"linear"``, as for FP4; ``None`` means
            ``"128x4"``. With ``"token"`` or ``"tensor"``, the argument has no effect.
        interleaved: ``True`` to interleave k of ``y`` for ``mm_fp8_fp4``, as :func:`interleave_k` does. ``granularity``
            must be ``"token"`` or ``"tensor"``.
        scale_format: ``"ue8m0"`` for scales that are powers of two, with ``"block128"`` or ``"block32"``. ``None``
            means ``"ue8m0"`` with ``"block32"``, and float32 scales of any value otherwise.
        out: tensors to write ``(y, scale)`` into. They must be contiguous; block scales may instead be column-major,
            with any distance between columns.

    Returns:
        ``y``: (..., K) float8_e4m3fn, or (..., ⌈K/256⌉, 256) with zeros beyond K if ``interleaved``.
        ``scale``: float32 (1,) with granularity ``"tensor"``, (..., 1) with ``"token"``, (..., ⌈K/128⌉) with
        ``"block128"``; uint8 with ``"block32"``, in the shape of ``scale_layout``, such as (..., K/32) for
        ``"linear"``. Scales of ``"block128"`` are column-major by default: for M flattened rows, a matrix (M,
        ⌈K/128⌉) with strides (1, M).

    Raises:
        ValueError: If a shape, device, format or layout is wrong, or if an input requires grad while gradients are
            enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp8_quantize
        >>> y, scale = fp8_quantize(torch.tensor([[896.0, -448.0, 2.0, 0.0]]))
        >>> y.float().tolist(), scale.tolist()
        ([[448.0, -224.0, 1.0, 0.0]], [[2.0]])

    References:
        P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022. Blocks of 128: DeepSeek-AI, "DeepSeek-V3
        Technical Report", 2024, section 3.3.2. Roundings and special values: docs/numerics.md, "Quantising to FP8".
    """
