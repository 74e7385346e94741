"""Read the quantisation configurations of checkpoints that this package supports, and refuse all other
configurations."""

from __future__ import annotations

import copy
import json

import pytest

pytest.importorskip("safetensors")
from support.checkpoints import (
    FP8_CHANNEL_WEIGHT,
    FP8_INPUT,
    FP8_TENSOR_INPUT,
    FP8_TENSOR_WEIGHT,
    FP8_TOKEN_INPUT,
    FP8_WEIGHT,
    KINDS,
    MXFP4_WEIGHT,
    NVFP4_WEIGHT,
    compressed,
)

from torch_cute_ops.checkpoint import LayerScheme, QuantSpec, read_spec


def spec_of(folder, quantization, name: str = "config.json", key: str = "quantization_config") -> QuantSpec:
    (folder / name).write_text(json.dumps({key: quantization}))
    return read_spec(folder)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_kinds(kind, tmp_path):
    spec = spec_of(tmp_path, kind.quantization)
    assert spec.style == kind.style and spec.path == tmp_path / "config.json"
    scheme = spec.scheme("model.layers.3.mlp.up_proj")
    assert scheme is not None and (scheme.format, scheme.style) == (kind.scheme, kind.style)
    if kind.scheme == "nvfp4":
        assert scheme.activations == ("fp4" if kind.has_input_scale else "16bit")
    elif "fp8" in kind.scheme:
        assert scheme.activations == ("fp8_static" if kind.has_input_scale else "fp8")
    assert spec.scheme("lm_head") is (scheme if kind.quantization["quant_method"] == "fp8" else None)


def test_modelopt_file(tmp_path):
    """Read ModelOpt's own file, which contains wildcards. ``config.json`` takes precedence over this file."""
    given = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "model.layers.0.self_attn*"]}
    spec = spec_of(tmp_path, given, "hf_quant_config.json", "quantization")
    assert spec.scheme("model.layers.1.self_attn.q_proj") == LayerScheme("nvfp4", "modelopt", "fp4")
    assert spec.scheme("model.layers.0.self_attn.q_proj") is None
    (tmp_path / "config.json").write_text("{}")
    assert read_spec(tmp_path) == spec
    assert spec_of(tmp_path, KINDS["DeepSeek FP8"].quantization).style == "deepseek"


def test_targets(tmp_path):
    """Check that names take precedence over regular expressions, and regular expressions over ``"Linear"``."""
    quantization = {
        **compressed("mixed-precision", {}, None),
        "config_groups": {
            "rest": {"targets": ["Linear"], "weights": FP8_WEIGHT, "input_activations": FP8_INPUT,
                     "format": "float-quantized"},
            "some": {"targets": [r"re:.*\.mlp\..*"], "weights": MXFP4_WEIGHT, "format": "mxfp4-pack-quantized"},
            "one": {"targets": ["a.mlp.up"], "weights": NVFP4_WEIGHT, "format": "nvfp4-pack-quantized"},
        },
        "ignore": [r"re:.*gate$", "vision"],
    }  # fmt: skip
    spec = spec_of(tmp_path, quantization)
    formats = {
        name: getattr(spec.scheme(name), "format", None)
        for name in ("a.q", "a.mlp.down", "a.mlp.up", "a.mlp.gate", "vision.q", "vision2.q")
    }
    assert formats == {
        "a.q": "fp8_block", "a.mlp.down": "mxfp4", "a.mlp.up": "nvfp4", "a.mlp.gate": None, "vision.q": None,
        "vision2.q": "fp8_block",
    }  # fmt: skip
    assert spec.scheme_of_tensors("a.mlp.gate") is None


@pytest.mark.parametrize("weight", [FP8_TENSOR_WEIGHT, FP8_CHANNEL_WEIGHT], ids=["tensor", "channel"])
@pytest.mark.parametrize(
    ("inputs", "activations"), [(FP8_TENSOR_INPUT, "fp8_static"), (FP8_TOKEN_INPUT, "fp8"), (None, "fp8")]
)
def test_fp8_strategies(weight, inputs, activations, tmp_path):
    spec = spec_of(tmp_path, compressed("float-quantized", weight, inputs))
    assert spec.scheme("a") == LayerScheme(f"fp8_{weight['strategy']}", "compressed-tensors", activations)


def test_not_quantised(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    spec = read_spec(tmp_path)
    assert spec.style is None and spec.scheme("a") is None and spec.scheme_of_tensors("a") is None


def changed(kind: str, path: str, value) -> dict:
    """Return the configuration of this kind with another value at a path of keys."""
    quantization = copy.deepcopy(KINDS[kind].quantization)
    *keys, last = path.split("/")
    part = quantization
    for key in keys:
        part = part[key]
    part[last] = value
    return quantization


MXFP4 = "compressed-tensors MXFP4"
NVFP4, FP8, DEEPSEEK = "compressed-tensors NVFP4", "compressed-tensors FP8", "DeepSeek FP8"
FP8_TENSOR, FP8_CHANNEL = "compressed-tensors FP8 tensor", "compressed-tensors FP8 channel"
GROUP = "config_groups/group_0"


@pytest.mark.parametrize(
    ("kind", "path", "value", "message"),
    [
        ("modelopt W4A4", "quant_algo", "INT8_SQ", "quant_algo is 'INT8_SQ'; expected 'NVFP4' or 'W4A16_NVFP4' or 'F"),
        ("modelopt W4A4", "quant_algo", None, "quant_algo is None"),
        ("modelopt W4A4", "group_size", 32, "group_size is 32; expected 16 or 0 or None"),
        ("modelopt W4A4", "config_groups", {"g": {"pre_quant_scale": True}}, "pre_quant_scale is True"),
        ("modelopt W4A4", "quant_algo", "MIXED_PRECISION", "quantized_layers is missing"),
        ("modelopt W4A4", "quant_method", "awq", "quant_method is 'awq'; expected one of 'modelopt', "),
        (NVFP4, "quantization_status", "frozen", "quantization_status is 'frozen'; expected 'compressed'"),
        (
            NVFP4,
            "transform_config",
            {"config_groups": {"u": 1}},
            "transform_config: u is 1; expected a list",
        ),
        (NVFP4, "sparsity_config", {"format": "sparse-24"}, "sparsity_config: format is 'sparse-24'"),
        (NVFP4, "format", "pack-quantized", "group group_0: format is 'pack-quantized'; expected one of"),
        (NVFP4, "config_groups", {}, "config_groups is missing"),
        (NVFP4, "config_groups", {"NVFP4": ["Linear"]}, r"the group NVFP4 is \['Linear'\]"),
        (NVFP4, f"{GROUP}/weights/symmetric", False, "group_0: weights: symmetric is False; expected True"),
        (NVFP4, f"{GROUP}/weights/group_size", 32, "weights: group_size is 32; expected 16"),
        (NVFP4, f"{GROUP}/weights/type", "int", "weights: type is 'int'; expected 'float'"),
        (NVFP4, f"{GROUP}/weights/actorder", "group", "weights: actorder is 'group'"),
        (NVFP4, f"{GROUP}/input_activations/num_bits", 8, "input_activations: num_bits is 8; expected 4"),
        (NVFP4, f"{GROUP}/input_activations/dynamic", False, "input_activations: dynamic is False; expected 'local'"),
        (NVFP4, f"{GROUP}/output_activations", {"num_bits": 8}, "output_activations is "),
        ("modelopt FP8 tensor", "group_size", 128, "group_size is 128; expected None"),
        (FP8, f"{GROUP}/weights/strategy", "group", "strategy is 'group'; expected 'block' or 'tensor' or 'channel'"),
        (MXFP4, f"{GROUP}/input_activations", {**FP8_INPUT, "group_size": 32}, "group_size is 32; expected 128"),
        (FP8_TENSOR, f"{GROUP}/weights/num_bits", 4, "weights: num_bits is 4; expected 8"),
        (FP8_TENSOR, f"{GROUP}/weights/symmetric", False, "weights: symmetric is False; expected True"),
        (FP8_TENSOR, f"{GROUP}/weights/dynamic", True, "weights: dynamic is True; expected False"),
        (FP8_TENSOR, f"{GROUP}/input_activations/strategy", "token", "strategy is 'token'; expected 'tensor'"),
        (FP8_CHANNEL, f"{GROUP}/input_activations/strategy", "tensor", "strategy is 'tensor'; expected 'token'"),
        (FP8_CHANNEL, f"{GROUP}/input_activations/dynamic", "local", "dynamic is 'local'; expected True or False"),
        (FP8_CHANNEL, "format", "naive-quantized", "format is 'naive-quantized'; expected one of"),
        (FP8, f"{GROUP}/weights/block_structure", [64, 64], r"expected \[128, 128\]"),
        (DEEPSEEK, "weight_block_size", [64, 64], r"weight_block_size is \[64, 64\]; expected \[128, 128\]"),
        (DEEPSEEK, "activation_scheme", "static", "activation_scheme is 'static'; expected 'dynamic'"),
    ],
)
def test_refused_checkpoints(kind, path, value, message, tmp_path):
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        spec_of(tmp_path, changed(kind, path, value))


def test_mixed_precision_with_an_unknown_algorithm(tmp_path):
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"a.q": {"quant_algo": "NVFP4"}, "a.k": {"quant_algo": "INT4_AWQ"}},
    }
    with pytest.raises(ValueError, match=r"of a\.k, quant_algo is 'INT4_AWQ'"):
        spec_of(tmp_path, quantization)
