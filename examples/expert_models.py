#!/usr/bin/env python3
"""Run a whole model with experts and random weights: in the shapes of DeepSeek-V3 in FP8, or of gpt-oss in MXFP4.

    python examples/expert_models.py                                  # DeepSeek-V3 with FP8 blocks
    python examples/expert_models.py --model gpt-oss                  # gpt-oss with MXFP4 experts
    python examples/expert_models.py --layers 4 --experts 64 --tokens 128 --batches 1 16

The model class is from transformers. Linear layers and experts are modules of torch_cute_ops.nn. The weights are drawn
as codes and never stored in 16 bits. `generate` continues each batch of prompts with a static cache, and on a GPU
compiles and captures the decode step. The script compares the result of the first layer of experts with a computation
from the decoded weights in float32. Without a GPU the ops run their references in plain torch. The last line starts
with SUCCESS or FAILURE; the exit status is 0 or 1 accordingly.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DeepseekV3Config, GptOssConfig

import torch_cute_ops.nn
from quickstart import conclude, multiple_of, pick_device
from torch_cute_ops.integrations import transformers as cute_transformers

SCHEMES = {"deepseek-v3": "fp8_block", "gpt-oss": "mxfp4"}
SMALL = {"layers": 2, "hidden": 256, "width": 128, "experts": 8, "heads": 4, "vocabulary": 512}
LARGE = {
    "deepseek-v3": {
        "layers": 4, "hidden": 7168, "width": 2048, "experts": 32, "heads": 128, "vocabulary": 32_000,
    },
    "gpt-oss": {"layers": 8, "hidden": 2880, "width": 2880, "experts": 32, "heads": 64, "vocabulary": 32_000},
}  # fmt: skip
"""Sizes by model. SMALL is used on a CPU. LARGE is used on a GPU: widths as published, but fewer layers, experts and
vocabulary entries."""

LEAST_COSINE = 0.995
"""Smallest accepted cosine similarity between a token's result and the exact result. FP8 activations reduce the cosine
by 0.001 to 0.002 in each of two GEMMs."""


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device, backend = pick_device()
    print(f"device     {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}: {backend}")
    sizes = SMALL if device.type == "cpu" else LARGE[options.model]
    sizes = {**sizes, **{name: value for name in ("layers", "experts") if (value := getattr(options, name))}}
    scheme = SCHEMES[options.model]
    # gpt-oss's attention stays in bf16, as in its checkpoints.
    ignore = ("lm_head", "re:.*self_attn.*") if options.model == "gpt-oss" else ("lm_head",)
    model = cute_transformers.from_config(
        CONFIGS[options.model](**sizes), scheme, device=device, ignore=ignore, dtype=torch.bfloat16
    )
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    print(f"model      {options.model}, {sizes['layers']} layers, {sizes['experts']} experts, {size:,} bytes, {scheme}")

    torch.manual_seed(0)
    cosine = cosine_of_experts(model, device)
    print(f"experts    cosine {cosine:.5f} of a token, the least of 16 (limit {LEAST_COSINE})")
    problems = [] if cosine >= LEAST_COSINE else [f"a cosine of {cosine:.5f} is below {LEAST_COSINE}"]

    torch_cute_ops.nn.warmup(model, rows=sorted({*options.batches, *(batch * 8 for batch in options.batches)}))
    print(f"\n{'batch':>9}  tokens a second")
    for batch in options.batches:
        prompts = torch.randint(1, sizes["vocabulary"], (batch, 8), device=device)
        given: dict[str, Any] = {
            "max_new_tokens": options.tokens, "min_new_tokens": options.tokens, "do_sample": False,
            "cache_implementation": "static", "pad_token_id": 0,
        }  # fmt: skip
        if device.type == "cuda":
            model.generate(prompts, **given)  # the first call compiles the decode step
        start = time.perf_counter()
        served = model.generate(prompts, **given)
        if served.shape != (batch, 8 + options.tokens) or not torch.equal(served[:, :8], prompts):
            problems.append(f"batch {batch}: {tuple(served.shape)} tokens")
        print(f"{batch:9}  {batch * options.tokens / (time.perf_counter() - start):15,.1f}")
    print()
    return conclude(problems)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SCHEMES), default="deepseek-v3")
    parser.add_argument("--layers", type=multiple_of(1, least=2), help="number of layers, at least 2")
    parser.add_argument("--experts", type=multiple_of(8), help="number of experts per layer, a multiple of 8")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens of each sequence (default: 16)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="numbers of sequences (default: 1 8)")
    return parser.parse_args(arguments)


def deepseek_v3(layers: int, hidden: int, width: int, experts: int, heads: int, vocabulary: int) -> DeepseekV3Config:
    is_small, groups = hidden < 1024, min(8, experts // 2)
    head = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32} if is_small else {}
    return DeepseekV3Config(
        hidden_size=hidden, intermediate_size=2 * hidden, moe_intermediate_size=width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, n_routed_experts=experts, n_group=groups,
        topk_group=groups // 2,
        num_experts_per_tok=min(8, experts // 2), first_k_dense_replace=1, vocab_size=vocabulary,
        max_position_embeddings=4096, q_lora_rank=128 if is_small else 1536, kv_lora_rank=128 if is_small else 512,
        pad_token_id=0, **head,
    )  # fmt: skip


def gpt_oss(layers: int, hidden: int, width: int, experts: int, heads: int, vocabulary: int) -> GptOssConfig:
    return GptOssConfig(
        hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads // 4 if heads < 8 else 8, head_dim=64, num_local_experts=experts,
        num_experts_per_tok=4, vocab_size=vocabulary, pad_token_id=0,
    )  # fmt: skip


CONFIGS = {"deepseek-v3": deepseek_v3, "gpt-oss": gpt_oss}


def cosine_of_experts(model: torch.nn.Module, device: torch.device) -> float:
    """Compare the first layer of experts with a float32 computation from the decoded weights. Return the smallest
    cosine similarity between the two results of a token."""
    experts = next(each for each in model.modules() if isinstance(each, torch_cute_ops.nn.QuantExperts))
    x = torch.randn(16, experts.hidden_size, device=device, dtype=torch.bfloat16)
    factors, ids = torch.rand(16, experts.experts, device=device).topk(experts.topk)
    gate_up, down = experts.dequantize(torch.float32)
    alpha, beta, limit, _ = experts.swiglu
    want = torch.zeros(x.shape, device=device)
    for token, row in enumerate(x.float()):
        for expert, factor in zip(ids[token].tolist(), factors[token].tolist(), strict=True):
            gate, up = (gate_up[expert] @ row).chunk(2)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            want[token] += factor * (down[expert] @ (gate * torch.sigmoid(alpha * gate) * (up + beta)))
    return F.cosine_similarity(experts(x, ids, factors).float(), want, dim=1).min().item()


if __name__ == "__main__":
    sys.exit(main())
