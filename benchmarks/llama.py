"""Build and call the Llama models that `python -m benchmarks model` measures, in several sizes and precisions.

The models use transformers' modelling code with random weights. The bf16 models are unchanged. In our models, linear
layers are quantised, and linear layers with the same input are merged. The last layer, `lm_head`, stays in bf16.
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
"""Width of an attention head."""
BATCHES, CONTEXT, TOKENS = (1, 16, 64), 1024, 2048
"""Default batch sizes of decode steps, default number of tokens in the cache, and default length of a prefill's
prompt."""
MANY = 64
"""Smallest batch size for which models with FP8 activations are also measured."""
ROUNDS = 11
"""Rounds of timing; each round times a decode step, prefill or generation of each model once."""
PROMPT, NEW, LONGEST, GENERATIONS = 16, 128, 256, 3
"""Arguments of the measurement of `generate()`: the length of the prompt, the number of new tokens in timed
generations, the number of new tokens when recompilations are counted, and the number of timed generations."""
BF16 = "bf16"
UNMASKED = "sdpa_unmasked"


@dataclass(frozen=True)
class Size:
    """Size of a Llama model, and its default measurements.

    Attributes:
        widths: widths of a layer.
        layers: number of layers.
        vocabulary: number of tokens in the vocabulary.
        parts: measurements that run by default.
        bf16_layers: numbers of layers of the smaller bf16 models that are timed if the whole bf16 model does not fit
            into the GPU's memory. Empty if the whole model fits.
    """

    widths: layer.Widths
    layers: int
    vocabulary: int
    parts: tuple[str, ...]
    bf16_layers: tuple[int, ...] = ()

    def config(self, layers: int | None = None, attention: str = "sdpa") -> Any:
        """Return transformers' configuration of the model with `layers` layers, or with all layers if `layers` is
        None."""
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
            eos_token_id=None,  # a model with random weights could generate it at any position
        )


PARTS = ("memory", "decode", "prefill", "generate", "logits")
MODELS = {
    "8B": Size(layer.MODELS["8B"], 32, 128256, PARTS),
    "70B": Size(layer.MODELS["70B"], 80, 128256, ("memory", "decode"), bf16_layers=(2, 6)),
}
"""Sizes of Llama 3.1, keyed by name."""


# Models


def register_unmasked() -> None:
    """Register `UNMASKED` with transformers: attention by `scaled_dot_product_attention` without a mask.

    Attention without a mask is correct if a prompt fills an empty cache, or if the new token takes the last position of
    the cache. With a mask, transformers 5.17 copies keys and values for each query head in every step: eight times the
    cache of a 70B model.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(UNMASKED, sdpa_attention_forward)


def build(label: str, config: Any, device: torch.device, merge: bool = True, fuse: bool = False) -> Any:
    """Return the model in the precision `label`: bf16, or "scheme/activations".

    Args:
        merge: True to merge layers with the same input.
        fuse: True if the attention blocks of quantised models call `qkv_norm_rope_append`.
    """
    from torch_cute_ops.integrations.transformers import from_config, fuse_attention_

    if label == BF16:  # all layers are ignored, so transformers' layers stay unchanged
        return from_config(config, device=device, dtype=DTYPE, merge=False, ignore=("*",))
    scheme, _, activations = label.partition("/")
    model = from_config(
        config,
        scheme,  # type: ignore[arg-type]
        activations=activations,  # type: ignore[arg-type]
        device=device,
        dtype=DTYPE,
        merge=merge,
    )
    return fuse_attention_(model) if fuse else model


def decoded(model: nn.Module) -> nn.Module:
    """Return a copy of a model in which each `QuantLinear` is a bf16 `nn.Linear` with the decoded weight.

    The model must have no merged layers.
    """
    twin = copy.deepcopy(model)
    for parent in [*twin.modules()]:
        for name, each in [*parent.named_children()]:
            if isinstance(each, QuantLinear):
                linear = nn.Linear(each.in_features, each.out_features, bias=False, device="meta")
                linear.weight = nn.Parameter(each.dequantize(DTYPE), requires_grad=False)
                parent.add_module(name, linear)
    return twin


def bytes_of(model: nn.Module) -> int:
    """Return the size in bytes of all parameters and buffers of a model. Shared tensors count once."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


# Calls


class Context:
    """Static KV cache that is full except for the last position. Keys and values are random.

    The token counts of all layers are views of one tensor, so that filling this tensor resets all counts.
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
        """Reset the number of cached tokens, so that the next step writes the last position again."""
        self.taken.fill_(self.length - 1)


class DecodeStep:
    """Decode step at the last position of each sequence's context. Each call chooses the next tokens greedily. The next
    call processes these tokens at the same position, so that all calls take equally long."""

    def __init__(self, model: Any, context: Context, batch: int) -> None:
        self.model, self.context = model, context
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
        self.positions = torch.full((1, 1), context.length - 1, device=model.device)

    def __call__(self, _: int = 0) -> Tensor:
        """Return the logits (batch, 1, vocabulary), and set `ids` to the next tokens."""
        self.context.rewind()
        logits = forward(self.model, self.ids, self.context.cache, position_ids=self.positions)
        self.ids.copy_(logits[:, -1].argmax(-1, keepdim=True))
        return logits


def forward(model: Any, ids: Tensor, cache: Any = None, **given: Any) -> Tensor:
    """Return the logits after the last token of `ids`. The model uses `cache`, or if that is None, a new KV cache."""
    if cache is not None:
        # The cache argument is called `past_key_values` in transformers 5.17.
        parameters = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
        given["cache" if "cache" in parameters else "past_key_values"] = cache
    return model(input_ids=ids, use_cache=True, logits_to_keep=1, **given).logits


def generated(model: Any, prompt: Tensor, new: int, compile_config: Any = None) -> Tensor:
    """Call `generate()` with a static cache, and return the prompt followed by `new` tokens that are chosen
    greedily."""
    from transformers import GenerationConfig

    how = GenerationConfig(
        max_new_tokens=new,
        do_sample=False,
        cache_implementation="static",
        compile_config=compile_config,
        pad_token_id=0,
    )
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=how)
