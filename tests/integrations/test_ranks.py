"""A transformers decoder divided among ranks, compared with the model on one rank."""

from __future__ import annotations

import warnings

import pytest
import torch
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

pytest.importorskip("transformers")
from transformers import LlamaConfig

from torch_cute_ops.distributed import decoder_plan
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
