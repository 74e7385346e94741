"""From a checkpoint straight to shards: each rank reads its part of each tensor."""

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
from torch_cute_ops.distributed.parallel import ColumnParallel, Cut, LinearStyle, RowParallel, check_mesh, cut_of
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
    activations: Activations = "auto",
    device: torch.device | str | None = None,
    merged: Mapping[str, Sequence[str]] = _names.MERGED,
    ignore: str | Iterable[str] = (),
    progress: Progress | None = None,
) -> nn.Module:
    """Fill a model from a checkpoint, in place, each rank with its part of the layers that a plan divides.

    As :func:`torch_cute_ops.checkpoint.load_`, followed by ``parallelize_module(model, mesh, plan)``, but no rank reads
    or holds more than its own part of a layer that is divided. Other layers, norms and embeddings are read whole. At
    the end the ranks compare what they have, as :func:`check_ranks` does.

    Experts that a checkpoint holds layer by layer, or as gpt-oss's does, can be divided; torchao's cannot.

    Args:
        model: with ``nn.Linear`` layers and experts of the checkpoint's sizes under its names, best on the meta device.
        path: the checkpoint's folder, which every rank can read.
        mesh: of one dimension: the ranks that divide the layers.
        plan: styles by the names of layers, in which each part between dots may be a wildcard, as for
            ``parallelize_module``. Names that the model does not have are passed over.
        activations, device, merged, ignore, progress: as for :func:`torch_cute_ops.checkpoint.load_`.

    Returns:
        ``model``.

    Raises:
        FileNotFoundError, ValueError: as :func:`torch_cute_ops.checkpoint.load_`; for sizes that the ranks cannot
            divide; for a plan that names no layer of the model, or experts that the checkpoint does not quantise.
        TypeError: for a style that is none of this package, or a module that is not what its style divides.
        RuntimeError: for ranks that differ: in versions, or in what they hold now.
    """
    check_mesh("load_", mesh)
    chosen = _resolve(model, plan)
    spec, options = read_spec(path), LoadOptions(activations, device, merged, ignore, progress)
    whole: dict[str, list[int]] = {}
    with _Parts(path) as files:
        loader = Loader(model, files, spec, options)
        quantised = loader.quantised_modules()
        for name, style in chosen.items():
            if isinstance(style, DividedExperts):
                if name not in quantised:
                    raise ValueError(f"load_: {files.path} does not quantise {name}; expected experts that it does")
                _divide_experts(loader, files, name, style, mesh)
                continue
            assert isinstance(style, LinearStyle)
            sources, module = loader.sources(name), model.get_submodule(name)
            whole[name] = [files.size(source)[0] for source in sources]
            files.cuts.update(dict.fromkeys(sources, style.cut(mesh)))
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
    """The style of each module that the plan names."""
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
                what = "a torch.nn.Linear" if is_linear else "experts in parameters gate_up_proj and down_proj,"
                raise TypeError(f"load_: {name} is a {type(module).__name__}; expected {what} to be filled")
            chosen[name] = style
    if not chosen:
        raise ValueError(f"load_: the model has none of the layers that the plan names: {', '.join(plan)}")
    return chosen


def _fits(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _resized(module: nn.Linear, files: "_Parts", sources: Sequence[str]) -> nn.Linear:
    """A layer without numbers of the size of this rank's part."""
    sizes = [files.own_size(source) for source in sources]
    n, k = sum(size[0] for size in sizes), sizes[0][1]
    whole = sum(files.size(source)[0] for source in sources), files.size(sources[0])[1]
    if whole != (module.out_features, module.in_features):
        given = (module.out_features, module.in_features)
        raise ValueError(f"{files.describe(f'{sources[0]}.weight')} has N and K {whole}; the model's layer has {given}")
    weight = module.weight
    resized = nn.Linear(k, n, bias=module.bias is not None, device=weight.device, dtype=weight.dtype)
    return resized.requires_grad_(weight.requires_grad)


def _divide_experts(loader: Loader, files: "_Parts", name: str, style: DividedExperts, mesh: DeviceMesh) -> None:
    """Have files show experts as this rank has them, and make the model's of that size, without numbers."""
    given, stored = float_experts(loader.model.get_submodule(name)), loader.stored(name)
    assert given is not None
    begin, end = style.own(given.experts, given.width, mesh, name)
    layers = loader.expert_layers(name, given.experts)
    if layers is None and f"{stored}.gate_up_proj_blocks" not in files:
        raise ValueError(f"load_: {files.path} has {name} in a form that cannot be divided while it is read")
    if style.by == "expert":
        files.keep_experts(stored, given.experts, begin, end)
    elif layers is None:
        files.cut_gpt_oss(stored, begin, end)
    else:
        rank, world = mesh.get_local_rank(), mesh.size()
        for gate, up, down in layers:
            files.cuts |= {gate: Cut(0, rank, world), up: Cut(0, rank, world), down: Cut(1, rank, world)}
    _resize_experts(given, style, begin, end)


def _resize_experts(given: FloatExperts, style: DividedExperts, begin: int, end: int) -> None:
    widths = {"gate_up_proj": 2 if given.is_transposed else 1, "gate_up_proj_bias": 1}
    widths["down_proj"] = 1 if given.is_transposed else 2
    for key in (*widths, "down_proj_bias"):
        old = given.module._parameters.get(key)
        if old is None or (style.by == "tensor" and key not in widths):
            continue
        dim, share = (0, 1) if style.by == "expert" else (widths[key], 2 if "up" in key else 1)
        shape = (*old.shape[:dim], share * (end - begin), *old.shape[dim + 1 :])
        new = torch.empty(shape, dtype=old.dtype, device=old.device)
        given.module._parameters[key] = nn.Parameter(new, requires_grad=old.requires_grad)


class _Parts(Files):
    """The tensors of a checkpoint as one rank sees them: of a layer that is divided, its part; of experts, its own.

    Args:
        path: the checkpoint's folder.

    Attributes:
        cuts: how the layer of a name is divided.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.cuts: dict[str, Cut] = {}
        self._pieces: dict[str, tuple[int, int, int]] = {}

    def keep_experts(self, name: str, experts: int, begin: int, end: int) -> None:
        """Show those from ``begin`` to ``end`` of the experts ``name`` alone, numbered from 0.

        Raises:
            ValueError: for tensors of another number of experts.
        """
        for suffix in self.suffixes(name):  # of all experts
            tensor = f"{name}.{suffix}"
            if super().shape(tensor)[0] != experts:
                shape = super().shape(tensor)
                raise ValueError(f"{self.describe(tensor)} has shape {shape}; expected {experts} in dimension 0")
            self._pieces[tensor] = (0, begin, end)

        def own(tensor: str) -> str | None:
            number, _, rest = tensor.removeprefix(f"{name}.").partition(".")
            if not tensor.startswith(f"{name}.") or not number.isdecimal() or int(number) >= experts:
                return tensor
            return f"{name}.{int(number) - begin}.{rest}" if begin <= int(number) < end else None

        self.rename(own)

    def cut_gpt_oss(self, name: str, begin: int, end: int) -> None:
        """Show the elements from ``begin`` to ``end`` between the two GEMMs, of all experts in the form of gpt-oss.

        Raises:
            ValueError: if they are no whole blocks.
        """
        block = MXFP4Linear.format.block_size
        if begin % block or end % block:
            raise ValueError(f"{name}: cut at {begin} and {end}; expected multiples of {block}, which share a scale")
        for tensor in gpt_oss_names(name):
            if ".gate_up_proj_" in tensor:  # their rows take turns
                self._pieces[tensor] = (1, 2 * begin, 2 * end)
            elif not tensor.endswith("bias"):
                self._pieces[tensor] = (2, begin // block, end // block)

    def size(self, layer: str) -> tuple[int, int]:
        """N and K of a layer, as a whole.

        Raises:
            ValueError: if it has no weight.
        """
        for suffix in ("weight_packed", "weight"):
            name = f"{layer}.{suffix}"
            if name in self:
                shape = super().shape(name)
                if len(shape) == 2:
                    return shape[0], shape[1] * (2 if self.is_packed(name) else 1)
        raise ValueError(f"{self.path} has no weight of {layer}")

    def own_size(self, layer: str) -> tuple[int, int]:
        """N and K of this rank's part."""
        size, cut = self.size(layer), self.cuts.get(layer)
        if cut is None:
            return size
        begin, end = cut.bounds(size[cut.dim], layer)
        return (end - begin, size[1]) if cut.dim == 0 else (size[0], end - begin)

    def _part(self, name: str) -> tuple[int, int, int] | None:
        if name in self._pieces:
            return self._pieces[name]
        layer, _, suffix = name.rpartition(".")
        cut = self.cuts.get(layer)
        if cut is None or name not in self:
            return None
        return cut_of(cut, suffix, super().shape(name), self.size(layer), name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of this rank's part of a tensor."""
        shape, part = super().shape(name), self._part(name)
        if part is None:
            return shape
        dim, begin, end = part
        return (*shape[:dim], end - begin, *shape[dim + 1 :])

    def read(self, name: str) -> Tensor:
        """This rank's part of a tensor, on the CPU.

        Raises:
            ValueError: if there is no such tensor.
        """
        part = self._part(name)
        return super().read(name) if part is None else self.read_slice(name, *part).contiguous()
