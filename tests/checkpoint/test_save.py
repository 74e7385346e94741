"""Save checkpoints: saved checkpoints are read back bit for bit, and decode by the formulas of the formats."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support import weights
from torch import nn

pytest.importorskip("safetensors")
from safetensors.torch import load_file

from torch_cute_ops import checkpoint
from torch_cute_ops.checkpoint._layers import _inverse
from torch_cute_ops.nn import FP8ChannelLinear, FP8TensorLinear, NVFP4Linear, QuantLinear, merge, quantize_

H = 128
FORMATS = [
    ("modelopt", "nvfp4", "16bit"),
    ("modelopt", "nvfp4", "fp4"),
    ("compressed-tensors", "nvfp4", "16bit"),
    ("compressed-tensors", "nvfp4", "fp4"),
    ("compressed-tensors", "mxfp4", "16bit"),
    ("compressed-tensors", "mxfp4", "fp4"),
    ("compressed-tensors", "mxfp4", "fp8"),
    ("compressed-tensors", "fp8_block", "fp8"),
    ("modelopt", "fp8_tensor", "fp8_static"),
    ("modelopt", "fp8_channel", "fp8"),
    ("compressed-tensors", "fp8_tensor", "fp8"),
    ("compressed-tensors", "fp8_channel", "fp8"),
    ("compressed-tensors", "fp8_channel", "fp8_static"),
    ("modelopt", "mxfp8", "fp8"),
    ("compressed-tensors", "mxfp8", "fp8"),
]
by_format = pytest.mark.parametrize(("style", "scheme", "activations"), FORMATS)


@pytest.mark.parametrize(("scheme", "activations"), [each[1:] for each in FORMATS if each[0] == "modelopt"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_file_of_modelopt_is_a_state_dict(scheme, activations, assign, tmp_path):
    """Check that a saved ModelOpt checkpoint of a model without merged layers equals the model's state dict."""
    model, fresh = (quantised(scheme, activations) for _ in range(2))
    checkpoint.save(model, tmp_path, "modelopt")
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=assign)
    for (name, tensor), other in zip(model.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), name
    x = torch.randn(3, H).bfloat16()
    assert torch.equal(fresh.q_proj(x), model.q_proj(x))


class Model(nn.Module):
    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, H)
        self.q_proj, self.k_proj = nn.Linear(H, 256), nn.Linear(H, 64)
        self.mlp = nn.Sequential(nn.Linear(256, 192, bias=False), nn.LayerNorm(192))
        self.lm_head = nn.Linear(H, 32, bias=False)
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        if is_tied:
            self.lm_head.weight = self.embed.weight


def calibrate(model: nn.Module) -> None:
    model.q_proj(torch.randn(4, H).bfloat16())
    model.k_proj(torch.randn(4, H).bfloat16())
    model.mlp(torch.randn(4, 256).bfloat16())


def quantised(scheme: str, activations: str, **given) -> Model:
    is_calibrated = activations in ("fp4", "fp8_static")
    model = Model(**given).bfloat16()
    return quantize_(model, scheme, activations=of_layers(activations), calibrate=calibrate if is_calibrated else None)


def of_layers(activations: str) -> str:
    return activations.removesuffix("_static")


def assert_same(got: nn.Module, want: nn.Module) -> None:
    states = [each.state_dict() for each in (got, want)]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[1].items():
        assert torch.equal(states[0][name].view(torch.uint8), tensor.view(torch.uint8)), name


@by_format
@pytest.mark.parametrize("is_tied", [False, True], ids=["", "tied"])
def test_read_back(style, scheme, activations, is_tied, tmp_path):
    model = quantised(scheme, activations, is_tied=is_tied)
    checkpoint.save(model, tmp_path / "new" / "folder", style, config={"model_type": "llama"})
    given = {"activations": of_layers(activations)}
    read = checkpoint.load_(Model(is_tied=is_tied).bfloat16(), tmp_path / "new" / "folder", **given)
    assert_same(read, model)
    assert json.loads((tmp_path / "new" / "folder" / "config.json").read_text())["model_type"] == "llama"
    assert ("lm_head.weight" in load_file(tmp_path / "new" / "folder" / "model.safetensors")) is not is_tied
    assert {type(each) for each in read.modules()} == {type(each) for each in model.modules()}


@by_format
def test_tensors_decode_by_the_formulas(style, scheme, activations, tmp_path):
    model = quantised(scheme, activations)
    checkpoint.save(model, tmp_path, style)
    tensors = load_file(tmp_path / "model.safetensors")
    own = {name.removeprefix("mlp.0."): tensor for name, tensor in tensors.items() if name.startswith("mlp.0.")}
    if scheme == "fp8_block":
        assert own.keys() == {"weight", "weight_scale"}
        got = weights.fp8_blocks(own["weight"], own["weight_scale"])
    elif scheme == "mxfp8":
        assert own.keys() == {"weight", "weight_scale"} and own["weight_scale"].dtype == torch.uint8
        got = weights.mxfp8(own["weight"], own["weight_scale"])
    elif scheme.startswith("fp8"):
        inputs = {"input_scale"} if activations == "fp8_static" else set()
        assert own.keys() == {"weight", "weight_scale"} | inputs
        shape = (1,) if scheme == "fp8_tensor" else (192, 1)
        assert own["weight_scale"].shape == (shape if style == "compressed-tensors" else shape[:-1])
        got = weights.fp8_rows(own["weight"], own["weight_scale"])
    elif scheme == "mxfp4":
        assert own.keys() == {"weight_packed", "weight_scale"}
        got = weights.fp4(own["weight_packed"], own["weight_scale"])
    elif style == "modelopt":
        assert own.keys() - {"input_scale"} == {"weight", "weight_scale", "weight_scale_2"}
        assert own["weight_scale_2"].shape == ()
        got = weights.fp4(own["weight"], own["weight_scale"], own["weight_scale_2"].double().item())
    else:
        assert own.keys() - {"input_global_scale"} == {"weight_packed", "weight_scale", "weight_global_scale"}
        assert own["weight_global_scale"].shape == (1,)
        got = weights.fp4(own["weight_packed"], own["weight_scale"], 1 / own["weight_global_scale"].double().item())
    assert np.allclose(got, model.mlp[0].dequantize().double().numpy(), rtol=2e-7, atol=0)
    if scheme == "nvfp4" and activations == "fp4":
        amax = 2688 * (own["input_scale"] if style == "modelopt" else 1 / own["input_global_scale"]).item()
        assert amax == pytest.approx(2688 * model.mlp[0].input_scale.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("style", "cls"),
    [("modelopt", FP8TensorLinear), ("compressed-tensors", FP8TensorLinear), ("compressed-tensors", FP8ChannelLinear)],
)
def test_static_fp8(style, cls, tmp_path):
    model = Model().bfloat16()
    for name in ("q_proj", "k_proj"):
        model.set_submodule(name, cls.from_float(model.get_submodule(name), input_amax=3.0))
    model.mlp[0] = cls.from_float(model.mlp[0], input_amax=5.0)
    checkpoint.save(model, tmp_path, style)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["q_proj.input_scale"].shape == (() if style == "modelopt" else (1,))
    assert tensors["q_proj.input_scale"].item() == pytest.approx(3 / 448)
    assert_same(checkpoint.load_(Model().bfloat16(), tmp_path), model)
    if style == "modelopt":
        own = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
        assert own == {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, H).bfloat16())


class OwnLinear(nn.Linear):
    pass


@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors"])
def test_unquantised_modules_are_listed(style, tmp_path):
    """Check that the configuration lists every unquantised module that a reader could mistake for a linear layer, so
    that readers expect no scales for it."""
    model = quantised("nvfp4", "16bit")
    model.gate, model.own = Router(), OwnLinear(H, 8).bfloat16()
    checkpoint.save(model, tmp_path, style)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", "gate", "own"]


def test_modelopt_configuration(tmp_path):
    checkpoint.save(quantised("nvfp4", "16bit"), tmp_path, "modelopt")
    own = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
    assert own == {
        "quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]
    }  # fmt: skip
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["quant_algo"], config["ignore"]) == ("modelopt", "W4A16_NVFP4", ["lm_head"])


@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors"])
def test_layers_of_several_schemes(style, tmp_path):
    model = quantised("nvfp4", "16bit")
    model.q_proj = NVFP4Linear.from_float(nn.Linear(H, 256).bfloat16(), input_amax=3.0)
    model.mlp[0] = FP8TensorLinear.from_float(nn.Linear(256, 192, bias=False).bfloat16(), input_amax=2.0)
    if style == "compressed-tensors":
        quantize_(model.mlp.append(nn.Linear(128, 128, bias=False).bfloat16()), "fp8_block")
    checkpoint.save(model, tmp_path, style)
    read = Model().bfloat16()
    if style == "compressed-tensors":
        read.mlp.append(nn.Linear(128, 128, bias=False).bfloat16())
    assert_same(checkpoint.load_(read, tmp_path), model)
    spec = checkpoint.read_spec(tmp_path)
    assert [spec.scheme(name).activations for name in ("q_proj", "k_proj")] == ["fp4", "16bit"]


def test_shards(tmp_path):
    model = quantised("nvfp4", "16bit")
    checkpoint.save(model, tmp_path, "modelopt", shard_bytes=30_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and all(path.stat().st_size < 40_000 for path in files)
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert_same(checkpoint.load_(Model().bfloat16(), tmp_path), model)


@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors"])
def test_merged_layers_are_written_separately(style, tmp_path):
    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qk = nn.Linear(H, 320)

    parts = [NVFP4Linear.from_float(nn.Linear(H, n).bfloat16()) for n in (256, 64)]
    model = Merged()
    model.qk = merge(parts)
    names = {"qk": ("q_proj", "k_proj")}
    with pytest.raises(ValueError, match="qk merges 2 layers, but merged gives 0 names"):
        checkpoint.save(model, tmp_path, style)
    checkpoint.save(model, tmp_path, style, merged=names)
    assert {name.partition(".")[0] for name in load_file(tmp_path / "model.safetensors")} == {"q_proj", "k_proj"}
    read = checkpoint.load_(Merged().bfloat16(), tmp_path, merged=names)
    assert_same(read, model)
    assert isinstance(read.qk, QuantLinear) and read.qk.parts == (256, 64)


def test_reciprocals():
    """Check that the inverse of a factor is exact if the factor is the reciprocal of a float32 number, and otherwise
    rounded."""
    scales = torch.rand(100_000) * 2.0 ** torch.randint(-20, 20, (100_000,))
    values = scales.reciprocal()
    assert torch.equal(_inverse(values).reciprocal(), values)
    assert torch.allclose(_inverse(scales).double() * scales.double(), torch.ones(()).double(), rtol=2.0**-23)


def test_fp8_activations_per_token_of_fp4_weights(tmp_path):
    """Check that NVFP4 layers with dynamic scales are saved as weights for 16-bit activations, which load again, and
    that static scales of FP8 activations are refused."""
    model = quantised("nvfp4", "fp8_token")
    checkpoint.save(model, tmp_path / "dynamic", "modelopt", config={})
    read = checkpoint.load_(Model().bfloat16(), tmp_path / "dynamic", activations="fp8_token")
    assert_same(read, model)
    x = torch.randn(3, H).bfloat16()
    assert torch.equal(read.q_proj(x), model.q_proj(x))
    static = quantize_(Model().bfloat16(), "nvfp4", activations="fp8_token", calibrate=calibrate)
    assert static.q_proj.has_input_scale
    with pytest.raises(ValueError, match="does not support nvfp4 with a static scale of FP8 activations"):
        checkpoint.save(static, tmp_path / "static", "modelopt", config={})


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="style is 'gguf'"):
        checkpoint.save(quantised("nvfp4", "16bit"), tmp_path, "gguf")
    with pytest.raises(ValueError, match="no quantised layers"):
        checkpoint.save(Model(), tmp_path, "modelopt")
    with pytest.raises(ValueError, match="style 'modelopt' does not support mxfp4; expected 'compressed-tensors'"):
        checkpoint.save(quantised("mxfp4", "16bit"), tmp_path, "modelopt")
    with pytest.raises(
        ValueError, match="style 'modelopt' does not support fp8_tensor with activations 'fp8'; expected 'fp8_st"
    ):
        checkpoint.save(quantised("fp8_tensor", "fp8"), tmp_path, "modelopt")
    assert not [*tmp_path.iterdir()]
    checkpoint.save(quantised("nvfp4", "16bit"), tmp_path, "modelopt")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match=r"model\.safetensors exists"):
        checkpoint.save(quantised("nvfp4", "16bit"), tmp_path, "compressed-tensors")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
