"""``all_reduce_add_rmsnorm_fp8quant``: sum over ranks, residual addition, RMSNorm and FP8 quantisation of each row."""

from torch import Tensor

from torch_cute_ops.ops._all_reduce import AllReduceRowQuant
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._signature import FP8Granularity, FP8ScaleFormat, FP8ScaleLayout, UpdatedTensor


@define(AllReduceRowQuant(), "y", "scale")
def all_reduce_add_rmsnorm_fp8quant(
    input: Tensor,
    residual: UpdatedTensor,
    weight: Tensor,
    group: str,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    granularity: FP8Granularity = "token",
    scale_layout: FP8ScaleLayout | None = None,
    interleaved: bool = False,
    weight_plus_one: bool = False,
    scale_format: FP8ScaleFormat | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum ``input`` over the ranks of a group, add the sum to ``residual`` in place, and quantise the RMS norm of each
    row to FP8, in one launch.

    The sum over the ranks is computed in fp32, in the order of the ranks, and rounded once to the dtype of ``input``.
    :func:`add_rmsnorm_fp8quant` does the rest::

        total = round(input[rank 0] + input[rank 1] + …)
        y, scale = add_rmsnorm_fp8quant(total, residual, weight, …)

    All ranks get the same bits, which do not depend on the number of rows, as long as ``residual`` and ``weight`` are
    equal on all ranks. GPUs exchange the rows through torch's symmetric memory, in the launch that also quantises. On a
    CPU, the rows are gathered through the group.

    Args:
        input: (..., H) bfloat16, float16 or float32, with the same shape on all ranks. Rows may be strided. If they do
            not start at multiples of 16 bytes, or H is not a multiple of 16, the op first copies them.
        residual: (..., H) in the dtype of ``input``, updated in place to the sum over the ranks plus ``residual``,
            computed in fp32 and rounded once. ``residual`` may be strided. It may be ``input`` itself, but must not
            otherwise overlap ``input``.
        weight: (H,) in the dtype of ``input`` or float32: gain of each column.
        group: name of the process group, such as ``torch.distributed.group.WORLD.group_name``, of 1 to 8 ranks. An
            empty string means this process alone. All ranks call the op in the same order, and on one stream at a time.
            The GPUs need direct access to each other's memory.
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
        ValueError: If the group does not exist, if a shape, device, format or layout is wrong, if ``residual`` overlaps
            itself or ``input``, or if an input requires grad while gradients are enabled.
        TypeError: If a dtype is wrong.
        RuntimeError: If in an earlier call a rank sent no rows within the group's time-out. The message names the rank.

    Example:
        >>> import torch
        >>> from torch_cute_ops import all_reduce_add_rmsnorm_fp8quant
        >>> x, residual = torch.tensor([[3.0, -1.0] * 8]), torch.tensor([[1.0, -3.0] * 8])
        >>> y, scale = all_reduce_add_rmsnorm_fp8quant(x, residual, torch.ones(16), group="")
        >>> residual[0, :2].tolist(), y[0, :2].float().tolist()
        ([4.0, -4.0], [448.0, -448.0])
        >>> assert torch.allclose(y.float() * scale, residual / 4)

    References:
        B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4. P. Micikevicius et al., "FP8
        Formats for Deep Learning", 2022. Roundings and special values: docs/numerics.md, "Residual", "Norm" and
        "Quantising to FP8".
    """
