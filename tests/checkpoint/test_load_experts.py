"""Load checkpoints with experts: each format decodes as its producer defines it, and ambiguous files are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support import experts as support
from support.experts import TOPK, Block, E, Experts, GptOssExperts, H, I

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file
from support import checkpoints, weights
from support.checkpoints import KINDS

from torch_cute_ops import checkpoint
from torch_cute_ops.nn import QuantExperts, quantize_

QWEN, MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
SIZES = ((I, H), (I, H), (H, I))
NAMES = ("gate_up_proj", "down_proj")
BY_EXPERTS = [name for name in KINDS if KINDS[name].scheme != "fp8_tensor"]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def on_meta(form=Experts) -> Block:
    with torch.device("meta"):
        return Block(form()).bfloat16()


def written(kind, folder, parts=QWEN, prefix="mlp"):
    """Write a checkpoint of a block with experts. Return its tensors, and the weights (E, 2I, H) and (E, H, I) in
    float64."""
    tensors = {"o_proj.weight": torch.randn(H, H).bfloat16()}
    decoded = []
    for e in range(E):
        for part, size in zip(parts, SIZES, strict=True):
            own, weight = checkpoints.random_layer(kind, *size)
            decoded.append(weight)
            tensors |= {f"{prefix}.experts.{e}.{part}.{suffix}": tensor for suffix, tensor in own.items()}
    checkpoints.write(folder, tensors, kind.quantization)
    gate_up = np.stack([np.concatenate(decoded[3 * e : 3 * e + 2]) for e in range(E)])
    return tensors, gate_up, np.stack(decoded[2::3])


@pytest.mark.parametrize("name", BY_EXPERTS)
def test_values(name, tmp_path, device):
    tensors, gate_up, down = written(KINDS[name], tmp_path)
    block = checkpoint.load_(on_meta(), tmp_path, device=device)
    experts = block.mlp.experts
    assert isinstance(experts, QuantExperts) and experts.topk == TOPK
    for got, want in zip(support.decoded(experts), (gate_up, down), strict=True):
        assert np.allclose(got, want, rtol=2.5e-7, atol=0)
    assert torch.equal(block.o_proj.weight.cpu(), tensors["o_proj.weight"])
    x, ids = torch.randn(3, H, device=device).bfloat16(), torch.tensor([[0, 3], [2, 1], [3, 0]], device=device)
    factors = torch.rand(3, 2, device=device)
    with torch.no_grad():
        got = experts(x, ids, factors).double().cpu().numpy()
    granularity = {"fp8_channel": "token", "mxfp8": "block32"}.get(KINDS[name].scheme, "block128")
    want = support.computed(x, ids, factors, gate_up, down, granularity=granularity)
    assert np.linalg.norm(got - want) < (0.07 if "NVFP4" in name or "W4A" in name else 0.015) * np.linalg.norm(want)


def test_names_of_minimax(tmp_path):
    """Load experts as MiniMax-M3-MXFP8 names them: ``block_sparse_moe.experts.0.w1``."""
    _, gate_up, down = written(KINDS["MiniMax MXFP8"], tmp_path, MIXTRAL, "block_sparse_moe")
    experts = checkpoint.load_(on_meta(), tmp_path).mlp.experts
    assert experts.scheme == "mxfp8"
    for got, want in zip(support.decoded(experts), (gate_up, down), strict=True):
        assert np.array_equal(got, want)


def test_names_of_mixtral(tmp_path):
    """Load a Mixtral checkpoint, which names the experts' layers and their parent module differently from the model."""
    _, gate_up, down = written(KINDS["compressed-tensors FP8"], tmp_path / "x", MIXTRAL, "block_sparse_moe")
    experts = checkpoint.load_(on_meta(), tmp_path / "x").mlp.experts
    for got, want in zip(support.decoded(experts), (gate_up, down), strict=True):
        assert np.allclose(got, want, rtol=2.5e-7, atol=0)
    block = Block(experts)
    checkpoint.save(block.bfloat16(), tmp_path / "y", "compressed-tensors", config={"model_type": "mixtral"})
    written_again = load_file(tmp_path / "y" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "x" / "model.safetensors").items():
        if "experts" in name:
            assert torch.equal(written_again[name].float(), tensor.float()), name


@pytest.mark.parametrize(
    ("scheme", "style", "form"),
    [
        ("nvfp4", "modelopt", Experts),
        ("nvfp4", "compressed-tensors", GptOssExperts),
        ("mxfp4", "compressed-tensors", Experts),
        ("fp8_block", "compressed-tensors", Experts),
        ("fp8_channel", "compressed-tensors", Experts),
        ("fp8_channel", "modelopt", Experts),
        ("mxfp8", "compressed-tensors", Experts),
        ("mxfp8", "modelopt", Experts),
    ],
)
def test_saved_and_read_again(scheme, style, form, tmp_path):
    block = quantize_(Block(form()).bfloat16(), scheme)
    checkpoint.save(block, tmp_path, style)
    names = {*load_file(tmp_path / "model.safetensors")}
    weight = "weight" if style == "modelopt" or "fp8" in scheme else "weight_packed"
    assert {f"mlp.experts.{e}.{part}.{weight}" for e in range(E) for part in QWEN} <= names
    again = checkpoint.load_(on_meta(form), tmp_path)
    assert again.mlp.experts.swiglu == block.mlp.experts.swiglu
    for (name, tensor), other in zip(block.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), name


def test_gpt_oss(tmp_path):
    """Load gpt-oss experts, in whose checkpoint rows of gate and up alternate."""
    tensors = {**checkpoints.gpt_oss_experts(E, H, I), "o_proj.weight": torch.randn(H, H).bfloat16()}
    checkpoints.write(tmp_path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["o_proj"]})
    experts = checkpoint.load_(on_meta(GptOssExperts), tmp_path).mlp.experts
    gate_up, down = support.decoded(experts)
    prefix = "mlp.experts."
    for e in range(E):
        want = weights.fp4(
            tensors[f"{prefix}gate_up_proj_blocks"][e].flatten(1), tensors[f"{prefix}gate_up_proj_scales"][e]
        )
        assert np.array_equal(gate_up[e], np.concatenate((want[0::2], want[1::2])))
        want = weights.fp4(tensors[f"{prefix}down_proj_blocks"][e].flatten(1), tensors[f"{prefix}down_proj_scales"][e])
        assert np.array_equal(down[e], want)
    bias = tensors[f"{prefix}gate_up_proj_bias"]
    assert torch.equal(experts.gate_up_proj.bias.view(E, -1), torch.cat((bias[:, 0::2], bias[:, 1::2]), 1))
    assert torch.equal(experts.down_proj.bias.view(E, -1), tensors[f"{prefix}down_proj_bias"])
    with torch.device("meta"):
        wider = Block(GptOssExperts(width=2 * I)).bfloat16()
    with pytest.raises(ValueError, match=r"down_proj_blocks in .* \(E, N, K\) is \(4, 256, 128\); expected .* 256\)"):
        checkpoint.load_(wider, tmp_path)
    checkpoints.write(tmp_path / "y", tensors, KINDS["modelopt W4A16"].quantization)
    with pytest.raises(ValueError, match=r"gate_up_proj_blocks in .* is in gpt-oss's form"):
        checkpoint.load_(on_meta(GptOssExperts), tmp_path / "y")


@torch.no_grad()
def test_few_tokens_of_gpt_oss(tmp_path):
    """Call experts as wide as gpt-oss's with few tokens. The weights of all experts are stored side by side in one
    matrix, in which the scales of every second expert start inside a scale tile."""
    experts, hidden, width, prefix = 3, 64, 2880, "mlp.experts."
    tensors = checkpoints.gpt_oss_experts(experts, hidden, width)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["o_proj"]}
    checkpoints.write(tmp_path, {**tensors, "o_proj.weight": torch.randn(H, H).bfloat16()}, quantization)
    layer = checkpoint.load_(on_meta(lambda: GptOssExperts(experts, hidden, width)), tmp_path).mlp.experts
    layer.route_few_(tokens_of_expert=2)  # set explicitly, because by default no call of this model has few tokens
    up, down = (
        np.stack([weights.fp4(codes.flatten(1), scales) for codes, scales in zip(*stacks, strict=True)])
        for stacks in ([tensors[f"{prefix}{name}_{part}"] for part in ("blocks", "scales")] for name in NAMES)
    )
    biases = [tensors[f"{prefix}{name}_bias"].double().numpy() for name in NAMES]
    up, biases[0] = (np.concatenate((each[:, 0::2], each[:, 1::2]), 1) for each in (up, biases[0]))
    x, ids = torch.randn(3, hidden).bfloat16(), torch.tensor([[0, 1], [2, 1], [1, -1]])
    factors = torch.rand(3, 2)
    got, called = layer(x, ids, factors), support.ops_of(layer, x, ids, factors)
    assert called == {"moe_fc1_fp4_weight_only", "moe_fc2_fp4_weight_only"}
    want = support.computed(x, ids, factors, up, down, tuple(biases), support.GPT_OSS, in_16_bits=True)
    assert np.linalg.norm(got.double().numpy() - want) < 0.004 * np.linalg.norm(want)


def test_experts_that_are_not_quantised(tmp_path):
    tensors = {"o_proj.weight": torch.randn(H, H).bfloat16()}
    for e in range(E):
        for part, size in zip(QWEN, SIZES, strict=True):
            tensors[f"mlp.experts.{e}.{part}.weight"] = torch.randn(size).bfloat16()
    checkpoints.write(tmp_path, tensors, None)
    experts = checkpoint.load_(on_meta(), tmp_path).mlp.experts
    assert isinstance(experts, Experts)
    for e in range(E):
        gate, up, down = (tensors[f"mlp.experts.{e}.{part}.weight"] for part in QWEN)
        assert torch.equal(experts.gate_up_proj[e], torch.cat((gate, up))) and torch.equal(experts.down_proj[e], down)


# Invalid checkpoints


def changed(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


NAME = "mlp.experts.2.up_proj"


def without_a_scale(tensors):
    del tensors[f"{NAME}.weight_scale_2"]


def of_another_size(tensors):
    tensors[f"{NAME}.weight"] = tensors[f"{NAME}.weight"][:64].clone()
    tensors[f"{NAME}.weight_scale"] = tensors[f"{NAME}.weight_scale"][:64].clone()


def one_in_bfloat16(tensors):
    for suffix in ("weight_scale", "weight_scale_2"):
        del tensors[f"{NAME}.{suffix}"]
    tensors[f"{NAME}.weight"] = torch.randn(I, H).bfloat16()


def one_more(tensors):
    for name in [*tensors]:
        if ".experts.0." in name:
            tensors[name.replace(".0.", f".{E}.")] = tensors[name].clone()


def with_a_bias(tensors):
    tensors[f"{NAME}.bias"] = torch.randn(I).bfloat16()


def without_one(tensors):
    for name in [*tensors]:
        if name.startswith(NAME):
            del tensors[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_scale, r"contains no mlp.experts.2.up_proj.weight_scale_2, which modelopt nvfp4 needs"),
        (of_another_size, r"mlp.experts.2.up_proj.weight in .* \(N, K\) is \(64, 256\); expected \(128, 256\)"),
        (one_in_bfloat16, r"mlp.experts.0.gate_proj.weight in .* is quantised, but mlp.experts.2.up_proj is not"),
        (one_more, r"the model does not use mlp.experts.4"),
        (with_a_bias, r"mlp.experts.2.up_proj in .* contains an unexpected bias"),
        (without_one, r"is quantised, but mlp.experts.2.up_proj is not"),
    ],
)
def test_bad_tensors(change, message, tmp_path):
    written(KINDS["modelopt W4A16"], tmp_path)
    changed(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        checkpoint.load_(on_meta(), tmp_path)


def test_bad_formats(tmp_path):
    written(KINDS["modelopt W4A16"], tmp_path / "y")
    path = tmp_path / "y" / "config.json"
    config = json.loads(path.read_text())
    layers = {
        f"mlp.experts.{e}.{part}": {"quant_algo": "NVFP4" if e else "W4A16_NVFP4"} for e in range(E) for part in QWEN
    }
    config["quantization_config"] |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config.json gives several schemes for the experts of this layer"):
        checkpoint.load_(on_meta(), tmp_path / "y")
    written(KINDS["modelopt W4A16"], tmp_path / "z")
    block = on_meta()
    block.mlp.experts.act_fn = torch.nn.ReLU()
    with pytest.raises(ValueError, match=r"mlp.experts is quantised in .*: Experts computes something else"):
        checkpoint.load_(block, tmp_path / "z")
