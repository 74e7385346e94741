"""Writing a model with quantised layers as others read it."""

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
    """Tensors that are made when they are written.

    Attributes:
        size: bytes.
        make: the tensors by name.
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
    merged: Mapping[str, Sequence[str]] = _names.PARTS,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model's tensors and configuration, in a format of others.

    ``load_`` reads the same bits, but for one case: ModelOpt stores what multiplies, compressed-tensors its reciprocal,
    and a global scale that came from the one may have no exact reciprocal for the other; it is the nearest then.

    Args:
        model: with layers of :mod:`torch_cute_ops.nn`. Other modules' parameters and buffers are written as they are,
            tied ones once.
        path: a folder, made if need be, in which none of the files is that are written. Of a model of Hugging Face
            ``generation_config.json`` is one of them; the tokenizer's are not.
        style: ``"modelopt"``, for NVFP4, FP8 of the tensor with static activations, and FP8 of channels with dynamic
            ones; or ``"compressed-tensors"``, for every format.
        config: what ``config.json`` has beside its ``quantization_config``; ``None``: the model's ``config``, if it has
            one, as models of Hugging Face have.
        merged: names of the layers that are merged in one, as for :func:`load_`: each is written by itself, as each
            layer of an expert is.
        shard_bytes: files do not exceed this, but for a layer that does.

    Raises:
        FileExistsError: where a file is already.
        ValueError: for a model without quantised layers or with one that ranks divide, a format that the style does not
            have, and a merged layer whose parts have no names in ``merged``.
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
            raise ValueError(f"save: ranks divide {own_name or 'the model'}; save the model before, as a whole")
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
            parts = _part_names(name, module, merged)
            schemes |= dict.fromkeys(parts, _scheme_of(module, style))
            entries.append(_Entry(_bytes(module.buffers()), _layer(module, parts, style)))
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


def _part_names(name: str, layer: QuantLinear, merged: Mapping[str, Sequence[str]]) -> list[str]:
    if len(layer.parts) == 1:
        return [name]
    parent, _, last = name.rpartition(".")
    parts = merged.get(last, ())
    if len(parts) != len(layer.parts):
        raise ValueError(f"save: {name} merges {len(layer.parts)} layers, and merged has {len(parts)} names for them")
    return [f"{parent}.{part}".lstrip(".") for part in parts]


def _expert_names(name: str, experts: int, parts: Sequence[str]) -> list[str]:
    return [f"{name}.{expert}.{part}" for expert in range(experts) for part in parts]


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
    where: dict[str, str] = {}
    total = 0
    for file, shard in zip(files, shards, strict=True):
        tensors = {name: each for entry in shard for name, each in entry.make().items()}
        # Copies, because no two tensors of a file may share memory.
        tensors = {name: each.detach().to("cpu", copy=True).contiguous() for name, each in tensors.items()}
        load_safetensors().torch.save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
        total += _bytes(tensors.values())
    if len(shards) > 1:
        documents[INDEX] = {"metadata": {"total_size": total}, "weight_map": where}
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


# Configuration


def _is_matrix(module: nn.Module) -> bool:
    """Whether others may take a module that is not quantised for a linear layer, such as the router of experts."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def _config_of(model: nn.Module) -> dict[str, Any]:
    document = _document(getattr(model, "config", None))
    # Missing where the model was made and not loaded; serving engines look for it.
    if document and not document.get("architectures"):
        document["architectures"] = [type(model).__name__]
    return document


def _document(config: Any) -> dict[str, Any]:
    """What a configuration of Hugging Face's says; of anything else, nothing."""
    return json.loads(config.to_json_string()) if hasattr(config, "to_json_string") else {}


def _scheme_of(layer: QuantLinear, style: str) -> LayerScheme:
    fields_of(style, layer.scheme)
    # An input scale says that a checkpoint is for FP4 activations; without one, only MXFP4 ones are possible. Of FP8 it
    # says that they are static.
    activations = layer.activations
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
    if scheme.activations == "fp8":
        return {**arguments, "strategy": "token", "dynamic": True}
    return {**arguments, "dynamic": "local" if scheme.format == "nvfp4" else True}


def _algorithm_of(scheme: LayerScheme) -> str:
    for name, known in MODELOPT_ALGORITHMS.items():
        if known == (scheme.format, scheme.activations):
            return name
    able = " or ".join(repr(activations) for fmt, activations in MODELOPT_ALGORITHMS.values() if fmt == scheme.format)
    raise ValueError(
        f"style 'modelopt' has no {scheme.format} with activations {scheme.activations!r}; expected {able}, or style "
        "'compressed-tensors'"
    )


def _group_size(fmt: str) -> dict[str, int]:
    """What ModelOpt says of the scales of a format."""
    return {"group_size": 16} if fmt == "nvfp4" else {}


def _modelopt_group(scheme: LayerScheme) -> dict[str, Any]:
    """What ModelOpt says of weights and activations."""
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
    """The same as ModelOpt's own file says it."""
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
