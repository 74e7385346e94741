"""From a checkpoint straight to shards: each rank reads its part of each tensor."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from torch_cute_ops.checkpoint._files import Files
from torch_cute_ops.checkpoint.load import Loader, Progress
from torch_cute_ops.checkpoint.spec import read_spec
from torch_cute_ops.distributed.parallel import ColumnParallel, Cut, LinearStyle, RowParallel, check_mesh, cut_of
from torch_cute_ops.nn import QuantLinear, _names
from torch_cute_ops.nn._base import Activations

Plan = Mapping[str, ColumnParallel | RowParallel]


@torch.no_grad()
def load_(
    model: nn.Module,
    path: str | Path,
    mesh: DeviceMesh,
    plan: Plan,
    *,
    activations: Activations = "auto",
    device: torch.device | str | None = None,
    merged: Mapping[str, Sequence[str]] = _names.PARTS,
    ignore: Iterable[str] = (),
    progress: Progress | None = None,
) -> nn.Module:
    """Fill a model from a checkpoint, in place, each rank with its part of the layers that a plan divides.

    As :func:`torch_cute_ops.checkpoint.load_`, followed by ``parallelize_module(model, mesh, plan)``, but no rank reads
    or holds more than its own part of a layer that is divided. Other layers, norms and embeddings are read whole.

    Args:
        model: with ``nn.Linear`` layers of the checkpoint's sizes under its names, best on the meta device.
        path: the checkpoint's folder, which every rank can read.
        mesh: of one dimension: the ranks that divide the layers.
        plan: styles by the names of layers, in which each part between dots may be a wildcard, as for
            ``parallelize_module``. Names that the model does not have are passed over.
        activations, device, merged, ignore, progress: as for :func:`torch_cute_ops.checkpoint.load_`.

    Returns:
        ``model``.

    Raises:
        FileNotFoundError, ValueError: as :func:`torch_cute_ops.checkpoint.load_`; for sizes that the ranks cannot
            divide; for a plan that names no layer of the model.
        TypeError: for a style that is none of this package, or a layer that is not linear.
    """
    check_mesh("load_", mesh)
    chosen = _resolve(model, plan)
    spec = read_spec(path)
    cuts: dict[str, Cut] = {}
    whole: dict[str, list[int]] = {}
    with _Parts(path, cuts.get) as files:
        loader = Loader(model, files, spec, activations, device, merged)
        for name, style in chosen.items():
            cuts.update(dict.fromkeys(loader.sources(name), style.cut(mesh)))
        for name in chosen:
            whole[name] = [files.size(source)[0] for source in loader.sources(name)]
            module = model.get_submodule(name)
            assert isinstance(module, nn.Linear)
            _names.replace(model, module, _resized(module, files, loader.sources(name)))
        Loader(model, files, spec, activations, device, merged).load(tuple(ignore), progress)
    for name, style in chosen.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear | QuantLinear)
        style.bind_layer(layer, mesh, whole[name])
    return model


def _resolve(model: nn.Module, plan: Plan) -> dict[str, LinearStyle]:
    """The style of each layer that the plan names."""
    chosen: dict[str, LinearStyle] = {}
    for pattern, style in plan.items():
        if not isinstance(style, LinearStyle):
            kind = "a style of torch's own" if isinstance(style, ParallelStyle) else f"a {type(style).__name__}"
            raise TypeError(f"load_: the plan has {kind} for {pattern}; expected ColumnParallel or RowParallel")
        for name, module in model.named_modules():
            if not _fits(name, pattern):
                continue
            if isinstance(module, QuantLinear) or type(module) is not nn.Linear:
                raise TypeError(f"load_: {name} is a {type(module).__name__}; expected a torch.nn.Linear to be filled")
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
    resized = nn.Linear(k, n, bias=module.bias is not None, device="meta", dtype=module.weight.dtype)
    return resized.requires_grad_(module.weight.requires_grad)


class _Parts(Files):
    """The tensors of a checkpoint as one rank sees them: of a layer that is divided, its part.

    Args:
        path: the checkpoint's folder.
        cut: how the layer of a name is divided; ``None``: it is not.
    """

    def __init__(self, path: str | Path, cut: Callable[[str], Cut | None]) -> None:
        super().__init__(path)
        self._cut = cut

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
        size, cut = self.size(layer), self._cut(layer)
        if cut is None:
            return size
        begin, end = cut.bounds(size[cut.dim], layer)
        return (end - begin, size[1]) if cut.dim == 0 else (size[0], end - begin)

    def _part(self, name: str) -> tuple[int, int, int] | None:
        layer, _, suffix = name.rpartition(".")
        cut = self._cut(layer)
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
        return super().read(name) if part is None else self.read_part(name, *part).contiguous()
