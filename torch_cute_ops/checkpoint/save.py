"""Write a model with quantised layers as a checkpoint that other software can read."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torch_cute_ops._version import __version__
from torch_cute_ops.checkpoint._files import INDEX, SINGLE, load_safetensors
from torch_cute_ops.checkpoint._layers import fields_of, stored_tensors
from torch_cute_ops.checkpoint.experts import EXPERT_NAMES, RENAMED
from torch_cute_ops.checkpoint.spec import (
    COMPRESSED_FORMATS,
    MODELOPT_ALGORITHMS,
    LayerScheme,
    compressed_arguments,
)
from torch_cute_ops.nn import QuantExperts, QuantLinear, _names

PRODUCER: Final = {"name": "torch_cute_ops", "version": __version__}


class _Entry(NamedTuple):
    """Tensors of one layer. Their values are computed only when they are written to the file.

    Attributes:
        size: size in bytes.
        make: function that returns the tensors by name.
    """

    size: int
    make: Callable[[], dict[str, Tensor]]


@torch.no_grad()
def save(
    model: nn.Module,
    path: str | Path,
    style: Literal["modelopt", "compressed-tensors"],
    *,
    config: Mapping[str, Any] | None = None,
    merged: Mapping[str, Sequence[str]] = _names.MERGED,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model's tensors and configuration in the format of another quantisation library.

    :func:`load_` reads the same bits again, with one exception: the style compressed-tensors stores the reciprocal of
    the global scale that our layers use. If a global scale has no exact float32 reciprocal, the nearest number is
    written.

    Args:
        model: model with layers of :mod:`torch_cute_ops.nn`. Parameters and buffers of other modules are written
            unchanged; tied parameters are written once.
        path: output folder, created if missing. Files are never overwritten. A Hugging Face model's
            ``generation_config.json`` is written too; tokenizer files are not.
        style: ``"compressed-tensors"``, which supports every format; or ``"modelopt"``, which supports NVFP4, MXFP8,
            FP8 per tensor with static activations, and FP8 per channel with dynamic activations.
        config: contents of ``config.json`` without ``quantization_config``; ``None`` uses the model's ``config`` if it
            is a Hugging Face model.
        merged: names of merged layers, each with the names of the layers that it concatenates, as in :func:`load_`.
            These layers are written separately, and so is each layer of an expert.
        shard_bytes: largest file size in bytes. A file with a single layer may be larger.

    Raises:
        FileExistsError: if a file exists already.
        ValueError: for a model without quantised layers or with a layer that is divided among ranks; for a format that
            the style does not support; for a merged layer whose layers are not named in ``merged``.
    """
    if style not in ("modelopt", "compressed-tensors"):
        raise ValueError(f"save: style is {style!r}; expected 'modelopt' or 'compressed-tensors'")
    schemes: dict[str, LayerScheme] = {}
    entries, plain, seen = [], [], set()
    document = _config_of(model) if config is None else dict(config)
    is_mixtral = document.get("model_type") == "mixtral"
    within: set[nn.Module] = set()
    for own_name, module in model.named_modules():
        if hasattr(module, "divided"):
            raise ValueError(
                f"save: {own_name or 'the model'} is divided among ranks; save the model before you divide it"
            )
        name = f".{own_name}.".replace(*RENAMED[0])[1:-1] if is_mixtral else own_name
        if isinstance(module, QuantExperts):
            within.update(module.children())
            names = _expert_names(name, module.experts, EXPERT_NAMES[is_mixtral])
            schemes |= dict.fromkeys(names, _scheme_of(module.gate_up_proj, style))
            entries.append(_Entry(_bytes(module.buffers()), _experts(module, names, style)))
            continue
        if module in within:
            continue
        if isinstance(module, QuantLinear):
            names = _layer_names(name, module, merged)
            schemes |= dict.fromkeys(names, _scheme_of(module, style))
            entries.append(_Entry(_bytes(module.buffers()), _layer(module, names, style)))
            continue
        if _is_matrix(module):
            plain.append(name)
        for key, tensor in _names.own_tensors(module).items():
            if _names.identity(tensor) not in seen:
                seen.add(_names.identity(tensor))
                entries.append(_Entry(tensor.nbytes, _plain(f"{name}.{key}".lstrip("."), tensor)))
    if not schemes:
        raise ValueError("save: the model has no quantised layers")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    quantization = {"modelopt": _modelopt_config, "compressed-tensors": _compressed_config}[style](schemes, plain)
    documents = {"config.json": {**document, "quantization_config": quantization}}
    if style == "modelopt":
        documents["hf_quant_config.json"] = _hf_quant_config(quantization)
    generation = _document(getattr(model, "generation_config", None))
    if generation:
        documents["generation_config.json"] = generation
    _write(folder, _shards(entries, shard_bytes), documents)


# Tensors


def _layer_names(name: str, layer: QuantLinear, merged: Mapping[str, Sequence[str]]) -> list[str]:
    if len(layer.parts) == 1:
        return [name]
    parent, _, last = name.rpartition(".")
    names = merged.get(last, ())
    if len(names) != len(layer.parts):
        raise ValueError(f"save: {name} merges {len(layer.parts)} layers, but merged gives {len(names)} names for it")
    return [f"{parent}.{each}".lstrip(".") for each in names]


def _expert_names(name: str, experts: int, layers: Sequence[str]) -> list[str]:
    return [f"{name}.{expert}.{layer}" for expert in range(experts) for layer in layers]


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _layer(layer: QuantLinear, names: Sequence[str], style: str) -> Callable[[], dict[str, Tensor]]:
    return lambda: _tensors_of(layer.split(), names, style)


def _experts(experts: QuantExperts, names: Sequence[str], style: str) -> Callable[[], dict[str, Tensor]]:
    return lambda: _tensors_of([layer for each in experts.split() for layer in each], names, style)


def _tensors_of(layers: Sequence[QuantLinear], names: Sequence[str], style: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, layer in zip(names, layers, strict=True):
        tensors |= {f"{name}.{key}": each for key, each in stored_tensors(layer, style).items()}
        if layer.bias is not None:
            tensors[f"{name}.bias"] = layer.bias
    return tensors


def _plain(name: str, tensor: Tensor) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: tensor}


def _shards(entries: Sequence[_Entry], limit: int) -> list[list[_Entry]]:
    shards: list[list[_Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.size > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.size
    return shards


def _write(folder: Path, shards: Sequence[Sequence[_Entry]], documents: dict[str, dict[str, Any]]) -> None:
    stem = Path(SINGLE).stem
    files = [SINGLE]
    if len(shards) > 1:
        files = [f"{stem}-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    taken = [name for name in (*files, SINGLE, INDEX, *documents) if (folder / name).exists()]
    if taken:
        raise FileExistsError(f"{folder / taken[0]} exists; expected a folder without a checkpoint")
    file_of: dict[str, str] = {}
    total = 0
    for file, shard in zip(files, shards, strict=True):
        tensors = {name: each for entry in shard for name, each in entry.make().items()}
        # Copy the tensors: safetensors refuses tensors that share memory in one file.
        tensors = {name: each.detach().to("cpu", copy=True).contiguous() for name, each in tensors.items()}
        load_safetensors().torch.save_file(tensors, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(tensors, file)
        total += _bytes(tensors.values())
    if len(shards) > 1:
        documents[INDEX] = {"metadata": {"total_size": total}, "weight_map": file_of}
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


# Configuration


def _is_matrix(module: nn.Module) -> bool:
    """Return True if ``ignore`` must list this unquantised module, such as a router, because software that reads the
    checkpoint could mistake it for a linear layer."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def _config_of(model: nn.Module) -> dict[str, Any]:
    document = _document(getattr(model, "config", None))
    # transformers sets this key when it loads a model. Serving engines need it, so add it to a model that was never
    # loaded.
    if document and not document.get("architectures"):
        document["architectures"] = [type(model).__name__]
    return document


def _document(config: Any) -> dict[str, Any]:
    """Return a Hugging Face configuration as a dict. For any other object, return an empty dict."""
    return json.loads(config.to_json_string()) if hasattr(config, "to_json_string") else {}


def _scheme_of(layer: QuantLinear, style: str) -> LayerScheme:
    fields_of(style, layer.scheme)
    # With an FP4 weight, an input scale means that the activations are FP4. No configuration describes NVFP4
    # activations without an input scale (``"fp4_token"``). With an FP8 weight, an input scale means that the
    # activations are static FP8.
    activations = layer.activations
    if activations == "fp8_token":
        if layer.scheme == "nvfp4" and layer.has_input_scale:
            raise ValueError(
                f"style {style!r} does not support nvfp4 with a static scale of FP8 activations; expected 16-bit or "
                "FP4 activations, or FP8 activations without an input scale"
            )
        activations = "fp8"  # the configuration cannot express a single scale per row
    if layer.scheme == "nvfp4":
        activations = "fp4" if layer.has_input_scale else "16bit"
    elif "input_scale" in layer.layout():
        activations = "fp8_static"
    scheme = LayerScheme(layer.scheme, style, activations)
    if style == "modelopt":
        _algorithm_of(scheme)
    return scheme


def _groups(schemes: Mapping[str, LayerScheme]) -> dict[LayerScheme, list[str]]:
    groups: dict[LayerScheme, list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(scheme, []).append(name)
    return groups


def _compressed_config(schemes: Mapping[str, LayerScheme], plain: Sequence[str]) -> dict[str, Any]:
    groups = _groups(schemes)
    formats = {COMPRESSED_FORMATS[scheme.format] for scheme in groups}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": {
            f"group_{number}": {
                "targets": ["Linear"] if len(groups) == 1 else names,
                "weights": compressed_arguments(scheme.format),
                "input_activations": _compressed_inputs(scheme),
                "output_activations": None,
                "format": COMPRESSED_FORMATS[scheme.format],
            }
            for number, (scheme, names) in enumerate(groups.items())
        },
        "ignore": [*plain],
        "kv_cache_scheme": None,
    }


def _compressed_inputs(scheme: LayerScheme) -> dict[str, Any] | None:
    if scheme.activations == "16bit":
        return None
    if scheme.format == "fp8_block" or (scheme.format, scheme.activations) == ("mxfp4", "fp8"):
        return {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "symmetric": True,
                "dynamic": True}  # fmt: skip
    arguments = compressed_arguments(scheme.format)
    if scheme.activations == "fp8_static":
        return {**arguments, "strategy": "tensor"}
    if scheme.activations == "fp8" and scheme.format != "mxfp8":
        return {**arguments, "strategy": "token", "dynamic": True}
    return {**arguments, "dynamic": "local" if scheme.format == "nvfp4" else True}


def _algorithm_of(scheme: LayerScheme) -> str:
    for name, known in MODELOPT_ALGORITHMS.items():
        if known == (scheme.format, scheme.activations):
            return name
    able = " or ".join(repr(activations) for fmt, activations in MODELOPT_ALGORITHMS.values() if fmt == scheme.format)
    raise ValueError(
        f"style 'modelopt' does not support {scheme.format} with activations {scheme.activations!r}; expected {able}, "
        "or style 'compressed-tensors'"
    )


_GROUP_SIZES: Final = {"nvfp4": 16, "mxfp8": 32}


def _group_size(fmt: str) -> dict[str, int]:
    """Return ModelOpt's configuration entry ``group_size`` for a format, or an empty dict if it uses none."""
    return {"group_size": _GROUP_SIZES[fmt]} if fmt in _GROUP_SIZES else {}


def _modelopt_group(scheme: LayerScheme) -> dict[str, Any]:
    """Return ModelOpt's description of how weights and activations are quantised."""
    numbers = {
        "dynamic": False, "num_bits": 4 if scheme.format == "nvfp4" else 8, "type": "float",
        **_group_size(scheme.format),
    }  # fmt: skip
    by_channel = {"strategy": "channel"} if scheme.format == "fp8_channel" else {}
    inputs = {} if scheme.activations == "16bit" else {"input_activations": numbers}
    return {**inputs, "weights": {**numbers, **by_channel}}


def _modelopt_config(schemes: Mapping[str, LayerScheme], plain: Sequence[str]) -> dict[str, Any]:
    groups = _groups(schemes)
    config: dict[str, Any] = {
        "config_groups": {
            f"group_{number}": {
                **_modelopt_group(scheme),
                "targets": ["Linear"] if len(groups) == 1 else names,
            }
            for number, (scheme, names) in enumerate(groups.items())
        },
        "ignore": [*plain],
        "quant_algo": "MIXED_PRECISION" if len(groups) > 1 else _algorithm_of(next(iter(groups))),
        "producer": PRODUCER,
        "quant_method": "modelopt",
    }
    if len(groups) > 1:
        config["quantized_layers"] = {
            name: {"quant_algo": _algorithm_of(scheme), **_group_size(scheme.format)}
            for name, scheme in schemes.items()
        }
    return config


def _hf_quant_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a ModelOpt ``quantization_config`` to the contents of ``hf_quant_config.json``."""
    quantization = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": None,
        "exclude_modules": config["ignore"],
    }
    if "quantized_layers" in config:
        quantization["quantized_layers"] = config["quantized_layers"]
    else:
        quantization |= _group_size(MODELOPT_ALGORITHMS[config["quant_algo"]][0])
    return {"producer": PRODUCER, "quantization": quantization}
