"""The norm before a divided layer: this rank's tokens, in the form in which they travel."""

from typing import Any

from torch import Tensor

from torch_cute_ops.nn import QuantizedRows, QuantLinear
from torch_cute_ops.ops.add_rmsnorm_fp4quant import add_rmsnorm_fp4quant
from torch_cute_ops.ops.add_rmsnorm_fp8quant import add_rmsnorm_fp8quant
from torch_cute_ops.ops.rmsnorm_fp4quant import rmsnorm_fp4quant
from torch_cute_ops.ops.rmsnorm_fp8quant import rmsnorm_fp8quant

_NORMS = {
    ("fp4", False): rmsnorm_fp4quant,
    ("fp4", True): add_rmsnorm_fp4quant,
    ("fp8", False): rmsnorm_fp8quant,
    ("fp8", True): add_rmsnorm_fp8quant,
}
"""By what rows are quantised to, and whether there is a residual."""


def normed_rows(
    layer: QuantLinear, x: Tensor, weight: Tensor, residual: Tensor | None = None, eps: float = 1e-6
) -> QuantizedRows:
    """RMSNorm of rows, quantised as the layer that follows takes them, in one pass over memory.

    The result goes to ``layer``, or to others with the same input scale, in place of a tensor. A
    :class:`ColumnParallel` layer with ``sequence=True`` gathers it, so that the norm's codes and scales travel.

    Args:
        layer: with ``activations`` ``"fp4"`` or ``"fp8"``.
        x: (..., H), bfloat16, float16 or float32.
        weight: (H,), of the norm, in the dtype of ``x`` or float32.
        residual: like ``x``: ``x`` is added to it in place, and the sum is normalised; ``None``: there is none.
        eps: added to the mean square.

    Raises:
        ValueError, TypeError: as the ops, for a wrong shape, dtype or device; for 16-bit activations.
    """
    how = layer.quantization()
    if how is None:
        raise ValueError(f"normed_rows: the layer has activations={layer.activations!r}; expected 'fp4' or 'fp8'")
    lead, rows = (*x.shape[:-1],), x.view(-1, x.shape[-1])
    sums = () if residual is None else (residual.view(-1, x.shape[-1]),)
    norm: Any = _NORMS[how.to, bool(sums)]
    operands = norm(rows, *sums, weight, eps=eps, **how.arguments)
    return QuantizedRows(operands, lead, x.dtype)
