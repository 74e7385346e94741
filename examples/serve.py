#!/usr/bin/env python3
"""Serve a quantised model with continuous batching, for requests of different lengths.

    python examples/serve.py                            # a tiny model with random weights
    python examples/serve.py --size 8b                  # the shapes of Llama 3 8B; 70b fits one H200
    python examples/serve.py --model path/or/hub-name   # an NVFP4, MXFP4 or FP8 checkpoint
    python examples/serve.py --config config.json       # random weights of a model of transformers
    python examples/serve.py --size 8b --scheme fp8_block --requests 256

Random weights are drawn as codes and never stored in bf16, so creating the model needs no more memory than serving it.
transformers' continuous batching forms the batches: a request joins the batch when the batch has room, and leaves when
it is done. On a GPU, steps are captured as CUDA graphs, one for each batch size. At the end the script checks the
served tokens with a forward pass over each whole request: the logit of each served token must be the largest logit, or
nearly as large. The last line starts with SUCCESS or FAILURE; the exit status is 0 or 1 accordingly.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch

import torch_cute_ops.nn
from quantize_and_save import bytes_of, refuse_activations
from quickstart import conclude, multiple_of, pick_device

# Sizes of Llama models: hidden, intermediate, layers, query heads, key and value heads, vocabulary
SIZES = {
    "tiny": (256, 512, 2, 4, 2, 512),
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "70b": (8192, 28672, 80, 64, 8, 128256),
}
PAGE = 256  # tokens per page of transformers' KV cache
CHECKED = 4  # number of requests whose tokens are checked
# Largest accepted distance between the logit of a served token and the largest logit, in standard deviations. A
# distance is possible, because a forward pass over a whole request sums attention in another order than single steps.
MAX_SHORTFALL = 0.1


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    try:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        from torch_cute_ops.integrations.transformers import from_pretrained
    except ImportError as error:
        sys.exit(f"serve.py needs transformers 5.17 or later: pip install -e '.[transformers]' ({error})")
    options = parse(arguments)
    device, backend = pick_device()
    is_cuda = device.type == "cuda"
    print(f"device     {torch.cuda.get_device_name(device) if is_cuda else 'CPU'}: {backend}")
    given = {"activations": options.activations, "device": device}
    model = from_pretrained(options.model, **given) if options.model else random_model(options, given)
    print(f"model      {options.model or options.config or options.size}, {bytes_of(model):,} bytes")

    prompts = random_prompts(options, model.config.vocab_size)
    longest = options.prompt + options.new
    pages = len(prompts) * -(-longest // PAGE)
    rows = max(options.prompt, min(len(prompts), options.batch))
    torch_cute_ops.nn.warmup(model, rows=range(1, rows + 1))
    if not is_cuda:
        # Without psutil, transformers warns that it cannot read the size of the host's memory, which is not needed
        # here.
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    # Limit the cache explicitly, because by default it would fill all free memory.
    batching = ContinuousBatchingConfig(
        num_blocks=pages + 1,
        max_batch_tokens=rows,
        max_requests_per_batch=options.batch,
        use_cuda_graph=is_cuda,
    )
    # Disable the end-of-sequence token, because a model with random weights would generate it at random positions.
    decoding = GenerationConfig(max_new_tokens=options.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    try:
        served = model.generate_batch(
            prompts, generation_config=decoding, continuous_batching_config=batching, progress_bar=sys.stderr.isatty()
        )
    except MemoryError as error:
        if is_cuda or importlib.util.find_spec("psutil"):
            raise
        sys.exit(f"serve.py needs psutil, by which transformers reads the CPU's memory: pip install psutil ({error})")
    seconds = time.perf_counter() - start

    outputs = [one.generated_tokens for one in served.values()]
    tokens = sum(map(len, outputs))
    print(f"served     {len(outputs)} requests, {tokens:,} new tokens in {seconds:.1f} s: {tokens / seconds:,.0f}/s")
    problems = [f"request {i} has {len(out)} tokens" for i, out in enumerate(outputs) if len(out) != options.new]
    if len(outputs) != len(prompts):
        problems.append(f"{len(prompts)} requests, and {len(outputs)} answers")
    if not problems:
        short = max(shortfall(model, prompts[i], outputs[i]) for i in range(min(CHECKED, len(outputs))))
        # With random weights, the roundings of FP4 and FP8 activations change the logits too much for this check.
        is_judged = options.model is not None or options.activations in ("auto", "16bit")
        limit = f"limit {MAX_SHORTFALL}" if is_judged else "not judged with random weights and quantised activations"
        print(f"tokens     at most {short:.3f} standard deviations below the best ({limit})")
        if is_judged and not short <= MAX_SHORTFALL:
            problems.append(f"a token is {short:.3f} standard deviations below the best")
    return conclude(problems)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="folder of a quantised checkpoint, or its name on the Hub; else random weights")
    which.add_argument("--size", choices=tuple(SIZES), default="tiny", help="size with random weights (default: tiny)")
    which.add_argument("--config", type=existing_file, help="config.json of transformers, for random weights")
    parser.add_argument("--scheme", choices=("nvfp4", "mxfp4", "fp8_block"), default="nvfp4", help="of random weights")
    parser.add_argument("--activations", choices=("auto", "16bit", "fp4", "fp8"), default="auto")
    parser.add_argument("--requests", type=multiple_of(1), default=8)
    parser.add_argument("--batch", type=multiple_of(1), default=64, help="maximum of requests at once (default: 64)")
    parser.add_argument("--prompt", type=multiple_of(1), default=32, help="tokens of the longest prompt (default: 32)")
    parser.add_argument("--new", type=multiple_of(1), default=16, help="new tokens of each request (default: 16)")
    options = parser.parse_args(arguments)
    if options.model is None:  # a checkpoint names its own scheme
        refuse_activations(parser, options)
    return options


def existing_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"file {text} does not exist")
    return path


def random_model(options: argparse.Namespace, given: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    from torch_cute_ops.integrations.transformers import from_config

    config = AutoConfig.from_pretrained(options.config) if options.config else llama_config(options)
    return from_config(config, options.scheme, dtype=torch.bfloat16, **given)


def llama_config(options: argparse.Namespace) -> Any:
    from transformers import LlamaConfig

    hidden, intermediate, layers, heads, kv_heads, vocabulary = SIZES[options.size]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=max(2048, options.prompt + options.new),
    )


def random_prompts(options: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Return random prompts. Their lengths vary from half of ``options.prompt`` to ``options.prompt``."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(-(-options.prompt // 2), options.prompt + 1, (options.requests,), generator=random)
    return [torch.randint(vocabulary, (length,), generator=random).tolist() for length in lengths.tolist()]


def shortfall(model: Any, prompt: list[int], output: list[int]) -> float:
    """Return the largest distance between the logit of a served token and the largest logit at its position, in
    standard deviations of the logits."""
    ids = torch.tensor([prompt + output], device=model.device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return ((logits.amax(1) - chosen) / logits.std(1)).max().item()


if __name__ == "__main__":
    sys.exit(main())
