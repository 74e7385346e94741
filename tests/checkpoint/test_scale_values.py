"""Load checkpoints with unusual values of scales and parameters: missing, zero, powers of two, not finite."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from support import weights
from support.experts import Block, Experts
from torch import nn

pytest.importorskip("safetensors")
from support import checkpoints
from support.checkpoints import KINDS

from torch_cute_ops import checkpoint
from torch_cute_ops.nn import MXFP8Linear, QuantLinear

N, K = 192, 256


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(K, N, bias=False), nn.Linear(K, N, bias=False)
        self.norm = nn.LayerNorm(K, bias=False)
        self.register_buffer("mask", torch.zeros(3))


class Merged(Model):
    def __init__(self) -> None:
        super().__init__()
        del self.q_proj, self.k_proj
        self.qk_proj = nn.Linear(K, 2 * N, bias=False)


def load(folder, form=Model, **given) -> nn.Module:
    with torch.device("meta"):
        model = form().bfloat16()
    return checkpoint.load_(model, folder, merged={"qk_proj": ("q_proj", "k_proj")}, **given)


def load_named(folder, kind: str) -> nn.Module:
    """Write a checkpoint of this kind and load it."""
    checkpoints.write(folder / "x", tensors_of(kind)[0], KINDS[kind].quantization)
    return load(folder / "x")


def tensors_of(name: str) -> tuple[checkpoints.Tensors, dict[str, np.ndarray]]:
    """Return the tensors of a checkpoint for ``Model``, and the weights in float64 to which they decode."""
    tensors, decoded = {"norm.weight": torch.ones(K).bfloat16(), "mask": torch.zeros(3).bfloat16()}, {}
    for layer in ("q_proj", "k_proj"):
        own, decoded[layer] = checkpoints.random_layer(KINDS[name], N, K)
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in own.items()}
    return tensors, decoded


# Input scales that calibration did not set

SCALES = {"modelopt W4A4": "input_scale", "compressed-tensors NVFP4": "input_global_scale"}


def without_scale(tensors: checkpoints.Tensors, name: str, value: float | None) -> None:
    if value is None:
        del tensors[name]
    else:
        tensors[name].fill_(value)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("modelopt W4A4", None),
        ("modelopt W4A4", 0.0),
        ("compressed-tensors NVFP4", None),
        ("compressed-tensors NVFP4", 0.0),
        ("compressed-tensors NVFP4", torch.inf),
    ],
)
def test_input_scales_that_are_missing_or_zero(kind, value, tmp_path):
    """Check that missing or zero input scales cause one warning if activations do not use them, and an error for FP4
    activations."""
    tensors, decoded = tensors_of(kind)
    for layer in ("q_proj", "k_proj"):
        without_scale(tensors, f"{layer}.{SCALES[kind]}", value)
    checkpoints.write(tmp_path, tensors, KINDS[kind].quantization)
    for given in ({}, {"activations": "fp8"}, {"form": Merged}):
        with pytest.warns(UserWarning, match=r"2 layers have no input scale, or 0, .*: q_proj, k_proj$") as warned:
            model = load(tmp_path, **given)
        assert len(warned) == 1
        want = np.concatenate([*decoded.values()]) if given.get("form") else decoded["q_proj"]
        layer = model.qk_proj if given.get("form") else model.q_proj
        assert np.allclose(layer.dequantize().double().numpy(), want, rtol=2.5e-7, atol=0)
    with pytest.raises(ValueError, match=rf"q_proj\.{SCALES[kind]}"):
        load(tmp_path, activations="fp4")


def test_input_scales_of_a_part(tmp_path):
    """Check that a merged layer is loaded without an input scale if one of its parts lacks it."""
    tensors, decoded = tensors_of("modelopt W4A4")
    del tensors["k_proj.input_scale"]
    checkpoints.write(tmp_path, tensors, KINDS["modelopt W4A4"].quantization)
    with pytest.warns(UserWarning, match=r"1 layers have no input scale, or 0, .*: k_proj$"):
        layer = load(tmp_path, Merged).qk_proj
    assert np.allclose(layer.dequantize().double().numpy(), np.concatenate([*decoded.values()]), rtol=2.5e-7, atol=0)


@pytest.mark.parametrize("kind", ["modelopt W4A4", "modelopt FP8 tensor"])
@pytest.mark.parametrize("value", [None, 0.0])
def test_input_scales_of_experts(kind, value, tmp_path):
    """Check that experts load without input scales, because they compute their activations' scales at run time."""
    experts, hidden, width = 3, 128, 128
    tensors, decoded = {"o_proj.weight": torch.zeros(256, 256).bfloat16()}, []
    for e in range(experts):
        for part in ("gate_proj", "up_proj", "down_proj"):
            own, weight = checkpoints.random_layer(KINDS[kind], 128, 128)
            decoded.append(weight)
            tensors |= {f"mlp.experts.{e}.{part}.{suffix}": tensor for suffix, tensor in own.items()}
    for part in ("gate_proj", "down_proj"):
        without_scale(tensors, f"mlp.experts.1.{part}.input_scale", value)
    checkpoints.write(tmp_path, tensors, KINDS[kind].quantization)
    with torch.device("meta"):
        block = Block(Experts(experts, hidden, width)).bfloat16()
    with pytest.warns(UserWarning, match=r"2 layers have no .*: mlp\.experts\.1\.gate_proj, mlp\.ex") as warned:
        checkpoint.load_(block, tmp_path)
    assert len(warned) == 1
    gate_up, down = block.mlp.experts.dequantize(torch.float64)
    for e in range(experts):
        want = np.concatenate(decoded[3 * e : 3 * e + 2])
        assert np.allclose(gate_up[e].numpy(), want, rtol=2.5e-7, atol=0)
        assert np.allclose(down[e].numpy(), decoded[3 * e + 2], rtol=2.5e-7, atol=0)


def test_static_fp8_needs_its_input_scale(tmp_path):
    tensors, _ = tensors_of("modelopt FP8 tensor")
    del tensors["q_proj.input_scale"]
    checkpoints.write(tmp_path, tensors, KINDS["modelopt FP8 tensor"].quantization)
    with pytest.raises(ValueError, match=r"contains no q_proj\.input_scale, which modelopt fp8_tensor needs"):
        load(tmp_path)


# Scales of 0


@pytest.mark.parametrize(
    ("kind", "suffix", "place"),
    [
        ("modelopt W4A4", "weight_scale_2", ...),
        ("modelopt FP8 tensor", "weight_scale", ...),
        ("modelopt FP8 channel", "weight_scale", 5),
        ("DeepSeek FP8", "weight_scale_inv", (1, 1)),
    ],
)
def test_zero_scales_of_weights(kind, suffix, place, tmp_path):
    """Check that a scale of 0 is refused if an element that it scales is not zero, and accepted if all these elements
    are zero, as producers write them."""
    tensors, _ = tensors_of(kind)
    tensors[f"k_proj.{suffix}"][place] = 0
    checkpoints.write(tmp_path, tensors, KINDS[kind].quantization)
    with pytest.raises(ValueError, match=rf"k_proj\.{suffix} in .* is 0, but the elements that it scales are not"):
        load(tmp_path)
    codes = tensors["k_proj.weight"].view(torch.uint8)
    hidden = codes[128:, 128:] if place == (1, 1) else codes[place]
    hidden &= 0x88 if kind == "modelopt W4A4" else 0x80  # keep only signs: zeros of either sign
    checkpoints.write(tmp_path, tensors, KINDS[kind].quantization)
    got = load(tmp_path).k_proj.dequantize()
    assert not (got[128:, 128:] if place == (1, 1) else got[place]).any()
    assert got.any() == (place is not ...)


# Block scales that are powers of two


@pytest.mark.parametrize("kind", ["DeepSeek FP8", "compressed-tensors FP8"])
@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8])
def test_powers_of_two(kind, dtype, tmp_path):
    """Check that e8m0 block scales of FP8 are exact in float32, from 2^-127 to 2^127."""
    tensors, _ = tensors_of(kind)
    suffix = "weight_scale_inv" if kind == "DeepSeek FP8" else "weight_scale"
    codes = torch.tensor([[0, 1], [119, 254]], dtype=torch.uint8)
    tensors[f"q_proj.{suffix}"] = codes.view(dtype)
    tensors[f"k_proj.{suffix}"] = torch.randint(100, 140, (2, 2), dtype=torch.uint8).view(dtype)
    checkpoints.write(tmp_path, tensors, KINDS[kind].quantization)
    model = load(tmp_path)
    scale = np.ldexp(1.0, codes.numpy().astype(int) - 127)
    assert np.array_equal(model.q_proj.weight_scale_inv.double().numpy(), scale)
    want = np.ldexp(1.0, tensors[f"k_proj.{suffix}"].view(torch.uint8).numpy().astype(int) - 127)
    want = weights.fp8_blocks(tensors["k_proj.weight"], torch.from_numpy(want))
    assert np.array_equal(model.k_proj.dequantize().double().numpy(), want)
    codes[1, 0] = 0xFF
    checkpoints.write(tmp_path, tensors, KINDS[kind].quantization)
    with pytest.raises(ValueError, match=rf"q_proj\.{suffix} in .* contains the byte 0xFF at \[1, 0\]"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["modelopt MXFP8", "compressed-tensors MXFP8", "MiniMax MXFP8"])
def test_scales_of_mxfp8(kind, tmp_path):
    """Check that MXFP8 scales load from uint8 and from float8_e8m0fnu, and that NaN scales are refused."""
    tensors, decoded = tensors_of(kind)
    suffix = "weight_scale_inv" if kind == "MiniMax MXFP8" else "weight_scale"
    tensors[f"q_proj.{suffix}"] = tensors[f"q_proj.{suffix}"].view(torch.float8_e8m0fnu)
    checkpoints.write(tmp_path, tensors, KINDS[kind].quantization)
    model = load(tmp_path)
    for name, want in decoded.items():
        layer = model.get_submodule(name)
        assert type(layer) is MXFP8Linear and np.array_equal(layer.dequantize().double().numpy(), want)
    assert type(load(tmp_path, Merged).qk_proj) is MXFP8Linear
    tensors[f"k_proj.{suffix}"][3, 5] = 0xFF
    checkpoints.write(tmp_path, tensors, KINDS[kind].quantization)
    with pytest.raises(ValueError, match=rf"k_proj\.{suffix} in .* contains the byte 0xFF at \[3, 5\]"):
        load(tmp_path)
    tensors[f"k_proj.{suffix}"] = torch.zeros(N, K // 128, dtype=torch.uint8)
    checkpoints.write(tmp_path, tensors, KINDS[kind].quantization)
    with pytest.raises(ValueError, match=rf"k_proj\.{suffix} in .* with shape \(192, 2\); expected \(192, 8\)"):
        load(tmp_path)


# Numbers that are not finite


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_parameters_that_are_not_finite(value, tmp_path):
    tensors, _ = tensors_of("modelopt W4A16")
    tensors["norm.weight"][7] = value
    checkpoints.write(tmp_path, tensors, KINDS["modelopt W4A16"].quantization)
    with pytest.raises(ValueError, match=rf"norm\.weight in .* is {value} at \[7\]; expected finite numbers"):
        load(tmp_path)


def test_buffers_that_are_not_finite(tmp_path):
    """Check that a buffer such as a mask may contain infinities, but no NaN."""
    tensors, _ = tensors_of("modelopt W4A16")
    tensors["mask"][1] = -torch.inf
    checkpoints.write(tmp_path, tensors, KINDS["modelopt W4A16"].quantization)
    assert load(tmp_path).mask[1] == -torch.inf
    tensors["mask"][2] = torch.nan
    checkpoints.write(tmp_path, tensors, KINDS["modelopt W4A16"].quantization)
    with pytest.raises(ValueError, match=r"mask in .* is nan at \[2\]; expected finite numbers"):
        load(tmp_path)


def test_bias_that_is_not_finite(tmp_path):
    own, _ = checkpoints.random_layer(KINDS["modelopt W4A16"], N, K)
    tensors = {f"0.{suffix}": tensor for suffix, tensor in own.items()}
    tensors["0.bias"] = torch.full((N,), torch.nan)
    checkpoints.write(tmp_path, tensors, KINDS["modelopt W4A16"].quantization)
    with pytest.raises(ValueError, match=r"0\.bias in .* is nan at \[0\]; expected finite numbers"):
        checkpoint.load_(nn.Sequential(nn.Linear(K, N)), tmp_path)


# Activations per format


def mixed(folder) -> None:
    """Write a ModelOpt checkpoint with an NVFP4 layer and an FP8 layer."""
    tensors, _ = tensors_of("modelopt W4A4")
    fp8, _ = checkpoints.random_layer(KINDS["modelopt FP8 tensor"], N, K)
    tensors = {name: each for name, each in tensors.items() if not name.startswith("k_proj")}
    tensors |= {f"k_proj.{suffix}": tensor for suffix, tensor in fp8.items()}
    layers = {"q_proj": {"quant_algo": "NVFP4", "group_size": 16}, "k_proj": {"quant_algo": "FP8"}}
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    checkpoints.write(folder, tensors, quantization)


@pytest.mark.parametrize(
    ("activations", "of_nvfp4"),
    [("auto", "16bit"), ("fp4", "fp4"), ("fp8", "fp8"), ({"nvfp4": "fp4"}, "fp4"), ({"fp8_tensor": "fp8"}, "16bit")],
)
@torch.no_grad()
def test_activations_of_mixed_checkpoints(activations, of_nvfp4, tmp_path):
    """Check that each layer uses the requested activations if its format supports them."""
    mixed(tmp_path)
    model = load(tmp_path, activations=activations)
    assert (model.q_proj.activations, model.k_proj.activations) == (of_nvfp4, "fp8")
    x = torch.randn(4, K).bfloat16()
    want = x.float() @ model.q_proj.dequantize().T
    assert (model.q_proj(x) - want).norm() < 0.2 * want.norm()


@pytest.mark.parametrize(
    ("kind", "activations", "message"),
    [
        (
            "modelopt FP8 tensor",
            "fp4",
            "activations is 'fp4', but the layers of .* are fp8_tensor; expected 'auto', 'f",
        ),
        ("modelopt W4A4", "int8", "activations is 'int8', but the layers of .* are nvfp4; expected 'auto', '16bit', "),
        ("modelopt W4A4", {"fp4": "fp4"}, "activations has the key 'fp4'; expected some of 'nvfp4', 'mxfp4'"),
        ("modelopt W4A4", {"nvfp4": "int8"}, "activations is 'int8'; expected one of 'auto', '16bit'"),
    ],
)
def test_unsupported_activations(kind, activations, message, tmp_path):
    tensors, _ = tensors_of(kind)
    checkpoints.write(tmp_path, tensors, KINDS[kind].quantization)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, activations=activations)


# Loading into a model that was loaded before


class Whole(nn.Module):
    """Unquantised, quantised, merged and tied layers, and buffers that do not come from the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, K), nn.Linear(K, 16, bias=False)
        self.head.weight = self.embed.weight
        self.qk_proj, self.o_proj = nn.Linear(K, 2 * N), nn.Linear(K, 256)
        self.register_buffer("mask", torch.zeros(3))


def contents(kind: str) -> checkpoints.Tensors:
    tensors = {"embed.weight": torch.randn(16, K).bfloat16(), "mask": torch.randn(3).bfloat16()}
    for layer, n in (("q_proj", N), ("k_proj", N), ("o_proj", 256)):
        own, _ = checkpoints.random_layer(KINDS[kind], n, K)
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in own.items()}
        tensors[f"{layer}.bias"] = torch.randn(n).bfloat16()
    if kind == "modelopt FP8 tensor":  # parts of a merged layer may have different input scales
        tensors["q_proj.input_scale"] *= 2
    return tensors


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize(
    ("kind", "activations"),
    [
        ("modelopt W4A4", "16bit"),
        ("compressed-tensors NVFP4", "fp4"),
        ("compressed-tensors MXFP4", "fp4"),
        ("modelopt FP8 tensor", "auto"),
        ("compressed-tensors FP8 channel", "auto"),
    ],
)
@torch.no_grad()
def test_loaded_in_place(kind, activations, tmp_path):
    """Load a second checkpoint into a loaded model. Check that modules and tensors stay at the addresses that CUDA
    graphs read, and that they contain the second checkpoint's values."""
    merged = {"qk_proj": ("q_proj", "k_proj")}

    def load_again(model: nn.Module, folder: str) -> nn.Module:
        checkpoints.write(tmp_path / folder, contents(kind), KINDS[kind].quantization)
        return checkpoint.load_(model, tmp_path / folder, merged=merged, activations=activations)

    model = load_again(Whole().bfloat16(), "first")
    tensors, modules, before = held(model), [*model.modules()], {}
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    load_again(model, "second")
    with torch.device("meta"):
        blank = Whole().bfloat16()
    blank.head.weight = blank.embed.weight
    fresh = checkpoint.load_(blank, tmp_path / "second", merged=merged, activations=activations)
    assert [*map(id, model.modules())] == [*map(id, modules)]
    again = held(model)
    assert {name: tensor.data_ptr() for name, tensor in again.items()} == places
    assert all(again[name].data_ptr() == tensor.data_ptr() for name, tensor in tensors.items())
    for name, tensor in held(fresh).items():
        assert torch.equal(again[name].view(torch.uint8), tensor.view(torch.uint8)), name
        assert not torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)) or "input" in name, name
    x = torch.randn(3, K).bfloat16()
    assert torch.equal(model.qk_proj(x), fresh.qk_proj(x))
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()


def test_loaded_with_other_activations(tmp_path):
    """Check that loading a checkpoint with another kind of activations replaces the layer."""
    checkpoints.write(tmp_path, tensors_of("modelopt W4A4")[0], KINDS["modelopt W4A4"].quantization)
    model = load(tmp_path)
    old = model.q_proj
    checkpoint.load_(model, tmp_path, activations="fp4")
    assert model.q_proj is not old and isinstance(model.q_proj, QuantLinear)
    assert (old.activations, model.q_proj.activations) == ("16bit", "fp4")


@pytest.mark.parametrize("has_scale", [False, True])
def test_an_input_scale_that_is_not_used(has_scale, tmp_path):
    """Check that a layer can be overwritten in place if only the old or only the new layer stores an input scale that
    is not used."""
    model = load_named(tmp_path, "modelopt W4A4" if has_scale else "modelopt W4A16")
    layer, places = model.q_proj, {key: tensor.data_ptr() for key, tensor in model.q_proj.named_buffers()}
    tensors, decoded = tensors_of("modelopt W4A16" if has_scale else "modelopt W4A4")
    other = KINDS["modelopt W4A16" if has_scale else "modelopt W4A4"]
    checkpoints.write(tmp_path / "y", tensors, other.quantization)
    checkpoint.load_(model, tmp_path / "y")
    assert model.q_proj is layer and not layer.has_input_scale and "input_scale" not in layer.state_dict()
    assert all(tensor.data_ptr() == places[key] for key, tensor in layer.named_buffers())
    assert np.allclose(layer.dequantize().double().numpy(), decoded["q_proj"], rtol=2.5e-7, atol=0)


def test_tensors_of_inference_mode(tmp_path):
    """Check that tensors that cannot be changed in place are replaced."""
    with torch.inference_mode():
        model = load_named(tmp_path, "modelopt W4A16")
    tensors, decoded = tensors_of("modelopt W4A16")
    checkpoints.write(
        tmp_path / "y", {**tensors, "norm.weight": torch.full((K,), 3.0)}, KINDS["modelopt W4A16"].quantization
    )
    checkpoint.load_(model, tmp_path / "y")
    assert np.allclose(model.q_proj.dequantize().double().numpy(), decoded["q_proj"], rtol=2.5e-7, atol=0)
    assert (model.norm.weight == 3).all()


@pytest.mark.parametrize("form", ["layers", "gpt-oss", "not quantised"])
def test_experts_in_place(form, tmp_path):
    from support.experts import E, GptOssExperts, H, I

    def write(folder: str) -> None:
        tensors = {"o_proj.weight": torch.randn(H, H).bfloat16()}
        quantization = KINDS["modelopt W4A16"].quantization
        if form == "gpt-oss":
            tensors |= checkpoints.gpt_oss_experts(E, H, I)
            quantization = {"quant_method": "mxfp4"}
        for e in range(E) if form != "gpt-oss" else ():
            for part, n, k in (("gate_proj", I, H), ("up_proj", I, H), ("down_proj", H, I)):
                own, _ = checkpoints.random_layer(KINDS["modelopt W4A16"], n, k)
                own = own if form == "layers" else {"weight": torch.randn(n, k).bfloat16()}
                tensors |= {f"mlp.experts.{e}.{part}.{suffix}": each for suffix, each in own.items()}
        checkpoints.write(tmp_path / folder, tensors, None if form == "not quantised" else quantization)

    def blank() -> nn.Module:
        return Block(GptOssExperts() if form == "gpt-oss" else Experts()).bfloat16()

    write("first")
    write("second")
    model = checkpoint.load_(blank(), tmp_path / "first")
    experts = model.mlp.experts
    if form != "not quantised":
        experts.route_few_(tokens_of_expert=4)
    places = {name: tensor.data_ptr() for name, tensor in held(model).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load_(model, tmp_path / "second")
    assert model.mlp.experts is experts
    assert {name: tensor.data_ptr() for name, tensor in held(model).items()} == places
    fresh = checkpoint.load_(blank(), tmp_path / "second")
    if form != "not quantised":
        fresh.mlp.experts.route_few_(tokens_of_expert=4)
    for name, tensor in held(fresh).items():
        assert torch.equal(held(model)[name].view(torch.uint8), tensor.view(torch.uint8)), name
    if form == "layers":
        (tmp_path / "second" / "model.safetensors").unlink()
        checkpoints.write(tmp_path / "second", {"o_proj.weight": torch.zeros(H, H)}, None)
        with pytest.raises(ValueError, match=r"does not quantise mlp\.experts; the model's experts are quantised"):
            checkpoint.load_(model, tmp_path / "second")
