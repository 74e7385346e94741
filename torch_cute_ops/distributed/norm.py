"""The norm before a divided layer: this rank's tokens, in the form in which they travel."""

from torch import Tensor

from torch_cute_ops.nn import QuantizedRows, QuantLinear
from torch_cute_ops.nn.linear import FP8BlockLinear, FP8ChannelLinear, FP8TensorLinear, MXFP4Linear, NVFP4Linear
from torch_cute_ops.ops.add_rmsnorm_fp4quant import add_rmsnorm_fp4quant
from torch_cute_ops.ops.add_rmsnorm_fp8quant import add_rmsnorm_fp8quant
from torch_cute_ops.ops.rmsnorm_fp4quant import rmsnorm_fp4quant
from torch_cute_ops.ops.rmsnorm_fp8quant import rmsnorm_fp8quant


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
    lead, hidden = (*x.shape[:-1],), x.shape[-1]
    rows = x.view(-1, hidden)
    sums = () if residual is None else (residual.view(-1, hidden),)
    if isinstance(layer, NVFP4Linear | MXFP4Linear) and layer.activations == "fp4":
        fp4 = add_rmsnorm_fp4quant if sums else rmsnorm_fp4quant
        scale = layer._input_global_scale()
        return QuantizedRows(fp4(rows, *sums, weight, scale, eps, layer.format.block_size), lead, x.dtype)
    fp8 = add_rmsnorm_fp8quant if sums else rmsnorm_fp8quant
    if isinstance(layer, FP8BlockLinear):
        return QuantizedRows(fp8(rows, *sums, weight, None, eps, "block128", "column"), lead, x.dtype)
    if isinstance(layer, FP8TensorLinear | FP8ChannelLinear):
        if layer.has_input_scale:
            return QuantizedRows(fp8(rows, *sums, weight, layer.input_scale, eps, "tensor"), lead, x.dtype)
        return QuantizedRows(fp8(rows, *sums, weight, None, eps, "token"), lead, x.dtype)
    raise ValueError(f"normed_rows: the layer has activations={layer.activations!r}; expected 'fp4' or 'fp8'")
