"""Norm before a divided layer. It quantises this rank's tokens, so that ranks gather only codes and scales."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from torch_cute_ops.nn import QuantizedRows, QuantLinear
from torch_cute_ops.ops.add_rmsnorm_fp4quant import add_rmsnorm_fp4quant
from torch_cute_ops.ops.add_rmsnorm_fp4quant_per_token import add_rmsnorm_fp4quant_per_token
from torch_cute_ops.ops.add_rmsnorm_fp8quant import add_rmsnorm_fp8quant
from torch_cute_ops.ops.all_reduce_add_rmsnorm_fp4quant import all_reduce_add_rmsnorm_fp4quant
from torch_cute_ops.ops.all_reduce_add_rmsnorm_fp8quant import all_reduce_add_rmsnorm_fp8quant
from torch_cute_ops.ops.rmsnorm_fp4quant import rmsnorm_fp4quant
from torch_cute_ops.ops.rmsnorm_fp4quant_per_token import rmsnorm_fp4quant_per_token
from torch_cute_ops.ops.rmsnorm_fp8quant import rmsnorm_fp8quant

_NORMS = {
    ("fp4", False): rmsnorm_fp4quant,
    ("fp4", True): add_rmsnorm_fp4quant,
    ("fp4_token", False): rmsnorm_fp4quant_per_token,
    ("fp4_token", True): add_rmsnorm_fp4quant_per_token,
    ("fp8", False): rmsnorm_fp8quant,
    ("fp8", True): add_rmsnorm_fp8quant,
}
"""Op for each pair of the result's format and a flag, which is True if a residual is added."""

_SUMMED_NORMS = {"fp4": all_reduce_add_rmsnorm_fp4quant, "fp8": all_reduce_add_rmsnorm_fp8quant}
"""Op that first sums over ranks, for each format of the result."""


def normed_rows(
    layer: QuantLinear,
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_plus_one: bool = False,
    group: dist.ProcessGroup | None = None,
) -> QuantizedRows:
    """Apply RMSNorm to rows and quantise them for the next layer, in one pass over memory.

    Pass the result to ``layer`` instead of a tensor, or to other layers with the same input scale. A
    :class:`ColumnParallel` layer with ``sequence=True`` then gathers codes and scales instead of 16-bit rows.

    Args:
        layer: layer with FP4 or FP8 activations.
        x: (..., H), bfloat16, float16 or float32.
        weight: (H,), weight of the norm, in the dtype of ``x`` or float32.
        residual: tensor like ``x``; ``x`` is added to it in place, and the sum is normalised. ``None`` normalises
            ``x``.
        eps: number added to the mean square.
        weight_plus_one: ``True`` if the norm multiplies by ``1 + weight``, as in Gemma.
        group: ranks whose ``x`` are first added up, in float32 and in the order of the ranks. Use it for partial sums
            of a :class:`RowParallel` layer with ``partial=True``. All ranks get all rows, in the same launch. A group
            requires a residual. ``None`` adds up nothing.

    Raises:
        ValueError, TypeError: for a wrong shape, dtype or device, as the norm ops raise; for a ``layer`` that takes
            16-bit activations; for a ``group`` without a residual, or with per-token FP4 activations.
    """
    quantization = layer.quantization()
    if quantization is None:
        raise ValueError(f"normed_rows: the layer has activations={layer.activations!r}; expected 'fp4' or 'fp8'")
    lead, rows = (*x.shape[:-1],), x.view(-1, x.shape[-1])
    sums = () if residual is None else (residual.view(-1, x.shape[-1]),)
    given = {"eps": eps, "weight_plus_one": weight_plus_one, **quantization.arguments}
    if group is not None:
        summed: Any = _SUMMED_NORMS.get(quantization.to)
        if residual is None or summed is None:
            raise ValueError(
                f"normed_rows: got group with residual={'None' if residual is None else 'a tensor'} and a layer with "
                f"activations={layer.activations!r}; expected a residual, and activations 'fp4' or FP8"
            )
        return QuantizedRows(summed(rows, *sums, weight, group.group_name, **given), lead, x.dtype)
    norm: Any = _NORMS[quantization.to, bool(sums)]
    operands = norm(rows, *sums, weight, **given)
    return QuantizedRows(operands, lead, x.dtype)
