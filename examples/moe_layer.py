#!/usr/bin/env python3
"""Run an expert layer of DeepSeek-V3 or gpt-oss in FP4, and compare it with bf16 on the decoded weights.

    python examples/moe_layer.py                        # activations in FP4 too: moe_fc1_fp4, moe_fc2_fp4
    python examples/moe_layer.py --activations bf16     # moe_fc1_fp4_weight_only, moe_fc2_fp4_weight_only
    python examples/moe_layer.py --model gpt-oss        # MXFP4, biases, another gate, no shared expert
    python examples/moe_layer.py --tokens 1 64 --experts 64 --hidden 2048 --intermediate 512

A router chooses some of the experts for each token. The result of a token is the weighted sum of its experts' results,
`down(swiglu(gate(x), up(x)))`. DeepSeek-V3 adds the result of a shared expert.

The layer is a `torch_cute_ops.nn.ExpertLayer`. Calls with few tokens run three ops and permute no rows:

1. `moe_route_dense` writes the routing weights of all experts, 0 for experts that a token is not routed to.
2. `moe_fc1_fp4` computes gate, up and SwiGLU for each routed pair of a token and an expert, and quantises the result.
3. `moe_fc2_fp4` multiplies by the second weight, and computes the weighted sum over each token's experts.

Calls with many tokens permute rows into the experts' order, with activations in FP8: `moe_route`,
`moe_permute_fp8quant`, `grouped_mm_fp8_fp4`, `moe_swiglu_fp8quant`, `grouped_mm_fp8_fp4` and `moe_finalize`. A call has
few tokens if it has up to 16 tokens per expert on average, and up to 512 tokens. With experts as wide as gpt-oss's, no
call counts as a call with few tokens (`torch_cute_ops.nn.experts.few_tokens`). The two kinds of calls need the second
weight in different layouts. No shape depends on the routing, so the layer can be captured in a CUDA graph.

Weights are random. Without a GPU, or if the GPU lacks kernels for both GEMMs, the ops run their references in plain
torch on the CPU, and no time is measured. The bf16 layer loops over the experts and waits for the device, so it is
timed call by call, not as a graph. The last line starts with SUCCESS or FAILURE; the exit status is 0 or 1 accordingly.
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
from quickstart import conclude, multiple_of, pick_device
from torch_cute_ops.nn import ExpertLayer, GatedMLP, merge, quantize_
from torch_cute_ops.nn.experts import few_tokens, reason_unrouted

Sizes = tuple[int, int, int, Sequence[int]]
"""Hidden size, number of experts, intermediate size, and numbers of tokens."""


class Model(NamedTuple):
    """Properties of a model's expert layers.

    Attributes:
        sizes: sizes of the part of a layer that one GPU holds; for DeepSeek-V3, an eighth of each expert's
            intermediate size, as if eight GPUs shared the layer.
        top: number of experts that a token is routed to (topk).
        block_size: block size of the weights: 16 (NVFP4) or 32 (MXFP4).
        scoring: arguments of `moe_route` and `moe_route_dense`.
        swiglu: alpha, beta and limit of the gate.
        has_bias: True if the experts' layers use biases.
        has_shared: True if the layer also contains a shared expert, as wide as a routed expert.
    """

    sizes: Sizes
    top: int
    block_size: int
    scoring: dict[str, Any]
    swiglu: tuple[float, float, float | None] = (1.0, 0.0, None)
    has_bias: bool = False
    has_shared: bool = False

    @property
    def scheme(self) -> str:
        """Format of the weights."""
        return "nvfp4" if self.block_size == 16 else "mxfp4"


TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 2048)
DEEPSEEK_SCORING = {"scoring": "sigmoid", "scaling_factor": 2.5}
MODELS = {
    "deepseek-v3": Model((7168, 256, 256, TOKENS), 8, 16, DEEPSEEK_SCORING, has_shared=True),
    "gpt-oss": Model((2880, 128, 2880, TOKENS), 4, 32, {}, (1.702, 1.0, 7.0), has_bias=True),
}
SMALL: Sizes = (256, 16, 64, (1, 8, 33))
"""Sizes for a CPU. With 8 of 16 experts per token, a call with 33 tokens is a call with many tokens."""

LARGEST_ERROR = {"bf16": 0.014, "nvfp4": 0.2, "mxfp4": 0.26, "fp8": 0.06}
"""Largest accepted relative error, by the format of the activations. Errors of 0.014 and 0.2 correspond to cosines of
0.9999 and 0.98. On a CPU we measured 20 layers of two sizes for each model. With 1 and 8 tokens, errors were 0.0036 to
0.0065 in bf16, 0.098 to 0.144 in NVFP4, and 0.148 to 0.238 in MXFP4. With 60 tokens they were 0.031 to 0.041 in FP8."""


class Weights(NamedTuple):
    """Weights of an expert layer in bf16. The gate rows of an expert precede its up rows."""

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
    if device.type == "cuda":
        in_few = "fp4" if options.activations == "fp4" else "16bit"
        reason = reason_unrouted(model.scheme, experts, hidden, intermediate, device, in_few)
        if reason is not None:
            device, kernels = torch.device("cpu"), f"the ops' references in plain torch ({reason})"
            hidden, experts, intermediate, tokens = chosen_sizes(options, SMALL)
    model = model._replace(top=min(options.top or model.top, experts))
    torch.manual_seed(options.seed)
    weights = random_weights(model, hidden, experts, intermediate, device)
    layer = fp4_layer(model, weights, torch.randn(64, hidden, device=device).bfloat16(), options.activations)
    in_bf16 = BF16Layer(model, decoded(layer, weights))
    print_device(device, kernels)
    print(f"layer      {experts} experts of {intermediate}, {model.top} a token, hidden {hidden}")
    is_timed = device.type == "cuda"  # timing the references would be meaningless
    print(f"backend    of the GEMMs for few tokens: {'auto' if is_timed else 'reference'}")
    stacks = (layer.experts.gate_up_proj, layer.experts.down_proj)
    print_weights((weights.up, weights.down), (each for stack in stacks for each in (stack.weight, stack.weight_scale)))

    problems = []
    head = f"{'tokens':>9}  {'activations':>11}  {'cosine':>8}  {'relative error':>14}"
    print(f"\n{head}     FP4 µs    bf16 µs" if is_timed else f"\n{head}")
    for count, x in inputs(tokens, hidden, device):
        cosine, error = compared(layer(x), in_bf16(x))
        line = f"{count:9}  {activations_of(layer, count):>11}  {cosine:8.5f}  {error:14.5f}"
        if is_timed and count > 0:
            line += f"  {captured_us(layer, x):9.1f}  {called_us(in_bf16, x):9.1f}"
        print(line)
        largest = LARGEST_ERROR[activations_of(layer, count)]
        if not error <= largest:
            problems.append(f"{count} tokens: error {error:.3g} is above {largest}")
    print()
    return conclude(problems)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = layer_parser(__doc__, hidden_step=64, intermediate_step=64, top=None)
    parser.add_argument("--model", choices=tuple(MODELS), default="deepseek-v3", help="model that the layer is from")
    parser.add_argument("--activations", choices=("fp4", "bf16"), default="fp4", help="of few tokens")
    return parser.parse_args(arguments)


def layer_parser(
    description: str | None, hidden_step: int, intermediate_step: int, top: int | None = 8
) -> argparse.ArgumentParser:
    """Return a parser of options for the sizes of an expert layer and its numbers of tokens."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", help="numbers of tokens")
    parser.add_argument("--hidden", type=multiple_of(hidden_step), help=f"hidden size, a multiple of {hidden_step}")
    parser.add_argument("--experts", type=multiple_of(1))
    parser.add_argument(
        "--intermediate",
        type=multiple_of(intermediate_step),
        help=f"intermediate size, a multiple of {intermediate_step}",
    )
    parser.add_argument(
        "--top", type=multiple_of(1), default=top, help=f"experts per token (default: {top or 'as in the model'})"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser


def print_device(device: torch.device, kernels: str) -> None:
    """Print the device, and ``kernels``, a description of the code that runs on it."""
    print(f"device     {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}: {kernels}")


def print_weights(in_bf16: Iterable[torch.Tensor], quantised: Iterable[torch.Tensor]) -> None:
    """Print the size of the experts' weights in bytes, in bf16 and quantised."""
    before, after = (sum(tensor.nbytes for tensor in tensors) for tensors in (in_bf16, quantised))
    print(f"weights    {before:,} bytes in bf16, {after:,} as codes and scales: {before / after:.2f} times fewer")


def inputs(tokens: Iterable[int], hidden: int, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each number of tokens M, and random tokens (M, H)."""
    for count in tokens:
        yield count, torch.randn(count, hidden, device=device).bfloat16()


def compared(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Return the smallest cosine similarity between the two results of a token, and the relative error of all results.
    If there are no tokens, return 1 and 0."""
    if not len(got):
        return 1.0, 0.0
    got, want = got.double(), want.double()
    return F.cosine_similarity(got, want, dim=-1).min().item(), relative_error(got, want)


def chosen_sizes(options: argparse.Namespace, defaults: Sizes) -> Sizes:
    """Return the sizes that the options set, and default values for all other sizes."""
    hidden, experts, intermediate, tokens = defaults
    return (
        options.hidden or hidden,
        options.experts or experts,
        options.intermediate or intermediate,
        options.tokens or tokens,
    )


def random_weights(model: Model, hidden: int, experts: int, intermediate: int, device: torch.device) -> Weights:
    """Return random weights, scaled so that the result of each GEMM is about as large as its input."""

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
    """Expert layer in bf16 and plain torch, which loops over the experts."""

    def __init__(self, model: Model, weights: Weights) -> None:
        self.model = model
        self.weights = weights

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's result (M, H) for tokens (M, H)."""
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
        """Return routing weights (M, E), fp32; 0 for unrouted experts."""
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
        """Return the router's logits (M, E), fp32."""
        return F.linear(x.float(), self.weights.router.float())

    def activations(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Return the input (M, I) of the expert's second GEMM."""
        bias = None if self.weights.up_bias is None else self.weights.up_bias[expert]
        return gated(F.linear(x, self.weights.up[expert], bias), *self.model.swiglu)


def gated(both: torch.Tensor, alpha: float, beta: float, limit: float | None) -> torch.Tensor:
    """Apply SwiGLU to the two halves of each row."""
    gate, up = both.float().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + beta)).to(both.dtype)


class ModelExperts(torch.nn.Module):
    """Experts as Hugging Face models store them.

    `quantize_` replaces this module with a `QuantExperts`, after it has compared the results of both on random tokens.
    """

    def __init__(self, model: Model, weights: Weights) -> None:
        super().__init__()
        tensors = {"gate_up_proj": weights.up, "down_proj": weights.down}
        tensors |= {"gate_up_proj_bias": weights.up_bias, "down_proj_bias": weights.down_bias}
        for name, tensor in tensors.items():
            if tensor is not None:
                self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self.swiglu, (self.alpha, _, self.limit) = model.swiglu, model.swiglu

    def forward(self, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for token, slot in torch.cartesian_prod(*map(torch.arange, ids.shape)):
            expert = ids[token, slot]
            result = x[token]
            for name in ("gate_up_proj", "down_proj"):
                bias = getattr(self, f"{name}_bias", None)
                result = F.linear(result, getattr(self, name)[expert], None if bias is None else bias[expert])
                result = gated(result, *self.swiglu) if name == "gate_up_proj" else result
            y[token] += factors[token, slot] * result
        return y


def fp4_layer(model: Model, weights: Weights, calibration: torch.Tensor, activations: str) -> ExpertLayer:
    """Return the layer with the experts' weights in FP4. The router's weight stays in bf16.

    Args:
        model: properties of the layer.
        weights: bf16 weights to quantise.
        calibration: tokens (M, H), for the global scales of the activations.
        activations: format of activations for few tokens, "fp4" or "bf16".
    """
    modules = torch.nn.ModuleDict({"experts": ModelExperts(model, weights)})
    if weights.shared_up is not None and weights.shared_down is not None:
        gate, up = weights.shared_up.chunk(2)
        shared_weights = {"gate": gate, "up": up, "down": weights.shared_down}
        # Next to the experts, a layer named "gate" could be the router, which quantize_ leaves in bf16.
        modules["shared"] = torch.nn.ModuleDict({name: linear(each) for name, each in shared_weights.items()})
    quantize_(modules, model.scheme)
    shared = None
    if model.has_shared:
        layers = modules["shared"]
        shared = GatedMLP(merge([layers["gate"], layers["up"]]), layers["down"])
    experts = modules["experts"]
    if few_tokens(weights.down.shape[-1]):
        if activations == "bf16":
            experts.route_few_()
        else:
            experts.route_few_("fp4", **global_scales(model, weights, calibration))
    return ExpertLayer(weights.router.float(), experts, model.top, shared=shared, **model.scoring)


def linear(weight: torch.Tensor) -> torch.nn.Linear:
    """Return an `nn.Linear` without a bias, with the given weight (N, K)."""
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    return made


def global_scales(model: Model, weights: Weights, calibration: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute the global scales of NVFP4 activations: one for the tokens, and one for each expert's activations. Return
    them as arguments of `route_few_`. For MXFP4, return an empty dict."""
    if model.scheme != "nvfp4":
        return {}
    twin = BF16Layer(model, weights)
    amax = [twin.activations(calibration, e).abs().amax() for e in range(len(weights.up))]
    return {
        "input_global_scale": torch_cute_ops.nvfp4_global_scale(calibration.abs().amax()),
        "hidden_global_scale": torch.cat([torch_cute_ops.nvfp4_global_scale(each) for each in amax]),
    }


def decoded(layer: ExpertLayer, weights: Weights) -> Weights:
    """Return the decoded weights of a quantised layer, in bf16."""
    up, down = layer.experts.dequantize(torch.bfloat16)
    weights = weights._replace(up=up, down=down)
    if layer.shared is None:
        return weights
    shared = layer.shared.gate_up_proj, layer.shared.down_proj
    shared_up, shared_down = (each.dequantize(torch.bfloat16) for each in shared)
    return weights._replace(shared_up=shared_up, shared_down=shared_down)


def activations_of(layer: ExpertLayer, tokens: int) -> str:
    """Return the format of the activations of a call with this number of tokens."""
    experts = layer.experts
    if not experts.are_routed(tokens, layer.topk, torch.bfloat16):
        return "fp8"
    return experts.scheme if experts.side_by_side.activations == "fp4" else "bf16"


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def captured_us(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, replays: int = 50) -> float:
    """Capture a call of the layer in a CUDA graph, and return the median time of a replay in µs. All replays use the
    same weights, so the weights may be in L2."""
    layer(x)  # compiles and loads; a server would call torch_cute_ops.warmup
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
    """Call the layer several times without a CUDA graph, and return the median time of a call in µs."""
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
