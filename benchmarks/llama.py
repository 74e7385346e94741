"""What `python -m benchmarks model` measures: Llamas by size and precision, and how they are called.

They have random weights, on transformers' own modelling code. bf16 is what the same configuration gives there,
untouched; ours has quantised linear layers, merged where they share an input, and its `lm_head` in bf16.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_cute_ops.nn import QuantLinear

from . import layer

DTYPE = layer.DTYPE
HEAD = 128
"""Elements of a head of attention."""
BATCHES, CONTEXT, TOKENS = (1, 16, 64), 1024, 2048
"""Sequences of a decode step, tokens in its cache, tokens of a prefill."""
MANY = 64
"""Sequences from which on FP8 activations are measured beside those that were asked for."""
ROUNDS = 11
"""Of a decode step, a prefill, or a generation each model is timed so many times, in turn."""
PROMPT, NEW, LONGEST, GENERATIONS = 16, 128, 256, 3
"""Tokens of the prompt of `generate()`, new ones where it is timed and where recompilations are counted; how often."""
BF16 = "bf16"
UNMASKED = "sdpa_unmasked"


@dataclass(frozen=True)
class Size:
    """Of a Llama: a layer's widths, how many there are, the vocabulary.

    Attributes:
        parts: what is measured if nothing is said.
        bf16_layers: of the bf16 models that are timed in place of one that does not fit; empty: it does.
    """

    widths: layer.Widths
    layers: int
    vocabulary: int
    parts: tuple[str, ...]
    bf16_layers: tuple[int, ...] = ()

    def config(self, layers: int | None = None, attention: str = "sdpa") -> Any:
        """transformers' configuration, with all layers or `layers`."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.widths.hidden,
            intermediate_size=self.widths.intermediate,
            num_hidden_layers=layers or self.layers,
            num_attention_heads=self.widths.attention // HEAD,
            num_key_value_heads=(self.widths.qkv - self.widths.attention) // 2 // HEAD,
            head_dim=HEAD,
            vocab_size=self.vocabulary,
            max_position_embeddings=8192,
            attn_implementation=attention,
            eos_token_id=None,  # random weights would draw it anywhere
        )


PARTS = ("memory", "decode", "prefill", "generate", "logits")
MODELS = {
    "8B": Size(layer.MODELS["8B"], 32, 128256, PARTS),
    "70B": Size(layer.MODELS["70B"], 80, 128256, ("memory", "decode"), bf16_layers=(2, 6)),
}
"""Llama 3.1."""


# Models


def register_unmasked() -> None:
    """Have transformers know `UNMASKED`: its attention by `scaled_dot_product_attention`, without a mask.

    Right where a prompt fills an empty cache, and where a token takes the last place of one. With a mask transformers
    5.17 copies keys and values for each head of queries, eight times the cache of a 70B, in every step.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(UNMASKED, sdpa_attention_forward)


def build(label: str, config: Any, device: torch.device, merge: bool = True) -> Any:
    """The model in bf16, or in "scheme/activations"."""
    from torch_cute_ops.integrations.transformers import from_config

    if label == BF16:  # no layer quantised: the layers as transformers has them
        return from_config(config, device=device, dtype=DTYPE, merge=False, ignore=("*",))
    scheme, _, activations = label.partition("/")
    return from_config(
        config,
        scheme,  # type: ignore[arg-type]
        activations=activations,  # type: ignore[arg-type]
        device=device,
        dtype=DTYPE,
        merge=merge,
    )


def decoded(model: nn.Module) -> nn.Module:
    """The model with bf16 weights that have the numbers of the quantised ones, which are not merged."""
    twin = copy.deepcopy(model)
    for parent in [*twin.modules()]:
        for name, each in [*parent.named_children()]:
            if isinstance(each, QuantLinear):
                linear = nn.Linear(each.in_features, each.out_features, bias=False, device="meta")
                linear.weight = nn.Parameter(each.dequantize(DTYPE), requires_grad=False)
                parent.add_module(name, linear)
    return twin


def bytes_of(model: nn.Module) -> int:
    """Of all tensors of a model, shared ones once."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


# Calls


class Context:
    """A static cache with random keys and values in all places but the last.

    The layers count their tokens in views of one tensor, so that one fill takes a step back.
    """

    def __init__(self, config: Any, batch: int, length: int, device: torch.device) -> None:
        from transformers import StaticCache

        self.length = length
        self.cache = StaticCache(config=config, max_cache_len=length)
        self.cache.early_initialization(
            batch_size=batch, num_heads=config.num_key_value_heads, head_dim=HEAD, dtype=DTYPE, device=device
        )
        counts = [each.cumulative_length for each in self.cache.layers]
        self.taken = torch.full((len(counts),), length - 1, dtype=counts[0].dtype, device=device)
        for each, taken in zip(self.cache.layers, self.taken.unbind(), strict=True):
            each.cumulative_length = taken
            each.keys.normal_()
            each.values.normal_()

    def rewind(self) -> None:
        """Free the last place again."""
        self.taken.fill_(self.length - 1)


class DecodeStep:
    """A token for each sequence at the last place of a context, and greedily the one after it; as often as called."""

    def __init__(self, model: Any, context: Context, batch: int) -> None:
        self.model, self.context = model, context
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
        self.positions = torch.full((1, 1), context.length - 1, device=model.device)

    def __call__(self, _: int = 0) -> Tensor:
        """The logits, (batch, 1, vocabulary); `ids` are the next tokens then."""
        self.context.rewind()
        logits = forward(self.model, self.ids, self.context.cache, position_ids=self.positions)
        self.ids.copy_(logits[:, -1].argmax(-1, keepdim=True))
        return logits


def forward(model: Any, ids: Tensor, cache: Any = None, **given: Any) -> Tensor:
    """The logits of the last token after `ids`, with a new cache or the given one."""
    if cache is not None:
        # transformers 5.17 calls it `past_key_values`.
        parameters = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
        given["cache" if "cache" in parameters else "past_key_values"] = cache
    return model(input_ids=ids, use_cache=True, logits_to_keep=1, **given).logits


def generated(model: Any, prompt: Tensor, new: int, compile_config: Any = None) -> Tensor:
    """`new` tokens after a prompt by `generate()`: greedily, with a static cache."""
    from transformers import GenerationConfig

    how = GenerationConfig(
        max_new_tokens=new,
        do_sample=False,
        cache_implementation="static",
        compile_config=compile_config,
        pad_token_id=0,
    )
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=how)
