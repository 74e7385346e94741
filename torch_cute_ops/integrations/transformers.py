"""Models of Hugging Face's transformers, from quantised checkpoints.

Needs transformers 5.17 or later: the extra ``transformers``.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torch_cute_ops.checkpoint import read_spec
from torch_cute_ops.checkpoint.load import LoadOptions, fill
from torch_cute_ops.nn import QuantExperts, QuantLinear, _names, merge_, random_
from torch_cute_ops.nn._base import Activations
from torch_cute_ops.nn.quantize import Scheme

try:
    import huggingface_hub
    from tqdm.auto import tqdm
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"torch_cute_ops.integrations.transformers needs {missing.name}: pip install 'torch-cute-ops[transformers]'",
        name=missing.name,
    ) from missing

from torch_cute_ops.integrations._transformers_quantizer import register, unregister

__all__ = ["from_config", "from_pretrained", "register", "unregister"]

FILES = ("*.json", "*.safetensors")
"""What is fetched of a checkpoint on the Hub."""
OTHER_FILES = ("*/*", "consolidated*")
"""What is not: the same weights in another form, as gpt-oss and Mistral's models have them beside."""
HUB = ("revision", "token", "cache_dir", "local_files_only")
"""Settings of the Hub."""


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
    """A causal language model from a quantised checkpoint, with weights as the checkpoint holds them.

    Any decoder that ``AutoModelForCausalLM`` builds of ``nn.Linear`` layers, such as Llama, Mistral, Qwen2 and Qwen3,
    and of experts in two parameters beside them, such as Mixtral, Qwen3-MoE, gpt-oss and DeepSeek-V3, which become
    :class:`torch_cute_ops.nn.QuantExperts`. The formats are those of :func:`torch_cute_ops.checkpoint.load_`; no weight
    is ever decoded, and the peak of memory is the model and twice its largest layer.

    ``generate(cache_implementation="static")`` compiles the decode step, without graph breaks. Call
    :func:`torch_cute_ops.nn.warmup` first, with the numbers of rows that will be served.

    Args:
        path: the checkpoint's folder, or, as a string, the name of a repository on the Hugging Face Hub.
        activations: as for :func:`torch_cute_ops.checkpoint.load_`.
        device: of all tensors; ``None``: the current CUDA device, or the CPU where there is none.
        dtype: of activations and of what is not quantised; ``None`` or ``"auto"``: what the checkpoint's configuration
            says.
        merge: whether q, k and v, and gate and up, are merged: :func:`torch_cute_ops.nn.merge_`.
        ignore: tensors of the checkpoint that the model need not have, as for ``load_``.
        progress: whether to show a progress bar.
        config: settings of the model's configuration in place of the checkpoint's, such as ``attn_implementation``; and
            for the Hub ``revision``, ``token``, ``cache_dir`` and ``local_files_only``.

    Returns:
        The model, in evaluation mode, without gradients.

    Raises:
        FileNotFoundError, ValueError: as :func:`torch_cute_ops.checkpoint.load_`; for a path that is not there.
            Also for ``dtype=torch.float32`` beside 16-bit activations.
        NotADirectoryError: for the path of a file.
        TypeError: for an argument that is neither one of these nor a setting of the configuration.
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
    # transformers has quantisers of its own for some of these formats.
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
    model = fill(model, folder, spec, options)
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
    """A causal language model with random quantised weights: to measure and to try sizes without a checkpoint.

    Codes are drawn at random; no weight ever exists in another format, so that a model needs no more memory than it
    will be served with.

    Args:
        config: a configuration of transformers', such as ``LlamaConfig()``.
        scheme: of all linear layers but those that ``ignore`` names.
        activations, device, dtype, merge: as for :func:`from_pretrained`.
        ignore: as for :func:`torch_cute_ops.nn.quantize_`.
        seed: of the generator.

    Returns:
        The model, in evaluation mode, without gradients.

    Raises:
        ValueError: as :func:`torch_cute_ops.nn.quantize_`.
    """
    target = _device(device)
    model = _on_meta(config, dtype)
    random_(model, scheme, activations=activations, ignore=ignore, device=target, seed=seed)
    generator = torch.Generator(target).manual_seed(seed)
    deviation = getattr(config, "initializer_range", 0.02)
    _fill_buffers(model)
    for module in model.modules():
        if isinstance(module, QuantLinear):
            continue
        for name, buffer in module._buffers.items():
            # Such as the bias of DeepSeek-V3's choice of experts.
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=target)
        for name, old in module._parameters.items():
            if old is not None and old.is_meta:
                new = torch.empty_like(old, device=target)
                # Factors of norms have one dimension, as biases have.
                if new.dim() > 1:
                    new.normal_(std=deviation, generator=generator)
                else:
                    new.fill_(0 if name == "bias" else 1)
                module._parameters[name] = nn.Parameter(new, requires_grad=False)
    if config.tie_word_embeddings:
        model.tie_weights()
    return _ready(model, target, merge)


def _refuse_unless_name(path: str | Path) -> None:
    """Raise for what is no folder, and cannot be a name on the Hub."""
    if Path(path).exists():
        raise NotADirectoryError(f"from_pretrained: {path} is a file; expected a checkpoint's folder")
    if isinstance(path, Path) or path.startswith((".", "/")):
        raise FileNotFoundError(
            f"from_pretrained: there is no {path}; expected a checkpoint's folder, or a name on the Hub as a string"
        )


def _unused(model: Any) -> list[str]:
    """Tensors that checkpoints of the model may have and it does not, such as those of layers that predict further
    tokens."""
    return [f"re:.*(?:{pattern})" for pattern in model._keys_to_ignore_on_load_unexpected or ()]


def _device(device: torch.device | str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _on_meta(config: Any, dtype: torch.dtype | None) -> Any:
    """The model that a configuration describes, on the meta device, its tied weights one parameter."""
    dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if config.tie_word_embeddings:
        model.tie_weights()
    return model


@torch.no_grad()
def _fill_buffers(model: Any) -> None:
    """Compute the buffers that no checkpoint has, such as the frequencies of rotary embeddings, on the CPU."""
    for name, module in model.named_modules():
        own = [key for key in module._non_persistent_buffers_set if module._buffers.get(key) is not None]
        if isinstance(module, QuantLinear) or not any(module._buffers[key].is_meta for key in own):
            continue
        for key in own:
            module._buffers[key] = torch.full_like(module._buffers[key], torch.nan, device="cpu")
        model._init_weights(module)
        undefined = [key for key in own if module._buffers[key].isnan().any()]
        if undefined:
            raise ValueError(f"{name} of {type(model).__name__} does not say what its {', '.join(undefined)} holds")


def _bar(modules: Sequence[tuple[str, nn.Module]]) -> Iterable[tuple[str, nn.Module]]:
    return tqdm(modules, desc="Loading", unit="module")


def _refuse_dtype(model: Any) -> None:
    """Raise where the model's dtype is not one that its layers take."""
    of_experts = {each for module in model.modules() if isinstance(module, QuantExperts) for each in module.modules()}
    refusing = [
        name
        for name, module in model.named_modules()
        if isinstance(module, QuantLinear) and module not in of_experts and module.activations == "16bit"
    ]
    if model.dtype == torch.float32 and refusing:
        raise ValueError(
            f"dtype is {model.dtype}, and {refusing[0]} has 16-bit activations; expected dtype=torch.bfloat16 or "
            "torch.float16, or other activations"
        )


def _ready(model: Any, device: torch.device, merge: bool) -> Any:
    _refuse_dtype(model)
    if merge:
        merge_(model)
    return model.to(device).requires_grad_(False).eval()
