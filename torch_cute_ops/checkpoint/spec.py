"""Read from ``config.json`` or ``hf_quant_config.json`` how a checkpoint is quantised."""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch_cute_ops.checkpoint._files import read_json
from torch_cute_ops.nn import _names

Style = Literal["modelopt", "compressed-tensors", "auto-round", "quark", "deepseek", "gpt-oss", "torchao"]


@dataclass(frozen=True)
class LayerScheme:
    """Quantisation of one linear layer.

    Attributes:
        format: ``"nvfp4"``, ``"mxfp4"``, ``"fp8_block"``, ``"mxfp8"``, ``"fp8_tensor"`` or ``"fp8_channel"``.
        style: naming convention of the tensors: ``"modelopt"``, ``"compressed-tensors"``, ``"quark"``, ``"deepseek"``
            or ``"torchao"``.
        activations: format of activations for which the checkpoint was made: ``"16bit"``, ``"fp4"``, ``"fp8"`` (scales
            computed at run time), or ``"fp8_static"`` (FP8 with a calibrated input scale). In NVFP4, ``"fp4"`` means
            that the layer stores input scales. The caller of ``load_`` may choose another format, except for FP8
            weights with static FP8 activations. If weights are FP4, input scales for static FP8 are not used.
    """

    format: str
    style: str
    activations: str


@dataclass(frozen=True)
class QuantSpec:
    """Quantisation of a checkpoint's linear layers, according to its configuration.

    Attributes:
        path: configuration file.
        style: software that wrote the checkpoint: ``"modelopt"``, ``"compressed-tensors"``, ``"auto-round"``,
            ``"quark"``, ``"deepseek"``, ``"gpt-oss"`` or ``"torchao"``; ``None`` if the checkpoint is not quantised.
            For torchao, the metadata of the safetensors files gives each layer's scheme.
        groups: pairs of a scheme and its targets: ``"Linear"`` for every linear layer, names of layers or of modules
            that contain them, wildcards, or regular expressions after ``re:``.
        ignore: layers and modules that are not quantised. If a module is listed, everything inside it is unquantised.
    """

    path: Path
    style: Style | None = None
    groups: tuple[tuple[LayerScheme, tuple[str, ...]], ...] = ()
    ignore: tuple[str, ...] = ()

    def scheme(self, name: str) -> LayerScheme | None:
        """Return the scheme of the linear layer ``name``, or ``None`` if it is not quantised.

        Targets are tried in this order: the layer's name; modules that contain the layer, innermost first; wildcards
        and regular expressions; ``"Linear"``.
        """
        if self._ignored.includes(name):
            return None
        named, patterns = self._targets
        for each in (name, *reversed(_names.parents(name))):
            if each in named:
                return named[each]
        fitting = (scheme for pattern, scheme in patterns if _names.fits(name, pattern))
        return next(fitting, named.get("Linear"))

    @functools.cached_property
    def _ignored(self) -> "_Names":
        return _Names(self.ignore)

    @functools.cached_property
    def _targets(self) -> tuple[dict[str, LayerScheme], list[tuple[str, LayerScheme]]]:
        """Split the targets by kind. Return the scheme of each plain name, and a list of (target, scheme) for patterns
        and ``"Linear"``."""
        named: dict[str, LayerScheme] = {}
        patterns: list[tuple[str, LayerScheme]] = []
        for scheme, targets in self.groups:
            for target in targets:
                if _names.is_pattern(target):
                    patterns.append((target, scheme))
                else:
                    named.setdefault(target, scheme)
        return named, patterns

    def scheme_of_tensors(self, name: str) -> LayerScheme | None:
        """Return the scheme of a layer whose tensors are quantised, even if ``ignore`` names the layer.

        For an ignored layer, return the checkpoint's only scheme, or ``None`` if the checkpoint uses several schemes.
        """
        schemes = {scheme for scheme, _ in self.groups}
        return self.scheme(name) or (schemes.pop() if len(schemes) == 1 else None)


class _Names:
    """Set of module names, wildcards and regular expressions with a fast test, because a configuration can list
    thousands of names.

    Args:
        given: names and patterns.
    """

    def __init__(self, given: Iterable[str]) -> None:
        every = [*given]
        self.patterns = [each for each in every if _names.is_pattern(each)]
        self.exact = {*every} - {*self.patterns}

    def includes(self, name: str) -> bool:
        """Return True if ``name`` is in the set, is inside a module in the set, or matches a pattern in the set."""
        inside = not self.exact.isdisjoint((name, *_names.parents(name)))
        return inside or any(_names.fits(name, pattern) for pattern in self.patterns)


def read_spec(path: str | Path) -> QuantSpec:
    """Read how a checkpoint is quantised.

    Args:
        path: folder of the checkpoint. It contains ``config.json`` with a ``quantization_config``, or otherwise
            ModelOpt's ``hf_quant_config.json``.

    Raises:
        FileNotFoundError: if the folder contains neither file.
        ValueError: for a method, algorithm, scheme, transform or zero point that this package does not support.
    """
    folder = Path(path)
    config, modelopt = folder / "config.json", folder / "hf_quant_config.json"
    if not config.is_file() and not modelopt.is_file():
        raise FileNotFoundError(f"{folder} has neither {config.name} nor {modelopt.name}")
    quantization = read_json(config).get("quantization_config") if config.is_file() else None
    if quantization is not None:
        if not isinstance(quantization, Mapping):
            raise ValueError(f"{config}: quantization_config is {quantization!r}; expected an object")
        return spec_of(config, quantization)
    if modelopt.is_file():
        return _modelopt(modelopt, read_json(modelopt).get("quantization", {}))
    return QuantSpec(config)


def spec_of(path: Path, quantization: Mapping[str, Any]) -> QuantSpec:
    """Parse the ``quantization_config`` of a configuration.

    Args:
        path: file that contains it, for messages.
        quantization: contents of ``quantization_config``.

    Raises:
        ValueError: as :func:`read_spec`.
    """
    method = quantization.get("quant_method")
    parse = {"modelopt": _modelopt, "compressed-tensors": _compressed_tensors, "fp8": _fp8, "mxfp8": _mxfp8,
             "mxfp4": _gpt_oss, "torchao": _torchao, "auto-round": _auto_round, "quark": _quark}  # fmt: skip
    if method not in parse:
        expected = ", ".join(map(repr, parse))
        raise ValueError(f"{path}: quant_method is {method!r}; expected one of {expected}")
    return parse[method](path, quantization)


def _expect(path: Path, prefix: str, given: Mapping[str, Any], **expected: Any) -> None:
    """Check that each entry of ``given`` has one of the values that ``expected`` lists under the entry's name."""
    for name, allowed in expected.items():
        if given.get(name) not in allowed:
            values = " or ".join(map(repr, allowed))
            raise ValueError(f"{path}: {prefix}{name} is {given.get(name)!r}; expected {values}")


# ModelOpt

MODELOPT_ALGORITHMS = {
    "NVFP4": ("nvfp4", "fp4"),
    "W4A16_NVFP4": ("nvfp4", "16bit"),
    "FP8": ("fp8_tensor", "fp8_static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_channel", "fp8"),
    "MXFP8": ("mxfp8", "fp8"),
}
"""Formats of weights and activations for each ``quant_algo`` of ModelOpt that this package reads and writes."""
_MODELOPT_READ = {
    **MODELOPT_ALGORITHMS,
    "W4A8_NVFP4_FP8": ("nvfp4", "fp8_static"),
    "mxfp4": ("mxfp4", "fp4"),
    "W4A8_MXFP4_FP8": ("mxfp4", "fp8_static"),
    "fp8_pb_wo": ("fp8_block", "fp8"),
}
_MODELOPT_BLOCKS = {"nvfp4": (16, 0, None), "mxfp4": (32, 0, None), "fp8_block": (128, 0, None), "mxfp8": (32, 0, None)}
"""Valid values of ``group_size``. For algorithms with a fixed block size, ModelOpt omits the entry or writes 0."""


def _modelopt(path: Path, given: Mapping[str, Any]) -> QuantSpec:
    algorithm = given.get("quant_algo")
    ignore = tuple(given.get("exclude_modules") or given.get("ignore") or ())
    if algorithm == "MIXED_PRECISION":
        layers = given.get("quantized_layers")
        if not layers:
            raise ValueError(f"{path}: quant_algo is 'MIXED_PRECISION', but quantized_layers is missing or empty")
        groups = [(modelopt_scheme(path, f"of {name}, ", layer), (name,)) for name, layer in layers.items()]
        return QuantSpec(path, "modelopt", tuple(groups), ignore)
    return QuantSpec(path, "modelopt", ((modelopt_scheme(path, "", given), ("Linear",)),), ignore)


def modelopt_scheme(path: Path, prefix: str, given: Mapping[str, Any]) -> LayerScheme:
    """Return the scheme that ModelOpt's settings specify for one layer or for all layers.

    Args:
        path: file that contains the settings, for messages.
        prefix: place in the file, for messages.
        given: settings with ``quant_algo``.

    Raises:
        ValueError: for an unsupported setting.
    """
    _expect(path, prefix, given, quant_algo=(*_MODELOPT_READ,))
    fmt, activations = _MODELOPT_READ[given["quant_algo"]]
    sizes = (16, 32, 0, None) if given["quant_algo"] == "W4A8_NVFP4_FP8" else _MODELOPT_BLOCKS.get(fmt, (None,))
    _expect(path, prefix, given, group_size=sizes, pre_quant_scale=(None, False))
    for group in (given.get("config_groups") or {}).values():
        _expect(path, prefix, group, pre_quant_scale=(None, False), has_zero_point=(None, False))
    return LayerScheme(fmt, "modelopt", activations)


# compressed-tensors

COMPRESSED_FORMATS = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "fp8_block": "float-quantized",
    "fp8_tensor": "float-quantized",
    "fp8_channel": "float-quantized",
    "mxfp8": "mxfp8-quantized",
}
_GROUPS: dict[str, dict[str, Any]] = {
    "nvfp4": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
    "mxfp4": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "fp8_block": {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
    "fp8_tensor": {"num_bits": 8, "strategy": "tensor"},
    "fp8_channel": {"num_bits": 8, "strategy": "channel"},
    "mxfp8": {"num_bits": 8, "strategy": "group", "group_size": 32},
}


def compressed_arguments(fmt: str) -> dict[str, Any]:
    """Return the entry ``weights`` that compressed-tensors writes to the configuration for a format."""
    return {"type": "float", "symmetric": True, "dynamic": False, **_GROUPS[fmt]}


def _compressed_tensors(path: Path, given: Mapping[str, Any]) -> QuantSpec:
    _expect(path, "", given, quantization_status=("compressed",))
    _refuse_online(path, given.get("transform_config") or {})
    sparsity = given.get("sparsity_config") or {}
    _expect(path, "sparsity_config: ", sparsity, format=(None, "dense"))
    groups = []
    for name, group in (given.get("config_groups") or {}).items():
        if not isinstance(group, Mapping):
            raise ValueError(f"{path}: the group {name} is {group!r}; expected weights and targets")
        groups.append(
            (compressed_scheme(path, f"group {name}: ", group, given.get("format")), tuple(group.get("targets") or ()))
        )
    if not groups:
        raise ValueError(f"{path}: config_groups is missing or empty")
    return QuantSpec(path, "compressed-tensors", tuple(groups), tuple(given.get("ignore") or ()))


_OFFLINE = ("weight_input", "weight_output")
"""Places of transforms that the producer has already multiplied into the stored weights."""


def _refuse_online(path: Path, transforms: Mapping[str, Any]) -> None:
    """Raise an error if the model would have to apply a transform at run time, as with QuIP. Other transforms, such as
    SpinQuant's R1 and R2, are already part of the weights."""
    for name, group in (transforms.get("config_groups") or {}).items():
        if not isinstance(group, Mapping):
            raise ValueError(f"{path}: transform_config: {name} is {group!r}; expected a list of what it applies")
        for each in group.get("apply") or ():
            _expect(path, f"transform_config: {name}: ", each, location=_OFFLINE)


def compressed_scheme(path: Path, prefix: str, group: Mapping[str, Any], overall: str | None) -> LayerScheme:
    """Return the scheme of one entry of ``config_groups`` in a compressed-tensors configuration.

    Args:
        path: file that contains the group, for messages.
        prefix: place in the file, for messages.
        group: ``weights``, ``input_activations`` and, optionally, ``format``.
        overall: format of groups that do not name a format.

    Raises:
        ValueError: for an unsupported setting.
    """
    stored = group.get("format") or overall
    weights = group.get("weights") or {}
    # compressed-tensors divides a format into strategies, such as per tensor and per channel. In this package, each
    # strategy is a separate format.
    of_strategy = {_GROUPS[fmt]["strategy"]: fmt for fmt, name in COMPRESSED_FORMATS.items() if name == stored}
    if not of_strategy:
        expected = ", ".join(map(repr, dict.fromkeys(COMPRESSED_FORMATS.values())))
        raise ValueError(f"{path}: {prefix}format is {stored!r}; expected one of {expected}")
    _expect(path, f"{prefix}weights: ", weights, strategy=(*of_strategy,))
    fmt = of_strategy[weights["strategy"]]
    wanted: dict[str, Any] = {name: (value,) for name, value in compressed_arguments(fmt).items()}
    # The orders "static" and "weight" permute columns only during calibration, so they need no support. "group" and
    # "dynamic" store a permutation, which this package cannot apply.
    _expect(path, f"{prefix}weights: ", weights, **wanted, actorder=(None, "static", "weight"))
    _expect(path, prefix, group, output_activations=(None,))
    inputs = group.get("input_activations")
    bits = _GROUPS[fmt]["num_bits"]
    if inputs is None:
        return LayerScheme(fmt, "compressed-tensors", "fp8" if bits == 8 else "16bit")
    prefix = f"{prefix}input_activations: "
    if fmt == "mxfp4" and inputs.get("num_bits") == 8:
        _expect(
            path, prefix, inputs, type=("float",), symmetric=(True, None), dynamic=(True,), strategy=("group",),
            group_size=(128,),
        )  # fmt: skip
        return LayerScheme(fmt, "compressed-tensors", "fp8")
    dynamic = {"nvfp4": ("local",), "fp8_tensor": (True, False), "fp8_channel": (True, False)}.get(fmt, (True,))
    _expect(path, prefix, inputs, num_bits=(bits,), type=("float",), symmetric=(True, None), dynamic=dynamic)
    if fmt == "mxfp8":
        _expect(path, prefix, inputs, strategy=("group",), group_size=(32,))
    if False not in dynamic:
        return LayerScheme(fmt, "compressed-tensors", f"fp{bits}")
    _expect(path, prefix, inputs, strategy=("token",) if inputs["dynamic"] else ("tensor",))
    return LayerScheme(fmt, "compressed-tensors", "fp8" if inputs["dynamic"] else "fp8_static")


# DeepSeek-V3 and models with the same format


def _fp8(path: Path, given: Mapping[str, Any]) -> QuantSpec:
    _expect(
        path, "", given, weight_block_size=([128, 128],), activation_scheme=("dynamic",), fmt=("e4m3", None),
        scale_fmt=("ue8m0", "float", None), expert_dtype=("fp8", None),
    )  # fmt: skip
    scheme = LayerScheme("fp8_block", "deepseek", "fp8")
    return QuantSpec(path, "deepseek", ((scheme, ("Linear",)),), tuple(given.get("modules_to_not_convert") or ()))


# MiniMax-M3-MXFP8 and models with the same format. Tensors have DeepSeek-V3's names


def _mxfp8(path: Path, given: Mapping[str, Any]) -> QuantSpec:
    _expect(
        path, "", given, weight_block_size=([1, 32], None), activation_scheme=("dynamic", None), fmt=("e4m3", None),
        scale_fmt=("ue8m0", None), moe_quant_algo=(None,),
    )  # fmt: skip
    scheme = LayerScheme("mxfp8", "deepseek", "fp8")
    ignore = given.get("ignored_layers") or given.get("modules_to_not_convert") or ()
    return QuantSpec(path, "deepseek", ((scheme, ("Linear",)),), tuple(ignore))


# auto-round's own configuration. Its tensors are stored as compressed-tensors stores them


def _auto_round(path: Path, given: Mapping[str, Any]) -> QuantSpec:
    _expect(path, "", given, rotation_config=(None, {}))
    base = _auto_round_scheme(path, "", given)
    groups = []
    for name, own in (given.get("extra_config") or {}).items():
        settings = {**given, **own}
        if settings.get("bits", 16) < 16:
            scheme = _auto_round_scheme(path, f"extra_config: {name}: ", settings)
            is_name = re.fullmatch(r"[\w.]+", name) is not None
            groups.append((scheme, (name if is_name else f"re:{name}",)))
    return QuantSpec(path, "auto-round", (*groups, (base, ("Linear",))))


def _auto_round_scheme(path: Path, prefix: str, given: Mapping[str, Any]) -> LayerScheme:
    """Return the scheme that an auto-round configuration specifies for all layers or for one layer."""
    _expect(path, prefix, given, data_type=("nv_fp", "nv_fp4", "mx_fp", "mx_fp4"), bits=(4,), sym=(None, True))
    fmt = "nvfp4" if given["data_type"].startswith("nv") else "mxfp4"
    _expect(path, prefix, given, group_size=(16 if fmt == "nvfp4" else 32,))
    bits = given.get("act_bits") or 16
    if bits >= 16:
        return LayerScheme(fmt, "compressed-tensors", "16bit")
    kinds = ("nv_fp", "nv_fp4", "nv_fp4_with_static_gs") if fmt == "nvfp4" else ("mx_fp", "mx_fp4", "mx_fp_rceil")
    _expect(path, prefix, given, act_bits=(4,), act_data_type=kinds)
    return LayerScheme(fmt, "compressed-tensors", "fp4")


# Quark


def _quark(path: Path, given: Mapping[str, Any]) -> QuantSpec:
    _expect(path, "", given, layer_type_quant_config=(None, {}), softmax_quant_spec=(None,))
    _expect(path, "export: ", given.get("export") or {}, weight_format=(None, "real_quantized"))
    for algorithm in given.get("algo_config") or ():
        if algorithm.get("name") in ("rotation", "quarot"):
            raise ValueError(f"{path}: algo_config: name is {algorithm['name']!r}; expected no rotations")
    groups = [
        (_quark_scheme(path, f"layer_quant_config: {name}: ", own), (name,))
        for name, own in (given.get("layer_quant_config") or {}).items()
        if own.get("weight") is not None
    ]
    base = given.get("global_quant_config") or {}
    every = ((_quark_scheme(path, "global_quant_config: ", base), ("Linear",)),) if base.get("weight") else ()
    if not groups and not every:
        raise ValueError(f"{path}: global_quant_config is {base!r}; expected a weight")
    return QuantSpec(path, "quark", (*groups, *every), tuple(given.get("exclude") or ()))


def _quark_scheme(path: Path, prefix: str, given: Mapping[str, Any]) -> LayerScheme:
    _expect(path, prefix, given, output_tensors=(None,), bias=(None,))
    tensors = {name: given.get(name) for name in ("weight", "input_tensors")}
    for name, each in tensors.items():
        if each is not None and not isinstance(each, Mapping):
            raise ValueError(f"{path}: {prefix}{name} has {len(each)} stages; expected one")
    weight, inputs = tensors["weight"] or {}, tensors["input_tensors"]
    blocks: dict[str, Any] = {
        "dtype": ("fp4",), "qscheme": ("per_group",), "group_size": (32,), "scale_format": ("e8m0",),
    }  # fmt: skip
    _expect(path, f"{prefix}weight: ", weight, **blocks, is_dynamic=(False, None), ch_axis=(-1, 1, None))
    if inputs is None:
        return LayerScheme("mxfp4", "quark", "16bit")
    if inputs.get("dtype") == "fp8_e4m3":
        return LayerScheme("mxfp4", "quark", "fp8" if inputs.get("is_dynamic") else "fp8_static")
    _expect(path, f"{prefix}input_tensors: ", inputs, **blocks, is_dynamic=(True,))
    return LayerScheme("mxfp4", "quark", "fp4")


# gpt-oss, which quantises only its experts. These are not linear layers


def _gpt_oss(path: Path, given: Mapping[str, Any]) -> QuantSpec:
    return QuantSpec(path, "gpt-oss", (), tuple(given.get("modules_to_not_convert") or ()))


# torchao. The configuration says little, because the metadata of the safetensors files describes each tensor

TORCHAO_CONFIGS = ("NVFP4WeightOnlyConfig", "NVFP4DynamicActivationNVFP4WeightConfig")
"""torchao configurations that quantise weights to NVFP4."""
_TORCHAO_MX = "MXDynamicActivationMXWeightConfig"
_TORCHAO_BY_NAME = ("FqnToConfig", "ModuleFqnToConfig")


def _torchao(path: Path, given: Mapping[str, Any]) -> QuantSpec:
    quantised = given.get("quant_type")
    quantised = quantised.get("default") if isinstance(quantised, Mapping) else quantised
    configs = [quantised]
    if isinstance(quantised, Mapping) and quantised.get("_type") in _TORCHAO_BY_NAME:
        configs = [each for value in (quantised.get("_data") or {}).values() if isinstance(value, Mapping)
                   for each in value.values() if each is not None]  # fmt: skip
    for config in configs:
        kind = config.get("_type") if isinstance(config, Mapping) else config
        if kind in TORCHAO_CONFIGS:
            continue
        data = (config.get("_data") or {}) if isinstance(config, Mapping) else {}
        dtype = (data.get("weight_dtype") or {}).get("_data")
        if kind != _TORCHAO_MX or dtype != "float4_e2m1fn_x2":
            elements = f" with weights in {dtype}" if kind == _TORCHAO_MX else ""
            expected = ", ".join((*TORCHAO_CONFIGS, f"{_TORCHAO_MX} with weights in float4_e2m1fn_x2"))
            raise ValueError(f"{path}: quant_type is {kind}{elements}; expected one of {expected}")
    return QuantSpec(path, "torchao", (), tuple(given.get("modules_to_not_convert") or ()))
