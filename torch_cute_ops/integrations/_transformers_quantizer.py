"""Quantizer for transformers: with it, ``from_pretrained`` loads checkpoints into the layers of this package."""

import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_cute_ops.checkpoint._files import Files
from torch_cute_ops.checkpoint._layers import KV_SCALES
from torch_cute_ops.checkpoint.load import Loader, LoadOptions
from torch_cute_ops.checkpoint.spec import read_spec, spec_of
from torch_cute_ops.integrations._transformers_names import converted_names, model_names
from torch_cute_ops.nn import QuantExperts, QuantLinear, _names, merge_
from torch_cute_ops.nn._base import Activations
from torch_cute_ops.nn._summary import bytes_of, record_loaded

logger = logging.getLogger(__name__)

METHODS: Final = ("modelopt", "compressed-tensors", "fp8", "mxfp4", "mxfp8", "torchao", "auto-round", "quark")
"""Supported values of ``quant_method`` in checkpoints."""

_replaced: dict[str, tuple[Any, Any]] = {}
"""transformers' configuration class and quantizer of each replaced method, or None."""


def register(
    methods: str | Iterable[str] = METHODS,
    *,
    activations: Activations | Mapping[str, Activations] = "auto",
    merge: bool = True,
) -> None:
    """Make ``AutoModelForCausalLM.from_pretrained`` of transformers load quantised checkpoints into our layers.

    Replaces transformers' quantizers for the given methods. If this package does not support a checkpoint, a warning
    gives the reason and transformers' quantizer loads the checkpoint. If transformers' quantizer needs a package that
    is not installed, the ``ImportError`` begins with our reason. Transformers still loads the unquantised tensors. The
    whole model is loaded to one device: the CPU unless ``device_map`` is given. ``save_pretrained`` refuses the model;
    save it with :func:`torch_cute_ops.checkpoint.save` instead.

    Args:
        methods: values of ``quant_method``: ``"modelopt"``, ``"compressed-tensors"``, ``"fp8"`` (blocks, as in
            DeepSeek-V3), ``"mxfp4"`` (gpt-oss), ``"mxfp8"`` (MiniMax), ``"torchao"``, ``"auto-round"`` and
            ``"quark"``; all by default.
        activations, merge: as in :func:`torch_cute_ops.integrations.transformers.from_pretrained`, for all models
            loaded from now on.

    Raises:
        ValueError: for an unknown method.
    """
    chosen = _names.as_patterns(methods)
    unknown = [method for method in chosen if method not in METHODS]
    if unknown:
        expected = ", ".join(map(repr, METHODS))
        raise ValueError(f"register: methods contains {unknown[0]!r}; expected some of {expected}")
    configs, quantizers = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
    for method in chosen:
        own = _replaced.setdefault(method, (configs.get(method), quantizers.get(method)))
        configs[method] = _config_class(own[0])
        quantizers[method] = _quantizer_factory(own[1], activations, merge)


def unregister() -> None:
    """Restore the quantizers that :func:`register` replaced."""
    for method, own in _replaced.items():
        mappings = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
        for mapping, each in zip(mappings, own, strict=True):
            if each is None:
                mapping.pop(method, None)
            else:
                mapping[method] = each
    _replaced.clear()


class CuteConfig(QuantizationConfigMixin):
    """Stores the fields of a checkpoint's ``quantization_config`` as attributes, for ``CuteQuantizer``."""

    def __init__(self, quant_method: str, **stored: Any) -> None:
        self.quant_method: Any = quant_method
        for name, value in stored.items():
            setattr(self, name, value)


def _config_class(own: Any) -> type[CuteConfig]:
    class Config(CuteConfig):
        """Class that transformers calls to parse a ``quantization_config``. If this package does not support the
        checkpoint, transformers' original class parses the configuration."""

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
            try:
                spec_of(Path("config.json"), config_dict)
            except ValueError as error:
                if own is None:
                    raise
                logger.warning("%s; transformers' own %s is used", error, own.__name__)
                with _reason_first(str(error)):
                    passed_on = own.from_dict(config_dict, return_unused_kwargs, **kwargs)
                (passed_on[0] if return_unused_kwargs else passed_on)._cute_reason = str(error)
                return passed_on
            config = CuteConfig(**config_dict)
            return (config, kwargs) if return_unused_kwargs else config

    return Config


def _quantizer_factory(
    own: Any, activations: Activations | Mapping[str, Activations], merge: bool
) -> Callable[..., HfQuantizer]:
    def make(config: Any, **kwargs: Any) -> HfQuantizer:
        if isinstance(config, CuteConfig):
            return CuteQuantizer(config, activations=activations, merge=merge, **kwargs)
        with _reason_first(getattr(config, "_cute_reason", None)):
            quantizer: HfQuantizer = own(config, **kwargs)
        _validate_with(quantizer, config.__dict__.pop("_cute_reason", None))
        return quantizer

    return make


@contextlib.contextmanager
def _reason_first(reason: str | None) -> Iterator[None]:
    """Prefix an ``ImportError`` of transformers' quantizer with the reason why this package does not load the
    checkpoint."""
    try:
        yield
    except ImportError as error:
        if reason is None:
            raise
        raise ImportError(f"{reason}. transformers' own quantizer failed too: {error}") from error


def _validate_with(quantizer: HfQuantizer, reason: str | None) -> None:
    """Wrap ``quantizer.validate_environment`` so that its ``ImportError`` begins with our reason."""
    validate: Callable[..., None] = quantizer.validate_environment

    def checked(*args: Any, **kwargs: Any) -> None:
        with _reason_first(reason):
            validate(*args, **kwargs)

    vars(quantizer)["validate_environment"] = checked


class CuteQuantizer(HfQuantizer):
    """Removes quantised layers from a model before transformers loads the model, and loads these layers afterwards."""

    def __init__(
        self,
        quantization_config: Any,
        *,
        activations: Activations | Mapping[str, Activations],
        merge: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(quantization_config, **kwargs)
        self.activations, self.merge = activations, merge
        self.pending: dict[str, _Pending] = {}
        self.bytes_before = 0
        self.device = torch.device("cpu")
        self.folder = Path()
        self.unused: tuple[str, ...] = ()
        self.names: dict[str, str] = {}

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Check that the checkpoint is already quantised."""
        if not self.pre_quantized:
            raise ValueError("CuteQuantizer: the checkpoint is not quantised; use torch_cute_ops.nn.quantize_")

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, device_map: Any = None, **_: Any
    ) -> None:
        if not checkpoint_files or not str(checkpoint_files[0]).endswith(".safetensors"):
            raise ValueError(f"CuteQuantizer: the checkpoint's files are {checkpoint_files}; expected safetensors")
        self.folder, self.device = Path(checkpoint_files[0]).parent, _one_device(device_map)
        self.bytes_before = bytes_of(model)
        self.unused = tuple(model._keys_to_ignore_on_load_unexpected or ())
        ignored = {*self.unused, *(rf"\.{name}$" for name in KV_SCALES)}
        with Files(self.folder) as files:
            self.names = model_names(model, files.file_of)
            loader = self._loader(model, files)
            # Transformers ties weights, such as lm_head to the embedding, only after loading. So tell the loader now
            # which modules will be tied.
            loader.tied |= {model.get_submodule(name.rpartition(".")[0]) for name in _tied_parameters(model)}
            for name, module in loader.quantised_modules().items():
                self.pending[name] = _Pending(module)
                stored = loader.layers.stored(name)
                ignored |= {rf"^{re.escape(each)}\." for each in (name, stored, files.original(stored))}
                ignored |= {rf"^{re.escape(files.original(source))}\." for source in loader.layers.sources(name)}
            _refuse_absent(model, loader)
            self._refuse_others(loader)
        model._keys_to_ignore_on_load_unexpected = ignored
        for pending in self.pending.values():
            _names.replace(model, pending.module, pending)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        with Files(self.folder) as files:
            for pending in self.pending.values():
                _names.replace(model, pending, pending.module)
            loader, before = self._loader(model, files), dict(model.named_modules())
            for name, pending in tqdm([*self.pending.items()], desc="Loading quantised layers", unit="module"):
                loader.load_module(name, pending.module)
            loader.warn(stacklevel=7)
            loader.layers.refuse_unused(self._tensors_of_pending(loader))
        self.pending.clear()
        record_loaded("register", model, before, self.bytes_before)
        refuse_dtype(model)
        if self.merge:
            merge_(model)
        return model.requires_grad_(False)

    def _refuse_others(self, loader: Loader) -> None:
        """Check that this package supports every module with quantised tensors, because transformers would load the
        codes without decoding them.

        Experts are not supported if their gate differs from the gate of :class:`torch_cute_ops.nn.QuantExperts`.
        """
        inside = {
            each for name in self.pending for each in (name, loader.layers.stored(name), *loader.layers.sources(name))
        }
        for name in loader.files.file_of:
            is_unused = any(re.search(pattern, name) for pattern in self.unused)
            if loader.files.is_quantised(name) and not is_unused and inside.isdisjoint(_names.parents(name)):
                raise ValueError(
                    f"{loader.files.describe(name)} is quantised, but its module has no quantised form; expected "
                    "quantised weights of nn.Linear layers and of experts only"
                )

    def _tensors_of_pending(self, loader: Loader) -> Iterator[str]:
        """Yield the checkpoint tensors of the removed layers, except tensors that the model declares unused. The loader
        must check these tensors, because transformers does not."""
        modules = {each for name in self.pending for each in (name, loader.layers.stored(name))}
        for name in loader.files.file_of:
            is_unused = any(re.search(pattern, name) for pattern in self.unused)
            if not is_unused and not modules.isdisjoint(_names.parents(name)):
                yield name

    def _loader(self, model: Any, files: Files) -> Loader:
        files.rename(self.names.get)
        return Loader(model, files, read_spec(self.folder), LoadOptions(self.activations, self.device, {}))

    def is_serializable(self) -> bool:
        """Return False, because ``save_pretrained`` cannot save the model."""
        logger.warning("transformers cannot save this model: use torch_cute_ops.checkpoint.save(model, path, style)")
        return False

    @property
    def is_trainable(self) -> bool:
        """Return True: LoRA adapters can be trained, because our modules compute the gradient of their input."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Return True, because ``generate`` can compile the decode step with a static cache."""
        return True


class _Pending(nn.Module):
    """Placeholder that replaces a layer while transformers loads the model, so that the layer's tensors are skipped."""

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["module"] = module  # not a registered submodule, so transformers finds no tensors


def _tied_parameters(model: Any) -> set[str]:
    """Return the names of the parameters that transformers will tie to another parameter after loading."""
    pairs: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return {*pairs, *pairs.values()}


def _refuse_absent(model: Any, loader: Loader) -> None:
    """Check that the checkpoint contains tensors for all layers, because transformers would fill a layer without
    tensors with random weights."""
    patterns = model._keys_to_ignore_on_load_missing or ()
    absent = [
        name
        for name in loader.absent_modules()
        if not any(re.search(pattern, f"{name}.weight") for pattern in patterns)
    ]
    if absent:
        floats = filter(loader.files.is_floating, loader.files.file_of)
        renamed = converted_names(model, map(loader.files.original, floats))
        absent = [name for name in absent if not renamed & {f"{name}.weight", f"{name}.gate_up_proj"}]
    if absent:
        raise ValueError(
            f"{loader.files.path} contains no weight of {_names.listed(absent)}; expected weights of all linear layers "
            f"and experts of {type(model).__name__}"
        )


def refuse_dtype(model: Any) -> None:
    """Check that the model's quantised layers support the model's dtype."""
    of_experts = {each for module in model.modules() if isinstance(module, QuantExperts) for each in module.modules()}
    refusing = [
        name
        for name, module in model.named_modules()
        if isinstance(module, QuantLinear) and module not in of_experts and module.activations == "16bit"
    ]
    if model.dtype == torch.float32 and refusing:
        raise ValueError(
            f"dtype is {model.dtype}, but {refusing[0]} takes 16-bit activations; expected dtype=torch.bfloat16 or "
            "torch.float16, or other activations"
        )


def _one_device(device_map: Any) -> torch.device:
    """Return the only device in a ``device_map``."""
    devices = {*device_map.values()} if isinstance(device_map, dict) else {device_map}
    if len(devices) > 1 or devices & {"disk"}:
        raise ValueError(f"CuteQuantizer: device_map is {device_map}; expected one device")
    (device,) = devices
    if device is None:
        return torch.device("cpu")
    if isinstance(device, str) and device in ("auto", "balanced", "balanced_low_0", "sequential"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
