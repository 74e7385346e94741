"""Tiny models with experts, served by vLLM on a CPU, and compared with the same checkpoints in transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import SIZES, differences, model_of, save, serve
from support import checkpoints
from torch import nn

from torch_cute_ops.integrations import transformers as cute_transformers
from torch_cute_ops.integrations.vllm._experts import CuteExpertsMethod
from torch_cute_ops.integrations.vllm._linear import CuteLinearMethod
from torch_cute_ops.nn import QuantExperts

QWEN: dict[str, Any] = {
    "kind": "Qwen3Moe", "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 64,
    "norm_topk_prob": True,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {"kind": "Mixtral", "intermediate_size": 128, "num_local_experts": 4, "head_dim": 64}
ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
GLM: dict[str, Any] = {"kind": "Glm4Moe", "head_dim": 64, **ROUTED}
"""Model with the experts, router and shared expert of DeepSeek-V3, but a different attention."""
DEEPSEEK: dict[str, Any] = {
    "kind": "DeepseekV3", "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64,
    "v_head_dim": 64, "num_key_value_heads": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", **ROUTED,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "kind": "GptOss", "intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64,
    "sliding_window": 64,
}  # fmt: skip


def gpt_oss(folder: Path, **sizes: Any) -> Path:
    """Save a random model in gpt-oss's own form, with experts in MXFP4."""
    of = {**GPT_OSS, **sizes}
    model = model_of(**of)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for i in range(SIZES["num_hidden_layers"]):
        name = f"model.layers.{i}.mlp.experts"
        experts = checkpoints.gpt_oss_experts(
            of["num_local_experts"], SIZES["hidden_size"], of["intermediate_size"], name=name, scales=(118, 122)
        )
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(name)} | experts
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def experts_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each layer of routed experts of vLLM's model, with the name of the experts in transformers."""
    for name, layer in model.named_modules():
        if type(layer).__name__.endswith("RoutedExperts"):
            yield name.removesuffix(".routed_experts").replace(".block_sparse_moe.", ".mlp."), layer


class ExpertsAgree:
    """Check that each layer of experts is ours, and that its results equal the results of the same experts in
    transformers, bit for bit: with few tokens (only routed pairs are computed), and with many (tokens are permuted)."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.count = model, 0

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> None:
        for name, layer in experts_of(model):
            assert type(layer.quant_method) is CuteExpertsMethod, name
            experts: Any = self.model.get_submodule(name)
            for tokens in (3, 100):
                x = torch.randn(tokens, experts.hidden_size).bfloat16()
                ids = torch.rand(tokens, experts.experts).argsort(1)[:, :2].to(torch.int32)
                weights = torch.rand(tokens, 2)
                got = layer.quant_method.apply(layer, x, weights, ids, None, None)
                assert torch.equal(got, experts(x, ids, weights)), (name, tokens, got, experts(x, ids, weights))
            self.count += 1


def in_transformers(folder: Path) -> nn.Module:
    """Return a checkpoint's model in transformers, whose experts keep 16-bit activations for few tokens, as in
    vLLM."""
    model: nn.Module = cute_transformers.from_pretrained(folder)
    for module in model.modules():
        if isinstance(module, QuantExperts) and module.scheme in ("nvfp4", "mxfp4"):
            module.route_few_()
    return model


def check_as_transformers(folder: Path, unquantised: nn.Module | None = None) -> None:
    """Check that vLLM answers as transformers does with the checkpoint, and that the unquantised model answers
    differently."""
    model = in_transformers(folder)
    check = ExpertsAgree(model)
    served = serve(folder, check=check)
    assert check.count > 0 and served.methods.keys() <= {CuteLinearMethod.__name__, "UnquantizedLinearMethod"}
    for module in model.modules():
        if isinstance(module, QuantExperts) and module.side_by_side is not None:
            module.tokens_of_expert = 1000  # vLLM computes each step with few tokens
    wrong, apart = differences(model, served.answers)
    assert wrong == 0 and apart < 0.1, (wrong, apart)
    if unquantised is not None:
        wrong, apart = differences(unquantised, served.answers)
        assert wrong > 3 and apart > 0.1, (wrong, apart)


@pytest.mark.parametrize(
    ("scheme", "style", "of"),
    [
        ("nvfp4", "modelopt", QWEN), ("nvfp4", "compressed-tensors", MIXTRAL), ("mxfp4", "compressed-tensors", QWEN),
        ("nvfp4", "modelopt", GLM),
    ],
)  # fmt: skip
def test_experts(scheme, style, of, tmp_path):
    for seed in (0, 1, 2) if of is MIXTRAL else (0,):
        folder = save(tmp_path / str(seed), scheme, style, seed=seed, **of)
        check_as_transformers(folder, model_of(seed=seed, **of))


@pytest.mark.parametrize(("scheme", "style", "of"), [
    ("fp8_block", "compressed-tensors", DEEPSEEK), ("fp8_channel", "modelopt", QWEN),
])  # fmt: skip
def test_experts_with_quantised_activations(scheme, style, of, tmp_path):
    """Compare whole models with FP8 activations, which agree only roughly. For this model, DeepSeek's attention differs
    between vLLM and transformers even without quantisation."""
    folder = save(tmp_path / "model", scheme, style, **of)
    model = in_transformers(folder)
    check = ExpertsAgree(model)
    served = serve(folder, check=check)
    assert check.count > 0 and CuteLinearMethod.__name__ in served.methods
    if of is not DEEPSEEK:
        wrong, apart = differences(model, served.answers)
        assert wrong < 12 and apart < 0.25, (wrong, apart)


def test_gpt_oss(tmp_path):
    check_as_transformers(gpt_oss(tmp_path / "model"))
