"""Filling a model from a checkpoint, one tensor at a time."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from torch_cute_ops.checkpoint._files import Files
from torch_cute_ops.checkpoint._layers import KV_SCALES, read_layer
from torch_cute_ops.checkpoint.spec import QuantSpec, read_spec
from torch_cute_ops.nn import QuantLinear, _names, merge
from torch_cute_ops.nn._base import Activations

Progress = Callable[[Sequence[tuple[str, nn.Module]]], Iterable[tuple[str, nn.Module]]]

SHOWN = 8
"""Names that a message lists."""


@torch.no_grad()
def load_(
    model: nn.Module,
    path: str | Path,
    *,
    activations: Activations = "auto",
    device: torch.device | str | None = None,
    merged: Mapping[str, Sequence[str]] = _names.PARTS,
    ignore: Iterable[str] = (),
    progress: Progress | None = None,
) -> nn.Module:
    """Fill a model from a checkpoint, in place: its linear layers become quantised ones where the checkpoint's are.

    Whether a layer is quantised, its tensors say; how, the configuration does. Layers that are not stay ``nn.Linear``.
    Tensors are read one at a time, so that the peak of memory is the model and its largest layer, twice. Where it
    raises, the model is partly loaded.

    Args:
        model: with ``nn.Linear`` layers under the checkpoint's names; on the meta device, or any other, whose numbers
            are replaced. What is not quantised gets the dtype that the model has.
        path: the checkpoint's folder: ``config.json`` or ``hf_quant_config.json``, and ``model.safetensors`` or shards
            with ``model.safetensors.index.json``.
        activations: as of the layers of :mod:`torch_cute_ops.nn`: ``"auto"`` is 16-bit ones beside FP4 weights, and FP8
            ones beside FP8.
        device: where tensors go; ``None``: where those of the model are, or from the meta device to the CPU.
        merged: layers of the model that are several of the checkpoint, side by side, by the last part of their names:
            ``qkv_proj`` of q, k and v, and ``gate_up_proj`` of gate and up, if nothing is said. Used where the
            checkpoint has no such layer itself.
        ignore: tensors of the checkpoint that the model need not have: names, wildcards, or regular expressions behind
            ``re:``.
        progress: given the names and modules in the order in which they are filled, returns what iterates over them, as
            ``tqdm`` does.

    Returns:
        ``model``.

    Raises:
        FileNotFoundError: for a missing file.
        ValueError: for a configuration that is not understood; a truncated file; a tensor that is missing, unknown or
            of a wrong shape, dtype or value, by name and file; quantised tensors of a layer that shares its weight with
            another module, such as a tied embedding.
    """
    spec = read_spec(path)
    with Files(path) as files:
        Loader(model, files, spec, activations, device, merged).load(tuple(ignore), progress)
    return model


class Loader:
    """One call of ``load_``; arguments are its own, and the files and the configuration of the checkpoint."""

    def __init__(
        self,
        model: nn.Module,
        files: Files,
        spec: QuantSpec,
        activations: Activations,
        device: torch.device | str | None,
        merged: Mapping[str, Sequence[str]],
    ) -> None:
        self.model, self.files, self.spec, self.activations = model, files, spec, activations
        self.device = None if device is None else torch.device(device)
        self.merged = merged
        self.used: set[str] = set()
        self.places: defaultdict[object, list[tuple[nn.Module, str]]] = defaultdict(list)
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.places[_names.identity(parameter)].append((module, name))
        self.tied = {module for places in self.places.values() if len(places) > 1 for module, _ in places}
        self.filled: dict[object, str] = {}
        self.missing: list[tuple[object, str]] = []

    def load(self, ignore: tuple[str, ...], progress: Progress | None) -> None:
        """Fill the model."""
        modules = [*self.model.named_modules()]
        for name, module in modules if progress is None else progress(modules):
            if isinstance(module, QuantLinear) or type(module) is nn.Linear:
                self._load_linear(name, module)
            else:
                self._load_own(name, module)
        missing = [name for key, name in self.missing if key not in self.filled]
        if missing:
            raise ValueError(f"{self.files.path} has no {_listed(missing)}")
        kv_scales = {name for name in self.files.file_of if name.rpartition(".")[2] in KV_SCALES}
        if kv_scales:
            warnings.warn(f"scales of the KV cache are not used: {_listed(sorted(kv_scales))}", stacklevel=4)
        left = [
            name
            for name in self.files.file_of
            if name not in self.used | kv_scales and not any(_names.fits(name, pattern) for pattern in ignore)
        ]
        if left:
            raise ValueError(f"the model has no place for {_listed([self.files.describe(name) for name in left])}")
        lost = [
            f"{name}.{key}".lstrip(".")
            for name, module in self.model.named_modules()
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and tensor.is_meta
        ]
        if lost:
            raise ValueError(f"on the meta device, and in no checkpoint: {_listed(lost)}; make them on a real device")

    # Linear layers

    def _load_linear(self, name: str, module: nn.Linear | QuantLinear) -> None:
        sources = self.sources(name)
        quantised = [source for source in sources if self._is_quantised(source)]
        if not quantised:
            if isinstance(module, QuantLinear):
                raise ValueError(f"{self.files.path} has no quantised {name}, which is a {type(module).__name__}")
            self._load_own(name, module, sources)
            return
        if len(quantised) < len(sources):
            others = sorted({*sources} - {*quantised})
            raise ValueError(f"{name} merges {', '.join(quantised)}, quantised, and {', '.join(others)}, not")
        if module in self.tied:
            raise ValueError(
                f"{self._describe(sources[0])} is quantised, but {name} shares its weight with another module"
            )
        device = self._device_of(module.weight)
        bias_dtype = None if module.bias is None else module.bias.dtype
        layers = []
        for source in sources:
            scheme = self.spec.scheme_of_tensors(source)
            if scheme is None:
                raise ValueError(f"{self._describe(source)} is quantised, and {self.spec.path} does not say how")
            layers.append(read_layer(self.files, source, scheme, self.activations, device, bias_dtype))
            self.used.update(f"{source}.{suffix}" for suffix in self.files.suffixes(source))
        try:
            layer = layers[0] if len(layers) == 1 else merge(layers)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from error
        got, want = ((each.out_features, each.in_features, each.bias is not None) for each in (layer, module))
        if got != want:
            raise ValueError(
                f"{self._describe(sources[0])} has N, K and whether there is a bias {got}; expected {want}, of {name}"
            )
        _names.replace(self.model, module, layer)

    def sources(self, name: str) -> list[str]:
        """The layers of the checkpoint that a layer of the model is made of."""
        parent, _, last = name.rpartition(".")
        if not self.files.suffixes(name) and last in self.merged:
            parts = [f"{parent}.{part}".lstrip(".") for part in self.merged[last]]
            if any(self.files.suffixes(part) for part in parts):
                return parts
        return [name]

    def _is_quantised(self, source: str) -> bool:
        """Whether a layer of the checkpoint has anything but a weight of plain numbers and a bias."""
        suffixes = self.files.suffixes(source) - {"bias"} - KV_SCALES
        return bool(suffixes) and not (suffixes == {"weight"} and self.files.is_floating(f"{source}.weight"))

    def _describe(self, source: str) -> str:
        suffixes = sorted(self.files.suffixes(source))
        return self.files.describe(f"{source}.{suffixes[0]}") if suffixes else source

    # What is not quantised

    def _load_own(self, name: str, module: nn.Module, sources: Sequence[str] = ()) -> None:
        """Load the module's own parameters, and the buffers that belong into a state dict."""
        for key, old in _names.own_tensors(module).items():
            names = [f"{source}.{key}".lstrip(".") for source in sources or (name,)]
            identity = _names.identity(old)
            absent = [each for each in names if each not in self.files]
            if absent:
                self.missing += [(identity, each) for each in absent]
                continue
            self.used.update(names)
            self._place(names, old, module, key, identity)

    def _place(self, names: list[str], old: Tensor, module: nn.Module, key: str, identity: object) -> None:
        shapes = [self.files.shape(each) for each in names]
        shape = (sum(each[0] for each in shapes), *shapes[0][1:]) if len(names) > 1 else shapes[0]
        if shape != old.shape or any(each[1:] != shape[1:] for each in shapes):
            raise ValueError(f"{self.files.describe(names[0])} has shape {shape}; expected {tuple(old.shape)}")
        for each in names:
            if old.is_floating_point() and not self.files.is_floating(each):
                raise ValueError(f"{self.files.describe(each)} is quantised; only linear layers can be")
        read = [self.files.read(each) for each in names]
        value = torch.cat(read) if len(read) > 1 else read[0]
        new = value.to(self._device_of(old), old.dtype, copy=True)
        if key in module._buffers:
            module._buffers[key] = new
            return
        if identity in self.filled:  # the places of a tied parameter have the first one already
            current = module._parameters[key]
            assert current is not None
            if not torch.equal(current, new):
                first = self.files.describe(self.filled[identity])
                raise ValueError(f"{self.files.describe(names[0])} differs from {first}, and the model ties them")
            return
        parameter = nn.Parameter(new, requires_grad=old.requires_grad)
        for owner, attribute in self.places[identity]:
            owner._parameters[attribute] = parameter
        self.filled[identity] = names[0]
        self.filled[_names.identity(parameter)] = names[0]

    def _device_of(self, tensor: Tensor) -> torch.device:
        return self.device or (torch.device("cpu") if tensor.is_meta else tensor.device)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
