"""Filling a model from a checkpoint, one tensor at a time."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from torch_cute_ops.checkpoint import torchao
from torch_cute_ops.checkpoint._files import Files
from torch_cute_ops.checkpoint._layers import KV_SCALES, read_layer, read_tensors
from torch_cute_ops.checkpoint.experts import EXPERT_NAMES, RENAMED, gpt_oss_names, mxfp4_experts
from torch_cute_ops.checkpoint.spec import LayerScheme, QuantSpec, read_spec
from torch_cute_ops.nn import MXFP4Linear, QuantExperts, QuantLinear, _names, merge
from torch_cute_ops.nn._base import Activations
from torch_cute_ops.nn._saving import guard_saving
from torch_cute_ops.nn.experts import FORMATS, stack
from torch_cute_ops.nn.float_experts import FloatExperts, float_experts, topk_of

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
    ignore: str | Iterable[str] = (),
    progress: Progress | None = None,
) -> nn.Module:
    """Fill a model from a checkpoint, in place: its linear layers become quantised ones where the checkpoint's are.

    Whether a layer is quantised, its tensors say; how, the configuration does. Layers that are not stay ``nn.Linear``.
    Experts that the model has in two parameters, ``gate_up_proj`` and ``down_proj`` of three dimensions, and the
    checkpoint as layers of each expert, or in gpt-oss's form, become :class:`torch_cute_ops.nn.QuantExperts`. Tensors
    are read one at a time, so that the peak of memory is the model and its largest layer, twice; of experts, their
    scales twice. Where it raises, the model is partly loaded.

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
        ignore: tensors of the checkpoint that the model need not have, one pattern or several: names, wildcards, or
            regular expressions behind ``re:``.
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
        Loader(model, files, spec, activations, device, merged).load(_names.as_patterns(ignore), progress)
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
        modules = [f".{name}." for name, _ in model.named_modules()]
        self.renamed = [
            pair
            for pair in RENAMED
            if any(pair[1] in f".{name}" for name in files.file_of) and not any(pair[1] in name for name in modules)
        ]
        self.filled: dict[object, str] = {}
        self.missing: list[tuple[object, str]] = []

    def load(self, ignore: tuple[str, ...], progress: Progress | None) -> None:
        """Fill the model."""
        modules = [*self.model.named_modules()]
        for name, module in modules if progress is None else progress(modules):
            experts = float_experts(module)
            if isinstance(module, QuantLinear) or type(module) is nn.Linear:
                self._load_linear(name, module)
            elif experts is not None:
                self._load_experts(name, experts)
            else:
                self._load_own(name, module)
        missing = [name for key, name in self.missing if key not in self.filled]
        if missing:
            raise ValueError(f"{self.files.path} has no {listed(missing)}")
        self.warn_of_kv_scales(stacklevel=5)
        self.refuse_unused(
            name for name in self.files.file_of if not any(_names.fits(name, pattern) for pattern in ignore)
        )
        lost = [
            f"{name}.{key}".lstrip(".")
            for name, module in self.model.named_modules()
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and tensor.is_meta
        ]
        if lost:
            raise ValueError(f"on the meta device, and in no checkpoint: {listed(lost)}; make them on a real device")
        guard_saving(self.model)

    def warn_of_kv_scales(self, stacklevel: int) -> None:
        """Say which scales of the KV cache there are, if any."""
        kv_scales = sorted(name for name in self.files.file_of if name.rpartition(".")[2] in KV_SCALES)
        if kv_scales:
            warnings.warn(f"scales of the KV cache are not used: {listed(kv_scales)}", stacklevel=stacklevel)

    def refuse_unused(self, names: Iterable[str]) -> None:
        """Raise a ``ValueError`` for tensors of the checkpoint among these that nothing has been loaded from, but for
        scales of the KV cache."""
        left = [name for name in names if name not in self.used and name.rpartition(".")[2] not in KV_SCALES]
        if left:
            raise ValueError(f"the model has no place for {listed([self.files.describe(name) for name in left])}")

    def absent_modules(self) -> list[str]:
        """The linear layers and experts of the model that the checkpoint has no weight of, but for layers that share
        theirs with another module."""
        modules = {parent for name in self.files.file_of for parent in _names.parents(name)}

        def is_absent(name: str, module: nn.Module) -> bool:
            if type(module) is nn.Linear:
                found = set[str]().union(*map(self.files.suffixes, self.sources(name)))
                return module not in self.tied and not found - {"bias"} - KV_SCALES
            return float_experts(module) is not None and self.stored(name) not in modules

        return [name for name, module in self.model.named_modules() if is_absent(name, module)]

    def quantised_modules(self) -> dict[str, nn.Module]:
        """The linear layers and experts of the model, as it is now, that are quantised in the checkpoint.

        Raises:
            ValueError: for one that shares its weight with another module.
        """
        found: dict[str, nn.Module] = {}
        for name, module in self.model.named_modules():
            experts = float_experts(module)
            if type(module) is nn.Linear:
                sources = self.sources(name)
                is_quantised = any(self._is_quantised(source) for source in sources)
                if is_quantised:
                    self._refuse_tied(name, module, sources)
            elif experts is not None:
                prefix = f"{self.stored(name)}."
                is_quantised = any(
                    tensor.startswith(prefix) and not self.files.is_floating(tensor) for tensor in self.files.file_of
                )
            else:
                continue
            if is_quantised:
                found[name] = module
        return found

    def load_module(self, name: str, module: nn.Module) -> None:
        """Load one of ``quantised_modules``."""
        experts = float_experts(module)
        if experts is not None:
            self._load_experts(name, experts)
        elif isinstance(module, (nn.Linear, QuantLinear)):
            self._load_linear(name, module)

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
        self._refuse_tied(name, module, sources)
        device = self._device_of(module.weight)
        bias_dtype = None if module.bias is None else module.bias.dtype
        layers = []
        for source in sources:
            scheme = self._scheme(source)
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

    def _refuse_tied(self, name: str, module: nn.Module, sources: Sequence[str]) -> None:
        if module in self.tied:
            raise ValueError(
                f"{self._describe(sources[0])} is quantised, but {name} shares its weight with another module; "
                "expected a weight that is not quantised, or a model that does not tie it (tie_word_embeddings=False)"
            )

    def stored(self, name: str) -> str:
        """What the checkpoint calls what the model calls ``name``."""
        for ours, theirs in self.renamed:
            name = f".{name}.".replace(ours, theirs)[1:-1]
        return name

    def sources(self, name: str) -> list[str]:
        """The layers of the checkpoint that a layer of the model is made of."""
        name = self.stored(name)
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

    def _scheme(self, source: str) -> LayerScheme | None:
        """How a layer of the checkpoint is quantised that is."""
        if self.spec.style == "torchao":
            return torchao.scheme_of(self.files, source)
        return self.spec.scheme_of_tensors(source)

    def _describe(self, source: str) -> str:
        suffixes = sorted(self.files.suffixes(source))
        return self.files.describe(f"{source}.{suffixes[0]}") if suffixes else source

    # Experts

    def expert_layers(self, name: str, experts: int) -> list[list[str]] | None:
        """Gate, up and down in the checkpoint, of each of the experts ``name``; ``None``: it has no such layers."""
        stored = self.stored(name)
        parts = next((each for each in EXPERT_NAMES if self.files.suffixes(f"{stored}.0.{each[0]}")), None)
        return parts and [[f"{stored}.{expert}.{part}" for part in parts] for expert in range(experts)]

    def _load_experts(self, name: str, given: FloatExperts) -> None:
        stored = self.stored(name)
        layers = self.expert_layers(name, given.experts)
        if f"{stored}.gate_up_proj_blocks" in self.files:
            new = self._gpt_oss_experts(stored, given)
        elif f"{stored}._gate_up_proj_qdata" in self.files:
            new = self._torchao_experts(stored, given)
        elif layers is None:
            self._load_own(name, given.module)
            return
        else:
            every = [layer for each in layers for layer in each]
            quantised = [layer for layer in every if self._is_quantised(layer)]
            if not quantised:
                self._load_float_experts(given, layers)
                return
            if len(quantised) < len(every):
                others = sorted({*every} - {*quantised})
                raise ValueError(f"{self._describe(quantised[0])} is quantised, and {listed(others)} not")
            new = self._read_experts(given, layers)
        gate_up, down = new
        if given.swiglu is None:
            raise ValueError(f"{name} is quantised, and its gate is no SwiGLU")
        try:
            experts = QuantExperts(gate_up, down, given.experts, swiglu=given.swiglu, topk=topk_of(self.model, name))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        _names.replace(self.model, given.module, experts)

    def _read_experts(self, given: FloatExperts, layers: Sequence[Sequence[str]]) -> tuple[QuantLinear, QuantLinear]:
        """The stacks of what is quantised, layer by layer."""
        schemes = {self._scheme(layer) for each in layers for layer in each}
        first = layers[0][0]
        scheme = schemes.pop()
        if scheme is None or schemes:
            how = "does not say how" if scheme is None else "has several schemes for the experts of this layer"
            raise ValueError(f"{self._describe(first)} is quantised, and {self.spec.path} {how}")
        if scheme.format not in FORMATS:
            raise ValueError(f"{self._describe(first)} is {scheme.format}; experts can be {', '.join(FORMATS)}")
        device = self._device_of(given.module.down_proj)

        def stacked(sources: Sequence[str], n: int, k: int, has_bias: bool) -> QuantLinear:
            bias = (
                torch.empty(n * len(sources), dtype=given.module.down_proj.dtype, device=device) if has_bias else None
            )

            def tensors_of(i: int) -> dict[str, Tensor]:
                source = sources[i]
                tensors = dict(read_tensors(self.files, source, scheme))
                got = (len(tensors["weight"]), tensors["weight"].shape[1] * (1 if scheme.format == "fp8_block" else 2))
                if got != (n, k):
                    raise ValueError(f"{self._describe(source)} has N and K {got}; expected {(n, k)}")
                if (f"{source}.bias" in self.files) != has_bias:
                    raise ValueError(f"{source} has {'no' if has_bias else 'a'} bias in {self.files.path}")
                if bias is not None:
                    bias[i * n : (i + 1) * n] = self.files.read(f"{source}.bias")
                self.used.update(f"{source}.{suffix}" for suffix in self.files.suffixes(source))
                return tensors

            try:
                return stack(FORMATS[scheme.format], k, [n] * len(sources), tensors_of, device=device, bias=bias)
            except (TypeError, ValueError) as error:
                raise ValueError(f"experts of {self._describe(first)}: {error}") from error

        sources = [source for gate, up, _ in layers for source in (gate, up)]
        return (
            stacked(sources, given.width, given.hidden, given.has_bias),
            stacked([down for _, _, down in layers], given.hidden, given.width, given.has_bias),
        )

    def _gpt_oss_experts(self, stored: str, given: FloatExperts) -> tuple[QuantLinear, QuantLinear]:
        if self.spec.style != "gpt-oss":
            tensor = self.files.describe(f"{stored}.gate_up_proj_blocks")
            raise ValueError(f"{tensor} is of gpt-oss, and {self.spec.path} does not say that it is MXFP4")
        read = mxfp4_experts(self.files, stored, self._device_of(given.module.down_proj))
        got, want = read.down.shape, (given.experts, given.hidden, given.width // 2)
        if got != want:
            tensor = self.files.describe(f"{stored}.down_proj_blocks")
            raise ValueError(f"{tensor} has E, N and K {(*got[:2], 2 * got[2])}; expected {(*want[:2], given.width)}")
        self.used.update(gpt_oss_names(stored))
        dtype = given.module.down_proj.dtype
        return tuple(
            MXFP4Linear.from_tensors(
                codes.flatten(0, 1), scale.flatten(0, 1), bias=bias.flatten().to(dtype), parts=[rows] * count
            )
            for codes, scale, bias, rows, count in (
                (*read[:3], given.width, 2 * given.experts),
                (*read[3:], given.hidden, given.experts),
            )
        )  # type: ignore[return-value]

    def _torchao_experts(self, stored: str, given: FloatExperts) -> tuple[QuantLinear, QuantLinear]:
        names = [f"{stored}.{part}" for part in ("gate_up_proj", "down_proj")]
        device = self._device_of(given.module.down_proj)
        for key in ("gate_up_proj_bias", "down_proj_bias") if given.has_bias else ():
            bias = self.files.read(f"{stored}.{key}").to(device, getattr(given.module, key).dtype, copy=True)
            given.module._parameters[key] = nn.Parameter(bias, requires_grad=False)
            self.used.add(f"{stored}.{key}")
        gate_up, down = (torchao.read_weight(self.files, name) for name in names)
        for name in names:
            self.used.update(torchao.tensor_names(self.files, name).values())
        try:
            return torchao.expert_stacks(gate_up, down, given, device)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.files.describe(f'{stored}._gate_up_proj_qdata')}: {error}") from error

    def _load_float_experts(self, given: FloatExperts, layers: Sequence[Sequence[str]]) -> None:
        """Layers of experts that are not quantised, into the two parameters."""
        if given.is_transposed or given.is_interleaved or given.has_bias:
            raise ValueError(f"{self._describe(layers[0][0])} is of one expert, and the model's have another order")
        gate_up, down = (
            torch.empty_like(each, device=self._device_of(each))
            for each in (given.module.gate_up_proj, given.module.down_proj)
        )
        for expert, sources in enumerate(layers):
            places = gate_up[expert, : given.width], gate_up[expert, given.width :], down[expert]
            for source, place in zip(sources, places, strict=True):
                weight = self.files.read(f"{source}.weight")
                if weight.shape != place.shape:
                    described = self.files.describe(f"{source}.weight")
                    raise ValueError(f"{described} has shape {tuple(weight.shape)}; expected {tuple(place.shape)}")
                place.copy_(weight)
                self.used.add(f"{source}.weight")
        given.module.gate_up_proj = nn.Parameter(gate_up, requires_grad=False)
        given.module.down_proj = nn.Parameter(down, requires_grad=False)

    # What is not quantised

    def _load_own(self, name: str, module: nn.Module, sources: Sequence[str] = ()) -> None:
        """Load the module's own parameters, and the buffers that belong into a state dict."""
        for key, old in _names.own_tensors(module).items():
            names = [f"{source}.{key}".lstrip(".") for source in sources or (self.stored(name),)]
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


def listed(names: Sequence[str]) -> str:
    """The names, or the first of them, for messages."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
