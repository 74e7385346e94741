"""``add_rmsnorm``: residual addition and RMSNorm of each row, in one pass."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import UpdatedTensor


@define(RowQuant("add", normalises=True), "out")
def add_rmsnorm(
    input: Tensor,
    residual: UpdatedTensor,
    weight: Tensor,
    eps: float = 1e-6,
    weight_plus_one: bool = False,
    bias: Tensor | None = None,
    subtract_mean: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Add ``input`` to ``residual`` in place and RMS-normalise each row of the sum, in one pass over memory.

    The sum is rounded to the dtype of ``residual``; the rounded sum is normalised in fp32::

        residual = residual + input
        norm = residual / sqrt(mean(residual²) + eps) · weight

    If ``residual`` has the dtype of ``input``, the results equal, bit for bit, ``residual += input`` followed by
    :func:`rmsnorm` of the residual.

    Args:
        input: (..., H) bfloat16, float16 or float32. Rows may be strided. If they do not start at multiples of 16
            bytes, or H is not a multiple of 16, the op first copies them.
        residual: (..., H) in the dtype of ``input`` or float32, updated in place to ``input + residual``, computed in
            fp32 and rounded once. ``residual`` may be strided. It may be ``input`` itself, but must not otherwise
            overlap ``input``.
        weight: (H,) in the dtype of ``input`` or float32: gain of each column; or (0,) for a norm without gains.
        eps: number added to the mean square.
        weight_plus_one: ``True`` if the gain of each column is ``1 + weight``, added in fp32, as in Gemma's norms.
        bias: (H,) in the dtype of ``weight``, added to ``norm`` in fp32. ``None`` means no bias.
        subtract_mean: ``True`` to subtract the mean of each row first, in fp32, as LayerNorm does.
        out: contiguous tensor to write the result into.

    Returns:
        (..., H) in the dtype of ``input``.

    Raises:
        ValueError: If a shape or device is wrong, if ``residual`` overlaps itself or ``input``, or if an input requires
            grad while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import add_rmsnorm
        >>> x = torch.tensor([[3, 1, -1, -3]], dtype=torch.bfloat16)
        >>> residual = torch.tensor([[1, 3, -3, -1]], dtype=torch.bfloat16)
        >>> add_rmsnorm(x, residual, torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist()
        [[1.0, 2.0, -3.0, -4.0]]
        >>> residual.tolist()  # the sum
        [[4.0, 4.0, -4.0, -4.0]]

    References:
        B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4. J. Ba et al., "Layer
        Normalization", 2016, equation 4. Roundings and special values: docs/numerics.md, "Residual" and "Norm".
    """
