"""Parallel styles for ``parallelize_module``, which divide linear layers among the ranks of a mesh dimension."""

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
from torch_cute_ops.reference.fp4_quantize_per_token import quantize_rows_per_token

BLOCK: Final = 128
"""Rows and columns of an FP8 block. The last block of a matrix may be smaller."""
SHARING: Final = (1, 2, 16, 32)
"""Numbers of columns of a weight that can share one byte or one FP4 scale."""


@dataclass(frozen=True)
class WeightShard:
    """Shard of a weight: the rows (N) or columns (K) that one rank stores.

    Attributes:
        dim: 0 to shard rows, 1 to shard columns.
        rank: index of the shard.
        world: number of shards.
        unit: number of rows or columns that must stay on one rank, such as the rows of a head.
    """

    dim: int
    rank: int
    world: int
    unit: int = 1

    def bounds(self, size: int, name: str = "weight") -> tuple[int, int]:
        """Return this rank's range (begin, end) of the rows or columns of a weight.

        If a weight has fewer units than ranks, as can happen with key and value heads, several ranks get the same unit.

        Args:
            size: rows or columns of the weight.
            name: name of the weight, for messages.

        Raises:
            ValueError: if ``size`` is not a multiple of the unit, or the units cannot be divided among the ranks.
        """
        units, rest = divmod(size, self.unit)
        if rest or not units or (units % self.world and self.world % units):
            kind = "rows" if self.dim == 0 else "columns"
            units_of = f" in units of {self.unit}" if self.unit > 1 else ""
            raise ValueError(f"{name} has {size} {kind}{units_of}, which {self.world} ranks cannot divide equally")
        if units < self.world:
            first = self.rank * units // self.world
            return first * self.unit, (first + 1) * self.unit
        own = units // self.world * self.unit
        return self.rank * own, (self.rank + 1) * own

    def within(self, extent: int, size: int, name: str) -> tuple[int, int]:
        """Return this rank's range (begin, end) in a tensor that stores ``size`` rows or columns of the weight in
        ``extent`` elements.

        Examples of such tensors are packed codes and block scales.

        Raises:
            ValueError: if a shard would begin or end inside a byte or block.
        """
        begin, end = self.bounds(size, name)
        each = next((each for each in SHARING if extent * each == size), BLOCK)
        if begin % each or (end % each and end != size):
            raise ValueError(
                f"{name}: cut at {begin} and {end} of {size}; expected multiples of {each}, which share a scale"
            )
        return begin // each, -(-end // each)


def shard_range(
    shard: WeightShard, suffix: str, shape: Sequence[int], weight: Sequence[int], name: str
) -> tuple[int, int, int] | None:
    """Return a rank's shard of one tensor of a layer as (dimension, begin, end), or None if every rank stores the whole
    tensor.

    Args:
        shard: shard of the weight.
        suffix: last component of the tensor's name.
        shape: shape of the tensor.
        weight: N and K of the layer.
        name: name of the tensor, for messages.

    Raises:
        ValueError: if the shard would begin or end inside a byte or block of this tensor.
    """
    if not shape or ("weight" not in suffix and suffix != "bias") or (len(shape) == 1 and shape[0] == 1 != weight[0]):
        return None
    has_no_columns = len(shape) == 1 or (len(shape) == 2 and shape[1] == 1 and shape[0] == weight[0])
    if shard.dim == 1 and has_no_columns:
        return None
    dim = 2 * shard.dim if len(shape) == 4 else shard.dim  # ModelOpt's scales of blocks: (⌈N/128⌉, 1, ⌈K/128⌉, 1)
    return (dim, *shard.within(shape[dim], weight[shard.dim], name))


def shard_(layer: QuantLinear | nn.Linear, shard: WeightShard) -> None:
    """Replace a layer's weight by a rank's shard, in place.

    In a merged layer, such as q, k and v, the rows of each part are sharded separately.

    Raises:
        ValueError: for sizes that cannot be sharded.
    """
    if isinstance(layer, QuantLinear):
        _adopt(layer, _sharded(layer, shard))
        return
    begin, end = shard.bounds(layer.weight.shape[shard.dim])
    weight = layer.weight.detach().narrow(shard.dim, begin, end - begin)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=layer.weight.requires_grad)
    if layer.bias is not None:
        bias = layer.bias.detach()
        bias = bias[begin:end].clone() if shard.dim == 0 else bias
        layer.bias = nn.Parameter(bias, requires_grad=layer.bias.requires_grad)
    layer.out_features, layer.in_features = weight.shape


def _sharded(layer: QuantLinear, shard: WeightShard) -> QuantLinear:
    """Return one rank's shard of a layer as a new layer."""
    layers = []
    for each in layer.split():
        size, tensors = (each.out_features, each.in_features), {}
        for name, tensor in each.tensors().items():
            described = f"{type(layer).__name__}.{name}"
            found = None if name == _SHARED else shard_range(shard, name, tensor.shape, size, described)
            raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
            own = raw if found is None else raw.narrow(found[0], found[1], found[2] - found[1])
            tensors[name] = own.clone(memory_format=torch.contiguous_format).view(tensor.dtype)
        bias = None
        if each.bias is not None:
            bias = each.bias.detach()
            begin, end = shard.bounds(size[0]) if shard.dim == 0 else (0, size[0])
            bias = bias[begin:end].clone()
        begin, end = shard.bounds(size[1]) if shard.dim == 1 else (0, size[1])
        layers.append(_made(layer, end - begin, tensors, bias))
    return layers[0] if len(layers) == 1 else merge(layers)


def keep_parts_(layer: QuantLinear, begin: int, end: int) -> None:
    """Keep only some parts of a merged layer, in place."""
    layers = layer.split()[begin:end]
    _adopt(layer, merge(layers) if len(layers) > 1 else _sharded(layers[0], WeightShard(0, 0, 1)))


def fit_bias_(layer: nn.Linear | QuantLinear, sums: torch.dtype | None, *, is_added: bool) -> None:
    """Convert, in place, the bias of a layer whose results are partial sums in the dtype ``sums``. Use a dtype that the
    layer's GEMM accepts.

    Args:
        layer: layer with or without a bias.
        sums: dtype of the partial sums; ``None`` for the dtype of the activations, which needs no conversion.
        is_added: True if this rank adds the bias; otherwise the bias becomes zero.
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
    """Copy all attributes of ``other`` except its hooks to ``layer``."""
    for name in ("in_features", "out_features", "parts", "_buffers", "_parameters", "_non_persistent_buffers_set"):
        setattr(layer, name, getattr(other, name))


# Layers that communicate with other ranks


class Divided:
    """Base class of modules that are divided among ranks.

    Attributes:
        style: parallel style of the module.
        group: ranks.
        base: class of the undivided module.
    """

    style: "Style"
    group: Any
    base: ClassVar[Any]

    @property
    def divided(self) -> str:
        """Description of how the module is divided, as a text that is equal on all ranks."""
        return f"{self.style!r} among {dist.get_world_size(self.group)}"

    def extra_repr(self) -> str:
        """Return the settings that ``print(module)`` shows."""
        return f"{self.base.extra_repr(self)}, {self.style!r}, rank {dist.get_rank(self.group)} of {self.world}"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group)

    @classmethod
    def _build(cls, *_: Any) -> Any:
        raise ValueError(f"{cls.__name__}: build and merge a layer before you divide it among ranks")

    def split(self) -> Any:
        """Return the parts of this rank's shard of a merged layer as plain layers, which do not communicate."""
        plain = object.__new__(self.base)
        plain.__dict__ = {name: each for name, each in self.__dict__.items() if name not in OWN}
        return plain.split()


OWN: Final = ("style", "group", "whole_parts", "first")
"""Names of attributes that divided modules add to the undivided class."""


class _Column(Divided):
    """Linear layer whose weight rows are divided among ranks. Each rank computes the columns of the result that belong
    to its rows.

    Attributes:
        whole_parts: number of rows of each part of the undivided layer, and so of the part's columns in the result of
            ``gather_output``.
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
        """Gather the columns of all ranks, and return them in the order of the undivided layer, part by part."""
        columns = all_gather(y.flatten(0, -2) if y.dim() > 1 else y.unsqueeze(0), self.group, dim=1)
        of_ranks = columns.unflatten(1, (self.world, -1))
        shard = WeightShard(0, 0, self.world, self.style.unit)
        own = [end - begin for begin, end in (shard.bounds(rows) for rows in self.whole_parts)]
        parts = [
            # If several ranks computed the same heads, use only the first copy.
            part[:, :: rows * self.world // whole].flatten(1)
            for part, rows, whole in zip(of_ranks.split(own, 2), own, self.whole_parts, strict=True)
        ]
        return torch.cat(parts, 1).view(*y.shape[:-1], -1)

    def rows_for(self, rows: int) -> int:
        return -(-rows // self.world) if self.style.sequence else rows


class _Row(Divided):
    """Linear layer whose weight columns are divided among ranks. Each rank computes a partial sum of every element of
    the result."""

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
        if self.style.partial:
            return y
        y = reduce_scatter(y, self.group) if self.style.sequence else all_reduce(y, self.group)
        return y.to(dtype)

    def rows_for(self, rows: int) -> int:
        world = self.world if self.style.sequence else 1
        return -(-rows // world) * world

    def _own_rows(self, x: Tensor) -> QuantizedRows:
        assert isinstance(self, QuantLinear)
        if self.has_computed_row_scales:
            return _by_shared_scale(x, self.group)
        if self.activations == "fp4_token":
            return _by_shared_row_scale(x, self.group)
        return self.quantize(x)


def _lead(x: Any) -> tuple[int, ...]:
    return x.lead if isinstance(x, QuantizedRows) else (*x.shape[:-1],)


def refuse_gradient(module: nn.Module, x: Tensor) -> None:
    """Check that no input or parameter requires grad, because the collectives would lose the gradient.

    Raises:
        ValueError: for an input or a parameter that requires grad while gradients are enabled.
    """
    if torch.is_grad_enabled() and (x.requires_grad or any(each.requires_grad for each in module.parameters())):
        raise ValueError(
            "layers that are divided among ranks have no gradient, but the input or a parameter requires grad; call "
            "them under torch.no_grad() or torch.inference_mode()"
        )


def _refuse_unfit(layer: Any, x: Any, sequence: bool) -> None:
    """Check that a divided layer supports this input.

    Raises:
        ValueError: for an input that requires grad; with ``sequence``, for an input with a single dimension.
    """
    if isinstance(x, QuantizedRows):
        return
    if sequence and x.dim() < 2:
        raise ValueError(f"got an input with shape {tuple(x.shape)}; expected this rank's rows of it, (..., K)")
    refuse_gradient(layer, x)


def _by_shared_scale(x: Tensor, group: Any) -> QuantizedRows:
    """Quantise a rank's columns to FP8, with one scale per row over the columns of all ranks.

    The result equals ``fp8_quantize`` of the whole rows with granularity ``"token"``.
    """
    rows, amax = _rows_and_shared_amax(x, group)
    scale = torch.where(amax.isfinite(), amax / E4M3_MAX, torch.nan)
    is_zero = (scale == 0) | scale.isnan()
    elements = encode_e4m3(torch.where(is_zero, 0.0, rows / scale))
    return QuantizedRows((elements, scale), (*x.shape[:-1],), x.dtype)


def _by_shared_row_scale(x: Tensor, group: Any) -> QuantizedRows:
    """Quantise a rank's columns to NVFP4, with one row scale over the columns of all ranks.

    The result equals this rank's part of ``fp4_quantize_per_token`` of the whole rows.
    """
    rows, amax = _rows_and_shared_amax(x, group)
    return QuantizedRows(quantize_rows_per_token(rows, "128x4", amax), (*x.shape[:-1],), x.dtype)


def _rows_and_shared_amax(x: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Return this rank's columns as fp32 rows, and each row's largest magnitude over the columns of all ranks.

    The largest magnitude is infinite if the row contains NaN or infinity.
    """
    rows = x.flatten(0, -2).float() if x.dim() > 1 else x.float().unsqueeze(0)
    amax = rows.abs().amax(1, keepdim=True)
    amax = torch.where(amax.isfinite(), amax, torch.inf)  # no NaN, because backends differ in max(NaN, x)
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return rows, amax


@functools.cache
def divided_class(kind: Any, name: str, base: Any) -> Any:
    """Create a subclass of ``base`` with this name and with the ``forward`` of ``kind``."""
    return type(name, (kind, base), {"__module__": __name__, "__doc__": base.__doc__, "base": base})


# Styles


class Style(ParallelStyle):
    """Base class of the parallel styles of this package.

    Args:
        options: arguments of the style by name. Ranks compare them to detect different settings.
    """

    _kind: ClassVar[type[Divided]]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"

    def check_module(self, module: nn.Module) -> None:
        """Check that the style supports the module.

        Raises:
            TypeError: if it does not.
        """
        raise NotImplementedError

    def divide(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Replace a module by this rank's shard, in place, and make it communicate with the other ranks.

        Raises:
            ValueError: for sizes that cannot be divided among the ranks.
        """
        raise NotImplementedError

    def bind(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        """Make a module that is already sharded communicate with the other ranks, in place. Return the module."""
        base: Any = type(module)
        kind: Any = self._kind
        module.__class__ = divided_class(kind, f"{type(self).__name__}{base.__name__}", base)
        bound: Any = module
        bound.style, bound.group = self, mesh.get_group()
        return bound

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, Divided):
            raise ValueError(f"{type(self).__name__}: the module is already parallel")
        self.check_module(module)
        check_mesh(type(self).__name__, device_mesh)
        self.divide(module, device_mesh)
        return module


def check_mesh(name: str, mesh: DeviceMesh) -> None:
    """Check that a mesh is one-dimensional.

    Raises:
        ValueError: if it is not; the message shows how to select one dimension.
    """
    if mesh.ndim != 1:
        raise ValueError(f"{name}: the mesh has {mesh.ndim} dimensions; expected 1, such as mesh['tp']")


class LinearStyle(Style):
    """Base class of the parallel styles for linear layers."""

    dim: ClassVar[int]

    def weight_shard(self, mesh: DeviceMesh) -> WeightShard:
        """Return this rank's shard of a weight."""
        return WeightShard(self.dim, mesh.get_local_rank(), mesh.size(), getattr(self, "unit", 1))

    def check_module(self, module: nn.Module) -> None:
        """Check that the module is a linear layer.

        Raises:
            TypeError: if it is not; the message names the class.
        """
        if not isinstance(module, QuantLinear) and type(module) is not nn.Linear:
            raise TypeError(f"{type(self).__name__} is for linear layers; got {type(module).__name__}")

    def divide(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Replace a linear layer by this rank's shard, in place, and make it communicate with the other ranks."""
        layer: Any = module
        whole = layer.parts if isinstance(layer, QuantLinear) else (layer.out_features,)
        shard_(layer, self.weight_shard(mesh))
        self.bind_layer(layer, mesh, whole)

    def bind_layer(self, layer: nn.Linear | QuantLinear, mesh: DeviceMesh, whole: Sequence[int]) -> None:
        """Make a sharded layer communicate with the other ranks.

        Args:
            layer: layer with this rank's shard.
            mesh: one-dimensional mesh of the ranks.
            whole: number of rows of each part of the undivided layer.
        """
        self.bind(layer, mesh)


class ColumnParallel(LinearStyle):
    """Shard the rows of the weight (N), so that each rank computes some columns of the result.

    Use it for q, k and v, and for gate and up, merged or not. In a merged layer, each part is sharded. The result
    equals the undivided layer's columns bit for bit, for the same backend and tactic.

    Args:
        unit: number of rows that must stay on one rank: ``head_dim`` for q, k and v. If a part has fewer units than
            ranks, as key and value heads of grouped-query attention may, several ranks store copies of a unit.
        sequence: True if each rank passes different tokens. Each rank quantises its tokens to the format of the layer's
            GEMM, and the codes and scales of all ranks are gathered along the first dimension. 16-bit activations are
            gathered without quantisation.
        gather_output: True to return the columns of all ranks, in the order of the undivided layer. The divided layer's
            attribute ``whole_parts`` contains the number of columns of each part.
    """

    dim = 0
    _kind = _Column

    def __init__(self, *, unit: int = 1, sequence: bool = False, gather_output: bool = False) -> None:
        super().__init__(unit=unit, sequence=sequence, gather_output=gather_output)
        self.unit, self.sequence, self.gather_output = unit, sequence, gather_output

    def bind_layer(self, layer: nn.Linear | QuantLinear, mesh: DeviceMesh, whole: Sequence[int]) -> None:
        """Make a sharded layer communicate with the other ranks; see ``LinearStyle.bind_layer``."""
        self.bind(layer, mesh).whole_parts = tuple(whole)


class RowParallel(LinearStyle):
    """Shard the columns of the weight (K). Each rank multiplies its columns of the input, and the ranks add their
    partial sums.

    Use it for layers after a :class:`ColumnParallel` layer, such as o and down. The bias is added once. Codes and
    scales of the input are the same as in the undivided layer. With ``sums=torch.float32``, results differ from the
    undivided layer's only by the order of float32 additions.

    Args:
        sequence: True to return to each rank only an equal part of the tokens (the first dimension) instead of all
            tokens.
        sums: dtype in which partial sums are sent and added. ``None`` uses the dtype of the activations, as most
            tensor-parallel layers do, so each partial sum and each sum is rounded to this dtype. ``torch.float32``
            rounds only once, but sends twice the bytes. For FP8 weights with tensor or channel scales, the GEMM cannot
            return float32 on a GPU, so each call decodes the weight.
        partial: True to return this rank's partial sums, for :func:`normed_rows`, which adds up the partial sums of all
            ranks in the launch that adds the residual, normalises and quantises. The partial sums are rounded to the
            dtype of the activations, and added in float32.

    Raises:
        ValueError: for ``partial`` together with ``sequence`` or ``sums``.
    """

    dim = 1
    _kind = _Row

    def __init__(self, *, sequence: bool = False, sums: torch.dtype | None = None, partial: bool = False) -> None:
        super().__init__(
            sequence=sequence, sums=None if sums is None else str(sums), **({"partial": True} if partial else {})
        )
        if partial and (sequence or sums is not None):
            raise ValueError("RowParallel: got partial=True with sequence or sums; expected partial=True alone")
        self.sequence, self.sums, self.partial = sequence, sums, partial

    def bind_layer(self, layer: nn.Linear | QuantLinear, mesh: DeviceMesh, whole: Sequence[int]) -> None:
        """Make a sharded layer communicate with the other ranks; see ``LinearStyle.bind_layer``."""
        fit_bias_(layer, self.sums, is_added=mesh.get_local_rank() == 0)  # added on one rank only
        self.bind(layer, mesh)
