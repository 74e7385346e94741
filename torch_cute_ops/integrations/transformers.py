"""Load quantised checkpoints into Hugging Face transformers models.

Needs transformers 5.17 or later: the extra ``transformers``.
"""

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torch_cute_ops.checkpoint import read_spec
from torch_cute_ops.checkpoint._files import Files
from torch_cute_ops.checkpoint.load import LoadOptions, Quantisation, fill
from torch_cute_ops.nn import QuantLinear, _names, merge_
from torch_cute_ops.nn._base import Activations
from torch_cute_ops.nn._selection import DEFAULT_IGNORE, FilterFn, select
from torch_cute_ops.nn._summary import bytes_of
from torch_cute_ops.nn.quantize import SCHEMES, Scheme, finished
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

from torch_cute_ops.integrations._transformers_attention import fuse_attention_
from torch_cute_ops.integrations._transformers_names import model_names
from torch_cute_ops.integrations._transformers_quantizer import refuse_dtype, register, unregister

__all__ = ["from_config", "from_pretrained", "fuse_attention_", "register", "unregister"]

FILES = ("*.json", "*.safetensors")
"""Files of a checkpoint that are downloaded from the Hub."""
OTHER_FILES = ("*/*", "consolidated*")
"""Files that are not downloaded: the same weights in another form, as in the repositories of gpt-oss and Mistral."""
HUB = ("revision", "token", "cache_dir", "local_files_only")
"""Arguments for the Hub."""


def from_pretrained(
    path: str | Path,
    *,
    activations: Activations | Mapping[str, Activations] = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | Literal["auto"] | None = None,
    merge: bool = True,
    quantize: Scheme | None = None,
    ignore: str | Iterable[str] | None = None,
    filter_fn: FilterFn | None = None,
    progress: bool = True,
    **config: Any,
) -> Any:
    """Load a causal language model from a quantised checkpoint, with the weights as the checkpoint stores them.

    With ``quantize``, load a checkpoint in 16 or 32 bits instead, and quantise each layer as soon as it is loaded. The
    result equals :func:`torch_cute_ops.nn.quantize_` of the whole model, but only one layer, or the experts of one
    layer, is in memory in 16 bits at a time.

    Supports any decoder that ``AutoModelForCausalLM`` builds from ``nn.Linear`` layers, such as Llama, Mistral, Qwen2
    and Qwen3, and from experts in two parameters, such as Mixtral, Qwen3-MoE, gpt-oss and DeepSeek-V3. Experts become
    :class:`torch_cute_ops.nn.QuantExperts`. The formats are those that :func:`torch_cute_ops.checkpoint.load_`
    supports. No weight is ever decoded, and peak memory is the model plus twice its largest layer.

    ``generate(cache_implementation="static")`` compiles the decode step without graph breaks. Call
    :func:`torch_cute_ops.nn.warmup` first, with the numbers of rows that will be served.

    Args:
        path: folder of the checkpoint, or, as a string, the name of a repository on the Hugging Face Hub.
        activations: as in :func:`torch_cute_ops.checkpoint.load_`, or with ``quantize`` as in
            :func:`torch_cute_ops.nn.quantize_`.
        device: device of all tensors; ``None`` for the current CUDA device, or the CPU without CUDA.
        dtype: dtype of activations and of unquantised tensors; ``None`` or ``"auto"`` for the dtype in the checkpoint's
            configuration.
        merge: True to merge the layers q, k and v, and the layers gate and up, by :func:`torch_cute_ops.nn.merge_`.
        quantize: scheme for ``quantize_``, such as ``"nvfp4"``; ``None`` to load the checkpoint as it is, quantised or
            not. NVFP4 activations need calibration, which only a separate call of ``quantize_`` supports.
        ignore: checkpoint tensors that the model may lack, as in ``load_``. With ``quantize``, also layers that stay
            unquantised, as in ``quantize_``; the default is then ``"lm_head"``.
        filter_fn: as in ``quantize_``; allowed only with ``quantize``.
        progress: True to show a progress bar.
        config: settings that override the model's configuration, such as ``attn_implementation``; also the options of
            the Hub ``revision``, ``token``, ``cache_dir`` and ``local_files_only``.

    Returns:
        The model, in evaluation mode, without gradients.

    Raises:
        FileNotFoundError, ValueError: as :func:`torch_cute_ops.checkpoint.load_`; for a missing path; for
            ``dtype=torch.float32`` with 16-bit activations; for ``quantize`` with a checkpoint that is already
            quantised, with an unknown scheme, or with activations that need a calibration.
        NotADirectoryError: for the path of a file.
        TypeError: for an argument that is neither listed here nor a setting of the configuration.
    """
    _check_quantize(quantize, activations, filter_fn)
    folder, hub = Path(path), {key: config.pop(key) for key in HUB if key in config}
    if not folder.is_dir():
        _refuse_unless_name(path)
        files = {"allow_patterns": [*FILES], "ignore_patterns": [*OTHER_FILES]}
        folder = Path(huggingface_hub.snapshot_download(str(path), **files, **hub))
    spec = read_spec(folder)  # first, so that an unsupported checkpoint is refused before the model is built
    if quantize is not None and spec.style is not None:
        raise ValueError(
            f"from_pretrained: quantize is {quantize!r}, but {folder} is quantised already, by {spec.style}; leave "
            "quantize out, or pass a checkpoint in 16 bits"
        )
    settings, unknown = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **config)
    if unknown:
        hint = "; use device" if "device_map" in unknown else ""
        raise TypeError(f"from_pretrained: {type(settings).__name__} has no {', '.join(unknown)}{hint}")
    # Without this line, transformers would use its own quantizers for some formats.
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    model = _on_meta(settings, None if dtype == "auto" else dtype)
    _fill_buffers(model)
    target, bytes_before = _device(device), bytes_of(model)
    default = DEFAULT_IGNORE if quantize is not None else ()
    patterns, chosen = _names.as_patterns(default if ignore is None else ignore), None
    if quantize is not None:
        given = activations if isinstance(activations, str) else activations.get(quantize, "auto")
        of_modules = _of_modules(patterns, model, folder)
        chosen = Quantisation(quantize, given, select(model, SCHEMES[quantize], given, of_modules, filter_fn))
    options = LoadOptions(
        activations,
        target,
        ignore=(*patterns, *_unused(model)),
        progress=_bar if progress else None,
        quantisation=chosen,
    )
    model = fill(model, folder, spec, options, functools.partial(model_names, model))
    if chosen is not None:
        cls = SCHEMES[chosen.scheme]
        for text in finished("from_pretrained", model, cls, chosen.selection, bytes_before):
            warnings.warn(text, stacklevel=2)
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

    The codes themselves are drawn at random. No unquantised weight is ever made, so peak memory equals the size of the
    model.

    Args:
        config: configuration of transformers, such as ``LlamaConfig()``.
        scheme: quantisation scheme of all linear layers except the layers in ``ignore``.
        activations, device, dtype, merge: as in :func:`from_pretrained`.
        ignore: layers that stay unquantised, as in :func:`torch_cute_ops.nn.quantize_`.
        seed: seed of the generator.

    Returns:
        The model, in evaluation mode, without gradients.

    Raises:
        ValueError: as :func:`torch_cute_ops.nn.quantize_`.
    """
    target = _device(device)
    model = _on_meta(config, dtype)
    for text in replace_randomly("from_config", model, scheme, activations, ignore, None, target, seed):
        warnings.warn(text, stacklevel=2)
    generator = torch.Generator(target).manual_seed(seed)
    deviation = getattr(config, "initializer_range", 0.02)
    _fill_buffers(model)
    for module in model.modules():
        if isinstance(module, QuantLinear):
            continue
        for name, buffer in module._buffers.items():
            # Fill buffers that checkpoints contain, such as the bias with which DeepSeek-V3 selects experts.
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=target)
        for name, old in module._parameters.items():
            if old is not None and old.is_meta:
                new = torch.empty_like(old, device=target)
                # Only matrices get random values. Weights of norms and biases are one-dimensional and get constants.
                if new.dim() > 1:
                    new.normal_(std=deviation, generator=generator)
                else:
                    new.fill_(0 if name == "bias" else 1)
                module._parameters[name] = nn.Parameter(new, requires_grad=False)
    if config.tie_word_embeddings:
        model.tie_weights()
    return _ready(model, target, merge)


def _check_quantize(quantize: str | None, activations: Any, filter_fn: FilterFn | None) -> None:
    """Check that ``quantize`` is a known scheme, and that the arguments that depend on it fit it."""
    if quantize is None:
        if filter_fn is not None:
            raise ValueError("from_pretrained: filter_fn is given, but quantize is None; expected a scheme to quantise")
        return
    if quantize not in SCHEMES:
        raise ValueError(
            f"from_pretrained: quantize is {quantize!r}; expected one of {', '.join(map(repr, SCHEMES))}, or None"
        )
    given = activations if isinstance(activations, str) else activations.get(quantize, "auto")
    if SCHEMES[quantize]._chosen(given) == "fp4" and quantize == "nvfp4":
        raise ValueError(
            "from_pretrained: activations='fp4' in NVFP4 need a calibration; load the model without quantize, and call "
            "quantize_(model, 'nvfp4', activations='fp4', calibrate=...)"
        )


def _of_modules(patterns: Sequence[str], model: Any, folder: Path) -> list[str]:
    """Return the patterns in ``ignore`` that name layers of the model, for ``quantize_``. Leave out patterns that match
    only checkpoint tensors."""
    modules = [name for name, _ in model.named_modules()]
    with Files(folder) as files:
        return [
            pattern
            for pattern in patterns
            if any(_names.matches(name, [pattern]) for name in modules)
            or not any(_names.fits(name, pattern) for name in files.file_of)
        ]


def _refuse_unless_name(path: str | Path) -> None:
    """Check that ``path``, which is not a folder, can be the name of a repository on the Hub."""
    if Path(path).exists():
        raise NotADirectoryError(f"from_pretrained: {path} is a file; expected a checkpoint's folder")
    if isinstance(path, Path) or path.startswith((".", "/")):
        raise FileNotFoundError(
            f"from_pretrained: {path} does not exist; expected a checkpoint's folder, or a name on the Hub as a string"
        )


def _unused(model: Any) -> list[str]:
    """Return patterns for checkpoint tensors that the model does not use, such as layers for multi-token prediction."""
    return [f"re:.*(?:{pattern})" for pattern in model._keys_to_ignore_on_load_unexpected or ()]


def _device(device: torch.device | str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _on_meta(config: Any, dtype: torch.dtype | None) -> Any:
    """Build the model on the meta device, so that no memory is allocated. Tied weights are one parameter."""
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
    """Compute, on the CPU, the buffers that no checkpoint contains, such as the frequencies of rotary embeddings."""
    inits = {name: module for name, module in model.named_modules() if hasattr(module, "_init_weights")}
    for name, module in model.named_modules():
        own = [key for key in module._non_persistent_buffers_set if module._buffers.get(key) is not None]
        if isinstance(module, QuantLinear) or not any(module._buffers[key].is_meta for key in own):
            continue
        # Only whole models have _init_weights. The innermost model around this module, such as a vision tower,
        # initialises it.
        owner = next(inits[each] for each in (name, *reversed(_names.parents(name)), "") if each in inits)
        results = []
        for value in (torch.nan, 1.0):  # if the buffer is not initialised, the two results differ or contain NaN
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


def _ready(model: Any, device: torch.device, merge: bool) -> Any:
    refuse_dtype(model)
    if merge:
        merge_(model)
    return model.to(device).requires_grad_(False).eval()
