"""``rmsnorm``: RMSNorm of each row."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant


@define(RowQuant(normalises=True), "out")
def rmsnorm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    weight_plus_one: bool = False,
    bias: Tensor | None = None,
    subtract_mean: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """RMS-normalise each row of ``input``.

    Each row ``v`` of ``input`` is normalised in fp32, and the result is rounded once to the dtype of ``input``::

        norm = v / sqrt(mean(v²) + eps) · weight

    The result equals the ``norm`` of :func:`rmsnorm_fp4quant_with_norm`. The kernel releases dependent launches early,
    so that a following :func:`mm_fp4_weight_only` starts sooner.

    Args:
        input: (..., H) bfloat16, float16 or float32. Rows may be strided. If they do not start at multiples of 16
            bytes, or H is not a multiple of 16, the op first copies them.
        weight: (H,) in the dtype of ``input`` or float32: gain of each column; or (0,) for a norm without gains.
        eps: number added to the mean square.
        weight_plus_one: ``True`` if the gain of each column is ``1 + weight``, added in fp32, as in Gemma's norms.
        bias: (H,) in the dtype of ``weight``, added to ``norm`` in fp32. ``None`` means no bias.
        subtract_mean: ``True`` to subtract the mean of each row first, in fp32, as LayerNorm does.
        out: contiguous tensor to write the result into.

    Returns:
        (..., H) in the dtype of ``input``.

    Raises:
        ValueError: If a shape or device is wrong, or if an input requires grad while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import rmsnorm
        >>> x = torch.tensor([[2, 2, -2, -2], [4, 0, 0, 0]], dtype=torch.bfloat16)
        >>> rmsnorm(x, torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist()
        [[1.0, 2.0, -3.0, -4.0], [2.0, 0.0, 0.0, 0.0]]
        >>> rmsnorm(x, torch.tensor([0.0, 1.0, 2.0, 3.0]), weight_plus_one=True).tolist()
        [[1.0, 2.0, -3.0, -4.0], [2.0, 0.0, 0.0, 0.0]]

    References:
        B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4. J. Ba et al., "Layer
        Normalization", 2016, equation 4. Roundings and special values: docs/numerics.md, "Norm".
    """
