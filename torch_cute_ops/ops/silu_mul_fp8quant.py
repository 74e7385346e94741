"""``silu_mul_fp8quant``: SwiGLU's gate and FP8 quantisation of each row, in one pass."""

from torch import Tensor

from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP8Granularity, FP8ScaleFormat, FP8ScaleLayout


@define(RowQuant("silu_mul"), "y", "scale")
def silu_mul_fp8quant(
    input: Tensor,
    scale: Tensor | None = None,
    granularity: FP8Granularity = "token",
    scale_layout: FP8ScaleLayout | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
    interleaved: bool = False,
    gate: Gate = "silu",
    scale_format: FP8ScaleFormat | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply a gate, by default SwiGLU's, to each row of ``input`` and quantise the result to FP8, in one pass over
    memory.

    The gate is computed in fp32::

        g = min(gate, swiglu_limit)
        u = clip(up, -swiglu_limit, swiglu_limit)
        h = g · sigmoid(swiglu_alpha · g) · (u + swiglu_beta)

    ``gate`` is the first half of each row of ``input``, ``up`` the second half. By default ``h`` is ``silu(gate) · up``
    (SwiGLU). gpt-oss uses ``swiglu_alpha=1.702``, ``swiglu_beta=1`` and ``swiglu_limit=7``. Clamps propagate NaN. With
    ``gate="gelu_tanh"`` or ``gate="gelu"``, ``h`` is ``gelu(gate) · up``; with ``gate="relu2"``, ``max(gate, 0)² ·
    up``. ``h`` is quantised as in :func:`fp8_quantize`, without being rounded to the dtype of ``input`` first.

    Args:
        input: (..., 2I) bfloat16, float16 or float32. Rows may be strided. If they do not start at multiples of 16
            bytes, or I is not a multiple of 16, the op first copies them.
        scale: float32 tensor of one element, the static scale of the whole tensor. Required with
            ``granularity="tensor"``, otherwise ``None``.
        granularity: elements that share a scale: ``"tensor"`` (all elements; requires ``scale``), ``"token"`` (one
            row), ``"block128"`` (128 neighbouring elements of a row; I is a multiple of 64, so the last block may
            contain 64 elements), or ``"block32"`` (MXFP8: 32 neighbouring elements of a row; I is a multiple of 32).
        scale_layout: layout of the scales. With granularity ``"block128"``: ``"column"`` (column-major, which GEMMs
            read in place) or ``"row"`` (row-major); ``None`` means the layout of the scales in ``out``, or else
            ``"column"``. With ``"block32"``: ``"128x4"``, ``"8x4"`` or ``"linear"``, as for FP4; ``None`` means
            ``"128x4"``. With ``"token"`` or ``"tensor"``, the argument has no effect.
        swiglu_alpha, swiglu_beta: finite parameters of the gate; the defaults give SwiGLU.
        swiglu_limit: positive clamp of gate and up; ``None`` means no clamp.
        interleaved: ``True`` to interleave k of ``y`` for ``mm_fp8_fp4``, as :func:`interleave_k` does. ``granularity``
            must be ``"token"`` or ``"tensor"``.
        gate: activation function: ``"silu"``, ``"gelu_tanh"`` (GELU, approximated by tanh as in Gemma), ``"gelu"``
            (GELU with the error function) or ``"relu2"`` (squared ReLU). Only ``"silu"`` takes ``swiglu_`` parameters.
        scale_format: ``"ue8m0"`` for scales that are powers of two, with ``"block128"`` or ``"block32"``. ``None``
            means ``"ue8m0"`` with ``"block32"``, and float32 scales of any value otherwise.
        out: tensors to write ``(y, scale)`` into. They must be contiguous; block scales may instead be column-major,
            with any distance between columns.

    Returns:
        ``y``: (..., I) float8_e4m3fn, or (..., ⌈I/256⌉, 256) with zeros beyond I if ``interleaved``.
        ``scale``: float32 (1,) with granularity ``"tensor"``, (..., 1) with ``"token"``, (..., ⌈I/128⌉) with
        ``"block128"``; uint8 with ``"block32"``, in the shape of ``scale_layout``, such as (..., I/32) for
        ``"linear"``. Scales of ``"block128"`` are column-major by default: for M flattened rows, a matrix (M,
        ⌈I/128⌉) with strides (1, M).

    Raises:
        ValueError: If a shape, device, format, layout or gate parameter is wrong, or if an input requires grad while
            gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import silu_mul_fp8quant
        >>> gate = torch.full((1, 4), 32.0)  # silu(32) rounds to 32
        >>> up = torch.tensor([[448.0, -224.0, 1.0, 0.0]]) / 32
        >>> y, scale = silu_mul_fp8quant(torch.cat([gate, up], 1))
        >>> y.float().tolist(), scale.tolist()
        ([[448.0, -224.0, 1.0, 0.0]], [[1.0]])

    References:
        N. Shazeer, "GLU Variants Improve Transformer", 2020, equation 6; clamp and parameters: gpt-oss, OpenAI, 2025.
        P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022. Roundings and special values: docs/numerics.md,
        "Gate" and "Quantising to FP8".
    """
