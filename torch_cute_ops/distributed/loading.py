"""Load a checkpoint directly into shards: each rank reads only its shard of each tensor."""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from torch_cute_ops.checkpoint._files import Files
from torch_cute_ops.checkpoint.experts import gpt_oss_names
from torch_cute_ops.checkpoint.load import Loader, LoadOptions, Progress
from torch_cute_ops.checkpoint.spec import read_spec
from torch_cute_ops.distributed.compare import compare
from torch_cute_ops.distributed.divided_experts import DividedExperts
from torch_cute_ops.distributed.parallel import (
    ColumnParallel,
    LinearStyle,
    RowParallel,
    WeightShard,
    check_mesh,
    shard_range,
)
from torch_cute_ops.distributed.start import facts_of, versions
from torch_cute_ops.nn import MXFP4Linear, QuantExperts, QuantLinear, _names
from torch_cute_ops.nn._base import Activations
from torch_cute_ops.nn.float_experts import FloatExperts, float_experts

Plan = Mapping[str, ColumnParallel | RowParallel | DividedExperts]


@torch.no_grad()
def load_(
    model: nn.Module,
    path: str | Path,
    mesh: DeviceMesh,
    plan: Plan,
    *,
    activations: Activations | Mapping[str, Activations] = "auto",
    device: torch.device | str | None = None,
    merged: Mapping[str, Sequence[str]] = _names.MERGED,
    ignore: str | Iterable[str] = (),
    progress: Progress | None = None,
) -> nn.Module:
    """Fill a model from a checkpoint, in place. Each rank loads only its shards of the layers in the plan.

    The result equals :func:`torch_cute_ops.checkpoint.load_` followed by ``parallelize_module(model, mesh, plan)``, but
    a rank never reads or stores the shards of other ranks. Layers that the plan does not name, norms and embeddings are
    read whole. At the end the ranks compare their models, as :func:`check_ranks` does.

    Experts can be divided if the checkpoint stores them as separate layers or in gpt-oss's format, but not in torchao's
    format.

    Args:
        model: model with ``nn.Linear`` layers and experts in the checkpoint's sizes and names, best on the meta device.
        path: folder of the checkpoint, readable by every rank.
        mesh: one-dimensional mesh of the ranks that divide the layers.
        plan: parallel style for each layer name. Each component between dots may be a wildcard, as in
            ``parallelize_module``. Names that the model lacks are ignored.
        activations, device, merged, ignore, progress: as in :func:`torch_cute_ops.checkpoint.load_`.

    Returns:
        ``model``.

    Raises:
        FileNotFoundError, ValueError: as :func:`torch_cute_ops.checkpoint.load_`; for sizes that cannot be divided
            among the ranks; for a plan that names no layer of the model, or experts that the checkpoint does not
            quantise.
        TypeError: for a style from another package, or a module that its style does not support.
        RuntimeError: if the ranks differ in versions or in their models.
    """
    check_mesh("load_", mesh)
    chosen = _resolve(model, plan)
    spec, options = read_spec(path), LoadOptions(activations, device, merged, ignore, progress)
    whole: dict[str, list[int]] = {}
    with ShardedFiles(path) as files:
        loader = Loader(model, files, spec, options)
        quantised = loader.quantised_modules()
        for name, style in chosen.items():
            if isinstance(style, DividedExperts):
                if name not in quantised:
                    raise ValueError(f"load_: {files.path} does not quantise {name}; expected quantised experts")
                _divide_experts(loader, files, name, style, mesh)
                continue
            assert isinstance(style, LinearStyle)
            sources, module = loader.layers.sources(name), model.get_submodule(name)
            whole[name] = [files.size(source)[0] for source in sources]
            files.shards.update(dict.fromkeys(sources, style.weight_shard(mesh)))
            assert isinstance(module, nn.Linear)
            _names.replace(model, module, _resized(module, files, sources))
        Loader(model, files, spec, options).load(stacklevel=5)
    for name, style in chosen.items():
        loaded = model.get_submodule(name)
        if isinstance(style, DividedExperts):
            assert isinstance(loaded, QuantExperts)
            style.bind_experts(loaded, mesh)
        else:
            assert isinstance(loaded, nn.Linear | QuantLinear) and isinstance(style, LinearStyle)
            style.bind_layer(loaded, mesh, whole[name])
    compare("load_", {**versions(), **facts_of(model)}, mesh.get_group())
    return model


def _resolve(model: nn.Module, plan: Plan) -> dict[str, LinearStyle | DividedExperts]:
    """Return the parallel style of each module whose name matches the plan."""
    chosen: dict[str, LinearStyle | DividedExperts] = {}
    for pattern, style in plan.items():
        if not isinstance(style, LinearStyle | DividedExperts):
            kind = "a style of torch's own" if isinstance(style, ParallelStyle) else f"a {type(style).__name__}"
            raise TypeError(
                f"load_: the plan has {kind} for {pattern}; expected ColumnParallel, RowParallel or DividedExperts"
            )
        for name, module in model.named_modules():
            if not _fits(name, pattern):
                continue
            is_linear = isinstance(style, LinearStyle)
            if type(module) is not nn.Linear if is_linear else float_experts(module) is None:
                expected = "a torch.nn.Linear" if is_linear else "experts in parameters gate_up_proj and down_proj"
                raise TypeError(f"load_: {name} is a {type(module).__name__}; expected {expected}")
            reason = _names.reason_bound(module) or (_names.reason_holds_more(module) if is_linear else None)
            if reason is not None:
                raise TypeError(f"load_: {name} cannot be divided: {reason}; expected an unchanged module")
            chosen[name] = style
    if not chosen:
        raise ValueError(f"load_: the model contains none of the layers in the plan: {', '.join(plan)}")
    return chosen


def _fits(name: str, pattern: str) -> bool:
    components, patterns = name.split("."), pattern.split(".")
    return len(components) == len(patterns) and all(map(fnmatch.fnmatchcase, components, patterns))


def _resized(module: nn.Linear, files: "ShardedFiles", sources: Sequence[str]) -> nn.Linear:
    """Return an uninitialised linear layer with the size of this rank's shard."""
    sizes = [files.own_size(source) for source in sources]
    n, k = sum(size[0] for size in sizes), sizes[0][1]
    whole = sum(files.size(source)[0] for source in sources), files.size(sources[0])[1]
    if whole != (module.out_features, module.in_features):
        given = (module.out_features, module.in_features)
        raise ValueError(
            f"{files.describe(f'{sources[0]}.weight')}: (N, K) is {whole}; expected {given}, as in the model"
        )
    weight = module.weight
    resized = nn.Linear(k, n, bias=module.bias is not None, device=weight.device, dtype=weight.dtype)
    return resized.requires_grad_(weight.requires_grad)


def _divide_experts(loader: Loader, files: "ShardedFiles", name: str, style: DividedExperts, mesh: DeviceMesh) -> None:
    """Restrict ``files`` to this rank's shard of the experts. Replace the model's experts by uninitialised experts of
    the shard's size."""
    given, stored = float_experts(loader.model.get_submodule(name)), loader.layers.stored(name)
    assert given is not None
    begin, end = style.own(given.experts, given.width, mesh, name)
    layers = loader.layers.expert_layers(name, given.experts)
    if layers is None and f"{stored}.gate_up_proj_blocks" not in files:
        raise ValueError(f"load_: {files.path} stores {name} in a form that cannot be sharded during the load")
    if style.by == "expert":
        files.keep_experts(stored, given.experts, begin, end)
    elif layers is None:
        files.shard_gpt_oss(stored, begin, end)
    else:
        rank, world = mesh.get_local_rank(), mesh.size()
        for gate, up, down in layers:
            files.shards |= {
                gate: WeightShard(0, rank, world),
                up: WeightShard(0, rank, world),
                down: WeightShard(1, rank, world),
            }
    _resize_experts(given, style, begin, end)


def _resize_experts(given: FloatExperts, style: DividedExperts, begin: int, end: int) -> None:
    widths = {"gate_up_proj": 2 if given.is_transposed else 1, "gate_up_proj_bias": 1}
    widths["down_proj"] = 1 if given.is_transposed else 2
    for key in (*widths, "down_proj_bias"):
        old = given.module._parameters.get(key)
        if old is None or (style.by == "tensor" and key not in widths):
            continue
        dim, factor = (0, 1) if style.by == "expert" else (widths[key], 2 if "up" in key else 1)
        shape = (*old.shape[:dim], factor * (end - begin), *old.shape[dim + 1 :])
        new = torch.empty(shape, dtype=old.dtype, device=old.device)
        given.module._parameters[key] = nn.Parameter(new, requires_grad=old.requires_grad)


class ShardedFiles(Files):
    """View of a checkpoint that shows only one rank's shards of the divided layers, and only this rank's experts.

    Args:
        path: folder of the checkpoint.

    Attributes:
        shards: shard of each divided layer, keyed by the layer's name.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.shards: dict[str, WeightShard] = {}
        self._slices: dict[str, tuple[int, int, int]] = {}

    def keep_experts(self, name: str, experts: int, begin: int, end: int) -> None:
        """Hide all experts of the module ``name`` except ``begin`` to ``end``, and number these from 0.

        Raises:
            ValueError: for tensors with another number of experts.
        """
        for suffix in self.suffixes(name):  # tensors that contain all experts
            tensor = f"{name}.{suffix}"
            if super().shape(tensor)[0] != experts:
                shape = super().shape(tensor)
                raise ValueError(f"got {self.describe(tensor)} with shape {shape}; expected {experts} in dimension 0")
            self._slices[tensor] = (0, begin, end)

        def own(tensor: str) -> str | None:
            number, _, rest = tensor.removeprefix(f"{name}.").partition(".")
            if not tensor.startswith(f"{name}.") or not number.isdecimal() or int(number) >= experts:
                return tensor
            return f"{name}.{int(number) - begin}.{rest}" if begin <= int(number) < end else None

        self.rename(own)

    def shard_gpt_oss(self, name: str, begin: int, end: int) -> None:
        """Restrict experts in gpt-oss's format to the elements from ``begin`` to ``end`` of their intermediate size.

        Raises:
            ValueError: if the range does not consist of whole blocks.
        """
        block = MXFP4Linear.format.block_size
        if begin % block or end % block:
            raise ValueError(f"{name}: cut at {begin} and {end}; expected multiples of {block}, which share a scale")
        for tensor in gpt_oss_names(name):
            if ".gate_up_proj_" in tensor:  # rows of gate and up alternate
                self._slices[tensor] = (1, 2 * begin, 2 * end)
            elif not tensor.endswith("bias"):
                self._slices[tensor] = (2, begin // block, end // block)

    def size(self, layer: str) -> tuple[int, int]:
        """Return N and K of a whole layer.

        Raises:
            ValueError: if the checkpoint contains no weight of the layer.
        """
        for suffix in ("weight_packed", "weight"):
            name = f"{layer}.{suffix}"
            if name in self:
                shape = super().shape(name)
                if len(shape) == 2:
                    return shape[0], shape[1] * (2 if self.is_packed(name) else 1)
        raise ValueError(f"{self.path} contains no weight of {layer}")

    def own_size(self, layer: str) -> tuple[int, int]:
        """Return N and K of this rank's shard of a layer."""
        size, shard = self.size(layer), self.shards.get(layer)
        if shard is None:
            return size
        begin, end = shard.bounds(size[shard.dim], layer)
        return (end - begin, size[1]) if shard.dim == 0 else (size[0], end - begin)

    def _own_slice(self, name: str) -> tuple[int, int, int] | None:
        if name in self._slices:
            return self._slices[name]
        layer, _, suffix = name.rpartition(".")
        shard = self.shards.get(layer)
        if shard is None or name not in self:
            return None
        return shard_range(shard, suffix, super().shape(name), self.size(layer), name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's shard of a tensor."""
        shape, own = super().shape(name), self._own_slice(name)
        if own is None:
            return shape
        dim, begin, end = own
        return (*shape[:dim], end - begin, *shape[dim + 1 :])

    def read(self, name: str) -> Tensor:
        """Return this rank's shard of a tensor, on the CPU.

        Raises:
            ValueError: if the checkpoint contains no such tensor.
        """
        own = self._own_slice(name)
        return super().read(name) if own is None else self.read_slice(name, *own).contiguous()
