"""Load layers and experts from configurations and tensors as each producer writes them."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from support import experts as support
from support import weights
from support.experts import Block, E, Experts, GptOssExperts, H, I
from torch import nn

pytest.importorskip("safetensors")
from support import checkpoints
from support.checkpoints import (
    FP8_TENSOR_INPUT,
    FP8_TENSOR_WEIGHT,
    KINDS,
    MXFP4_WEIGHT,
    MXFP8_WEIGHT,
    NVFP4_WEIGHT,
    compressed,
)

from torch_cute_ops import checkpoint, interleave_k
from torch_cute_ops.checkpoint import LayerScheme, QuantSpec
from torch_cute_ops.checkpoint.spec import spec_of
from torch_cute_ops.nn import QuantLinear

N, K = 192, 256
Tensors = checkpoints.Tensors


def config(quantization: dict, folder) -> QuantSpec:
    return spec_of(folder / "config.json", quantization)


def loaded(folder, tensors: Tensors, quantization: dict, **given) -> np.ndarray:
    """Load a layer (N, K) and return its decoded weight."""
    return loaded_layer(folder, tensors, quantization, **given).dequantize(torch.float64).numpy()


def loaded_layer(folder, tensors: Tensors, quantization: dict, **given) -> QuantLinear:
    """Load a layer (N, K)."""
    checkpoints.write(folder, {f"0.{name}": tensor for name, tensor in tensors.items()}, quantization)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(K, N, bias=False)).bfloat16()
    checkpoint.load_(model, folder, **given)
    return model[0]


def assert_equal(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape and np.allclose(got, want, rtol=2.5e-7, atol=0)


# Configurations


@pytest.mark.parametrize("actorder", ["static", "weight"])
def test_gptq_of_llm_compressor(actorder, tmp_path):
    """Load GPTQ weights that llm-compressor wrote with its default activation order ``static``. It reorders columns
    only during calibration, not in the file."""
    kind = KINDS["compressed-tensors NVFP4A16"]
    tensors, want = checkpoints.random_layer(kind, N, K)
    quantization = compressed("nvfp4-pack-quantized", {**NVFP4_WEIGHT, "actorder": actorder}, None)
    assert_equal(loaded(tmp_path, tensors, quantization), want)
    with pytest.raises(ValueError, match=r"0\.weight_g_idx in .* is unknown to compressed-tensors nvfp4"):
        loaded(tmp_path, {**tensors, "weight_g_idx": torch.arange(K)}, quantization)


def rotation(*locations: str) -> dict:
    applied = [{"targets": ["Linear"], "location": each, "inverse": False, "ignore": []} for each in locations]
    group = {"type": "hadamard", "apply": applied, "randomize": False, "requires_grad": False, "head_dim": None,
             "precision": "torch.float32"}  # fmt: skip
    return {"config_groups": {"R": group}}


def test_rotations(tmp_path):
    """Load weights into which rotations were already multiplied, such as SpinQuant's R1 and R2. Refuse rotations that
    the model must apply at run time, such as QuIP's."""
    tensors, want = checkpoints.random_layer(KINDS["compressed-tensors NVFP4A16"], N, K)
    offline = compressed(
        "nvfp4-pack-quantized", NVFP4_WEIGHT, None, transform_config=rotation("weight_output", "weight_input")
    )
    assert_equal(loaded(tmp_path, tensors, offline), want)
    for location in ("input", "output", "k_cache", "q_attn"):
        online = {**offline, "transform_config": rotation("weight_input", location)}
        with pytest.raises(
            ValueError, match=rf"transform_config: R: location is '{location}'; expected 'weight_input'"
        ):
            config(online, tmp_path)


def mixed(layers: dict) -> dict:
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def test_targets_of_modules(tmp_path):
    """Check which scheme applies to a layer. A target names the layer or a module that contains the layer; the target
    that names the innermost module wins."""
    spec = config(
        mixed(
            {
                "m.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
                "m.0.mlp.experts.3": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
                "m.0.q": {"quant_algo": "FP8"},
            }
        ),
        tmp_path,
    )
    activations = {
        name: getattr(spec.scheme(name), "activations", None)
        for name in ("m.0.mlp.experts.1.up_proj", "m.0.mlp.experts.3.up_proj", "m.0.q", "m.0.qq", "m.0.mlp.gate")
    }
    assert [*activations.values()] == ["fp4", "16bit", "fp8_static", None, None]


def test_many_names(tmp_path):
    """Check that reading a configuration that lists each of 20,000 layers takes linear time."""
    names = [f"m.{layer}.mlp.experts.{expert}.up_proj" for layer in range(40) for expert in range(500)]
    layers = {name: {"quant_algo": "NVFP4", "group_size": 16} for name in names}
    spec = config({**mixed(layers), "ignore": [f"{name}.x" for name in names]}, tmp_path)
    start = time.perf_counter()
    assert {spec.scheme(name) for name in names} == {LayerScheme("nvfp4", "modelopt", "fp4")}
    assert time.perf_counter() - start < 5  # 0.1 s; comparing each pair of names takes minutes


# Linear layers of other producers


def modelopt(algorithm: str, **more) -> dict:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


def quark(inputs: dict | None) -> dict:
    blocks = {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32, "block_size": None,
              "symmetric": None, "round_method": "half_even", "scale_type": "float", "scale_format": "e8m0",
              "scale_calculation_mode": "even", "mx_element_dtype": None, "is_scale_quant": False}  # fmt: skip
    inputs = None if inputs is None else {**blocks, "is_dynamic": True, **inputs}
    every = {"weight": {**blocks, "is_dynamic": False}, "input_tensors": inputs, "output_tensors": None, "bias": None,
             "target_device": None}  # fmt: skip
    return {
        "quant_method": "quark", "global_quant_config": every, "exclude": ["lm_head", "*.gate"], "algo_config": None,
        "softmax_quant_spec": None, "layer_type_quant_config": {}, "layer_quant_config": {},
        "kv_cache_quant_config": {}, "quant_mode": "eager_mode", "version": "0.13",
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    }  # fmt: skip


FP8_INPUT = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "group_size": None}


def auto_round(fmt: str, activations: int = 16, **more) -> dict:
    data_type, size = {"nvfp4": ("nv_fp", 16), "mxfp4": ("mx_fp", 32)}[fmt]
    act = {} if activations == 16 else {
        "act_bits": activations, "act_group_size": size, "act_sym": True, "act_dynamic": True,
        "act_data_type": "nv_fp4_with_static_gs" if fmt == "nvfp4" else "mx_fp",
    }  # fmt: skip
    return {
        "quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4, "group_size": size,
        "sym": True, "data_type": data_type, "iters": 0, "autoround_version": "0.16.1",
        "block_name_to_quantize": "model.layers", **act, **more,
    }  # fmt: skip


def mxfp4(*, input_scale: bool = False) -> tuple[Tensors, np.ndarray]:
    """Return the tensors of an MXFP4 layer whose codes are called ``weight``, and its decoded weight."""
    own, want = checkpoints.random_layer(KINDS["compressed-tensors MXFP4"], N, K)
    tensors = {"weight": own["weight_packed"], "weight_scale": own["weight_scale"]}
    return {**tensors, **({"input_scale": torch.tensor(0.02)} if input_scale else {})}, want


@pytest.mark.parametrize(
    ("quantization", "input_scale"),
    [
        (modelopt("mxfp4"), False),
        (modelopt("W4A8_MXFP4_FP8", group_size=0), True),
        (quark({}), False),
        (quark(None), False),
        (quark(FP8_INPUT), True),
    ],
    ids=["modelopt mxfp4", "modelopt W4A8", "quark", "quark weights only", "quark W4A8"],
)
def test_mxfp4(quantization, input_scale, tmp_path):
    tensors, want = mxfp4(input_scale=input_scale)
    assert_equal(loaded(tmp_path, tensors, quantization), want)
    assert_equal(loaded(tmp_path, tensors, quantization, activations="fp4"), want)
    assert config(quantization, tmp_path).scheme("lm_head") is None
    tensors["weight_scale"][3, 5] = 0xFF
    with pytest.raises(ValueError, match=r"0\.weight_scale in .* contains the byte 0xFF at \[3, 5\]"):
        loaded(tmp_path, tensors, quantization)


@pytest.mark.parametrize("block", [16, 32])
def test_nvfp4_for_fp8_activations(block, tmp_path):
    """Load ModelOpt's ``W4A8_NVFP4_FP8``. Its blocks have 32 elements. Its input scale is meant for FP8 activations, so
    FP4 activations must not use it."""
    tensors, want = checkpoints.random_layer(KINDS["modelopt W4A4"], N, K)
    quantization = modelopt("W4A8_NVFP4_FP8", **({"group_size": 16} if block == 16 else {}))
    if block == 32:
        tensors["weight_scale"] = tensors["weight_scale"][:, ::2].contiguous()
        want = weights.fp4(tensors["weight"], tensors["weight_scale"], tensors["weight_scale_2"].double().numpy())
        with pytest.raises(ValueError, match=r"weight_scale in .* with shape \(192, 8\); expected \(192, 16\)"):
            loaded(tmp_path, tensors, modelopt("NVFP4"))
    for activations in ("auto", "fp8", "fp8_token"):
        layer = loaded_layer(tmp_path, tensors, quantization, activations=activations)
        assert_equal(layer.dequantize(torch.float64).numpy(), want)
        assert layer.has_input_scale == (activations == "fp8_token")
    x = torch.randn(3, K).bfloat16()
    codes, scale = layer.quantize(x).operands
    assert torch.equal(scale, tensors["input_scale"].reshape(1).float())
    step = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes.float(), interleave_k(step).float())
    # FP8 activations must not use the input scale of FP4 activations.
    tensors, _ = checkpoints.random_layer(KINDS["modelopt W4A4"], N, K)
    assert not loaded_layer(tmp_path, tensors, modelopt("NVFP4"), activations="fp8_token").has_input_scale
    tensors["input_scale"].zero_()
    with pytest.warns(UserWarning, match="1 layers have no input scale, or 0"):
        layer = loaded_layer(tmp_path, tensors, modelopt("W4A8_NVFP4_FP8"), activations="fp8_token")
    assert not layer.has_input_scale
    del tensors["input_scale"]
    with pytest.raises(ValueError, match=r"input_scale is missing; activations='fp4' needs it"):
        loaded(tmp_path, tensors, quantization, activations="fp4")


def test_fp8_blocks_of_modelopt(tmp_path):
    """Load ModelOpt's FP8 blocks. Their scales are stored with two additional dimensions."""
    own, want = checkpoints.random_layer(KINDS["DeepSeek FP8"], N, K)
    tensors = {"weight": own["weight"], "weight_scale": own["weight_scale_inv"].view(2, 1, 2, 1)}
    assert_equal(loaded(tmp_path, tensors, modelopt("fp8_pb_wo")), want)
    with pytest.raises(ValueError, match=r"weight_scale in .* with shape \(2, 1, 1, 2, 2\); expected \(2, 2\), for"):
        loaded(tmp_path, {**tensors, "weight_scale": torch.ones(2, 1, 1, 2, 2)}, modelopt("fp8_pb_wo"))


@pytest.mark.parametrize("name", ["scale", "weight_scale_inv"])
@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8], ids=["e8m0", "uint8"])
def test_fp8_blocks_of_deepseek_v4(name, dtype, tmp_path):
    """Load FP8 blocks whose scales are powers of two. DeepSeek-V4's files call the scales ``scale`` and store them as
    float8_e8m0fnu (cloudrift-ai/emmy, pull request 651; lightseekorg/tokenspeed, pull request 1048)."""
    elements = torch.randn(N, K).to(torch.float8_e4m3fn)
    codes = torch.randint(110, 130, (2, 2), dtype=torch.uint8)
    quantization = {**KINDS["DeepSeek FP8"].quantization, "scale_fmt": "ue8m0"}
    layer = loaded_layer(tmp_path, {"weight": elements, name: codes.view(dtype)}, quantization)
    scale = np.ldexp(1.0, codes.numpy().astype(int) - 127)
    assert_equal(layer.dequantize(torch.float64).numpy(), weights.fp8_blocks(elements, torch.from_numpy(scale)))
    assert layer.scheme == "fp8_block" and np.array_equal(layer.weight_scale_inv.double().numpy(), scale)
    both = {"weight": elements, "scale": codes.view(dtype), "weight_scale_inv": codes.clone()}
    with pytest.raises(ValueError, match=r"weight_scale_inv in .* is unknown to deepseek fp8_block"):
        loaded(tmp_path, both, quantization)


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [
        ("compressed-tensors NVFP4", auto_round("nvfp4", 4)),
        ("compressed-tensors NVFP4A16", auto_round("nvfp4")),
        ("compressed-tensors MXFP4", auto_round("mxfp4", 4)),
        ("compressed-tensors MXFP4", auto_round("nvfp4", extra_config={"0": {"data_type": "mx_fp", "group_size": 32}})),
        ("compressed-tensors NVFP4A16", auto_round("mxfp4", extra_config={
            r".*\d": {"data_type": "nv_fp", "group_size": 16}, "lm_head": {"bits": 16},
        })),
    ],
    ids=["NVFP4", "NVFP4A16", "MXFP4", "a layer in MXFP4", "layers in NVFP4"],
)  # fmt: skip
def test_auto_round(kind, quantization, tmp_path):
    tensors, want = checkpoints.random_layer(KINDS[kind], N, K)
    assert_equal(loaded(tmp_path, tensors, quantization), want)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (modelopt("W8A16"), r"quant_algo is 'W8A16'; expected 'NVFP4'"),
        (modelopt("MXFP8", group_size=16), "group_size is 16; expected 32 or 0 or None"),
        ({**KINDS["MiniMax MXFP8"].quantization, "weight_block_size": [32, 32]}, r"weight_block_size is \[32, 32\]; e"),
        ({**KINDS["MiniMax MXFP8"].quantization, "scale_fmt": "float"}, "scale_fmt is 'float'; expected 'ue8m0'"),
        ({**KINDS["MiniMax MXFP8"].quantization, "moe_quant_algo": "NVFP4"}, "moe_quant_algo is 'NVFP4'; expected N"),
        (compressed("mxfp8-quantized", {**MXFP8_WEIGHT, "group_size": 64}, None), "group_size is 64; expected 32"),
        (compressed("mxfp8-quantized", MXFP8_WEIGHT, {**FP8_TENSOR_INPUT, "dynamic": True}), "strategy is 'tensor'; e"),
        (modelopt("NVFP4_AWQ"), r"quant_algo is 'NVFP4_AWQ'"),
        (modelopt("fp8_pb_wo", group_size=64), "group_size is 64; expected 128 or 0 or None"),
        (modelopt("NVFP4", group_size=16, pre_quant_scale=True), "pre_quant_scale is True"),
        (mixed({"a": {"quant_algo": "NVFP4", "pre_quant_scale": True}}), "of a, pre_quant_scale is True"),
        (auto_round("mxfp4", bits=8), "bits is 8; expected 4"),
        (auto_round("nvfp4", data_type="nvfp4_v2"), "data_type is 'nvfp4_v2'; expected 'nv_fp'"),
        (auto_round("nvfp4", data_type="int", group_size=128), "data_type is 'int'"),
        (auto_round("mxfp4", 4, act_bits=8), "act_bits is 8; expected 4"),
        (auto_round("mxfp4", rotation_config={"type": "hadamard"}), "rotation_config is "),
        (auto_round("mxfp4", extra_config={"a": {"bits": 8}}), "extra_config: a: bits is 8; expected 4"),
        (quark({"is_dynamic": False}), "input_tensors: is_dynamic is False; expected True"),
        ({**quark({}), "algo_config": [{"name": "rotation"}]}, "name is 'rotation'; expected no rotations"),
        ({**quark({}), "export": {"weight_format": "fake_quantized"}}, "weight_format is 'fake_quantized'"),
        ({**quark({}), "global_quant_config": {}}, "global_quant_config is {}; expected a weight"),
        ({**quark({}), "global_quant_config": {"weight": [{}, {}]}}, "weight has 2 stages; expected one"),
        ({**quark({}), "layer_quant_config": {"a": {"weight": {"dtype": "int4"}}}}, "a: weight: dtype is 'int4'"),
        ({**KINDS["DeepSeek FP8"].quantization, "expert_dtype": "fp4"}, "expert_dtype is 'fp4'; expected 'fp8'"),
        (compressed("nvfp4-pack-quantized", {**NVFP4_WEIGHT, "actorder": "dynamic"}, None), "actorder is 'dynamic'"),
        (compressed("mxfp4-pack-quantized", {**MXFP4_WEIGHT, "strategy": "tensor_group"}, None), "strategy is 'te"),
    ],
)  # fmt: skip
def test_refused_configurations(quantization, message, tmp_path):
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        config(quantization, tmp_path)


# Experts


def block(form=Experts) -> Block:
    with torch.device("meta"):
        return Block(form()).bfloat16()


def filled(folder, tensors: Tensors, quantization: dict, form=Experts) -> tuple[np.ndarray, np.ndarray]:
    """Load a model with experts; return their decoded weights: (E, 2I, H), gate first, and (E, H, I)."""
    every = {f"mlp.experts.{name}": tensor for name, tensor in tensors.items()}
    checkpoints.write(folder, {**every, "o_proj.weight": torch.zeros(H, H).bfloat16()}, quantization)
    experts = checkpoint.load_(block(form), folder).mlp.experts
    filled.experts = experts
    return support.decoded(experts)


def stacked(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Stack gate, up and down weights that are listed expert by expert."""
    gate_up = [np.concatenate(parts[3 * e : 3 * e + 2]) for e in range(E)]
    return np.stack(gate_up), np.stack(parts[2::3])


def by_layer(kind: str) -> tuple[Tensors, list[np.ndarray]]:
    tensors, parts = {}, []
    for e in range(E):
        for part, n, k in (("gate_proj", I, H), ("up_proj", I, H), ("down_proj", H, I)):
            own, weight = checkpoints.random_layer(KINDS[kind], n, k)
            parts.append(weight)
            tensors |= {f"{e}.{part}.{suffix}": tensor for suffix, tensor in own.items()}
    return tensors, parts


def test_one_entry_for_experts(tmp_path):
    """Load ModelOpt's MIXED_PRECISION, whose configuration describes all experts of a layer in one entry."""
    tensors, parts = by_layer("modelopt W4A4")
    quantization = mixed({"mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}, "o_proj": {"quant_algo": "FP8"}})
    for got, want in zip(filled(tmp_path, tensors, quantization), stacked(parts), strict=True):
        assert_equal(got, want)


@pytest.mark.parametrize("kind", ["modelopt FP8 tensor", "compressed-tensors FP8 tensor", "dynamic"])
@torch.no_grad()
def test_fp8_experts_with_a_scale_each(kind, tmp_path):
    """Load FP8 experts with one scale per tensor, which becomes the scale of each block."""
    quantization = KINDS[kind].quantization if kind in KINDS else compressed(
        "float-quantized", FP8_TENSOR_WEIGHT, {**FP8_TENSOR_INPUT, "strategy": "token", "dynamic": True}
    )  # fmt: skip
    tensors, parts = by_layer(kind if kind in KINDS else "compressed-tensors FP8 tensor")
    if kind == "dynamic":
        tensors = {name: each for name, each in tensors.items() if not name.endswith("input_scale")}
    want = stacked(parts)
    for got, each in zip(filled(tmp_path, tensors, quantization), want, strict=True):
        assert_equal(got, each)
    x, ids, factors = torch.randn(3, H).bfloat16(), torch.tensor([[0, 3], [2, 1], [3, 0]]), torch.rand(3, 2)
    y = filled.experts(x, ids, factors).double().numpy()
    computed = support.computed(x, ids, factors, *want)
    assert np.linalg.norm(y - computed) < 0.015 * np.linalg.norm(computed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_fused_fp8_experts(dtype, tmp_path):
    """Load experts that are stored as two parameters with scales of blocks, as transformers saves Qwen3-MoE and
    Mixtral."""
    quantization = {**KINDS["DeepSeek FP8"].quantization, "modules_to_not_convert": ["lm_head"], "scale_fmt": "float"}
    tensors, want = {}, []
    for part, n, k in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        elements = torch.randn(E, n, k).to(torch.float8_e4m3fn)
        scale = torch.rand(E, n // 128, k // 128) + 0.5
        if dtype != torch.float32:
            scale = torch.randint(120, 130, scale.shape, dtype=torch.uint8).view(dtype)
        tensors |= {part: elements, f"{part}_scale_inv": scale}
        want.append(np.stack([weights.fp8_blocks(*each) for each in zip(elements, scale.float(), strict=True)]))
    for got, each in zip(filled(tmp_path, tensors, quantization), want, strict=True):
        assert_equal(got, each)
    for change, message in (
        ({"gate_up_proj_scale_inv": torch.ones(E, 2, 3)}, r"with shape \(4, 2, 3\); expected \(4, 2, 2\)"),
        (
            {"down_proj": tensors["down_proj"].view(torch.uint8)},
            r"with dtype torch\.uint8; expected torch\.float8_e4m3",
        ),
        ({"down_proj_scale_inv": torch.full((E, 2, 1), torch.nan)}, r"down_proj_scale_inv in .* is nan; expected a"),
        ({"down_proj_scale_inv": torch.zeros(E, 2, 1)}, r"is 0, but the elements that it scales are not"),
        ({"gate_up_proj_zeros": torch.ones(E)}, r"gate_up_proj_zeros in .* is unknown to deepseek fp8_block"),
    ):
        with pytest.raises(ValueError, match=message):
            filled(tmp_path, {**tensors, **change}, quantization)
    with pytest.raises(ValueError, match=r"gate_up_proj in .* holds all experts as modelopt fp8_tensor; expected FP8"):
        filled(tmp_path, tensors, KINDS["modelopt FP8 tensor"].quantization)


@pytest.mark.parametrize("factors", ["one", "each"])
def test_fused_nvfp4_experts_of_gpt_oss(factors, tmp_path):
    """Load experts in ModelOpt's format, which quantises each transposed parameter along its input and stores codes and
    scales transposed."""
    tensors, want = {}, []
    for part, n, k in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        codes = torch.randint(256, (E, n, k // 2), dtype=torch.uint8)
        scale = (torch.rand(E, n, k // 16) + 0.1).to(torch.float8_e4m3fn)
        factor = torch.rand(E if factors == "each" else ()) + 0.5
        tensors |= {
            part: codes.mT, f"{part}_weight_scale": scale.mT, f"{part}_weight_scale_2": factor,
            f"{part}_input_scale": torch.tensor(0.01), f"{part}_bias": torch.randn(E, n).bfloat16(),
        }  # fmt: skip
        every = factor.expand(E).double().numpy()
        want.append(np.stack([weights.fp4(*each) for each in zip(codes, scale, every, strict=True)]))
    want[0] = np.concatenate((want[0][:, 0::2], want[0][:, 1::2]), 1)  # gate and up rows alternate
    quantization = modelopt("NVFP4", group_size=16)
    for got, each in zip(filled(tmp_path, tensors, quantization, GptOssExperts), want, strict=True):
        assert_equal(got, each)
    experts, bias = filled.experts, tensors["gate_up_proj_bias"]
    assert torch.equal(experts.gate_up_proj.bias.view(E, -1), torch.cat((bias[:, 0::2], bias[:, 1::2]), 1))
    assert torch.equal(experts.down_proj.bias.view(E, -1), tensors["down_proj_bias"])
    wrong = {**tensors, "gate_up_proj_weight_scale": tensors["gate_up_proj_weight_scale"][:, 1:]}
    with pytest.raises(ValueError, match=r"weight_scale in .* with shape \(4, 15, 256\); expected \(4, 16, 256\)"):
        filled(tmp_path, wrong, quantization, GptOssExperts)


class Unlike(nn.Module):
    """Experts that store their weights in two parameters, like Llama 4's experts. This package cannot replace the
    module, because its forward computes another function."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(E, 3, H, I))


def test_fused_experts_of_another_kind(tmp_path):
    """Check that the error says that these experts cannot be quantised, instead of comparing shapes."""
    tensors = {"gate_up_proj": torch.zeros(E, H // 2, 2 * I, dtype=torch.uint8)}
    with pytest.raises(
        ValueError, match=r"gate_up_proj in .* is quantised, but Unlike has no quantised form; expected"
    ):
        filled(tmp_path, tensors, modelopt("NVFP4"), Unlike)
