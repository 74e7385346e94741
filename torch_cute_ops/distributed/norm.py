"""The norm before a divided layer: this rank's tokens, in the form in which they travel."""

from typing import Any

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
    lead, rows = (*x.shape[:-1],), x.view(-1, x.shape[-1])
    sums = () if residual is None else (residual.view(-1, x.shape[-1]),)
    ops: Any = (add_rmsnorm_fp4quant, add_rmsnorm_fp8quant) if sums else (rmsnorm_fp4quant, rmsnorm_fp8quant)
    to_fp4, to_fp8 = ops
    if isinstance(layer, NVFP4Linear | MXFP4Linear) and layer.activations == "fp4":
        operands = to_fp4(rows, *sums, weight, layer._activation_scale(), eps, layer.format.block_size)
    elif isinstance(layer, FP8BlockLinear | NVFP4Linear | MXFP4Linear) and layer.activations == "fp8":
        operands = to_fp8(rows, *sums, weight, None, eps, "block128", "column")
    elif isinstance(layer, FP8TensorLinear | FP8ChannelLinear):
        scale, granularity = (layer.input_scale, "tensor") if layer.has_input_scale else (None, "token")
        operands = to_fp8(rows, *sums, weight, scale, eps, granularity)
    else:
        raise ValueError(f"normed_rows: the layer has activations={layer.activations!r}; expected 'fp4' or 'fp8'")
    return QuantizedRows(operands, lead, x.dtype)
