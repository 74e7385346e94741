"""Plans for ``parallelize_module``: how linear layers are divided among the ranks of a mesh dimension."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from torch_cute_ops.distributed.collectives import all_gather, all_reduce, gather_rows, reduce_scatter
from torch_cute_ops.formats.fp4 import E4M3_MAX, encode_e4m3
from torch_cute_ops.nn import QuantizedRows, QuantLinear, merge
from torch_cute_ops.nn._base import _SHARED
from torch_cute_ops.nn.linear import FP8ChannelLinear, FP8TensorLinear

BLOCK: Final = 128
"""Rows and columns of a weight in FP8 blocks that share a scale; there may be fewer in the last block."""
SHARING: Final = (1, 2, 16, 32)
"""Columns of a weight that share a byte or an FP4 scale."""


@dataclass(frozen=True)
class Cut:
    """A rank's part of the rows (N) or columns (K) of a weight.

    Attributes:
        dim: 0 cuts rows, 1 columns.
        rank, world: which part, of how many.
        unit: rows or columns that stay together, such as those of a head.
    """

    dim: int
    rank: int
    world: int
    unit: int = 1

    def bounds(self, size: int, name: str = "weight") -> tuple[int, int]:
        """The first, and one past the last, of the rows or columns of a weight that has ``size``.

        Where there are fewer units than ranks, as key and value heads may be, several ranks have the same one.

        Raises:
            ValueError: if ``size`` is not whole units, or these cannot be divided.
        """
        units, rest = divmod(size, self.unit)
        if rest or not units or (units % self.world and self.world % units):
            what = "rows" if self.dim == 0 else "columns"
            of = f" in units of {self.unit}" if self.unit > 1 else ""
            raise ValueError(f"{name} has {size} {what}{of}, which {self.world} ranks cannot divide equally")
        if units < self.world:
            first = self.rank * units // self.world
            return first * self.unit, (first + 1) * self.unit
        own = units // self.world * self.unit
        return self.rank * own, (self.rank + 1) * own

    def within(self, extent: int, size: int, name: str) -> tuple[int, int]:
        """The same of a tensor that holds ``extent`` elements, packed or of blocks, for the ``size`` of the weight.

        Raises:
            ValueError: if the weight is cut within a byte or block.
        """
        begin, end = self.bounds(size, name)
        each = next((each for each in SHARING if extent * each == size), BLOCK)
        if begin % each or (end % each and end != size):
            raise ValueError(
                f"{name}: cut at {begin} and {end} of {size}; expected multiples of {each}, which share a scale"
            )
        return begin // each, -(-end // each)


def cut_of(
    cut: Cut, suffix: str, shape: Sequence[int], weight: Sequence[int], name: str
) -> tuple[int, int, int] | None:
    """Dimension, first, and one past the last, of a rank's part of a layer's tensor; ``None``: it has all of it.

    Args:
        cut: of the weight.
        suffix: the last part of the tensor's name.
        shape: of the tensor.
        weight: N and K of the layer.
        name: of the tensor, for messages.

    Raises:
        ValueError: if it cannot be cut there.
    """
    if not shape or ("weight" not in suffix and suffix != "bias") or (len(shape) == 1 and shape[0] == 1 != weight[0]):
        return None
    has_no_columns = len(shape) == 1 or (shape[1] == 1 and shape[0] == weight[0])
    if cut.dim == 1 and has_no_columns:
        return None
    return (cut.dim, *cut.within(shape[cut.dim], weight[cut.dim], name))


def shard_(layer: QuantLinear | nn.Linear, cut: Cut) -> None:
    """Leave a layer only a rank's part of its weight, in place.

    Rows are cut in each of the parts of a merged layer.

    Raises:
        ValueError: for sizes that cannot be cut so.
    """
    if isinstance(layer, QuantLinear):
        _adopt(layer, _sharded(layer, cut))
        return
    begin, end = cut.bounds(layer.weight.shape[cut.dim])
    weight = layer.weight.detach().narrow(cut.dim, begin, end - begin)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=layer.weight.requires_grad)
    if layer.bias is not None:
        bias = layer.bias.detach()
        bias = bias[begin:end].clone() if cut.dim == 0 else bias
        layer.bias = nn.Parameter(bias, requires_grad=layer.bias.requires_grad)
    layer.out_features, layer.in_features = weight.shape


def _sharded(layer: QuantLinear, cut: Cut) -> QuantLinear:
    """The part of a layer, as a layer."""
    layers = []
    for each in layer.split():
        size, tensors = (each.out_features, each.in_features), {}
        for name, tensor in each.tensors().items():
            where = None if name == _SHARED else cut_of(cut, name, tensor.shape, size, f"{type(layer).__name__}.{name}")
            raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
            part = raw if where is None else raw.narrow(where[0], where[1], where[2] - where[1])
            tensors[name] = part.clone(memory_format=torch.contiguous_format).view(tensor.dtype)
        bias = None
        if each.bias is not None:
            bias = each.bias.detach()
            begin, end = cut.bounds(size[0]) if cut.dim == 0 else (0, size[0])
            bias = bias[begin:end].clone()
        begin, end = cut.bounds(size[1]) if cut.dim == 1 else (0, size[1])
        layers.append(_made(layer, end - begin, tensors, bias))
    return layers[0] if len(layers) == 1 else merge(layers)


def _made(layer: QuantLinear, in_features: int, tensors: dict[str, Tensor], bias: Tensor | None) -> QuantLinear:
    activations: Any = layer.activations
    made: QuantLinear = _base_of(layer)._of(in_features, tensors, bias, None, activations)
    return made


def _adopt(layer: QuantLinear, other: QuantLinear) -> None:
    """Make ``layer`` what ``other`` is, but for its hooks."""
    for name in ("in_features", "out_features", "parts", "_buffers", "_parameters", "_non_persistent_buffers_set"):
        setattr(layer, name, getattr(other, name))


def _base_of(layer: nn.Module) -> Any:
    """The class that a layer had before it was made parallel."""
    return getattr(type(layer), "base", type(layer))


# What the layers compute


class _Column:
    """A layer whose rows of the weight are divided: each rank computes columns of the result."""

    style: "ColumnParallel"
    group: Any
    base: ClassVar[Any]

    def forward(self, x: Any) -> Tensor:
        base: Any = self.base
        _refuse_unfit(self, x, self.style.sequence)
        if self.style.sequence:
            if isinstance(self, QuantLinear):
                x = gather_rows(self, x if isinstance(x, QuantizedRows) else self.quantize(x), self.group)
            else:
                x = all_gather(x, self.group)
        y: Tensor = base.forward(self, x)
        if self.style.gather_output:
            gathered = all_gather(y.flatten(0, -2) if y.dim() > 1 else y.unsqueeze(0), self.group, dim=1)
            y = gathered.view(*y.shape[:-1], -1)
        return y

    def rows_for(self, rows: int) -> int:
        return -(-rows // dist.get_world_size(self.group)) if self.style.sequence else rows


class _Row:
    """A layer whose columns of the weight are divided: each rank computes a part of every sum."""

    style: "RowParallel"
    group: Any
    base: ClassVar[Any]

    def forward(self, x: Any) -> Tensor:
        base: Any = self.base
        _refuse_unfit(self, x, self.style.sequence)
        if isinstance(self, QuantLinear):
            rows = x if isinstance(x, QuantizedRows) else self._own_rows(x)
            dtype = rows.dtype
            # Beside torch's scaled GEMM, which has no float32 results.
            sums = self.style.sums or (dtype if isinstance(self, FP8TensorLinear | FP8ChannelLinear) else torch.float32)
            y: Tensor = base.forward(self, rows._replace(dtype=sums))
        else:
            dtype = x.dtype
            y = base.forward(self, x)
        y = reduce_scatter(y, self.group) if self.style.sequence else all_reduce(y, self.group)
        return y.to(dtype)

    def rows_for(self, rows: int) -> int:
        world = dist.get_world_size(self.group) if self.style.sequence else 1
        return -(-rows // world) * world

    def _own_rows(self, x: Tensor) -> QuantizedRows:
        assert isinstance(self, QuantLinear)
        if isinstance(self, FP8TensorLinear | FP8ChannelLinear) and not self.has_input_scale:
            return _by_shared_scale(x, self.group)
        return self.quantize(x)


def _refuse_unfit(layer: Any, x: Any, sequence: bool) -> None:
    """Refuse what the collectives would take and get wrong.

    Raises:
        ValueError: for a gradient, which they do not have; for an input of one row without a dimension for it, under
            ``sequence``.
    """
    if isinstance(x, QuantizedRows):
        return
    if sequence and x.dim() < 2:
        raise ValueError(f"the input has shape {tuple(x.shape)}; expected this rank's rows of it, (..., K)")
    if torch.is_grad_enabled() and (x.requires_grad or any(each.requires_grad for each in layer.parameters())):
        raise ValueError(
            "layers that ranks divide have no gradient, and the input or a parameter requires grad; call them under "
            "torch.no_grad() or torch.inference_mode()"
        )


def _by_shared_scale(x: Tensor, group: Any) -> QuantizedRows:
    """A rank's columns of rows in FP8, each row under the one scale that it has over the columns of all ranks.

    As ``fp8_quantize`` with granularity ``"token"`` of the whole rows.
    """
    rows = x.flatten(0, -2).float() if x.dim() > 1 else x.float().unsqueeze(0)
    amax = rows.abs().amax(1, keepdim=True)
    amax = torch.where(amax.isfinite(), amax, torch.inf)  # a maximum of NaN depends on the backend
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    scale = torch.where(amax.isfinite(), amax / E4M3_MAX, torch.nan)
    is_zero = (scale == 0) | scale.isnan()
    elements = encode_e4m3(torch.where(is_zero, 0.0, rows / scale))
    return QuantizedRows((elements, scale), (*x.shape[:-1],), x.dtype)


@functools.cache
def _parallel(kind: type, base: Any) -> Any:
    """A subclass of ``base`` with the ``forward`` of ``kind``."""
    members = {"__module__": base.__module__, "__doc__": base.__doc__, "base": base}
    return type(base.__name__, (kind, base), members)


class _Style(ParallelStyle):
    """What the styles here share."""

    dim: ClassVar[int]

    def cut(self, mesh: DeviceMesh) -> Cut:
        """This rank's part of a weight."""
        return Cut(self.dim, mesh.get_local_rank(), mesh.size(), getattr(self, "unit", 1))

    def bind(self, layer: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Have a layer that has its part of the weight compute with the other ranks, in place.

        Raises:
            TypeError: for a module that is no linear layer.
            ValueError: for one that is parallel already.
        """
        if not isinstance(layer, QuantLinear) and type(layer) is not nn.Linear:
            raise TypeError(f"{type(self).__name__} is for linear layers; got {type(layer).__name__}")
        if hasattr(type(layer), "base"):
            raise ValueError(f"{type(self).__name__}: the layer is parallel already")
        if self.dim == 1 and layer.bias is not None:
            # Added once, by the first rank, and to float32 sums where the layer has these.
            bias = layer.bias.detach().float() if isinstance(layer, QuantLinear) else layer.bias.detach()
            layer.bias = nn.Parameter(bias if mesh.get_local_rank() == 0 else torch.zeros_like(bias), False)
        layer.__class__ = _parallel((_Column, _Row)[self.dim], _base_of(layer))
        layer.style, layer.group = self, mesh.get_group()  # type: ignore[assignment]
        return layer

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, QuantLinear) and type(module) is not nn.Linear:
            raise TypeError(f"{type(self).__name__} is for linear layers; got {type(module).__name__}")
        if hasattr(type(module), "base"):
            raise ValueError(f"{type(self).__name__}: the layer is parallel already")
        if device_mesh.ndim != 1:
            raise ValueError(
                f"{type(self).__name__}: the mesh has {device_mesh.ndim} dimensions; expected 1, such as mesh['tp']"
            )
        shard_(module, self.cut(device_mesh))
        return self.bind(module, device_mesh)


class ColumnParallel(_Style):
    """Each rank has some of the rows of the weight (N), and computes these columns of the result.

    For q, k and v, gate and up, merged or not: of a merged layer each rank has its share of every part. The result
    equals the unsharded layer's columns bit for bit, with the same backend and tactic.

    Args:
        unit: rows that stay together: ``head_dim`` for q, k and v. A part with fewer units than there are ranks, as key
            and value heads of grouped attention may be, is repeated.
        sequence: whether each rank has its share of the tokens as input: it quantises them as the layer's GEMM takes
            them, and codes and scales are gathered along the first dimension. 16-bit activations travel as they are.
        gather_output: whether the columns of all ranks are gathered, one rank's behind the other's: those of a merged
            layer are not in the order of its parts then.
    """

    dim = 0

    def __init__(self, *, unit: int = 1, sequence: bool = False, gather_output: bool = False) -> None:
        super().__init__()
        self.unit, self.sequence, self.gather_output = unit, sequence, gather_output


class RowParallel(_Style):
    """Each rank has some of the columns of the weight (K), takes these columns of the input, and computes a part of
    every sum; the parts are added up.

    For what follows a :class:`ColumnParallel` layer: o, down. The bias is added once. Codes and scales of the input are
    those of the unsharded layer; sums are, but for the order of float32 additions, with ``sums=torch.float32``.

    Args:
        sequence: whether each rank gets the sums of its share of the tokens, the first dimension, in place of all.
        sums: dtype in which the parts travel and are added; ``None``: float32, and for FP8 with a scale of the tensor
            or of rows, whose GEMM has no such result on a GPU, that of the activations.
    """

    dim = 1

    def __init__(self, *, sequence: bool = False, sums: torch.dtype | None = None) -> None:
        super().__init__()
        self.sequence, self.sums = sequence, sums


def decoder_plan(
    head_dim: int, *, merged: bool = True, sequence: bool = False, prefix: str = "model.layers.*"
) -> dict[str, ColumnParallel | RowParallel]:
    """The plan of a decoder with the layers of Llama's, Mistral's and Qwen's.

    Args:
        head_dim: rows of a head.
        merged: whether q, k and v are one layer, ``qkv_proj``, and gate and up another, ``gate_up_proj``.
        sequence: as of the styles: the model gives each rank its share of the tokens between the layers.
        prefix: of the decoder layers.
    """
    heads, column, row = (
        ColumnParallel(unit=head_dim, sequence=sequence),
        ColumnParallel(sequence=sequence),
        RowParallel(sequence=sequence),
    )
    plan: dict[str, ColumnParallel | RowParallel] = {
        f"{prefix}.self_attn.{'qkv_proj' if merged else '[qkv]_proj'}": heads,
        f"{prefix}.self_attn.o_proj": row,
        f"{prefix}.mlp.down_proj": row,
    }
    for name in ("gate_up_proj",) if merged else ("gate_proj", "up_proj"):
        plan[f"{prefix}.mlp.{name}"] = column
    return plan
