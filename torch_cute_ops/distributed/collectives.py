"""Collectives that send quantised rows as bytes, and a counter of the bytes that are sent."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_cute_ops.distributed.rules import is_byte_float
from torch_cute_ops.formats import convert_scales
from torch_cute_ops.nn import QuantizedRows, QuantLinear

Group = dist.ProcessGroup
# torch 2.13 renamed these functions and warns about the old names.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
TILE_ROWS = 128


def as_bytes(tensor: Tensor) -> Tensor:
    """View an FP8 tensor as uint8, because not every collective backend supports FP8. Return other dtypes unchanged."""
    return tensor.view(torch.uint8) if is_byte_float(tensor.dtype) else tensor


def all_gather(tensor: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Concatenate the ranks' tensors along ``dim``, in the order of the ranks.

    Args:
        tensor: this rank's tensor; shape and dtype are the same on every rank. FP8 is sent as uint8.
        group: ranks.
        dim: 0 or 1.

    Returns:
        A contiguous tensor; its size in ``dim`` is multiplied by the number of ranks.
    """
    world = dist.get_world_size(group)
    sent = as_bytes(tensor.contiguous())
    gathered = sent.new_empty((world * sent.shape[0], *sent.shape[1:]))
    _all_gather(gathered, sent, group=group)
    if dim:
        gathered = gathered.unflatten(0, (world, -1)).movedim(0, 1).flatten(1, 2).contiguous()
    return gathered.view(tensor.dtype)


def reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    """Sum the ranks' tensors and return this rank's shard of dimension 0.

    Args:
        tensor: (M, ...), float32, bfloat16 or float16; M a multiple of the number of ranks.
        group: ranks.

    Raises:
        ValueError: if M is not a multiple of the number of ranks.
    """
    world = dist.get_world_size(group)
    if tensor.shape[0] % world:
        raise ValueError(f"reduce_scatter: {tensor.shape[0]} rows; expected a multiple of the {world} ranks")
    part = tensor.new_empty((tensor.shape[0] // world, *tensor.shape[1:]))
    _reduce_scatter(part, tensor.contiguous(), group=group)
    return part


def all_reduce(tensor: Tensor, group: Group) -> Tensor:
    """Sum the ranks' tensors in place."""
    dist.all_reduce(tensor, group=group)
    return tensor


def gather_rows(layer: QuantLinear, rows: QuantizedRows, group: Group) -> QuantizedRows:
    """Concatenate the quantised rows of all ranks, in the order of the ranks. Only codes and scales are sent.

    Args:
        layer: layer whose ``quantize`` made the rows and whose GEMM will read them.
        rows: rows of this rank; the number of rows is the same on every rank.
        group: ranks.

    Returns:
        Rows whose first leading dimension is multiplied by the number of ranks. They equal ``layer.quantize`` of the
        concatenated input, bit for bit.

    Raises:
        ValueError: for rows without a leading dimension.
    """
    if not rows.lead:
        raise ValueError("gather_rows: rows has no leading dimension; expected (M, K) or more")
    world = dist.get_world_size(group)
    lead = (world * rows.lead[0], *rows.lead[1:])
    elements = all_gather(rows.operands[0], group)
    if len(rows.operands) == 1:
        return rows._replace(operands=(elements,), lead=lead)
    row_scales = (all_gather(scale, group) for scale in rows.operands[2:])
    return rows._replace(operands=(elements, _gather_scales(layer, rows, group), *row_scales), lead=lead)


def _gather_scales(layer: QuantLinear, rows: QuantizedRows, group: Group) -> Tensor:
    elements, scale, *_ = rows.operands
    count = elements.shape[0]
    if layer.has_scale_tiles:
        if count % TILE_ROWS == 0:
            return all_gather(scale, group)
        k = layer.in_features
        linear = all_gather(convert_scales(scale, count, k, "128x4", "linear"), group)
        return convert_scales(linear, linear.shape[0], k, "linear", "128x4")
    if layer.has_fp8_blocks:  # column-major scales
        return all_gather(scale.t(), group, dim=1).t()
    # A static scale need not be sent, because it is equal on all ranks.
    has_scale_of_row = layer.has_computed_row_scales or layer.has_linear_scales
    return all_gather(scale, group) if has_scale_of_row else scale


class Sent(NamedTuple):
    """Description of the data that a rank sent in one collective.

    Attributes:
        name: name of the collective, such as ``"all_gather"``.
        dtype: dtype of the data.
        nbytes: number of bytes that the rank passed to the collective.
    """

    name: str
    dtype: torch.dtype
    nbytes: int


_COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
}
"""Name in ``Sent`` of each collective, keyed by its name in torch's dispatcher."""


class count_traffic(TorchDispatchMode):
    """Context manager that counts the data that this rank passes to collectives in eager code.

    Example:
        ``with count_traffic() as traffic: layer(x)``, then ``traffic.nbytes()``.

    Attributes:
        sent: the collectives so far, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []

    def nbytes(self, name: str | None = None) -> int:
        """Return the total bytes of all collectives, or of the collectives with this name."""
        return sum(each.nbytes for each in self.sent if name in (None, each.name))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = _COLLECTIVES.get(func._schema.name.rpartition("::")[2])
            if name is not None:
                # If a collective has an output argument, c10d passes it before the input.
                tensors = [each for each in args[:2] if isinstance(each, Tensor)]
                given = tensors[-1] if tensors else args[0][0]
                self.sent.append(Sent(name, given.dtype, given.nbytes))
        return func(*args, **(kwargs or {}))
