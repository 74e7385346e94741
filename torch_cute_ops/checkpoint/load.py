"""Fill a model from a checkpoint, reading one tensor at a time."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_cute_ops.checkpoint._expert_reader import ExpertReader
from torch_cute_ops.checkpoint._files import Files
from torch_cute_ops.checkpoint._layers import KV_SCALES, read_layer
from torch_cute_ops.checkpoint._stored import StoredLayers
from torch_cute_ops.checkpoint._values import check_finite
from torch_cute_ops.checkpoint.spec import QuantSpec, read_spec
from torch_cute_ops.nn import QuantExperts, QuantLinear, SwiGLU, _names, merge
from torch_cute_ops.nn._base import Activations, is_writable, overwrite_
from torch_cute_ops.nn._names import listed
from torch_cute_ops.nn._saving import guard_saving
from torch_cute_ops.nn._selection import Selection
from torch_cute_ops.nn._summary import bytes_of, record_loaded
from torch_cute_ops.nn.float_experts import FloatExperts, float_experts, quantized_experts, topk_of
from torch_cute_ops.nn.quantize import SCHEMES, Scheme, sibling_groups

Progress = Callable[[Sequence[tuple[str, nn.Module]]], Iterable[tuple[str, nn.Module]]]


class Quantisation(NamedTuple):
    """Settings for quantising modules of an unquantised checkpoint as soon as they are loaded.

    Attributes:
        scheme: format of the weights.
        activations: value for the layers' ``activations``.
        selection: modules to quantise, selected in the same model on the meta device.
    """

    scheme: Scheme
    activations: Activations
    selection: Selection


class LoadOptions(NamedTuple):
    """Keyword arguments of :func:`load_`, and ``quantisation``, the settings for quantising loaded modules, or None."""

    activations: Activations | Mapping[str, Activations] = "auto"
    device: torch.device | str | None = None
    merged: Mapping[str, Sequence[str]] = _names.MERGED
    ignore: str | Iterable[str] = ()
    progress: Progress | None = None
    quantisation: Quantisation | None = None


def load_(
    model: nn.Module,
    path: str | Path,
    *,
    activations: Activations | Mapping[str, Activations] = "auto",
    device: torch.device | str | None = None,
    merged: Mapping[str, Sequence[str]] = _names.MERGED,
    ignore: str | Iterable[str] = (),
    progress: Progress | None = None,
) -> nn.Module:
    """Fill a model from a checkpoint, in place. Linear layers that the checkpoint quantises become quantised layers.

    The checkpoint's tensors show whether a layer is quantised; the checkpoint's configuration says how. Other layers
    stay ``nn.Linear``. Experts become :class:`torch_cute_ops.nn.QuantExperts` if the model stores them in two
    three-dimensional parameters, ``gate_up_proj`` and ``down_proj``, and the checkpoint stores separate layers for each
    expert, or all experts in one tensor as gpt-oss does. Tensors are read one at a time: peak memory is the model plus
    twice its largest layer, or for experts the model plus twice the experts' scales. If ``load_`` raises, the model is
    partly loaded.

    A tensor of the model that already has the right shape and device is overwritten in place, so that CUDA graphs that
    read the tensor stay valid. This includes quantised layers of an earlier ``load_`` or ``quantize_``, if their class,
    parts and activations are the same. Other layers are replaced.

    Args:
        model: model with ``nn.Linear`` layers under the checkpoint's names, or with layers of this package, on the meta
            device or any other; its values are replaced. Tensors that are not quantised are converted to the model's
            dtype.
        path: folder of the checkpoint: ``config.json`` or ``hf_quant_config.json``, and ``model.safetensors`` or shards
            with ``model.safetensors.index.json``.
        activations: format of the layers' activations. ``"auto"`` selects 16-bit activations for FP4 weights and FP8
            activations for FP8 weights. Any other value applies to the layers whose weight format supports it. A
            mapping selects a value per weight format, such as ``{"nvfp4": "fp4"}``; formats that it lacks use
            ``"auto"``. The activations of experts are always FP8.
        device: device of the loaded tensors. ``None`` keeps the model's device, or uses the CPU for tensors on the meta
            device.
        merged: names of the model's merged layers, each with the names of the checkpoint's layers that it concatenates.
            All names are last components of module names. The default merges q, k and v in ``qkv_proj`` and gate and up
            in ``gate_up_proj``. An entry is ignored if the checkpoint itself contains the merged layer.
        ignore: checkpoint tensors that the model may lack, as one pattern or several patterns. A pattern is a name, a
            wildcard, or a regular expression after ``re:``.
        progress: function that takes the (name, module) pairs in loading order and returns an iterable over them, as
            ``tqdm`` does.

    Returns:
        ``model``.

    Raises:
        FileNotFoundError: for a missing file.
        ValueError: for an unsupported configuration; activations that no format of the checkpoint supports; a truncated
            file; a tensor that is missing or unknown, or that has a wrong shape, dtype or value, such as NaN (the
            message names tensor and file); a quantised layer whose weight the model shares with another module, such as
            a tied embedding.

    Warns:
        UserWarning: once for layers whose input scale is missing or 0 and not needed, and once for scales of the KV
            cache.
    """
    return fill(model, path, read_spec(path), LoadOptions(activations, device, merged, ignore, progress))


@torch.no_grad()
def fill(
    model: nn.Module,
    path: str | Path,
    spec: QuantSpec,
    options: LoadOptions,
    rename: Callable[[Iterable[str]], Mapping[str, str]] | None = None,
) -> nn.Module:
    """Fill a model as :func:`load_` does, if the configuration was already read as ``spec``.

    Args:
        model, path, options: arguments of :func:`load_`.
        spec: quantisation of the checkpoint.
        rename: function that returns the name in the model of each checkpoint tensor; ``None`` if the names are equal.
    """
    with Files(path) as files:
        if rename is not None:
            files.rename(rename(files.file_of).get)
        Loader(model, files, spec, options).load(stacklevel=6)
    return model


class Loader:
    """Fills one model from an open checkpoint.

    Args:
        model: model to fill.
        files: tensors of the checkpoint.
        spec: quantisation of the checkpoint.
        options: arguments of :func:`load_`.
    """

    def __init__(self, model: nn.Module, files: Files, spec: QuantSpec, options: LoadOptions) -> None:
        self.model, self.files, self.spec, self.options = model, files, spec, options
        self.device = None if options.device is None else torch.device(options.device)
        self.layers = StoredLayers(files, spec, options.merged, model)
        self.experts = ExpertReader(self.layers, self._device_of)
        self.places: defaultdict[object, list[tuple[nn.Module, str]]] = defaultdict(list)
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.places[_names.identity(parameter)].append((module, name))
        self.tied = {module for places in self.places.values() if len(places) > 1 for module, _ in places}
        self.filled: dict[object, str] = {}
        self.missing: list[tuple[object, str]] = []
        self.siblings: dict[str, list[str]] = {}
        self.amax: dict[str, Tensor] = {}
        self._check_activations()

    def _check_activations(self) -> None:
        given = self.options.activations
        formats = {scheme.format for scheme, _ in self.spec.groups} or {"nvfp4", "mxfp4"}
        if not isinstance(given, str):
            unknown = [fmt for fmt in given if fmt not in SCHEMES]
            if unknown:
                expected = ", ".join(map(repr, SCHEMES))
                raise ValueError(f"load_: activations has the key {unknown[0]!r}; expected some of {expected}")
            for fmt, each in given.items():
                SCHEMES[fmt]._chosen(each)
        elif self.spec.style is not None and not any(given in ("auto", *SCHEMES[fmt].choices) for fmt in formats):
            names = ", ".join(sorted(formats))
            able = ", ".join(map(repr, dict.fromkeys(each for fmt in sorted(formats) for each in SCHEMES[fmt].choices)))
            raise ValueError(
                f"load_: activations is {given!r}, but the layers of {self.files.path} are {names}; expected 'auto', "
                f"{able}"
            )

    def _activations(self, fmt: str) -> Activations:
        """Return the activations' format for linear layers whose weight has the format ``fmt``."""
        given = self.options.activations
        if not isinstance(given, str):
            return given.get(fmt, "auto")
        return given if fmt in SCHEMES and given in SCHEMES[fmt].choices else "auto"

    def load(self, stacklevel: int) -> None:
        """Fill the model.

        Args:
            stacklevel: argument ``stacklevel`` of ``warnings.warn``.
        """
        ignore, progress = _names.as_patterns(self.options.ignore), self.options.progress
        modules, bytes_before = [*self.model.named_modules()], bytes_of(self.model)
        within: set[nn.Module] = set()
        for name, module in modules if progress is None else progress(modules):
            experts = float_experts(module)
            if module in within:
                continue
            if isinstance(module, QuantLinear) or type(module) is nn.Linear:
                self._load_linear(name, module)
            elif isinstance(module, QuantExperts):
                within.update(module.modules())
                self._load_experts(name, _as_float(module), module)
            elif experts is not None:
                self._load_experts(name, experts)
            else:
                self._load_own(name, module)
            if self.options.quantisation is not None:
                self._quantise(name, module, self.options.quantisation)
        missing = [name for key, name in self.missing if key not in self.filled]
        if missing:
            raise ValueError(f"{self.files.path} contains no {listed(missing)}")
        self.warn(stacklevel + 1)
        self.layers.refuse_unused(
            name
            for name in self.files.file_of
            if not any(_names.fits(each, p) for p in ignore for each in (name, self.files.original(name)))
        )
        lost = [
            f"{name}.{key}".lstrip(".")
            for name, module in self.model.named_modules()
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and tensor.is_meta
        ]
        if lost:
            raise ValueError(
                f"{listed(lost)} is on the meta device and not in the checkpoint; create it on a real device"
            )
        guard_saving(self.model)
        record_loaded("load_", self.model, dict(modules), bytes_before)

    def warn(self, stacklevel: int) -> None:
        """Warn if the checkpoint contains scales of the KV cache, which are not used, or if input scales are missing or
        0."""
        uncalibrated = self.layers.uncalibrated
        if uncalibrated:
            warnings.warn(
                f"{len(uncalibrated)} layers have no input scale, or 0, because calibration did not reach them; "
                f"their activations do not need it: {listed(uncalibrated)}",
                stacklevel=stacklevel,
            )
        kv_scales = sorted(name for name in self.files.file_of if name.rpartition(".")[2] in KV_SCALES)
        if kv_scales:
            warnings.warn(f"scales of the KV cache are not used: {listed(kv_scales)}", stacklevel=stacklevel)

    def absent_modules(self) -> list[str]:
        """Return the names of the linear layers and experts without a weight in the checkpoint. Layers with a tied
        weight are left out."""
        modules = {parent for name in self.files.file_of for parent in _names.parents(name)}

        def is_absent(name: str, module: nn.Module) -> bool:
            if type(module) is nn.Linear:
                found = set[str]().union(*map(self.files.suffixes, self.layers.sources(name)))
                return module not in self.tied and not found - {"bias"} - KV_SCALES
            return float_experts(module) is not None and self.layers.stored(name) not in modules

        return [name for name, module in self.model.named_modules() if is_absent(name, module)]

    def quantised_modules(self) -> dict[str, nn.Module]:
        """Return the modules, by name, that are unquantised in the model and quantised in the checkpoint: linear layers
        and experts.

        Raises:
            ValueError: if such a module shares its weight with another module.
        """
        found: dict[str, nn.Module] = {}
        for name, module in self.model.named_modules():
            experts = float_experts(module)
            if type(module) is nn.Linear:
                sources = self.layers.sources(name)
                is_quantised = any(self.layers.is_quantised(source) for source in sources)
                if is_quantised:
                    self._refuse_tied(name, module, sources)
                    self._refuse_unlike_linear(name, module)
            elif experts is not None:
                prefix = f"{self.layers.stored(name)}."
                is_quantised = any(
                    tensor.startswith(prefix) and not self.files.is_floating(tensor) for tensor in self.files.file_of
                )
                if is_quantised:
                    self._verified(name, experts)
            else:
                continue
            if is_quantised:
                found[name] = module
        return found

    def load_module(self, name: str, module: nn.Module) -> None:
        """Load one of the modules that ``quantised_modules`` returned."""
        experts = float_experts(module)
        if experts is not None:
            self._load_experts(name, experts)
        elif isinstance(module, (nn.Linear, QuantLinear)):
            self._load_linear(name, module)

    # Quantise modules of an unquantised checkpoint after loading

    def _quantise(self, name: str, module: nn.Module, chosen: Quantisation) -> None:
        """Quantise a module right after it was loaded, if it is selected, so that its 16-bit weight is freed before the
        next module is loaded."""
        selection = chosen.selection
        if name in selection.experts:
            given, swiglu = selection.experts[name]
            if not given.module.gate_up_proj.is_meta and not given.module.down_proj.is_meta:
                scheme: Any = chosen.scheme
                _names.replace(self.model, module, quantized_experts(given, swiglu, scheme, topk_of(self.model, name)))
                _free(module)
            return
        if name not in selection.linears or selection.linears[name].weight.is_meta:
            return
        cls: Any = SCHEMES[chosen.scheme]
        own = {"amax": self._amax_of(name, chosen)} if chosen.scheme == "nvfp4" else {}
        _names.replace(self.model, module, cls.from_float(module, activations=chosen.activations, **own))
        _free(module)

    def _amax_of(self, name: str, chosen: Quantisation) -> Tensor | None:
        """Return the largest magnitude in the checkpoint's weights of a layer and its siblings, or None for a layer
        without siblings."""
        linears = chosen.selection.linears
        if not self.siblings:
            self.siblings = {each: group for group in sibling_groups(linears) for each in group}
        group = self.siblings.get(name)
        if group is not None and name not in self.amax:
            extremes = []
            for source in (source for each in group for source in self.layers.sources(each)):
                weight = f"{source}.weight"
                if weight in self.files:
                    extremes += [each.abs() for each in torch.aminmax(self.files.read(weight))]
            amax = torch.stack(extremes).amax().to(linears[name].weight.dtype)
            self.amax |= dict.fromkeys(group, amax.float())
        return self.amax.get(name)

    # Linear layers

    def _load_linear(self, name: str, module: nn.Linear | QuantLinear) -> None:
        sources = self.layers.sources(name)
        quantised = [source for source in sources if self.layers.is_quantised(source)]
        if not quantised:
            if isinstance(module, QuantLinear):
                kind = type(module).__name__
                raise ValueError(f"{self.files.path} does not quantise {name}; the model's layer is a {kind}")
            self._load_own(name, module, sources)
            return
        if len(quantised) < len(sources):
            others = sorted({*sources} - {*quantised})
            raise ValueError(
                f"{name} merges {', '.join(quantised)} (quantised) and {', '.join(others)} (not quantised)"
            )
        self._refuse_tied(name, module, sources)
        self._refuse_unlike_linear(name, module)
        device = self._device_of(module.weight)
        bias_dtype = None if module.bias is None else module.bias.dtype
        schemes = [self.layers.scheme_of_quantised(source) for source in sources]
        activations = [self._activations(scheme.format) for scheme in schemes]
        has_input_scale = True
        if all(scheme.format == "nvfp4" for scheme in schemes) and "fp4" not in activations:
            lacks = self.layers.note_uncalibrated(sources, schemes)
            # If the model's layer has no input scale, build the new layer without an input scale, too. Then both layers
            # contain the same tensors, and the old layer can be overwritten in place.
            has_input_scale = not lacks and getattr(module, "has_input_scale", True)
        layers = []
        for source, scheme, each in zip(sources, schemes, activations, strict=True):
            layers.append(
                read_layer(self.files, source, scheme, each, device, bias_dtype, has_input_scale=has_input_scale)
            )
            self.layers.use(source)
        try:
            layer = layers[0] if len(layers) == 1 else merge(layers)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from error
        got, want = ((each.out_features, each.in_features, each.bias is not None) for each in (layer, module))
        if got != want:
            raise ValueError(
                f"{self.layers.describe(sources[0])}: (N, K, has bias) is {got}; expected {want}, as in {name}"
            )
        if not isinstance(module, QuantLinear) or not overwrite_(module, layer):
            _names.replace(self.model, module, layer)

    def _refuse_tied(self, name: str, module: nn.Module, sources: Sequence[str]) -> None:
        if module in self.tied:
            raise ValueError(
                f"{self.layers.describe(sources[0])} is quantised, but {name} shares its weight with another module; "
                "expected a weight that is not quantised, or a model that does not tie it (tie_word_embeddings=False)"
            )

    def _refuse_unlike_linear(self, name: str, module: nn.Module) -> None:
        reason = None if isinstance(module, QuantLinear) else _names.reason_unlike_linear(module)
        if reason is not None:
            raise ValueError(f"{name} is quantised in {self.files.path}, but cannot become a quantised layer: {reason}")

    # Experts

    def _load_experts(self, name: str, given: FloatExperts, current: QuantExperts | None = None) -> None:
        """Load the experts of one module, and replace the module by ``QuantExperts``.

        Args:
            name: module name.
            given: unquantised experts, or a description of ``current``.
            current: quantised experts of the model, if it has any. They are overwritten in place if class, sizes and
                settings match, and otherwise replaced.
        """
        stored = self.layers.stored(name)
        layers = self.layers.expert_layers(name, given.experts)
        if f"{stored}.gate_up_proj_blocks" in self.files:
            new = self.experts.read_gpt_oss(stored, given)
        elif f"{stored}._gate_up_proj_qdata" in self.files:
            self._refuse_order(name, current)
            new = self.experts.read_torchao(stored, given)
        elif f"{stored}.gate_up_proj" in self.files and not self.files.is_floating(f"{stored}.gate_up_proj"):
            self._refuse_order(name, current)
            new = self.experts.read_fused(stored, given)
        elif layers is None and current is not None:
            raise ValueError(f"{self.files.path} does not quantise {name}; the model's experts are quantised")
        elif layers is None:
            self._load_own(name, given.module)
            return
        else:
            every = [layer for each in layers for layer in each]
            quantised = [layer for layer in every if self.layers.is_quantised(layer)]
            if not quantised and current is None:
                self._load_float_experts(given, layers)
                return
            if len(quantised) < len(every):
                others = sorted({*every} - {*quantised})
                if not quantised:
                    raise ValueError(f"{self.files.path} does not quantise {name}; the model's experts are quantised")
                raise ValueError(f"{self.layers.describe(quantised[0])} is quantised, but {listed(others)} is not")
            new = self.experts.read_layers(given, layers)
        gate_up, down = new
        swiglu = self._verified(name, given) if current is None else current.swiglu
        if current is not None and overwrite_(current.gate_up_proj, gate_up) and overwrite_(current.down_proj, down):
            current.renew_derived()
            return
        try:
            experts = QuantExperts(gate_up, down, given.experts, swiglu=swiglu, topk=topk_of(self.model, name))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        _names.replace(self.model, given.module if current is None else current, experts)

    def _refuse_order(self, name: str, current: QuantExperts | None) -> None:
        if current is not None:
            raise ValueError(
                f"{self.files.path} stores gate and up of {name} in one tensor, in the unquantised module's order; "
                "load it into a model whose experts are not quantised"
            )

    def _verified(self, name: str, given: FloatExperts) -> SwiGLU:
        """Check that ``QuantExperts`` computes the same function as the model's experts. Return the experts' gate."""
        swiglu = given.verified()
        if isinstance(swiglu, str):
            raise ValueError(f"{name} is quantised in {self.files.path}, but cannot become QuantExperts: {swiglu}")
        return swiglu

    def _load_float_experts(self, given: FloatExperts, layers: Sequence[Sequence[str]]) -> None:
        """Copy the unquantised layers of all experts into the model's two parameters."""
        if given.is_transposed or given.is_interleaved or given.has_bias:
            raise ValueError(
                f"{self.layers.describe(layers[0][0])} is the layer of one expert; the model's experts are transposed, "
                "interleaved or have a bias"
            )
        gate_up, down = (
            each.detach() if self._is_kept(each) else torch.empty_like(each, device=self._device_of(each))
            for each in (given.module.gate_up_proj, given.module.down_proj)
        )
        for expert, sources in enumerate(layers):
            places = gate_up[expert, : given.width], gate_up[expert, given.width :], down[expert]
            for source, place in zip(sources, places, strict=True):
                weight = self.files.read(f"{source}.weight")
                if weight.shape != place.shape:
                    described = self.files.describe(f"{source}.weight")
                    raise ValueError(f"got {described} with shape {tuple(weight.shape)}; expected {tuple(place.shape)}")
                check_finite(self.files.describe(f"{source}.weight"), weight)
                place.copy_(weight)
                self.layers.used.add(f"{source}.weight")
        for key, new in (("gate_up_proj", gate_up), ("down_proj", down)):
            if not self._is_kept(given.module._parameters[key]):
                given.module._parameters[key] = nn.Parameter(new, requires_grad=False)

    # Unquantised tensors

    def _load_own(self, name: str, module: nn.Module, sources: Sequence[str] = ()) -> None:
        """Load the parameters and persistent buffers of a module. Its submodules are not loaded."""
        for key, old in _names.own_tensors(module).items():
            names = [f"{source}.{key}".lstrip(".") for source in sources or (self.layers.stored(name),)]
            identity = _names.identity(old)
            absent = [each for each in names if each not in self.files]
            if absent:
                self.missing += [(identity, each) for each in absent]
                continue
            self.layers.used.update(names)
            self._place(names, old, module, key, identity)

    def _place(self, names: list[str], old: Tensor, module: nn.Module, key: str, identity: object) -> None:
        for each in names:
            if old.is_floating_point() and not self.files.is_floating(each):
                kind = type(module).__name__
                raise ValueError(
                    f"{self.files.describe(each)} is quantised, but {kind} has no quantised form; expected quantised "
                    "weights of nn.Linear layers and of experts only"
                )
        shapes = [self.files.shape(each) for each in names]
        shape = (sum(each[0] for each in shapes), *shapes[0][1:]) if len(names) > 1 else shapes[0]
        if shape != old.shape or any(each[1:] != shape[1:] for each in shapes):
            raise ValueError(f"got {self.files.describe(names[0])} with shape {shape}; expected {tuple(old.shape)}")
        read = [self.files.read(each) for each in names]
        for each, tensor in zip(names, read, strict=True):
            check_finite(self.files.describe(each), tensor, is_parameter=key not in module._buffers)
        value = torch.cat(read) if len(read) > 1 else read[0]
        if self._is_kept(old) and (key in module._buffers or identity not in self.filled):
            old.detach().copy_(value)
            self.filled[identity] = names[0]
            return
        new = value.to(self._device_of(old), old.dtype, copy=True)
        if key in module._buffers:
            module._buffers[key] = new
            return
        if identity in self.filled:  # this parameter is tied, and was already loaded under another name
            current = module._parameters[key]
            assert current is not None
            if not torch.equal(current, new):
                first = self.files.describe(self.filled[identity])
                raise ValueError(f"{self.files.describe(names[0])} differs from {first}, but the model ties them")
            return
        parameter = nn.Parameter(new, requires_grad=old.requires_grad)
        for owner, attribute in self.places[identity]:
            owner._parameters[attribute] = parameter
        self.filled[identity] = names[0]
        self.filled[_names.identity(parameter)] = names[0]

    def _is_kept(self, tensor: Tensor) -> bool:
        """Return True if a tensor of the model can be overwritten in place, and False if it must be replaced."""
        is_there = not tensor.is_meta and (self.device is None or _same_device(self.device, tensor.device))
        return is_there and tensor.is_contiguous() and is_writable(tensor)

    def _device_of(self, tensor: Tensor) -> torch.device:
        return self.device or (torch.device("cpu") if tensor.is_meta else tensor.device)


def _same_device(wanted: torch.device, actual: torch.device) -> bool:
    """Return True if new tensors on the device ``wanted`` would be on ``actual``. ``cuda`` means the current CUDA
    device."""
    if wanted.type == "cuda" and wanted.index is None:
        return actual.type == "cuda" and actual.index == torch.cuda.current_device()
    return wanted == actual


def _free(module: nn.Module) -> None:
    """Free the tensors of a module that was replaced. Otherwise a remaining reference to the module would keep them."""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[key] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


def _as_float(experts: QuantExperts) -> FloatExperts:
    """Describe quantised experts by a ``FloatExperts`` that has their sizes but no weights."""
    like = experts.down_proj.weight if experts.down_proj.bias is None else experts.down_proj.bias
    module = nn.Module()
    dtype = like.dtype if like.is_floating_point() and like.itemsize > 1 else torch.bfloat16
    module.register_buffer("down_proj", torch.empty(0, dtype=dtype, device=like.device))
    sizes = experts.experts, experts.hidden_size, experts.intermediate_size
    has_bias = experts.down_proj.bias is not None
    return FloatExperts(module, *sizes, False, False, has_bias)
