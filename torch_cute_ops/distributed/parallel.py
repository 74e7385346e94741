"""Styles for ``parallelize_module``: how linear layers are divided among the ranks of a mesh dimension."""

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
from torch_cute_ops.distributed.compare import agree_on_rows
from torch_cute_ops.formats.fp4 import E4M3_MAX, encode_e4m3
from torch_cute_ops.nn import QuantizedRows, QuantLinear, merge
from torch_cute_ops.nn._base import _SHARED
from torch_cute_ops.nn.fp8_linear import FP8ChannelLinear, FP8TensorLinear

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


def keep_parts_(layer: QuantLinear, begin: int, end: int) -> None:
    """Leave a merged layer some of its parts, in place."""
    layers = layer.split()[begin:end]
    _adopt(layer, merge(layers) if len(layers) > 1 else _sharded(layers[0], Cut(0, 0, 1)))


def fit_bias_(layer: nn.Linear | QuantLinear, sums: torch.dtype | None, *, is_added: bool) -> None:
    """Give a layer whose results ranks add up a bias in a dtype that its GEMM takes beside results in ``sums``.

    Args:
        layer: with a bias or none; in place.
        sums: ``None``: the dtype of the activations, beside which the bias stays as it is.
        is_added: whether this rank adds it; else it becomes zero.
    """
    if layer.bias is None:
        return
    bias = layer.bias.detach()
    if sums is not None and isinstance(layer, QuantLinear):
        bias = bias.to(sums if isinstance(layer, FP8TensorLinear | FP8ChannelLinear) else torch.float32)
    layer.bias = nn.Parameter(bias if is_added else torch.zeros_like(bias), requires_grad=False)


def _made(layer: QuantLinear, in_features: int, tensors: dict[str, Tensor], bias: Tensor | None) -> QuantLinear:
    activations: Any = layer.activations
    return type(layer)._build(in_features, tensors, bias, None, activations)


def _adopt(layer: QuantLinear, other: QuantLinear) -> None:
    """Make ``layer`` what ``other`` is, but for its hooks."""
    for name in ("in_features", "out_features", "parts", "_buffers", "_parameters", "_non_persistent_buffers_set"):
        setattr(layer, name, getattr(other, name))


# What the layers compute


class Divided:
    """What modules share whose ranks each have a part.

    Attributes:
        style: how they are divided.
        group: the ranks.
        base: the class of the whole module.
    """

    style: "Style"
    group: Any
    base: ClassVar[Any]

    @property
    def divided(self) -> str:
        """How, in words: the same on all ranks."""
        return f"{self.style!r} among {dist.get_world_size(self.group)}"

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{self.base.extra_repr(self)}, {self.style!r}, rank {dist.get_rank(self.group)} of {self.world}"

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return dist.get_world_size(self.group)

    @classmethod
    def _build(cls, *_: Any) -> Any:
        raise ValueError(f"{cls.__name__}: a layer is made and merged first, and then divided")

    def split(self) -> Any:
        """What the undivided class gives for this rank's part: layers that know nothing of ranks."""
        part = object.__new__(self.base)
        part.__dict__ = {name: each for name, each in self.__dict__.items() if name not in OWN}
        return part.split()


OWN: Final = ("style", "group", "whole_parts", "first")
"""Attributes that divided modules alone have."""


class _Column(Divided):
    """A layer whose rows of the weight are divided: each rank computes columns of the result.

    Attributes:
        whole_parts: rows of each part of the whole layer, whose columns ``gather_output`` gives.
    """

    style: "ColumnParallel"
    whole_parts: tuple[int, ...]

    def forward(self, input: Any) -> Tensor:
        x = input
        _refuse_unfit(self, x, self.style.sequence)
        if self.style.sequence or self.style.gather_output:
            agree_on_rows(type(self).__name__, _lead(x), self.group)
        if self.style.sequence:
            if isinstance(self, QuantLinear):
                x = gather_rows(self, x if isinstance(x, QuantizedRows) else self.quantize(x), self.group)
            else:
                x = all_gather(x, self.group)
        y: Tensor = self.base.forward(self, x)
        return self._gathered(y) if self.style.gather_output else y

    def _gathered(self, y: Tensor) -> Tensor:
        """All columns, in the order of the whole layer: of each part one rank's behind the other's."""
        columns = all_gather(y.flatten(0, -2) if y.dim() > 1 else y.unsqueeze(0), self.group, dim=1)
        of_ranks = columns.unflatten(1, (self.world, -1))
        cut = Cut(0, 0, self.world, self.style.unit)
        own = [end - begin for begin, end in (cut.bounds(rows) for rows in self.whole_parts)]
        parts = [
            # Of heads that several ranks have, the first one's.
            part[:, :: rows * self.world // whole].flatten(1)
            for part, rows, whole in zip(of_ranks.split(own, 2), own, self.whole_parts, strict=True)
        ]
        return torch.cat(parts, 1).view(*y.shape[:-1], -1)

    def rows_for(self, rows: int) -> int:
        return -(-rows // self.world) if self.style.sequence else rows


class _Row(Divided):
    """A layer whose columns of the weight are divided: each rank computes a part of every sum."""

    style: "RowParallel"

    def forward(self, input: Any) -> Tensor:
        _refuse_unfit(self, input, self.style.sequence)
        first, *rest = _lead(input) or (1,)
        if self.style.sequence and first % self.world:
            raise ValueError(f"{type(self).__name__}: {first} rows; expected a multiple of the {self.world} ranks")
        agree_on_rows(type(self).__name__, (first // self.world if self.style.sequence else first, *rest), self.group)
        if isinstance(self, QuantLinear):
            rows = input if isinstance(input, QuantizedRows) else self._own_rows(input)
            dtype = rows.dtype
            y: Tensor = self.base.forward(self, rows._replace(dtype=self.style.sums or dtype))
        else:
            dtype = input.dtype
            y = self.base.forward(self, input).to(self.style.sums or dtype)
        y = reduce_scatter(y, self.group) if self.style.sequence else all_reduce(y, self.group)
        return y.to(dtype)

    def rows_for(self, rows: int) -> int:
        world = self.world if self.style.sequence else 1
        return -(-rows // world) * world

    def _own_rows(self, x: Tensor) -> QuantizedRows:
        assert isinstance(self, QuantLinear)
        if isinstance(self, FP8TensorLinear | FP8ChannelLinear) and not self.has_input_scale:
            return _by_shared_scale(x, self.group)
        return self.quantize(x)


def _lead(x: Any) -> tuple[int, ...]:
    return x.lead if isinstance(x, QuantizedRows) else (*x.shape[:-1],)


def refuse_gradient(module: nn.Module, x: Tensor) -> None:
    """Refuse what the collectives would lose.

    Raises:
        ValueError: for an input or a parameter that requires grad while gradients are on.
    """
    if torch.is_grad_enabled() and (x.requires_grad or any(each.requires_grad for each in module.parameters())):
        raise ValueError(
            "layers that ranks divide have no gradient, and the input or a parameter requires grad; call them under "
            "torch.no_grad() or torch.inference_mode()"
        )


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
    refuse_gradient(layer, x)


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
def divided_class(kind: Any, name: str, base: Any) -> Any:
    """A subclass of ``base`` with the ``forward`` of ``kind``, which is called ``name``."""
    return type(name, (kind, base), {"__module__": __name__, "__doc__": base.__doc__, "base": base})


# Styles


class Style(ParallelStyle):
    """What the styles of this package share.

    Args:
        options: theirs, by name, which ranks compare.
    """

    _kind: ClassVar[type[Divided]]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"

    def check_module(self, module: nn.Module) -> None:
        """Refuse what the style does not divide.

        Raises:
            TypeError: for a module of another kind.
        """
        raise NotImplementedError

    def divide(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Leave a whole module this rank's part, and have it compute with the other ranks.

        Raises:
            ValueError: for sizes that the ranks cannot divide.
        """
        raise NotImplementedError

    def bind(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        """Have a module that has its part compute with the other ranks, in place; the module."""
        base: Any = type(module)
        kind: Any = self._kind
        module.__class__ = divided_class(kind, f"{type(self).__name__}{base.__name__}", base)
        bound: Any = module
        bound.style, bound.group = self, mesh.get_group()
        return bound

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, Divided):
            raise ValueError(f"{type(self).__name__}: the module is parallel already")
        self.check_module(module)
        check_mesh(type(self).__name__, device_mesh)
        self.divide(module, device_mesh)
        return module


def check_mesh(name: str, mesh: DeviceMesh) -> None:
    """Refuse a mesh of several dimensions.

    Raises:
        ValueError: saying how to take one.
    """
    if mesh.ndim != 1:
        raise ValueError(f"{name}: the mesh has {mesh.ndim} dimensions; expected 1, such as mesh['tp']")


class LinearStyle(Style):
    """What the styles of linear layers share."""

    dim: ClassVar[int]

    def cut(self, mesh: DeviceMesh) -> Cut:
        """This rank's part of a weight."""
        return Cut(self.dim, mesh.get_local_rank(), mesh.size(), getattr(self, "unit", 1))

    def check_module(self, module: nn.Module) -> None:
        """Refuse what is no linear layer.

        Raises:
            TypeError: naming the class.
        """
        if not isinstance(module, QuantLinear) and type(module) is not nn.Linear:
            raise TypeError(f"{type(self).__name__} is for linear layers; got {type(module).__name__}")

    def divide(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Leave a whole layer this rank's part, and have it compute with the other ranks."""
        layer: Any = module
        whole = layer.parts if isinstance(layer, QuantLinear) else (layer.out_features,)
        shard_(layer, self.cut(mesh))
        self.bind_layer(layer, mesh, whole)

    def bind_layer(self, layer: nn.Linear | QuantLinear, mesh: DeviceMesh, whole: Sequence[int]) -> None:
        """Have a layer that has its part compute with the other ranks; ``whole``: rows of each part of the whole."""
        self.bind(layer, mesh)


class ColumnParallel(LinearStyle):
    """Each rank has some of the rows of the weight (N), and computes these columns of the result.

    For q, k and v, gate and up, merged or not: of a merged layer each rank has its share of every part. The result
    equals the unsharded layer's columns bit for bit, with the same backend and tactic.

    Args:
        unit: rows that stay together: ``head_dim`` for q, k and v. A part with fewer units than there are ranks, as key
            and value heads of grouped attention may be, is repeated.
        sequence: whether each rank has its share of the tokens as input: it quantises them as the layer's GEMM takes
            them, and codes and scales are gathered along the first dimension. 16-bit activations travel as they are.
        gather_output: whether each rank gets the columns of all, in the order of the whole layer, whose parts are the
            layer's ``whole_parts``.
    """

    dim = 0
    _kind = _Column

    def __init__(self, *, unit: int = 1, sequence: bool = False, gather_output: bool = False) -> None:
        super().__init__(unit=unit, sequence=sequence, gather_output=gather_output)
        self.unit, self.sequence, self.gather_output = unit, sequence, gather_output

    def bind_layer(self, layer: nn.Linear | QuantLinear, mesh: DeviceMesh, whole: Sequence[int]) -> None:
        """Have a layer that has its part compute with the other ranks; ``whole``: rows of each part of the whole."""
        self.bind(layer, mesh).whole_parts = tuple(whole)


class RowParallel(LinearStyle):
    """Each rank has some of the columns of the weight (K), takes these columns of the input, and computes a part of
    every sum; the parts are added up.

    For what follows a :class:`ColumnParallel` layer: o, down. The bias is added once. Codes and scales of the input are
    those of the unsharded layer; sums are, but for the order of float32 additions, with ``sums=torch.float32``.

    Args:
        sequence: whether each rank gets the sums of its share of the tokens, the first dimension, in place of all.
        sums: dtype in which the parts travel and are added; ``None``: that of the activations, which is what other
            tensor-parallel layers do. In it each part is rounded, and each sum. ``torch.float32`` rounds once, for
            twice the bytes; in FP8 with a scale of the tensor or of rows, whose GEMM has no such result on a GPU, it
            decodes the weight in each call.
    """

    dim = 1
    _kind = _Row

    def __init__(self, *, sequence: bool = False, sums: torch.dtype | None = None) -> None:
        super().__init__(sequence=sequence, sums=None if sums is None else str(sums))
        self.sequence, self.sums = sequence, sums

    def bind_layer(self, layer: nn.Linear | QuantLinear, mesh: DeviceMesh, whole: Sequence[int]) -> None:
        """Have a layer that has its part compute with the other ranks; ``whole``: rows of each part of the whole."""
        fit_bias_(layer, self.sums, is_added=mesh.get_local_rank() == 0)  # added once
        self.bind(layer, mesh)
