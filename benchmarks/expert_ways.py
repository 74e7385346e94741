"""Models, random weights, random tokens, and the layer implementations that `python -m benchmarks expert_layer`
compares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_cute_ops as ops
from torch_cute_ops.nn import ExpertLayer
from torch_cute_ops.nn._expert_tensors import FewActivations
from torch_cute_ops.nn.experts import FORMATS, QuantExperts, SwiGLU
from torch_cute_ops.nn.random import INPUT_AMAX, random_stack

from .expert_gemms import keys

DTYPE = torch.bfloat16
FEW_ROWS = 1024
"""Largest number of tokens for which `few` and skewed routings are measured."""
HIDDEN_AMAX = 64.0
"""Largest magnitude of gated activations for which the NVFP4 global scales are computed."""


@dataclass(frozen=True)
class Model:
    """Sizes and formats of a model's expert layer.

    Attributes:
        experts, hidden, intermediate, topk: E, H, I, and number of experts per token.
        scheme: Scheme of the weights in `torch_cute_ops.nn`.
        scoring: Arguments of `moe_route` and `moe_route_dense`.
        swiglu: Parameters of the gate.
        has_bias: True if the experts' layers have biases.
        has_fp8: True if the model is also measured with FP8 weights.
    """

    experts: int
    hidden: int
    intermediate: int
    topk: int
    scheme: str
    scoring: Mapping[str, Any] = field(default_factory=dict, hash=False)
    swiglu: SwiGLU = SwiGLU()  # noqa: RUF009  an immutable tuple
    has_bias: bool = False
    has_fp8: bool = False


DEEPSEEK, GPT_OSS, QWEN3 = "DeepSeek-V3", "gpt-oss-120b", "Qwen3-30B-A3B"
MODELS = {
    DEEPSEEK: Model(256, 7168, 256, 8, "nvfp4", {"scoring": "sigmoid", "scaling_factor": 2.5}, has_fp8=True),
    GPT_OSS: Model(128, 2880, 2880, 4, "mxfp4", swiglu=SwiGLU(1.702, 1.0, 7.0), has_bias=True),
    QWEN3: Model(128, 2048, 768, 8, "nvfp4"),
}
"""Models by name. The experts of DeepSeek-V3 are reduced to an eighth of their columns, as on one of eight GPUs."""
ROUTINGS = ("uniform", "zipf", "hot")


# --- weights ---


@torch.no_grad()
def random_experts(model: Model, scheme: str, device: torch.device, seed: int) -> QuantExperts:
    """Return experts with random codes. If the model has biases, their magnitudes are a few tenths."""
    generator = torch.Generator(device).manual_seed(seed)
    experts, hidden, width = model.experts, model.hidden, model.intermediate
    bias = torch.empty(0, dtype=DTYPE) if model.has_bias else None
    made = QuantExperts(
        random_stack(scheme, hidden, [width] * (2 * experts), bias, generator),
        random_stack(scheme, width, [hidden] * experts, bias, generator),
        experts,
        swiglu=model.swiglu,
        topk=model.topk,
    )
    for linear in (made.gate_up_proj, made.down_proj):
        if linear.bias is not None:
            linear.bias.normal_(std=0.3, generator=generator)
    return made


@cache
def expert_bytes(model: Model, scheme: str) -> int:
    """Return the number of bytes of one expert's weights, scales included."""
    cls: Any = FORMATS[scheme]
    sizes = (2 * model.intermediate, model.hidden), (model.hidden, model.intermediate)
    layouts = (cls(k, n, device="meta").layout() for n, k in sizes)
    return sum(
        math.prod(shape) * dtype.itemsize
        for layout in layouts
        for name, (shape, dtype) in layout.items()
        if name in ("weight", "weight_scale", "weight_scale_inv")
    )


# --- tokens ---


class Inputs(NamedTuple):
    """Inputs of one call.

    Attributes:
        x: (M, H) bfloat16, tokens.
        logits: (M, E) float32, output of the router.
        used: Number of experts that the tokens are routed to.
    """

    x: Tensor
    logits: Tensor
    used: int


def draw(model: Model, routing: str, m: int, seed: int, device: torch.device) -> Inputs:
    """Return random tokens and router logits for a routing. Equal arguments give the same experts, because these are
    drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(model.experts, generator=generator)
    logits = keys(order + 1.0 if routing == "zipf" else torch.ones(model.experts), m, generator)
    if routing == "hot":
        logits[:, order[0]] = logits.amax(1) + 1
    used = logits.topk(model.topk).indices.unique().numel()
    x = torch.randn(m, model.hidden, dtype=DTYPE, device=device, generator=torch.Generator(device).manual_seed(seed))
    return Inputs(x, logits.to(device), used)


# --- ways to compute a layer ---


class Way:
    """Implementation of a layer of experts. Work that does not depend on the tokens is done in advance."""

    is_few = False
    """True if the implementation computes routed pairs only."""

    def __init__(self, model: Model, experts: QuantExperts) -> None:
        self.model, self.experts = model, experts

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return the layer's result (M, H) for tokens (M, H) with logits (M, E)."""
        raise NotImplementedError

    @classmethod
    def scheme(cls, model: Model) -> str:
        """Return the quantisation scheme of the weights that this implementation multiplies."""
        return model.scheme

    @classmethod
    def expert_bytes(cls, model: Model) -> int:
        """Return the number of bytes of weights that this implementation reads for one expert."""
        return expert_bytes(model, cls.scheme(model))


class Few(Way):
    """Computes only routed pairs, with activations in the format of the weights."""

    is_few = True
    activations: FewActivations = "fp4"

    def __init__(self, model: Model, experts: QuantExperts) -> None:
        # The weights of the first GEMM are shared with the other implementations. `route_few_` copies the weights of
        # the second GEMM into the side-by-side layout.
        own = QuantExperts(
            *(experts.gate_up_proj, experts.down_proj, experts.experts), swiglu=experts.swiglu, topk=experts.topk
        )
        super().__init__(model, own)
        self.layer = layer_of(model, own)
        scales = {}
        if self.activations == "fp4" and model.scheme == "nvfp4":
            amax = torch.tensor([INPUT_AMAX, HIDDEN_AMAX], device=own.down_proj.weight.device)
            names = ("input_global_scale", "hidden_global_scale")
            scales = {name: ops.nvfp4_global_scale(each) for name, each in zip(names, amax, strict=True)}
        # Raise the limit, because `Few` is also measured with numbers of tokens for which `Many` is faster.
        own.route_few_(self.activations, tokens_of_expert=FEW_ROWS, **scales)

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        return self.layer.forward_few(x, logits)


class FewBf16(Few):
    """Computes only routed pairs, with activations in bf16."""

    activations: FewActivations = "16bit"


class Many(Way):
    """Computes one row per routed pair, in the experts' order, with activations in FP8."""

    def __init__(self, model: Model, experts: QuantExperts) -> None:
        super().__init__(model, experts)
        self.layer = layer_of(model, experts)

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        return self.layer.forward_many(x, logits)


class ManyFP8(Many):
    """Computes one row per routed pair, in the experts' order, with FP8 activations and FP8 weights."""

    @classmethod
    def scheme(cls, model: Model) -> str:
        return "fp8_block"


class Bf16(Way):
    """Multiplies decoded bf16 weights with PyTorch's `torch._grouped_mm`. Our ops sort the rows by expert before these
    GEMMs, and add up the results after them."""

    def __init__(self, model: Model, experts: QuantExperts) -> None:
        super().__init__(model, experts)
        self.gate_up, self.down = (weight.mT for weight in experts.dequantize(DTYPE))
        self.biases = stacked_biases(model, experts)

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        model = self.model
        weights, ids, expanded, permuted, offsets, _ = ops.moe_route(logits, model.topk, alignment=1, **model.scoring)
        ends, owners = offsets[1:], ids.flatten()[permuted] if model.has_bias else None
        both = self._multiplied(x[permuted // model.topk], self.gate_up, ends, 0, owners)
        h = self._multiplied(gated(both.float(), model.swiglu).to(DTYPE), self.down, ends, 1, owners)
        return ops.moe_finalize(h, expanded, weights)

    def _multiplied(self, rows: Tensor, weight: Tensor, ends: Tensor, layer: int, owners: Tensor | None) -> Tensor:
        """Multiply each expert's rows by the expert's weight, and add the expert's bias. `owners` gives the expert of
        each row. It is None if the model has no biases."""
        product, bias = torch._grouped_mm(rows, weight, offs=ends), self.biases[layer]
        return product if bias is None or owners is None else product + bias[owners]

    @classmethod
    def expert_bytes(cls, model: Model) -> int:
        return 3 * model.intermediate * model.hidden * DTYPE.itemsize


WAYS: dict[str, type[Way]] = {"few": Few, "few-bf16": FewBf16, "many": Many, "many-fp8": ManyFP8, "bf16": Bf16}


def layer_of(model: Model, experts: QuantExperts) -> ExpertLayer:
    """Combine the experts and an empty router into an `ExpertLayer`. The router's GEMM is not measured."""
    router = torch.empty(model.experts, model.hidden, dtype=DTYPE, device=experts.down_proj.weight.device)
    return ExpertLayer(router, experts, model.topk, **model.scoring)


def stacked_biases(model: Model, experts: QuantExperts) -> list[Tensor | None]:
    """Return the biases of the experts' two GEMMs, (E, 2I) and (E, H) bf16."""
    stacks = (experts.gate_up_proj, experts.down_proj)
    return [None if each.bias is None else each.bias.unflatten(0, (model.experts, -1)) for each in stacks]


def gated(both: Tensor, swiglu: SwiGLU) -> Tensor:
    """Apply SwiGLU to the two halves of each row."""
    gate, up = both.chunk(2, -1)
    if swiglu.limit is not None:
        gate, up = gate.clamp(max=swiglu.limit), up.clamp(-swiglu.limit, swiglu.limit)
    return gate * torch.sigmoid(swiglu.alpha * gate) * (up + swiglu.beta)


def ways_of(model: Model, routing: str, m: int, asked: Sequence[str]) -> list[str]:
    """Return the names of the requested implementations that are measured with `m` tokens. Above `FEW_ROWS` tokens,
    only implementations that permute rows are measured."""
    names = [name for name in asked if name != "many-fp8" or model.has_fp8]
    if m <= FEW_ROWS:
        return names
    return [name for name in names if not WAYS[name].is_few] if model.has_fp8 and routing == "uniform" else []


class Decoded:
    """Expert layer with decoded weights in bf16, which multiplies in fp32 and loops over the experts."""

    def __init__(self, model: Model, experts: QuantExperts) -> None:
        self.model = model
        self.gate_up, self.down = experts.dequantize(DTYPE)
        self.biases = [None if each is None else each.float() for each in stacked_biases(model, experts)]

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return the result, (M, H) float32."""
        best = logits.topk(self.model.topk)
        weights = best.values.softmax(-1)
        if self.model.scoring.get("scoring") == "sigmoid":
            scores = best.values.sigmoid()
            weights = scores / scores.sum(-1, keepdim=True) * self.model.scoring["scaling_factor"]
        up_bias, down_bias = self.biases
        total = torch.zeros(x.shape, device=x.device)
        for e in best.indices.unique().tolist():
            token, place = (best.indices == e).nonzero(as_tuple=True)
            both = F.linear(x[token].float(), self.gate_up[e].float(), None if up_bias is None else up_bias[e])
            h = gated(both, self.model.swiglu)
            result = F.linear(h, self.down[e].float(), None if down_bias is None else down_bias[e])
            total.index_add_(0, token, weights[token, place, None] * result)
        return total


class Prepared:
    """Weights and layers of a model, created on first use and shared by all measurements of the model."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model, self.device = model, device
        self._experts: dict[tuple[str, int], QuantExperts] = {}
        self._ways: dict[tuple[str, int], Way] = {}

    def way(self, name: str, which: int) -> Way:
        """Return the implementation `name` of the layer, with the weights of set number `which`. Implementations with
        the same weight format share the weights."""
        if (name, which) not in self._ways:
            scheme = WAYS[name].scheme(self.model)
            if (scheme, which) not in self._experts:
                self._experts[scheme, which] = random_experts(self.model, scheme, self.device, which)
            self._ways[name, which] = WAYS[name](self.model, self._experts[scheme, which])
        return self._ways[name, which]
