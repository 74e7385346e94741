"""Launches of a decoder layer of transformers, with ``fuse_attention_`` and the Inductor pass."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
import torch._inductor.config as inductor_config
from support.compiling import fresh_compiler  # noqa: F401  (a fixture)
from torch import Tensor
from torch._inductor.utils import get_code

pytest.importorskip("transformers")
from support.transformers_cache import cached
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen3Config,
    StaticCache,
)

from torch_cute_ops.integrations import inductor
from torch_cute_ops.integrations.transformers import from_config, fuse_attention_

SIZES = {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 96, "max_position_embeddings": 128, "pad_token_id": 0, "attn_implementation": "one_launch",
}  # fmt: skip
# The first layer of each type of attention computes tables and slots. The last two layers use them.
TYPES = ["sliding_attention", "full_attention", "full_attention"]
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_hidden_layers=2),
    "qwen3": Qwen3Config(**SIZES, num_hidden_layers=2),
    "gemma3": Gemma3TextConfig(**SIZES, num_hidden_layers=3, layer_types=TYPES, sliding_window=12),
}


@torch.library.custom_op("torch_cute_ops_tests::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return a result of attention, (B, tokens, heads, D). Only the launches around attention are counted."""
    return torch.zeros_like(q.transpose(1, 2))


@attention.register_fake
def _(q, k, v):
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


AttentionInterface.register("one_launch", lambda module, q, k, v, mask, **kwargs: (attention(q, k, v), None))
AttentionMaskInterface.register("one_launch", lambda *args, **kwargs: None)

CALL = re.compile(r"torch\.ops\.(\w+\.\w+)(?:\.default)?\(|(extern_kernels\.\w+)\(|\b(cpp_fused)_\w+\(")
"""Call of an op, of an external kernel, or of a kernel of Inductor, in a program that Inductor generated."""
NORMS = {"cpp_fused": 2}
"""Launches for Gemma's norms before the additions to the residual."""
SIXTEEN_BIT = {
    "cute.add_rmsnorm": 2,
    "cute.mm_fp4_weight_only": 3,
    "cute.qkv_norm_rope_append": 1,
    "cute.silu_mul_mm_fp4_weight_only": 1,
}
FP4 = {
    "cute.add_rmsnorm_fp4quant": 2,
    "cute.fp4quant_mm_fp4": 1,
    "cute.mm_fp4": 2,
    "cute.qkv_norm_rope_append": 1,
    "cute.silu_mul_fp4quant_mm_fp4": 1,
}
FP8 = {
    "cute.add_rmsnorm_fp8quant": 2,
    "cute.fp8_quantize": 1,
    "cute.mm_fp8_fp4": 4,
    "cute.qkv_norm_rope_append": 1,
    "cute.silu_mul_fp8quant": 1,
}
LAUNCHES = [
    ("llama", "16bit", 1, SIXTEEN_BIT),
    ("qwen3", "fp4", 1, FP4),
    ("gemma3", "16bit", 1, {**SIXTEEN_BIT, **NORMS}),
    ("gemma3", "fp4", 1, {**FP4, **NORMS}),
    ("gemma3", "fp8", 2, {**FP8, **NORMS}),
]
"""Model, activations, sequences, and the calls of a layer: our ops, and kernels that Inductor compiles."""


@pytest.mark.parametrize(("name", "activations", "batch", "expected"), LAUNCHES)
def test_launches_of_a_layer(name, activations, batch, expected, fresh_compiler):  # noqa: F811
    """Count the calls of a layer in Inductor's program for a decode step with a static cache: from attention of one
    layer to attention of the next layer. docs/models.md contains these numbers."""
    config = CONFIGS[name]
    model = fuse_attention_(from_config(config, "nvfp4", activations=activations, device="cpu"))
    cache, ids = StaticCache(config=config, max_cache_len=12), torch.ones(batch, 5, dtype=torch.int64)
    # The program is neither compiled nor run, so it must not get into Inductor's cache.
    options = {"post_grad_custom_pre_pass": inductor.FuseQuantization(), "force_disable_caches": True}
    with torch.no_grad(), inductor_config.patch(options):
        model(ids, **cached(cache))
        step = torch.compile(model, fullgraph=True, dynamic=False)
        code, *_ = get_code(step, ids[:, :1], **cached(cache), position_ids=torch.full((batch, 1), 5))
    calls = ["".join(names) for names in CALL.findall(code[code.index("def call(") :])]
    *_, start, end = (i for i, call in enumerate(calls) if call == "torch_cute_ops_tests.attention")
    assert Counter(calls[start + 1 : end]) == expected
