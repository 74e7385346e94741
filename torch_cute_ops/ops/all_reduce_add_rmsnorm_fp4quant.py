"""``all_reduce_add_rmsnorm_fp4quant``: sum over ranks, residual addition, RMSNorm and FP4 quantisation of each row."""

from torch import Tensor

from torch_cute_ops.ops._all_reduce import AllReduceRowQuant
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._signature import FP4ScaleLayout, ScaleFormat, UpdatedTensor


@define(AllReduceRowQuant(), "y", "scale")
def all_reduce_add_rmsnorm_fp4quant(
    input: Tensor,
    residual: UpdatedTensor,
    weight: Tensor,
    group: str,
    global_scale: Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    scale_layout: FP4ScaleLayout = "128x4",
    weight_plus_one: bool = False,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum ``input`` over the ranks of a group, add the sum to ``residual`` in place, and quantise the RMS norm of each
    row to FP4, in one launch.

    The sum over the ranks is computed in fp32, in the order of the ranks, and rounded once to the dtype of ``input``.
    :func:`add_rmsnorm_fp4quant` does the rest::

        total = round(input[rank 0] + input[rank 1] + …)
        y, scale = add_rmsnorm_fp4quant(total, residual, weight, …)

    All ranks get the same bits, which do not depend on the number of rows, as long as ``residual`` and ``weight`` are
    equal on all ranks. GPUs exchange the rows through torch's symmetric memory, in the launch that also quantises. On a
    CPU, the rows are gathered through the group.

    Args:
        input: (..., H) bfloat16, float16 or float32, with the same shape on all ranks. H is a multiple of
            ``block_size``. Rows may be strided. If they do not start at multiples of 16 bytes, the op first copies
            them.
        residual: (..., H) in the dtype of ``input``, updated in place to the sum over the ranks plus ``residual``,
            computed in fp32 and rounded once. ``residual`` may be strided. It may be ``input`` itself, but must not
            otherwise overlap ``input``.
        weight: (H,) in the dtype of ``input`` or float32: gain of each column.
        group: name of the process group, such as ``torch.distributed.group.WORLD.group_name``, of 1 to 8 ranks. An
            empty string means this process alone. All ranks call the op in the same order, and on one stream at a time.
            The GPUs need direct access to each other's memory.
        global_scale: float32 tensor of one element: factor by which values are multiplied before they are encoded. For
            NVFP4 only; usually :func:`nvfp4_global_scale` of the tensor's amax. ``None`` means 1.
        eps: number added to the mean square.
        block_size: elements per block scale: 16 for NVFP4, 32 for MXFP4.
        scale_format: format of the block scales: ``"e4m3"`` (blocks of 16) or ``"ue8m0"`` (blocks of 32). ``None``
            means the format for ``block_size``.
        scale_layout: memory layout of ``scale``: ``"128x4"`` (tiles of 128 rows by 4 blocks, as cuBLAS and tcgen05 read
            them), ``"8x4"`` or ``"linear"`` (row-major).
        weight_plus_one: ``True`` if the gain of each column is ``1 + weight``, added in fp32, as in Gemma's norms.
        out: contiguous tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., H/2) uint8, two e2m1 codes per byte, element 0 in the low nibble.
        ``scale``: float8_e4m3fn (NVFP4) or uint8 (MXFP4). The shape depends on the layout. For M flattened rows and
        blocks of B: 128x4 (⌈M/128⌉, ⌈H/B/4⌉, 32, 4, 4), 8x4 (⌈M/8⌉, ⌈H/B/4⌉, 8, 4), linear (..., H/B). Padding is zero.

    Raises:
        ValueError: If the group does not exist, if a shape, device, format or layout is wrong, if ``residual`` overlaps
            itself or ``input``, or if an input requires grad while gradients are enabled.
        TypeError: If a dtype is wrong.
        RuntimeError: If in an earlier call a rank sent no rows within the group's time-out. The message names the rank.

    Example:
        >>> import torch
        >>> from torch_cute_ops import all_reduce_add_rmsnorm_fp4quant, fp4_dequantize
        >>> x, residual = torch.tensor([[3.0, -1.0] * 8]), torch.tensor([[1.0, -3.0] * 8])
        >>> y, scale = all_reduce_add_rmsnorm_fp4quant(x, residual, torch.full((16,), 6.0), group="")
        >>> residual[0, :2].tolist()  # the sum
        [4.0, -4.0]
        >>> fp4_dequantize(y, scale)[0, :2].tolist()
        [6.0, -6.0]

    References:
        B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4. NVFP4: NVIDIA, "Introducing
        NVFP4 for Efficient and Accurate Low-Precision Inference", 2025. MXFP4: OCP Microscaling Formats (MX)
        Specification v1.0, 2023; scales are rounded up as in the cuBLAS documentation. Roundings and special values:
        docs/numerics.md, "Residual", "Norm" and "Quantising to FP4".
    """
