"""``all_reduce_add_rmsnorm``: sum over ranks, residual addition and RMSNorm of each row, in one launch."""

from torch import Tensor

from torch_cute_ops.ops._all_reduce import AllReduceRowQuant
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._signature import UpdatedTensor


@define(AllReduceRowQuant(), "out")
def all_reduce_add_rmsnorm(
    input: Tensor,
    residual: UpdatedTensor,
    weight: Tensor,
    group: str,
    eps: float = 1e-6,
    weight_plus_one: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Sum ``input`` over the ranks of a group, add the sum to ``residual`` in place and RMS-normalise each row, in one
    launch.

    The sum over the ranks is computed in fp32, in the order of the ranks, and rounded once to the dtype of ``input``.
    :func:`add_rmsnorm` does the rest::

        total = round(input[rank 0] + input[rank 1] + …)
        out = add_rmsnorm(total, residual, weight, …)

    All ranks get the same bits, which do not depend on the number of rows, as long as ``residual`` and ``weight`` are
    equal on all ranks. GPUs exchange the rows through torch's symmetric memory, in the launch that also adds and
    normalises. On a CPU, the rows are gathered through the group.

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
        eps: number added to the mean square.
        weight_plus_one: ``True`` if the gain of each column is ``1 + weight``, added in fp32, as in Gemma's norms.
        out: contiguous tensor to write the result into.

    Returns:
        (..., H) in the dtype of ``input``.

    Raises:
        ValueError: If the group does not exist, if a shape or device is wrong, if ``residual`` overlaps itself or
            ``input``, or if an input requires grad while gradients are enabled.
        TypeError: If a dtype is wrong.
        RuntimeError: If in an earlier call a rank sent no rows within the group's time-out. The message names the rank.

    Example:
        >>> import torch
        >>> from torch_cute_ops import all_reduce_add_rmsnorm
        >>> x = torch.tensor([[3, 1, -1, -3]], dtype=torch.bfloat16)
        >>> residual = torch.tensor([[1, 3, -3, -1]], dtype=torch.bfloat16)
        >>> all_reduce_add_rmsnorm(x, residual, torch.tensor([1.0, 2.0, 3.0, 4.0]), group="").tolist()
        [[1.0, 2.0, -3.0, -4.0]]
        >>> residual.tolist()  # the sum
        [[4.0, 4.0, -4.0, -4.0]]

    References:
        B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4. Roundings and special
        values: docs/numerics.md, "Residual" and "Norm".
    """
