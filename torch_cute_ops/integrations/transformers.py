"""Load quantised checkpoints into Hugging Face transformers models.

Needs transformers 5.17 or later: the extra ``transformers``.
"""

import functools
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torch_cute_ops.checkpoint import read_spec
from torch_cute_ops.checkpoint.load import LoadOptions, fill
from torch_cute_ops.nn import QuantExperts, QuantLinear, _names, merge_
from torch_cute_ops.nn._base import Activations
from torch_cute_ops.nn.quantize import Scheme
from torch_cute_ops.nn.random import replace_randomly

try:
    import huggingface_hub
    from tqdm.auto import tqdm
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"torch_cute_ops.integrations.transformers needs {missing.name}: pip install 'torch-cute-ops[transformers]'",
        name=missing.name,
    ) from missing

from torch_cute_ops.integrations._transformers_names import model_names
from torch_cute_ops.integrations._transformers_quantizer import register, unregister

__all__ = ["from_config", "from_pretrained", "register", "unregister"]

FILES = ("*.json", "*.safetensors")
"""Files of a checkpoint that are downloaded from the Hub."""
OTHER_FILES = ("*/*", "consolidated*")
"""Files that are not downloaded: the same weights in another form, as in the repositories of gpt-oss and Mistral."""
HUB = ("revision", "token", "cache_dir", "local_files_only")
"""Arguments for the Hub."""


def from_pretrained(
    path: str | Path,
    *,
    activations: Activations = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | Literal["auto"] | None = None,
    merge: bool = True,
    ignore: str | Iterable[str] = (),
    progress: bool = True,
    **config: Any,
) -> Any:
    """Load a causal language model from a quantised checkpoint, with the weights as the checkpoint stores them.

    Supports any decoder that ``AutoModelForCausalLM`` builds from ``nn.Linear`` layers, such as Llama, Mistral, Qwen2
    and Qwen3, and from experts in two parameters, such as Mixtral, Qwen3-MoE, gpt-oss and DeepSeek-V3. Experts become
    :class:`torch_cute_ops.nn.QuantExperts`. The formats are the same as in :func:`torch_cute_ops.checkpoint.load_`. No
    weight is ever decoded, and peak memory is the model plus twice its largest layer.

    ``generate(cache_implementation="static")`` compiles the decode step without graph breaks. Call
    :func:`torch_cute_ops.nn.warmup` first, with the numbers of rows that will be served.

    Args:
        path: folder of the checkpoint, or, as a string, the name of a repository on the Hugging Face Hub.
        activations: argument of :func:`torch_cute_ops.checkpoint.load_`.
        device: device of all tensors; ``None`` for the current CUDA device, or the CPU without CUDA.
        dtype: dtype of activations and of unquantised tensors; ``None`` or ``"auto"`` for the dtype in the checkpoint's
            configuration.
        merge: True to merge q, k and v, and gate and up: :func:`torch_cute_ops.nn.merge_`.
        ignore: checkpoint tensors that the model may lack, as for ``load_``.
        progress: True to show a progress bar.
        config: settings that override the model's configuration, such as ``attn_implementation``; for the Hub
            ``revision``, ``token``, ``cache_dir`` and ``local_files_only``.

    Returns:
        The model, in evaluation mode, without gradients.

    Raises:
        FileNotFoundError, ValueError: as :func:`torch_cute_ops.checkpoint.load_`; for a missing path; for
            ``dtype=torch.float32`` with 16-bit activations.
        NotADirectoryError: for the path of a file.
        TypeError: for an argument that is neither listed here nor a setting of the configuration.
    """
    folder, hub = Path(path), {key: config.pop(key) for key in HUB if key in config}
    if not folder.is_dir():
        _refuse_unless_name(path)
        files = {"allow_patterns": [*FILES], "ignore_patterns": [*OTHER_FILES]}
        folder = Path(huggingface_hub.snapshot_download(str(path), **files, **hub))
    spec = read_spec(folder)  # refuses an unsupported checkpoint before the model is built
    settings, unknown = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **config)
    if unknown:
        hint = "; use device" if "device_map" in unknown else ""
        raise TypeError(f"from_pretrained: {type(settings).__name__} has no {', '.join(unknown)}{hint}")
    # transformers would use its own quantisers for some formats.
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    model = _on_meta(settings, None if dtype == "auto" else dtype)
    _fill_buffers(model)
    target = _device(device)
    options = LoadOptions(
        activations,
        target,
        ignore=(*_names.as_patterns(ignore), *_unused(model)),
        progress=_bar if progress else None,
    )
    model = fill(model, folder, spec, options, functools.partial(model_names, model))
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return _ready(model, target, merge)


def from_config(
    config: Any,
    scheme: Scheme = "nvfp4",
    *,
    activations: Activations = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    merge: bool = True,
    ignore: str | Iterable[str] = ("lm_head",),
    seed: int = 0,
) -> Any:
    """Build a causal language model with random quantised weights, to measure speed and sizes without a checkpoint.

    Codes are drawn at random. No weight ever exists in another format, so peak memory equals the memory of the model.

    Args:
        config: configuration of transformers, such as ``LlamaConfig()``.
        scheme: scheme of all linear layers except those that ``ignore`` names.
        activations, device, dtype, merge: arguments of :func:`from_pretrained`.
        ignore: argument of :func:`torch_cute_ops.nn.quantize_`.
        seed: seed of the generator.

    Returns:
        The model, in evaluation mode, without gradients.

    Raises:
        ValueError: as :func:`torch_cute_ops.nn.quantize_`.
    """
    target = _device(device)
    model = _on_meta(config, dtype)
    for text in replace_randomly(model, scheme, activations, ignore, None, target, seed):
        warnings.warn(text.replace("random_:", "from_config:", 1), stacklevel=2)
    generator = torch.Generator(target).manual_seed(seed)
    deviation = getattr(config, "initializer_range", 0.02)
    _fill_buffers(model)
    for module in model.modules():
        if isinstance(module, QuantLinear):
            continue
        for name, buffer in module._buffers.items():
            # For example the bias with which DeepSeek-V3 selects experts.
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=target)
        for name, old in module._parameters.items():
            if old is not None and old.is_meta:
                new = torch.empty_like(old, device=target)
                # Weights of norms are one-dimensional, and so are biases.
                if new.dim() > 1:
                    new.normal_(std=deviation, generator=generator)
                else:
                    new.fill_(0 if name == "bias" else 1)
                module._parameters[name] = nn.Parameter(new, requires_grad=False)
    if config.tie_word_embeddings:
        model.tie_weights()
    return _ready(model, target, merge)


def _refuse_unless_name(path: str | Path) -> None:
    """Raise for a path that is not a folder and cannot be a name on the Hub."""
    if Path(path).exists():
        raise NotADirectoryError(f"from_pretrained: {path} is a file; expected a checkpoint's folder")
    if isinstance(path, Path) or path.startswith((".", "/")):
        raise FileNotFoundError(
            f"from_pretrained: {path} does not exist; expected a checkpoint's folder, or a name on the Hub as a string"
        )


def _unused(model: Any) -> list[str]:
    """Return patterns of checkpoint tensors that the model does not use, such as layers that predict further tokens."""
    return [f"re:.*(?:{pattern})" for pattern in model._keys_to_ignore_on_load_unexpected or ()]


def _device(device: torch.device | str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _on_meta(config: Any, dtype: torch.dtype | None) -> Any:
    """Build the model of a configuration on the meta device, with tied weights as one parameter."""
    dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    auto = AutoModelForCausalLM if is_causal else AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto.from_config(config, dtype=dtype)
    if config.tie_word_embeddings:
        model.tie_weights()
    return model


@torch.no_grad()
def _fill_buffers(model: Any) -> None:
    """Compute buffers that no checkpoint contains, such as the frequencies of rotary embeddings, on the CPU."""
    inits = {name: module for name, module in model.named_modules() if hasattr(module, "_init_weights")}
    for name, module in model.named_modules():
        own = [key for key in module._non_persistent_buffers_set if module._buffers.get(key) is not None]
        if isinstance(module, QuantLinear) or not any(module._buffers[key].is_meta for key in own):
            continue
        # The innermost model initialises a module: a vision tower is a model with an initialisation of its own.
        owner = next(inits[each] for each in (name, *reversed(_names.parents(name)), "") if each in inits)
        results = []
        for value in (torch.nan, 1.0):  # a buffer that is not initialised keeps the value, or is not a number
            for key in own:
                fill = value if module._buffers[key].is_floating_point() else float(value == 1.0)
                module._buffers[key] = torch.full_like(module._buffers[key], fill, device="cpu")
            owner._init_weights(module)
            results.append([module._buffers[key] for key in own])
        undefined = [key for key, *both in zip(own, *results, strict=True) if not torch.equal(*both)]
        if undefined:
            raise ValueError(f"{type(model).__name__} does not initialise the buffers {', '.join(undefined)} of {name}")


def _bar(modules: Sequence[tuple[str, nn.Module]]) -> Iterable[tuple[str, nn.Module]]:
    return tqdm(modules, desc="Loading", unit="module")


def _refuse_dtype(model: Any) -> None:
    """Raise if the model's layers do not support its dtype."""
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


def _ready(model: Any, device: torch.device, merge: bool) -> Any:
    _refuse_dtype(model)
    if merge:
        merge_(model)
    return model.to(device).requires_grad_(False).eval()
