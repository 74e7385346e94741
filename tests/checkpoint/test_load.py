"""Load checkpoints: each format decodes as its producer defines it, and ambiguous files are refused."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import weights
from torch import nn

pytest.importorskip("safetensors")
from support import checkpoints
from support.checkpoints import KINDS, Kind

from torch_cute_ops import checkpoint
from torch_cute_ops.checkpoint._files import Files
from torch_cute_ops.nn import QuantLinear

H = 256
PARTS = {"q_proj": 256, "k_proj": 128, "v_proj": 72}
by_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
NVFP4 = KINDS["modelopt W4A4"]


class Attention(nn.Module):
    def __init__(self, is_merged: bool) -> None:
        super().__init__()
        if is_merged:
            self.qkv_proj = nn.Linear(H, sum(PARTS.values()))
        else:
            for name, n in PARTS.items():
                self.add_module(name, nn.Linear(H, n))
        self.o_proj = nn.Linear(H, H, bias=False)


class Model(nn.Module):
    def __init__(self, is_merged: bool = False, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, H)
        self.layers = nn.ModuleList([Attention(is_merged)])
        self.norm = nn.LayerNorm(H)
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.lm_head = nn.Linear(H, 32, bias=False)
        if is_tied:
            self.lm_head.weight = self.embed.weight


def model_of(device: str = "meta", **given: Any) -> Model:
    return Model(**given).bfloat16().to(device) if device != "meta" else on_meta(**given)


def on_meta(**given: Any) -> Model:
    with torch.device("meta"):
        return Model(**given).bfloat16()


class Content:
    """Tensors of a checkpoint for ``Model``, and the weights in float64 to which they decode."""

    def __init__(self, kind: Kind, is_tied: bool = False) -> None:
        self.tensors: dict[str, torch.Tensor] = {
            "embed.weight": torch.randn(32, H).bfloat16(),
            "norm.weight": torch.randn(H).bfloat16(),
            "norm.bias": torch.randn(H).bfloat16(),
            "steps": torch.arange(3),
        }
        if not is_tied:
            self.tensors["lm_head.weight"] = torch.randn(32, H).bfloat16()
        self.weights = {}
        for name, n in {**PARTS, "o_proj": H}.items():
            own, self.weights[name] = checkpoints.random_layer(kind, n, H)
            self.tensors |= {f"layers.0.{name}.{suffix}": tensor for suffix, tensor in own.items()}
            if name != "o_proj":
                self.tensors[f"layers.0.{name}.bias"] = torch.randn(n).bfloat16()


def assert_weight(layer: nn.Module, want: np.ndarray) -> None:
    assert isinstance(layer, QuantLinear)
    got = layer.dequantize().double().numpy()
    assert got.shape == want.shape and np.allclose(got, want, rtol=2.5e-7, atol=0)


# Valid checkpoints


@by_kind
@pytest.mark.parametrize("is_merged", [False, True], ids=["apart", "merged"])
@pytest.mark.parametrize("where", ["meta", "cpu"])
def test_values(kind, is_merged, where, tmp_path):
    content = Content(kind)
    checkpoints.write(tmp_path, content.tensors, kind.quantization, shards=3 if is_merged else 1)
    model = model_of(where, is_merged=is_merged)
    assert checkpoint.load_(model, tmp_path) is model
    attention = model.layers[0]
    assert_weight(attention.o_proj, content.weights["o_proj"])
    if is_merged:
        assert_weight(attention.qkv_proj, np.concatenate([content.weights[name] for name in PARTS]))
        assert attention.qkv_proj.parts == tuple(PARTS.values())
        bias = torch.cat([content.tensors[f"layers.0.{name}.bias"] for name in PARTS])
        assert torch.equal(attention.qkv_proj.bias, bias)
    else:
        for name in PARTS:
            assert_weight(attention.get_submodule(name), content.weights[name])
            assert torch.equal(attention.get_submodule(name).bias, content.tensors[f"layers.0.{name}.bias"])
    assert type(model.lm_head) is nn.Linear
    for name in ("embed.weight", "norm.weight", "norm.bias", "lm_head.weight", "steps"):
        assert torch.equal(model.state_dict()[name], content.tensors[name])
    x = torch.randn(3, H).bfloat16()
    with torch.no_grad():
        y = attention.o_proj(x).double().numpy()
    want = x.double().numpy() @ content.weights["o_proj"].T
    assert np.linalg.norm(y - want) <= (0.05 if "fp8" in kind.scheme else 2**-8) * np.linalg.norm(want)


@by_kind
def test_the_file_can_go(kind, tmp_path):
    """Check that no tensor of the loaded model is mapped from the file, so that the file can be deleted."""
    content = Content(kind)
    checkpoints.write(tmp_path, content.tensors, kind.quantization)
    model = checkpoint.load_(on_meta(), tmp_path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    size = (tmp_path / "model.safetensors").stat().st_size
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * size)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name


@pytest.mark.parametrize("name", ["modelopt W4A4", "compressed-tensors NVFP4"])
@torch.no_grad()
def test_fp4_activations(name, tmp_path):
    content = Content(KINDS[name])
    checkpoints.write(tmp_path, content.tensors, KINDS[name].quantization)
    model = checkpoint.load_(on_meta(is_merged=True), tmp_path, activations="fp4")
    layer = model.layers[0].qkv_proj
    assert layer.activations == "fp4" and layer.input_scale.item() == pytest.approx(0.01)
    x = torch.randn(64, H).bfloat16()
    want = x.float() @ layer.dequantize().T
    assert (layer(x) - layer.bias - want).norm() <= 0.15 * want.norm()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_fp8_activations(dynamic, tmp_path):
    """Check that the configuration decides whether activations are static, and that the tensors must agree."""
    kind = KINDS["compressed-tensors FP8 channel" if dynamic else "compressed-tensors FP8 tensor"]
    content = Content(kind)
    checkpoints.write(tmp_path, content.tensors, kind.quantization)
    model = checkpoint.load_(on_meta(is_merged=True), tmp_path)
    assert model.layers[0].qkv_proj.has_input_scale is not dynamic
    if dynamic:
        content.tensors["layers.0.o_proj.input_scale"] = torch.tensor([0.01])
        refused(tmp_path, content.tensors, r"o_proj\.input_scale in .* is unknown to compressed-tensors fp8_chan", kind)
    else:
        assert model.layers[0].qkv_proj.input_scale.item() == torch.tensor(0.01).bfloat16().item()


def test_mixed_precision_with_fp8(tmp_path):
    """Load a checkpoint with NVFP4 and FP8 layers, as ModelOpt's search for each layer's best format writes it."""
    content, fp8 = Content(KINDS["modelopt W4A4"]), KINDS["modelopt FP8 tensor"]
    tensors, want = checkpoints.random_layer(fp8, H, H)
    o_proj = {name for name in content.tensors if name.startswith("layers.0.o_proj.")}
    kept = {name: tensor for name, tensor in content.tensors.items() if name not in o_proj}
    layers = {f"layers.0.{name}": {"quant_algo": "NVFP4", "group_size": 16} for name in PARTS}
    layers["layers.0.o_proj"] = {"quant_algo": "FP8"}
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    checkpoints.write(
        tmp_path, kept | {f"layers.0.o_proj.{suffix}": each for suffix, each in tensors.items()}, quantization
    )
    model = checkpoint.load_(on_meta(), tmp_path)
    assert_weight(model.layers[0].q_proj, content.weights["q_proj"])
    assert_weight(model.layers[0].o_proj, want)


def test_mixed_precision(tmp_path):
    """Load a ModelOpt checkpoint whose configuration names an algorithm for each layer."""
    content = Content(KINDS["modelopt W4A16"])
    content.tensors["layers.0.o_proj.input_scale"] = torch.tensor(0.02)
    layers = {f"layers.0.{name}": {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in PARTS}
    layers["layers.0.o_proj"] = {"quant_algo": "NVFP4", "group_size": 16}
    quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "kv_cache_quant_algo": "FP8"}
    checkpoints.write(tmp_path, content.tensors, None)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    model = checkpoint.load_(on_meta(), tmp_path)
    assert_weight(model.layers[0].q_proj, content.weights["q_proj"])
    assert model.layers[0].o_proj.has_input_scale and not model.layers[0].q_proj.has_input_scale
    assert checkpoint.load_(on_meta(), tmp_path, activations={"nvfp4": "fp8"}).layers[0].q_proj.activations == "fp8"


def test_not_quantised(tmp_path):
    """Load a checkpoint without quantised tensors, and a merged layer of which no part is quantised."""
    plain = {f"layers.0.{name}.weight": torch.randn(n, H).bfloat16() for name, n in PARTS.items()}
    content = Content(NVFP4)
    kept = {name: tensor for name, tensor in content.tensors.items() if not name.startswith("layers") or "bias" in name}
    tensors = {**kept, **plain, "layers.0.o_proj.weight": torch.randn(H, H).bfloat16()}
    checkpoints.write(tmp_path, tensors, None)
    model = checkpoint.load_(on_meta(is_merged=True), tmp_path)
    assert type(model.layers[0].qkv_proj) is nn.Linear
    assert torch.equal(model.layers[0].qkv_proj.weight, torch.cat([*plain.values()]))


def test_quantised_lm_head(tmp_path):
    """Check that the tensors show whether lm_head is quantised, even if the list of ignored layers names it."""
    content = Content(NVFP4)
    del content.tensors["lm_head.weight"]
    own, want = checkpoints.random_layer(NVFP4, 32, H)
    content.tensors |= {f"lm_head.{suffix}": tensor for suffix, tensor in own.items()}
    checkpoints.write(tmp_path, content.tensors, NVFP4.quantization)
    assert "lm_head" in NVFP4.quantization["ignore"]
    assert_weight(checkpoint.load_(on_meta(), tmp_path).lm_head, want)
    with pytest.raises(ValueError, match=r"lm_head\.\w+ in .*model\.safetensors is quantised, but lm_head shares"):
        checkpoint.load_(on_meta(is_tied=True), tmp_path)


@pytest.mark.parametrize("where", ["meta", "cpu"])
def test_tied_embeddings(where, tmp_path):
    content = Content(NVFP4, is_tied=True)
    checkpoints.write(tmp_path, content.tensors, NVFP4.quantization)
    model = checkpoint.load_(model_of(where, is_tied=True), tmp_path)
    assert model.lm_head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, content.tensors["embed.weight"])
    content.tensors["lm_head.weight"] = content.tensors["embed.weight"].clone()
    checkpoints.write(tmp_path, content.tensors, NVFP4.quantization)
    assert torch.equal(
        checkpoint.load_(model_of(where, is_tied=True), tmp_path).lm_head.weight, content.tensors["embed.weight"]
    )
    content.tensors["lm_head.weight"][0, 0] += 1
    checkpoints.write(tmp_path, content.tensors, NVFP4.quantization)
    with pytest.raises(ValueError, match=r"lm_head\.weight in .* differs from embed\.weight in .*the model ties them"):
        checkpoint.load_(model_of(where, is_tied=True), tmp_path)


def test_scales_of_the_kv_cache(tmp_path):
    content = Content(NVFP4)
    for name in ("k_proj.k_scale", "v_proj.v_scale"):
        content.tensors[f"layers.0.{name}"] = torch.ones(())
    checkpoints.write(tmp_path, content.tensors, NVFP4.quantization)
    with pytest.warns(UserWarning, match=r"KV cache are not used: layers\.0\.k_proj\.k_scale, ") as warned:
        model = checkpoint.load_(on_meta(), tmp_path)
    assert len(warned) == 1
    assert_weight(model.layers[0].k_proj, content.weights["k_proj"])


def test_gpt_oss(tmp_path):
    experts, hidden, width = 3, 64, 96
    tensors = checkpoints.gpt_oss_experts(experts, hidden, width, name="e", scales=(110, 130))
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    checkpoints.write(tmp_path, tensors, quantization)
    got = checkpoint.read_experts(tmp_path, "e")
    for e in range(experts):
        blocks = tensors["e.gate_up_proj_blocks"][e].flatten(-2)
        rows = weights.fp4(blocks, tensors["e.gate_up_proj_scales"][e])  # rows of gate and up alternate
        assert np.array_equal(
            weights.fp4(got.gate_up[e], got.gate_up_scale[e]), np.concatenate((rows[::2], rows[1::2]))
        )
        want = weights.fp4(tensors["e.down_proj_blocks"][e].flatten(-2), tensors["e.down_proj_scales"][e])
        assert np.array_equal(weights.fp4(got.down[e], got.down_scale[e]), want)
    bias = tensors["e.gate_up_proj_bias"]
    assert torch.equal(got.gate_up_bias, torch.cat((bias[:, ::2], bias[:, 1::2]), 1))
    assert torch.equal(got.down_bias, tensors["e.down_proj_bias"])
    some = checkpoint.read_experts(tmp_path, "e", experts=(1, 3))
    assert all(torch.equal(part, whole[1:]) for part, whole in zip(some, got, strict=True))
    with pytest.raises(ValueError, match=r"e\.gate_up_proj_blocks in .* holds 3 experts; .* got 2 to 4"):
        checkpoint.read_experts(tmp_path, "e", experts=(2, 4))
    for name, change, message in (
        (
            "e.down_proj_scales",
            lambda t: t[:, 1:],
            r"got .*e\.down_proj_scales in .* with shape \(3, 63, 3\); expected",
        ),
        ("e.gate_up_proj_blocks", lambda t: t.float(), r"with dtype torch\.float32; expected torch\.uint8"),
        ("e.down_proj_blocks", lambda t: t.flatten(2), r"expected \(E, N, K/32, 16\)"),
        (
            "e.down_proj_scales",
            lambda t: t.index_fill(1, torch.tensor(5), 255),
            r"_scales in .* byte 0xFF at \[0, 5, 0\]",
        ),
    ):
        checkpoints.write(tmp_path, {**tensors, name: change(tensors[name])}, quantization)
        with pytest.raises(ValueError, match=message):
            checkpoint.read_experts(tmp_path, "e")
    with pytest.raises(ValueError, match=r"contains no tensor f\.gate_up_proj_blocks"):
        checkpoint.read_experts(tmp_path, "f")


def test_one_tensor_at_a_time(tmp_path, monkeypatch):
    """Check that the tensors of one layer are freed before the next layer is read."""
    content = Content(NVFP4)
    checkpoints.write(tmp_path, content.tensors, NVFP4.quantization, shards=2)
    read, names, alive, original = [], [], [], Files.read

    def watch(files: Files, name: str) -> torch.Tensor:
        tensor = original(files, name)
        if tensor.numel() > 1:
            names.append(name)
        read.append(weakref.ref(tensor))
        alive.append(sum(one() is not None for one in read))
        return tensor

    monkeypatch.setattr(Files, "read", watch)
    checkpoint.load_(on_meta(is_merged=True), tmp_path)
    assert sorted(names) == sorted(name for name, tensor in content.tensors.items() if tensor.numel() > 1)
    assert max(alive) <= 2


# Invalid checkpoints


def refused(folder: Path, tensors: dict[str, torch.Tensor], message: str, kind: Kind = NVFP4, **given: Any) -> None:
    checkpoints.write(folder, tensors, kind.quantization)
    with pytest.raises(ValueError, match=message):
        checkpoint.load_(on_meta(**given), folder)


@by_kind
def test_each_tensor_is_needed(kind, tmp_path):
    content = Content(kind)
    suffixes = [name.rpartition(".")[2] for name in content.tensors if name.startswith("layers.0.o_proj.")]
    assert len(suffixes) > 1
    for suffix in suffixes:
        if kind.scheme == "nvfp4" and suffix.startswith("input"):
            continue  # only FP4 activations need this tensor, see test_values
        rest = {name: tensor for name, tensor in content.tensors.items() if name != f"layers.0.o_proj.{suffix}"}
        refused(tmp_path, rest, rf"contains no layers\.0\.o_proj\.{suffix}, which", kind)


@by_kind
@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_each_tensor_is_checked(kind, change, tmp_path):
    """Check that each tensor's presence, shape and dtype are checked, and that the error names tensor and file."""
    content = Content(kind)
    for name, tensor in content.tensors.items():
        if not name.startswith("layers.0.o_proj."):
            continue
        if change == "shape":
            wrong = tensor.repeat(2) if tensor.dim() < 2 else tensor[: -8 if len(tensor) > 8 else -1]
        else:
            wrong = tensor.to(torch.int32) if tensor.dtype != torch.uint8 else tensor.view(torch.int8)
        expected = r" with shape .*| with dtype|: \(N, K, has bias\) is"
        refused(
            tmp_path, {**content.tensors, name: wrong}, rf"layers\.0\.o_proj\.\w+ in .*safetensors({expected})", kind
        )


@pytest.mark.parametrize("suffix", ["pre_quant_scale", "weight_zero_point", "svdquant_lora_a", "output_scale"])
def test_unknown_tensors_of_a_layer(suffix, tmp_path):
    content = Content(NVFP4)
    content.tensors[f"layers.0.o_proj.{suffix}"] = torch.ones(H)
    refused(tmp_path, content.tensors, rf"layers\.0\.o_proj\.{suffix} in .*safetensors is unknown to modelopt nvfp4")


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("modelopt W4A4", "weight_scale_2"),
        ("modelopt W4A4", "input_scale"),
        ("compressed-tensors NVFP4", "weight_global_scale"),
        ("modelopt FP8 tensor", "weight_scale"),
        ("compressed-tensors FP8 tensor", "input_scale"),
        ("compressed-tensors FP8 channel", "weight_scale"),
    ],
)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_values_of_global_scales(name, suffix, value, tmp_path):
    content, kind = Content(KINDS[name]), KINDS[name]
    content.tensors[f"layers.0.o_proj.{suffix}"].fill_(value)
    message = rf"o_proj\.{suffix} in .* is .*; expected a positive number"
    checkpoints.write(tmp_path, content.tensors, kind.quantization)
    with pytest.raises(ValueError, match=message):
        checkpoint.load_(on_meta(), tmp_path, activations="fp4" if kind.scheme == "nvfp4" else "auto")


BYTES = {
    "nvfp4": ("weight_scale", (0x7F, 0x80, 0x81, 0xB8, 0xFE, 0xFF), (0x00, 0x01, 0x7E)),
    "mxfp4": ("weight_scale", (0xFF,), (0x00, 0x7F, 0x80, 0xFE)),
    "fp8": ("weight", (0x7F, 0xFF), (0x00, 0x7E, 0x80, 0xFE)),
}
"""One-byte tensor of each format, with its invalid bytes and its smallest and largest valid bytes."""


@by_kind
def test_values_of_bytes(kind, tmp_path):
    """Check that an invalid byte is found at any position: a NaN or negative block scale, or a NaN element."""
    content = Content(kind)
    suffix, bad, good = BYTES["fp8" if "fp8" in kind.scheme else kind.scheme]
    tensor = content.tensors[f"layers.0.o_proj.{suffix}"]
    codes = tensor.view(torch.uint8)
    codes.view(-1)[: len(good)] = torch.tensor(good, dtype=torch.uint8)
    checkpoints.write(tmp_path, content.tensors, kind.quantization)
    checkpoint.load_(on_meta(), tmp_path)
    for byte, place in zip(bad, ((0, 0), (-1, -1), (3, 5)) * 2, strict=False):
        kept = codes[place].item()
        codes[place] = byte
        row, column = (i % size for i, size in zip(place, codes.shape, strict=True))
        message = rf"o_proj\.{suffix} in .* contains the byte 0x{byte:02X} at \[{row}, {column}\]; expected"
        refused(tmp_path, content.tensors, message, kind)
        codes[place] = kept
    codes[1:3, 2] = bad[0]
    refused(tmp_path, content.tensors, r"at \[1, 2\], and 1 more such bytes", kind)


def test_model_and_checkpoint_differ(tmp_path):
    content = Content(NVFP4)
    without = {name: tensor for name, tensor in content.tensors.items() if name != "norm.weight"}
    refused(tmp_path, without, r"contains no norm\.weight$")
    without = {name: tensor for name, tensor in content.tensors.items() if name != "layers.0.q_proj.bias"}
    refused(
        tmp_path,
        without,
        r"layers\.0\.q_proj.*: \(N, K, has bias\) is \(256, 256, False\); expected \(256, 256, True\)",
    )
    refused(tmp_path, {**content.tensors, "mtp.weight": torch.ones(3)}, r"does not use mtp\.weight in .*safetensors")
    for ignore in (["mtp.*"], "mtp.weight"):
        checkpoint.load_(on_meta(), tmp_path, ignore=ignore)
    refused(
        tmp_path, {**content.tensors, "norm.weight": torch.ones(H - 1)}, r"got .*norm\.weight in .* with shape \(255,\)"
    )
    codes = torch.zeros(32, H, dtype=torch.uint8)
    refused(tmp_path, {**content.tensors, "embed.weight": codes}, r"embed\.weight in .* but Embedding has no quantised")
    none = {name: tensor for name, tensor in content.tensors.items() if ".o_proj." not in name}
    refused(tmp_path, none, r"contains no layers\.0\.o_proj\.weight")


def test_merged_layers_that_do_not_fit(tmp_path):
    content = Content(NVFP4)
    rest = {name: tensor for name, tensor in content.tensors.items() if ".k_proj." not in name}
    rest["layers.0.k_proj.weight"] = torch.randn(128, H).bfloat16()
    rest["layers.0.k_proj.bias"] = torch.randn(128).bfloat16()
    refused(
        tmp_path,
        rest,
        r"merges .*q_proj, .*v_proj \(quantised\) and layers\.0\.k_proj \(not quantised\)",
        is_merged=True,
    )
    rest = {name: tensor for name, tensor in content.tensors.items() if ".v_proj." not in name}
    refused(tmp_path, rest, "qkv_proj merges", is_merged=True)
    fp8 = KINDS["DeepSeek FP8"]
    content = Content(fp8)
    own, _ = checkpoints.random_layer(fp8, 120, H)
    content.tensors |= {f"layers.0.k_proj.{suffix}": tensor for suffix, tensor in own.items()}
    content.tensors["layers.0.k_proj.bias"] = torch.zeros(120).bfloat16()
    refused(tmp_path, content.tensors, r"layers\.0\.qkv_proj: .*multiples of 128", fp8, is_merged=True)


def test_unsupported_sizes(tmp_path):
    content = Content(NVFP4)
    own, _ = checkpoints.random_layer(NVFP4, 12, H)
    content.tensors |= {f"layers.0.o_proj.{suffix}": tensor for suffix, tensor in own.items()}
    refused(tmp_path, content.tensors, r"o_proj\.weight in .*out_features is 12; expected a positive multiple of 8")


def test_no_configuration(tmp_path):
    content = Content(NVFP4)
    checkpoints.write(tmp_path, content.tensors, None)
    with pytest.raises(ValueError, match=r"layers\.0\.q_proj\.\w+ in .* is quantised, but .*config\.json does not say"):
        checkpoint.load_(on_meta(), tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither config\.json nor hf_quant_config\.json"):
        checkpoint.load_(on_meta(), tmp_path)


def test_tensors_that_stay_on_meta(tmp_path):
    content = Content(NVFP4)
    checkpoints.write(tmp_path, content.tensors, NVFP4.quantization)
    model = on_meta()
    model.register_buffer("inv_freq", torch.ones(4, device="meta"), persistent=False)
    with pytest.raises(
        ValueError, match=r"inv_freq is on the meta device and not in the checkpoint; create it on a real"
    ):
        checkpoint.load_(model, tmp_path)


# Files of checkpoints


def test_files(tmp_path):
    content = Content(NVFP4)
    checkpoints.write(tmp_path, content.tensors, NVFP4.quantization, shards=2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    whole = first.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 100, 4, 0):
        first.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"{first.name} is truncated or not a safetensors file"):
            checkpoint.load_(on_meta(), tmp_path)
    first.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{first.name}, named by model\.safetensors\.index\.json, is missing"):
        checkpoint.load_(on_meta(), tmp_path)
    first.write_bytes(second.read_bytes())
    with pytest.raises(
        ValueError, match=rf"{first.name} contains no tensor .*, although model\.safetensors\.index\.json says so"
    ):
        checkpoint.load_(on_meta(), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(ValueError, match="expected a file in the same folder"):
        checkpoint.load_(on_meta(), tmp_path)
    index.write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        checkpoint.load_(on_meta(), tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="contains no weight_map"):
        checkpoint.load_(on_meta(), tmp_path)
    index.unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        checkpoint.load_(on_meta(), tmp_path)
