#!/usr/bin/env python3
"""An expert layer as in DeepSeek's models, with its weights in NVFP4, beside the same layer in bf16.

    python examples/moe_layer.py                        # activations in NVFP4 too: mm_fp4, moe_fc2_fp4
    python examples/moe_layer.py --activations bf16     # mm_fp4_weight_only, moe_fc2_fp4_weight_only
    python examples/moe_layer.py --tokens 1 64 --experts 64 --hidden 2048 --intermediate 512

A router gives each token 8 experts. Of each, `down(silu(gate(x)) · up(x))` is taken, and the 8 are added up with the
router's weights. In NVFP4 that is: one product for the gates and ups of all experts (there is no op yet that leaves out
those without tokens), `silu_mul_fp4quant`, and `moe_fc2_fp4`, which multiplies, weighs and adds, and computes for no
expert that a token does not have. No shape depends on the routing, so the layer can be captured.

Weights are random, and so the errors are those of NVFP4 on numbers that no model has learned to be robust with. Without
a GPU the ops run their references in plain torch, and no time is measured; nor is one where no kernel can compute the
second product. The last line starts with SUCCESS or FAILURE, and the exit status follows it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

import torch_cute_ops
from quickstart import conclude, pick_device

LAYOUT = "128x4"
TOP = 448.0 * 6.0  # the largest block scale times the largest element
Sizes = tuple[int, int, int, Sequence[int]]
"""Hidden, experts, intermediate, and numbers of tokens."""
SIZES: dict[str, Sizes] = {
    "cpu": (256, 16, 64, (1, 8, 33)),
    "cuda": (7168, 256, 256, (1, 8, 16, 32, 64, 128, 256, 512)),
}
"""Small on a CPU; on a GPU an eighth of DeepSeek-V3's experts, as on one of eight GPUs."""

# What a run must reach, as a part of the result's size. Measured on a CPU, 90 layers of three sizes: of many tokens
# together 0.17 with weights alone in NVFP4, 0.23 with activations too; of one token 0.11 to 0.27, and 0.15 to 0.40.
LARGEST_ERROR = {"bf16": 0.3, "fp4": 0.42}
# Of moe_fc2 beside the same numbers in float64: one rounding to bf16.
LARGEST_FC2_ERROR = 2.0**-8


class Weights(NamedTuple):
    """Of the layer, bf16; the gates of all experts come first, then their ups."""

    router: torch.Tensor
    """(E, H)."""
    up: torch.Tensor
    """(2·E·I, H)."""
    down: torch.Tensor
    """(H, E·I)."""


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device, kernels = pick_device()
    hidden, experts, intermediate, tokens = chosen_sizes(options, SIZES[device.type])
    torch.manual_seed(options.seed)
    weights = random_weights(hidden, experts, intermediate, device)
    in_bf16 = BF16Layer(weights, min(options.top, experts))
    layer = NVFP4Layer(in_bf16, calibration=torch.randn(64, hidden, device=device).bfloat16(), mode=options.activations)
    before = sum(weight.nbytes for weight in weights[1:])
    after = sum(tensor.nbytes for tensor in (*layer.up, *layer.down))
    print(f"device     {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}: {kernels}")
    print(f"layer      {experts} experts of {intermediate}, {in_bf16.top} a token, hidden {hidden}")
    print(f"backend    of the second product: {layer.backend}")
    print(f"weights    {before:,} bytes in bf16, {after:,} as codes and scales: {before / after:.2f} times fewer")

    problems = []
    head = f"{'tokens':>9}  {'cosine':>8}  {'relative error':>14}  {'of moe_fc2':>10}"
    is_timed = device.type == "cuda" and layer.backend != "reference"  # whose time would say nothing
    print(f"\n{head}  NVFP4 µs  bf16 µs" if is_timed else f"\n{head}")
    for count in tokens:
        x = torch.randn(count, hidden, device=device).bfloat16()
        want, got = in_bf16(x).double(), layer(x).double()
        cosine = F.cosine_similarity(got, want, dim=-1).min().item()
        error, fc2_error = relative_error(got, want), layer.fc2_error(x)
        line = f"{count:9}  {cosine:8.4f}  {error:14.4f}  {fc2_error:10.5f}"
        if is_timed:
            line += f"  {captured_us(layer, x):8.1f}  {captured_us(in_bf16, x):7.1f}"
        print(line)
        if not error <= LARGEST_ERROR[options.activations]:
            problems.append(f"{count} tokens: error {error:.3g} is above {LARGEST_ERROR[options.activations]}")
        if not fc2_error <= LARGEST_FC2_ERROR:
            problems.append(f"{count} tokens: moe_fc2 is {fc2_error:.3g} from float64, more than {LARGEST_FC2_ERROR}")
    print()
    return conclude(problems)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--activations", choices=tuple(LARGEST_ERROR), default="fp4", help="what the products take")
    add_size_options(parser, hidden_step=16, intermediate_step=64)
    return parser.parse_args(arguments)


def add_size_options(parser: argparse.ArgumentParser, hidden_step: int, intermediate_step: int) -> None:
    """The options that say how large a layer of experts is, and how many tokens it gets."""
    parser.add_argument("--tokens", type=int, nargs="+", help="numbers of tokens")
    parser.add_argument("--hidden", type=int, help=f"elements of a token, a multiple of {hidden_step}")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--intermediate", type=int, help=f"of an expert, a multiple of {intermediate_step}")
    parser.add_argument("--top", type=int, default=8, help="experts of a token (default: 8)")
    parser.add_argument("--seed", type=int, default=0)


def chosen_sizes(options: argparse.Namespace, usual: Sizes) -> Sizes:
    """What was asked for, and what is usual where nothing was."""
    hidden, experts, intermediate, tokens = usual
    return (
        options.hidden or hidden,
        options.experts or experts,
        options.intermediate or intermediate,
        options.tokens or tokens,
    )


def random_weights(hidden: int, experts: int, intermediate: int, device: torch.device) -> Weights:
    """Weights with which each product keeps the size of its input, more or less."""
    width = experts * intermediate
    shapes = ((experts, hidden), (2 * width, hidden), (hidden, width))
    fan_in = (hidden, hidden, intermediate)
    made = (
        torch.randn(shape, device=device, dtype=torch.bfloat16).div_(count**0.5)
        for shape, count in zip(shapes, fan_in, strict=True)
    )
    return Weights(*made)


class BF16Layer:
    """The layer in plain torch. Experts that a token does not have are computed, and multiplied by zero."""

    def __init__(self, weights: Weights, top: int) -> None:
        self.weights = weights
        self.top = top

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(M, H) of tokens (M, H)."""
        routing = self.route(x)
        activations = self.activations(x).unflatten(1, (routing.shape[1], -1))
        return F.linear((activations * routing.unsqueeze(-1)).to(x.dtype).flatten(1), self.weights.down)

    def route(self, x: torch.Tensor) -> torch.Tensor:
        """Weights (M, E) of the experts, fp32: of the best, their shares of the softmax, made to sum to 1; else 0."""
        scores = F.linear(x.float(), self.weights.router.float()).softmax(-1)
        best = scores.topk(self.top, dim=-1)
        return torch.zeros_like(scores).scatter(1, best.indices, best.values / best.values.sum(-1, keepdim=True))

    def activations(self, x: torch.Tensor) -> torch.Tensor:
        """What the experts' second product takes, (M, E·I)."""
        gate, up = F.linear(x, self.weights.up).chunk(2, dim=-1)
        return F.silu(gate) * up


class NVFP4Layer:
    """The layer with its weights in NVFP4, but for the router's.

    Args:
        layer: the layer in bf16.
        calibration: tokens (M, H) whose activations show how large those will be that are quantised.
        mode: activations in "fp4", or in "bf16".
    """

    def __init__(self, layer: BF16Layer, calibration: torch.Tensor, mode: str) -> None:
        self.route = layer.route
        self.in_fp4 = mode == "fp4"
        router, up, down = layer.weights
        up_factor, down_factor = (TOP / weight.abs().amax().float() for weight in (up, down))
        self.up = torch_cute_ops.fp4_quantize(up, up_factor, scale_layout=LAYOUT)
        self.down = torch_cute_ops.fp4_quantize(down, down_factor, scale_layout=LAYOUT)
        # Global scales of what is quantised, of which the products know nothing: their factors take them away.
        self.x_factor = TOP / calibration.abs().amax().float()
        self.h_factor = TOP / layer.activations(calibration).abs().amax().float()
        self.up_alpha = 1 / (up_factor * self.x_factor if self.in_fp4 else up_factor)
        self.down_alpha = 1 / (down_factor * self.h_factor if self.in_fp4 else down_factor)
        n, k = down.shape
        facts = {"n": n, "k": k, "experts": len(router), "device": down.device}
        reasons = torch_cute_ops.backends("moe_fc2_fp4" if self.in_fp4 else "moe_fc2_fp4_weight_only", **facts)
        # On a GPU "auto" takes no reference.
        has_kernel = any(reason is None for name, reason in reasons.items() if name != "reference")
        self.backend = "auto" if has_kernel else "reference"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(M, H) of tokens (M, H)."""
        return self.second(self.first(x), self.route(x))

    def first(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the second product takes: codes and scales, or numbers, (M, E·I)."""
        codes, scale = self.up
        if not self.in_fp4:
            both = torch_cute_ops.mm_fp4_weight_only(x, codes.t(), scale, self.up_alpha, scale_layout=LAYOUT)
            gate, up = both.chunk(2, dim=-1)
            return (F.silu(gate) * up,)
        a, a_scale = torch_cute_ops.fp4_quantize(x, self.x_factor, scale_layout=LAYOUT)
        both = torch_cute_ops.mm_fp4(a, codes.t(), a_scale, scale, self.up_alpha, scale_layout=LAYOUT)
        return torch_cute_ops.silu_mul_fp4quant(both, self.h_factor, scale_layout=LAYOUT)

    def second(self, activations: tuple[torch.Tensor, ...], routing: torch.Tensor) -> torch.Tensor:
        """The experts' second products, added up, (M, H)."""
        codes, scale = self.down
        a, *a_scale = activations
        op = torch_cute_ops.moe_fc2_fp4 if self.in_fp4 else torch_cute_ops.moe_fc2_fp4_weight_only
        alpha = routing * self.down_alpha
        return op(a, codes, *a_scale, scale, alpha, scale_layout=LAYOUT, backend=self.backend)

    def fc2_error(self, x: torch.Tensor) -> float:
        """How far the second product is from that of the same numbers in float64, relative."""
        activations, routing = self.first(x), self.route(x)
        a = decoded(*activations) if self.in_fp4 else activations[0].double()
        alpha = (routing * self.down_alpha).double()
        a = (a.unflatten(1, (routing.shape[1], -1)) * alpha.unsqueeze(-1)).flatten(1)
        # By rows that have tiles of scales of their own: in float64 the whole weight is large.
        parts = zip(*(tensor.split(128) for tensor in self.down), strict=True)
        want = torch.cat([a @ decoded(*part).t() for part in parts], dim=1)
        return relative_error(self.second(activations, routing).double(), want)


def decoded(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The numbers without their global scale, in float64."""
    return torch_cute_ops.fp4_dequantize(codes, scale, scale_layout=LAYOUT, out_dtype=torch.float32).double()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def captured_us(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, replays: int = 50) -> float:
    """The median time of a replay of the captured layer, whose weights may lie in L2."""
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


if __name__ == "__main__":
    sys.exit(main())
