"""A transformers decoder divided among ranks, compared with the model on one rank."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch._inductor.config as inductor_config
from support.inductor_graphs import Compiler
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

pytest.importorskip("transformers")
from transformers import LlamaConfig, Qwen3Config

from torch_cute_ops.distributed import decoder_plan
from torch_cute_ops.integrations import inductor
from torch_cute_ops.integrations.transformers import from_config

WORLD = 2


@torch.no_grad()
def divided(rank: int) -> None:
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    model = from_config(config, "nvfp4", device="cpu").eval()
    prompt = torch.arange(12).unsqueeze(0)
    want, tokens = model(prompt).logits, model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning, because the model contains every layer that the plan names
        parallelize_module(model, init_device_mesh("cpu", (WORLD,)), decoder_plan(32))
    attention = model.model.layers[0].self_attn
    assert attention.qkv_proj.parts == (64, 32, 32) and attention.o_proj.in_features == 64
    logits = model(prompt).logits
    # The order of float32 additions differs, and results are rounded once to bfloat16.
    assert (logits - want).abs().max() <= want.abs().max() / 64
    assert torch.equal(model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0), tokens)


def test_generate_on_two_ranks():
    run_ranks(WORLD, divided)


@torch.no_grad()
def compiled(rank: int) -> None:
    """Check that the Inductor pass fuses both sums of each layer, except the last sum, which precedes no GEMM of
    ours."""
    for made, scheme, op in (
        (LlamaConfig, "fp8_block", "all_reduce_add_rmsnorm_fp8quant"),
        (Qwen3Config, "nvfp4", "all_reduce_add_rmsnorm"),
    ):
        config = made(
            hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            head_dim=128, vocab_size=64,
        )  # fmt: skip
        model = from_config(config, scheme, device="cpu").eval()
        parallelize_module(model, init_device_mesh("cpu", (WORLD,)), decoder_plan(128))
        compiler, prompt = Compiler(), torch.arange(12).unsqueeze(0)
        torch._dynamo.reset()
        with inductor_config.patch(post_grad_custom_pre_pass=inductor.FuseQuantization()):
            got = torch.compile(model, backend=compiler, fullgraph=True)(prompt, use_cache=False).logits
        (calls,) = (compiler.ours(i) for i in range(len(compiler.graphs)))
        assert {name: count for name, count in calls.items() if "add_rmsnorm" in name} == {op: 3}
        assert sum("c10d" in name and "all_reduce" in name for name in compiler.calls()) == 1
        want = model(prompt, use_cache=False).logits
        # With 16-bit activations, both programs compute the same bfloat16 sum of two ranks.
        allowed = 0 if scheme == "nvfp4" else want.abs().max() / 8
        assert (got - want).abs().max() <= allowed


def test_fused_sums_on_two_ranks():
    run_ranks(WORLD, compiled)
