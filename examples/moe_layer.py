#!/usr/bin/env python3
"""An expert layer in FP4, as in DeepSeek-V3 or in gpt-oss, beside the same layer in bf16 with the decoded weights.

    python examples/moe_layer.py                        # activations in FP4 too: moe_fc1_fp4, moe_fc2_fp4
    python examples/moe_layer.py --activations bf16     # moe_fc1_fp4_weight_only, moe_fc2_fp4_weight_only
    python examples/moe_layer.py --model gpt-oss        # MXFP4, biases, another gate, no shared expert
    python examples/moe_layer.py --tokens 1 64 --experts 64 --hidden 2048 --intermediate 512

A router chooses some of the experts for each token; the result is the sum of their `down(swiglu(gate(x), up(x)))`,
weighted by the router, and that of a shared expert, which DeepSeek-V3 has.

Few tokens take three ops, without permuted rows: `moe_route_dense` writes the routing weights of all experts, 0 for
those that a token does not have; `moe_fc1_fp4` computes gate, up and SwiGLU of the routed pairs and quantises them; and
`moe_fc2_fp4` multiplies these alone, and adds them up, weighted. Many tokens are put into the experts' order, with
activations in FP8: `moe_route`, `moe_permute_fp8quant`, `grouped_mm_fp8_fp4`, `moe_swiglu_fp8quant`, and so on. Few
are up to 16 tokens of an expert, on average, or 2 of a wide one (`torch_cute_ops.nn.experts.few_tokens`). In either no
shape depends on the routing, and the layer can be captured in a CUDA graph. Both need their own order of the second
weight.

Weights are random. Without a GPU the ops run their references in plain torch, and no time is measured; nor is it where
no kernel can compute both GEMMs. The layer in bf16 loops over the experts and waits for the device, so its time is that
of calls, not of a graph. The last line starts with SUCCESS or FAILURE, and the exit status follows it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import torch_cute_ops
from quickstart import conclude, pick_device
from torch_cute_ops.nn.experts import few_tokens

Sizes = tuple[int, int, int, Sequence[int]]
"""Hidden, experts, intermediate, and numbers of tokens."""


class Model(NamedTuple):
    """What layers of a model have in common.

    Attributes:
        sizes: on a GPU; of DeepSeek-V3 an eighth of each expert's columns, as on one of eight GPUs.
        top: experts of a token.
        block_size: of the weights: 16, NVFP4, or 32, MXFP4.
        scoring: arguments of `moe_route` and `moe_route_dense`.
        swiglu: alpha, beta and limit of the gate.
        has_bias: whether the experts' layers have biases.
        has_shared: whether there is a shared expert, as wide as the others.
    """

    sizes: Sizes
    top: int
    block_size: int
    scoring: dict[str, Any]
    swiglu: tuple[float, float, float | None] = (1.0, 0.0, None)
    has_bias: bool = False
    has_shared: bool = False


TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 2048)
DEEPSEEK_SCORING = {"scoring": "sigmoid", "scaling_factor": 2.5}
MODELS = {
    "deepseek-v3": Model((7168, 256, 256, TOKENS), 8, 16, DEEPSEEK_SCORING, has_shared=True),
    "gpt-oss": Model((2880, 128, 2880, TOKENS), 4, 32, {}, (1.702, 1.0, 7.0), has_bias=True),
}
SMALL: Sizes = (256, 16, 64, (1, 8, 33))
"""On a CPU; with 8 of 16 experts, 33 tokens are many."""

LARGEST_ERROR = {"bf16": 0.014, "nvfp4": 0.2, "mxfp4": 0.26, "fp8": 0.06}
"""The largest relative error that a run may have, by what activations are in: 0.014 and 0.2 are cosines of 0.9999 and
0.98. Measured on a CPU, 20 layers of two sizes of each model: 0.0036 to 0.0065 in bf16, 0.098 to 0.144 in NVFP4, 0.148
to 0.238 in MXFP4, of one token and of 8, and 0.031 to 0.041 in FP8, of 60."""


class Weights(NamedTuple):
    """The layer's weights, bf16; of an expert the gate's rows come before those of up."""

    router: torch.Tensor
    """(E, H)."""
    up: torch.Tensor
    """(E, 2·I, H)."""
    down: torch.Tensor
    """(E, H, I)."""
    up_bias: torch.Tensor | None
    """(E, 2·I)."""
    down_bias: torch.Tensor | None
    """(E, H)."""
    shared_up: torch.Tensor | None
    """(2·I, H)."""
    shared_down: torch.Tensor | None
    """(H, I)."""


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device, kernels = pick_device()
    model = MODELS[options.model]
    defaults = model.sizes if device.type == "cuda" else SMALL
    hidden, experts, intermediate, tokens = chosen_sizes(options, defaults)
    model = model._replace(top=min(options.top or model.top, experts))
    torch.manual_seed(options.seed)
    weights = random_weights(model, hidden, experts, intermediate, device)
    layer = FP4Layer(model, weights, torch.randn(64, hidden, device=device).bfloat16(), options.activations)
    in_bf16 = BF16Layer(model, layer.decoded)
    print_device(device, kernels)
    print(f"layer      {experts} experts of {intermediate}, {model.top} a token, hidden {hidden}")
    print(f"backend    of the GEMMs for few tokens: {layer.backend}")
    print_weights((weights.up, weights.down), (*layer.up, *layer.down))

    problems = []
    head = f"{'tokens':>9}  {'activations':>11}  {'cosine':>8}  {'relative error':>14}"
    is_timed = device.type == "cuda" and layer.backend != "reference"  # whose time would say nothing
    print(f"\n{head}     FP4 µs    bf16 µs" if is_timed else f"\n{head}")
    for count, x in inputs(tokens, hidden, device):
        cosine, error = compared(layer(x), in_bf16(x))
        line = f"{count:9}  {layer.activations(count):>11}  {cosine:8.5f}  {error:14.5f}"
        if is_timed:
            line += f"  {captured_us(layer, x):9.1f}  {called_us(in_bf16, x):9.1f}"
        print(line)
        largest = LARGEST_ERROR[layer.activations(count)]
        if not error <= largest:
            problems.append(f"{count} tokens: error {error:.3g} is above {largest}")
    print()
    return conclude(problems)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = layer_parser(__doc__, hidden_step=64, intermediate_step=64, top=None)
    parser.add_argument("--model", choices=tuple(MODELS), default="deepseek-v3", help="whose layer it is")
    parser.add_argument("--activations", choices=("fp4", "bf16"), default="fp4", help="of few tokens")
    return parser.parse_args(arguments)


def layer_parser(
    description: str | None, hidden_step: int, intermediate_step: int, top: int | None = 8
) -> argparse.ArgumentParser:
    """A parser of the options that say how large a layer of experts is, and how many tokens it gets."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", help="numbers of tokens")
    parser.add_argument("--hidden", type=int, help=f"elements of a token, a multiple of {hidden_step}")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--intermediate", type=int, help=f"of an expert, a multiple of {intermediate_step}")
    parser.add_argument("--top", type=int, default=top, help=f"experts of a token (default: {top or 'as the model'})")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def print_device(device: torch.device, kernels: str) -> None:
    """What computes, and with which kernels."""
    print(f"device     {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}: {kernels}")


def print_weights(in_bf16: Iterable[torch.Tensor], quantised: Iterable[torch.Tensor]) -> None:
    """How large the experts' weights are."""
    before, after = (sum(tensor.nbytes for tensor in tensors) for tensors in (in_bf16, quantised))
    print(f"weights    {before:,} bytes in bf16, {after:,} as codes and scales: {before / after:.2f} times fewer")


def inputs(tokens: Iterable[int], hidden: int, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """For each number of tokens so many random ones, (M, H)."""
    for count in tokens:
        yield count, torch.randn(count, hidden, device=device).bfloat16()


def compared(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """The least cosine of a token's results, and the relative error of all."""
    got, want = got.double(), want.double()
    return F.cosine_similarity(got, want, dim=-1).min().item(), relative_error(got, want)


def chosen_sizes(options: argparse.Namespace, defaults: Sizes) -> Sizes:
    """What was asked for, or else the defaults."""
    hidden, experts, intermediate, tokens = defaults
    return (
        options.hidden or hidden,
        options.experts or experts,
        options.intermediate or intermediate,
        options.tokens or tokens,
    )


def random_weights(model: Model, hidden: int, experts: int, intermediate: int, device: torch.device) -> Weights:
    """Random weights, scaled so that the result of each GEMM is about as large as its input."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16).div_(shape[-1] ** 0.5)

    return Weights(
        random(experts, hidden),
        random(experts, 2 * intermediate, hidden),
        random(experts, hidden, intermediate),
        random(experts, 2 * intermediate) * 8 if model.has_bias else None,
        random(experts, hidden) * 8 if model.has_bias else None,
        random(2 * intermediate, hidden) if model.has_shared else None,
        random(hidden, intermediate) if model.has_shared else None,
    )


class BF16Layer:
    """The layer in plain torch, expert by expert."""

    def __init__(self, model: Model, weights: Weights) -> None:
        self.model = model
        self.weights = weights

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's result (M, H) for tokens (M, H)."""
        w, routing = self.weights, self.route(x)
        total = torch.zeros(x.shape, device=x.device)
        for expert in (routing != 0).any(0).nonzero()[:, 0].tolist():
            rows = routing[:, expert].nonzero()[:, 0]
            bias = None if w.down_bias is None else w.down_bias[expert]
            result = F.linear(self.activations(x[rows], expert), w.down[expert], bias)
            total.index_add_(0, rows, routing[rows, expert, None] * result)
        if w.shared_up is not None and w.shared_down is not None:
            total += F.linear(gated(F.linear(x, w.shared_up), *self.model.swiglu), w.shared_down)
        return total.to(x.dtype)

    def route(self, x: torch.Tensor) -> torch.Tensor:
        """Routing weights (M, E), fp32; 0 for the experts that a token does not have."""
        logits = self.logits(x)
        if self.model.scoring.get("scoring") == "sigmoid":
            scores = logits.sigmoid()
            best = scores.topk(self.model.top, dim=-1)
            values = best.values / best.values.sum(-1, keepdim=True) * self.model.scoring["scaling_factor"]
        else:
            best = logits.topk(self.model.top, dim=-1)
            values = best.values.softmax(-1)
        return torch.zeros_like(logits).scatter(1, best.indices, values)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The router's logits (M, E), fp32."""
        return F.linear(x.float(), self.weights.router.float())

    def activations(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """What the expert's second GEMM takes, (M, I)."""
        bias = None if self.weights.up_bias is None else self.weights.up_bias[expert]
        return gated(F.linear(x, self.weights.up[expert], bias), *self.model.swiglu)


def gated(both: torch.Tensor, alpha: float, beta: float, limit: float | None) -> torch.Tensor:
    """SwiGLU of the halves of rows."""
    gate, up = both.float().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + beta)).to(both.dtype)


class FP4Layer:
    """The layer with its weights in FP4, but for the router's.

    Args:
        model: whose layer it is.
        weights: what is quantised.
        calibration: tokens (M, H), for the global scales of the activations.
        activations: their format where tokens are few, "fp4" or "bf16".
    """

    def __init__(self, model: Model, weights: Weights, calibration: torch.Tensor, activations: str) -> None:
        self.model, self.router = model, weights.router
        self.in_fp4, self.in_nvfp4 = activations == "fp4", model.block_size == 16
        self.format = {"block_size": model.block_size, "static_weight": True}
        self.gate = dict(zip(("swiglu_alpha", "swiglu_beta", "swiglu_limit"), model.swiglu, strict=True))
        experts, hidden, width = weights.down.shape
        self.up_bias, self.down_bias = weights.up_bias, weights.down_bias
        up_scale, down_scale = (self.global_scale(weight) for weight in (weights.up, weights.down))
        self.up = self.quantised(weights.up, up_scale)
        by_expert = self.quantised(weights.down, down_scale)
        beside = weights.down.transpose(0, 1).flatten(1)
        self.down = self.quantised(beside, down_scale)  # side by side, for few tokens
        self.down_by_expert = by_expert  # one below the other, for many
        self.shared = None
        if weights.shared_up is not None and weights.shared_down is not None:
            self.shared = [(w, self.global_scale(w)) for w in (weights.shared_up, weights.shared_down)]
            self.shared = [(*self.quantised(w, scale), self.inverse(scale)) for w, scale in self.shared]
        self.decoded = weights._replace(
            up=self.decoded_weight(*self.up, up_scale), down=self.decoded_weight(*by_expert, down_scale)
        )
        if self.shared is not None:
            pair = (torch_cute_ops.fp4_dequantize(codes, s, None, model.block_size) * a for codes, s, a in self.shared)
            shared_up, shared_down = (weight.to(torch.bfloat16) for weight in pair)
            self.decoded = self.decoded._replace(shared_up=shared_up, shared_down=shared_down)
        # GEMMs decode without global scales: factors take them out.
        self.x_scale = self.h_scale = None
        if self.in_fp4 and self.in_nvfp4:
            twin = BF16Layer(model, weights)
            amax = [twin.activations(calibration, e).abs().amax() for e in range(experts)]
            self.x_scale = torch_cute_ops.nvfp4_global_scale(calibration.abs().amax())
            self.h_scale = torch.stack([torch_cute_ops.nvfp4_global_scale(each) for each in amax]).view(experts)
        self.up_alpha, self.down_alpha = self.inverse(up_scale), self.inverse(down_scale)
        alpha = self.inverse(up_scale, self.x_scale)
        self.first_alpha = None if alpha is None else alpha.expand(experts).contiguous()
        factor = self.inverse(down_scale, self.h_scale)
        self.factor = None if factor is None else factor.expand(experts).contiguous()
        self.second_bias = None
        if self.down_bias is not None:  # which the factor multiplies too
            self.second_bias = self.down_bias.float() / (1 if self.factor is None else self.factor[:, None])
        self.backend = self.usable_backend(experts, hidden, width, weights.up.device)
        self.few_of_expert = few_tokens(width)

    def usable_backend(self, experts: int, hidden: int, width: int, device: torch.device) -> str:
        """On a GPU "auto" never takes the reference."""
        sizes = {"moe_fc1": (experts * width, hidden), "moe_fc2": (hidden, experts * width)}
        for name, (n, k) in sizes.items():
            op = f"{name}_fp4" if self.in_fp4 else f"{name}_fp4_weight_only"
            given = {"n": n, "k": k, "experts": experts, "block_size": self.model.block_size}
            reasons = torch_cute_ops.backends(op, **given, device=device)
            if all(reason is not None for backend, reason in reasons.items() if backend != "reference"):
                return "reference"
        return "auto"

    def global_scale(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Of a weight in NVFP4; MXFP4 has none."""
        return torch_cute_ops.nvfp4_global_scale(weight.abs().amax()) if self.in_nvfp4 else None

    def inverse(self, *scales: torch.Tensor | None) -> torch.Tensor | None:
        """One over the product of global scales; `None` where there are none."""
        product = None
        for scale in scales:
            if scale is not None:
                product = scale if product is None else product * scale
        return None if product is None else 1 / product

    def quantised(self, weight: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return torch_cute_ops.fp4_quantize(weight, scale, self.model.block_size)

    def decoded_weight(self, codes: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """What the codes (E, N, K/2) stand for, in bf16."""
        flat = torch_cute_ops.fp4_dequantize(codes.flatten(0, 1), scales, scale, self.model.block_size)
        return flat.unflatten(0, (len(codes), -1))

    def are_few(self, tokens: int) -> bool:
        """Whether so many tokens are computed by the routed pairs."""
        return tokens * self.model.top <= self.few_of_expert * len(self.router)

    def activations(self, tokens: int) -> str:
        """What those of so many tokens are in."""
        if not self.are_few(tokens):
            return "fp8"
        return ("nvfp4" if self.in_nvfp4 else "mxfp4") if self.in_fp4 else "bf16"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's result (M, H) for tokens (M, H)."""
        logits = F.linear(x.float(), self.router.float())
        shared = None if self.shared is None else self.of_shared_expert(x)
        if not self.are_few(len(x)):
            return self.of_many(x, logits, shared)
        y = self.of_few(x, logits)
        return y if shared is None else y + shared

    def of_few(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Three ops; a token's experts side by side in rows (M, E·I), of which the routed ranges are written."""
        routing = torch_cute_ops.moe_route_dense(
            logits, self.model.top, expert_factor=self.factor, **self.model.scoring
        )
        how = {**self.format, "backend": self.backend}
        up, up_scale = self.up
        down, down_scale = self.down
        first = {"alpha": self.first_alpha, "bias": self.up_bias, **self.gate, **how}
        if not self.in_fp4:
            h = torch_cute_ops.moe_fc1_fp4_weight_only(x, up, up_scale, routing, **first)
            return torch_cute_ops.moe_fc2_fp4_weight_only(h, down, down_scale, routing, self.second_bias, **how)
        a, a_scale = torch_cute_ops.fp4_quantize(x, self.x_scale, self.model.block_size)
        h, h_scale = torch_cute_ops.moe_fc1_fp4(a, up, a_scale, up_scale, routing, global_scale=self.h_scale, **first)
        return torch_cute_ops.moe_fc2_fp4(h, down, h_scale, down_scale, routing, self.second_bias, **how)

    def of_many(self, x: torch.Tensor, logits: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
        """A row for each routed pair, in the experts' order, in FP8."""
        weights, _, expanded, permuted, offsets, _ = torch_cute_ops.moe_route(
            logits, self.model.top, alignment=1, **self.model.scoring
        )
        a, a_scale = torch_cute_ops.moe_permute_fp8quant(x, permuted, self.model.top, expanded)
        h = self.multiplied(a, a_scale, self.up, offsets, self.up_alpha, self.up_bias)
        a, a_scale = torch_cute_ops.moe_swiglu_fp8quant(h, offsets, None, *self.model.swiglu)
        h = self.multiplied(a, a_scale, self.down_by_expert, offsets, self.down_alpha, self.down_bias)
        return torch_cute_ops.moe_finalize(h, expanded, weights, shared)

    def multiplied(
        self,
        a: torch.Tensor,
        a_scale: torch.Tensor,
        weight: tuple[torch.Tensor, torch.Tensor],
        offsets: torch.Tensor,
        alpha: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Each expert's rows times its weight."""
        codes, scale = weight
        return torch_cute_ops.grouped_mm_fp8_fp4(
            a, codes, a_scale, scale, offsets, None, alpha, bias, torch.bfloat16, **self.format
        )

    def of_shared_expert(self, x: torch.Tensor) -> torch.Tensor:
        """What every token has, (M, H)."""
        (up, up_scale, up_alpha), (down, down_scale, down_alpha) = self.shared
        both = torch_cute_ops.mm_fp4_weight_only(x, up.t(), up_scale, up_alpha, **self.format)
        h = gated(both, *self.model.swiglu)
        return torch_cute_ops.mm_fp4_weight_only(h, down.t(), down_scale, down_alpha, **self.format)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def captured_us(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, replays: int = 50) -> float:
    """The median time of a replay of the captured layer, whose weights may be in L2."""
    layer(x)  # compiles and loads; a server calls torch_cute_ops.warmup
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x)
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[replays // 2]


def called_us(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, calls: int = 5) -> float:
    """The median time of a call."""
    times = []
    for _ in range(calls + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        layer(x)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return sorted(times[1:])[calls // 2]


if __name__ == "__main__":
    sys.exit(main())
