"""Tiny models that ``save`` wrote, served by vLLM on a CPU, and compared with the same checkpoints in transformers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the model is in this process, where tests can call its layers
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import torch
import transformers
import vllm
from torch import nn
from vllm.lora.request import LoRARequest

import torch_cute_ops.nn
from torch_cute_ops import checkpoint
from torch_cute_ops.integrations.vllm import METHODS

PROMPTS = [[1, 5, 9, 33, 7], [1, *range(40, 61)], [1, 100]]
TOKENS = 12
GAP = 0.1
"""Largest difference between the log probabilities of two tokens at which both tokens count as right."""
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256, "seed": 0,
    "skip_tokenizer_init": True,
}  # fmt: skip
OURS = METHODS["auto"]


class Answer(NamedTuple):
    """Greedy tokens, and the log probabilities of the likeliest tokens at each step."""

    tokens: list[int]
    logprobs: list[dict[int, float]]


class Served(NamedTuple):
    """Answers to ``PROMPTS``, and the number of the model's linear layers by the class of their method."""

    answers: list[Answer]
    methods: Counter[str]


def model_of(kind: str = "Llama", seed: int = 0, **sizes: Any) -> nn.Module:
    """Return a random model whose logits are of the size of a trained model's."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **sizes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if each.dim() >= 2:
                is_tied = "embed" in name and config.tie_word_embeddings
                # Give the router large logits, so that the choice of experts seldom depends on rounding.
                gain = 6 if name.endswith(("gate.weight", "router.weight")) else 1.5
                each.normal_(std=0.1 if is_tied else 1.0 if "embed" in name else gain / each.shape[-1] ** 0.5)
            elif "bias" in name:
                each.normal_(std=0.5)
    return model.bfloat16()


def save(folder: Path, scheme: str, style: str, *, calibrated: bool = False, ignore: Any = None, **of: Any) -> Path:
    """Quantise a random model, and save it as a checkpoint."""
    model, how = model_of(**of), {} if ignore is None else {"ignore": ignore}
    if calibrated:
        how["calibrate"] = lambda model: model(torch.randint(4, 500, (4, 32)))
        how |= {"activations": "fp4"} if scheme == "nvfp4" else {}
    with torch.no_grad():
        torch_cute_ops.nn.quantize_(model, scheme, **how)
    checkpoint.save(model, folder, style)
    return folder


def serve(
    folder: Path,
    quantization: str | None = OURS,
    check: Callable[[nn.Module], Any] | None = None,
    adapters: Sequence[LoRARequest | None] | None = None,
    **options: Any,
) -> Served:
    """Serve a checkpoint, and call ``check`` with vLLM's model. ``adapters`` contains each prompt's LoRA adapter."""
    llm = vllm.LLM(str(folder), quantization=quantization, **{**OPTIONS, "enforce_eager": True, **options})
    try:
        parameters = vllm.SamplingParams(
            temperature=0, max_tokens=TOKENS, logprobs=5, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": each} for each in PROMPTS]
        outputs = llm.generate(prompts, parameters, use_tqdm=False, lora_request=adapters)
        model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        methods = Counter(
            type(each.quant_method).__name__
            for each in model.modules()
            if isinstance(each, vllm.model_executor.layers.linear.LinearBase)
        )
        if check is not None:
            check(model)
    finally:
        del llm
        vllm.distributed.cleanup_dist_env_and_memory()
    answers = []
    for output in outputs:
        said = output.outputs[0]
        logprobs = [{token: value.logprob for token, value in step.items()} for step in said.logprobs]
        answers.append(Answer([*said.token_ids], logprobs))
    return Served(answers, methods)


@torch.no_grad()
def differences(model: nn.Module, answers: list[Answer]) -> tuple[int, float]:
    """Compare the answers with a model of transformers. Return the number of tokens whose log probability in the model
    is more than ``GAP`` below the likeliest token's, and the mean difference of the log probabilities."""
    wrong, apart = 0, []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = model(torch.tensor([prompt + answer.tokens])).logits.float()
        rows = torch.log_softmax(logits, -1)[0, len(prompt) - 1 : -1]
        for row, token, few in zip(rows, answer.tokens, answer.logprobs, strict=True):
            wrong += bool(row.max() - row[token] > GAP)
            apart += [abs(row[key].item() - value) for key, value in few.items()]
    return wrong, sum(apart) / len(apart)
