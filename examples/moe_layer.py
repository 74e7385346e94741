#!/usr/bin/env python3
"""An expert layer as in DeepSeek's models, with its weights in NVFP4, beside the same layer in bf16.

    python examples/moe_layer.py                        # activations in NVFP4 too: mm_fp4, moe_fc2_fp4
    python examples/moe_layer.py --activations bf16     # mm_fp4_weight_only, moe_fc2_fp4_weight_only
    python examples/moe_layer.py --tokens 1 64 --experts 64 --hidden 2048 --intermediate 512

A router chooses 8 experts for each token; the result is the sum of their `down(silu(gate(x)) · up(x))`, weighted by the
router. In NVFP4 `moe_route_dense` writes the routing weights of all experts, 0 for those that a token does not have;
one GEMM computes the gates and ups of all experts (no op skips the unused ones yet); `silu_mul_fp4quant` quantises what
the second GEMM takes; and `moe_fc2_fp4` computes that GEMM for the routed pairs alone, and adds them up, weighted. No
shape depends on the routing, so the layer can be captured in a CUDA graph.

Weights are random, so the errors are those of NVFP4 on numbers that no model has been trained on. Without a GPU the ops
run their references in plain torch, and no time is measured; nor is it where no kernel can compute the second GEMM. The
last line starts with SUCCESS or FAILURE, and the exit status follows it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

import torch_cute_ops
from quickstart import conclude, pick_device

Sizes = tuple[int, int, int, Sequence[int]]
"""Hidden, experts, intermediate, and numbers of tokens."""
SIZES: dict[str, Sizes] = {
    "cpu": (256, 16, 64, (1, 8, 33)),
    "cuda": (7168, 256, 256, (1, 8, 16, 32, 64, 128, 256, 512)),
}
"""Small on a CPU; on a GPU an eighth of DeepSeek-V3's experts, as on one of eight GPUs."""

# The largest relative error that a run may have. Measured on a CPU, 90 layers of three sizes: 0.17 for many tokens with
# only the weights in NVFP4, 0.23 with activations too; for one token 0.11 to 0.27, and 0.15 to 0.40.
LARGEST_ERROR = {"bf16": 0.3, "fp4": 0.42}
# The same for moe_fc2 alone, against float64 on the same numbers: one rounding to bf16.
LARGEST_FC2_ERROR = 2.0**-8


class Weights(NamedTuple):
    """The layer's weights, bf16; the gates of all experts come first, then their ups."""

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
    print_device(device, kernels)
    print(f"layer      {experts} experts of {intermediate}, {in_bf16.top} a token, hidden {hidden}")
    print(f"backend    of the second GEMM: {layer.backend}")
    print_weights(weights[1:], (*layer.up, *layer.down))

    problems = []
    head = f"{'tokens':>9}  {'cosine':>8}  {'relative error':>14}  {'of moe_fc2':>10}"
    is_timed = device.type == "cuda" and layer.backend != "reference"  # whose time would say nothing
    print(f"\n{head}  NVFP4 µs  bf16 µs" if is_timed else f"\n{head}")
    for count, x in inputs(tokens, hidden, device):
        cosine, error = compared(layer(x), in_bf16(x))
        fc2_error = layer.fc2_error(x)
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
    parser = layer_parser(__doc__, hidden_step=16, intermediate_step=64)
    parser.add_argument("--activations", choices=tuple(LARGEST_ERROR), default="fp4", help="what the GEMMs take")
    return parser.parse_args(arguments)


def layer_parser(description: str | None, hidden_step: int, intermediate_step: int) -> argparse.ArgumentParser:
    """A parser of the options that say how large a layer of experts is, and how many tokens it gets."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", help="numbers of tokens")
    parser.add_argument("--hidden", type=int, help=f"elements of a token, a multiple of {hidden_step}")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--intermediate", type=int, help=f"of an expert, a multiple of {intermediate_step}")
    parser.add_argument("--top", type=int, default=8, help="experts of a token (default: 8)")
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


def random_weights(hidden: int, experts: int, intermediate: int, device: torch.device) -> Weights:
    """Random weights, scaled so that the result of each GEMM is about as large as its input."""
    width = experts * intermediate
    shapes = ((experts, hidden), (2 * width, hidden), (hidden, width))
    fan_in = (hidden, hidden, intermediate)
    made = (
        torch.randn(shape, device=device, dtype=torch.bfloat16).div_(count**0.5)
        for shape, count in zip(shapes, fan_in, strict=True)
    )
    return Weights(*made)


class BF16Layer:
    """The layer in plain torch. It computes all experts, and multiplies those that a token does not have by zero."""

    def __init__(self, weights: Weights, top: int) -> None:
        self.weights = weights
        self.top = top

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's result (M, H) for tokens (M, H)."""
        routing = self.route(x)
        activations = self.activations(x).unflatten(1, (routing.shape[1], -1))
        return F.linear((activations * routing.unsqueeze(-1)).to(x.dtype).flatten(1), self.weights.down)

    def route(self, x: torch.Tensor) -> torch.Tensor:
        """Routing weights (M, E), fp32: the softmax of the best experts, normalised to sum to 1; 0 for the others."""
        scores = self.logits(x).softmax(-1)
        best = scores.topk(self.top, dim=-1)
        return torch.zeros_like(scores).scatter(1, best.indices, best.values / best.values.sum(-1, keepdim=True))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The router's logits (M, E), fp32."""
        return F.linear(x.float(), self.weights.router.float())

    def activations(self, x: torch.Tensor) -> torch.Tensor:
        """What the experts' second GEMM takes, (M, E·I)."""
        gate, up = F.linear(x, self.weights.up).chunk(2, dim=-1)
        return F.silu(gate) * up


class NVFP4Layer:
    """The layer with its weights in NVFP4, but for the router's.

    Args:
        layer: the layer in bf16.
        calibration: tokens (M, H), for the global scales of the activations.
        mode: the activations' format, "fp4" or "bf16".
    """

    def __init__(self, layer: BF16Layer, calibration: torch.Tensor, mode: str) -> None:
        self.logits, self.top = layer.logits, layer.top
        self.in_fp4 = mode == "fp4"
        router, up, down = layer.weights
        up_factor, down_factor = (torch_cute_ops.nvfp4_global_scale(weight.abs().amax()) for weight in (up, down))
        self.up = torch_cute_ops.fp4_quantize(up, up_factor)
        self.down = torch_cute_ops.fp4_quantize(down, down_factor)
        # GEMMs decode without global scales: alpha divides by them.
        self.x_factor = torch_cute_ops.nvfp4_global_scale(calibration.abs().amax())
        self.h_factor = torch_cute_ops.nvfp4_global_scale(layer.activations(calibration).abs().amax())
        self.up_alpha = 1 / (up_factor * self.x_factor if self.in_fp4 else up_factor)
        down_alpha = 1 / (down_factor * self.h_factor if self.in_fp4 else down_factor)
        self.expert_factor = down_alpha.expand(len(router)).contiguous()
        n, k = down.shape
        op = "moe_fc2_fp4" if self.in_fp4 else "moe_fc2_fp4_weight_only"
        reasons = torch_cute_ops.backends(op, n=n, k=k, experts=len(router), device=down.device)
        # On a GPU "auto" never takes the reference.
        has_kernel = any(reason is None for name, reason in reasons.items() if name != "reference")
        self.backend = "auto" if has_kernel else "reference"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's result (M, H) for tokens (M, H)."""
        return self.second(self.first(x), self.alpha(x))

    def alpha(self, x: torch.Tensor) -> torch.Tensor:
        """The factors (M, E) of the second GEMM: routing weights, without the global scales."""
        return torch_cute_ops.moe_route_dense(self.logits(x), self.top, expert_factor=self.expert_factor)

    def first(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the second GEMM takes: codes and scales, or numbers, (M, E·I)."""
        codes, scale = self.up
        if not self.in_fp4:
            both = torch_cute_ops.mm_fp4_weight_only(x, codes.t(), scale, self.up_alpha)
            gate, up = both.chunk(2, dim=-1)
            return (F.silu(gate) * up,)
        a, a_scale = torch_cute_ops.fp4_quantize(x, self.x_factor)
        both = torch_cute_ops.mm_fp4(a, codes.t(), a_scale, scale, self.up_alpha)
        return torch_cute_ops.silu_mul_fp4quant(both, self.h_factor)

    def second(self, activations: tuple[torch.Tensor, ...], alpha: torch.Tensor) -> torch.Tensor:
        """The experts' second GEMMs, weighted and added up, (M, H)."""
        codes, scale = self.down
        a, *a_scale = activations
        op = torch_cute_ops.moe_fc2_fp4 if self.in_fp4 else torch_cute_ops.moe_fc2_fp4_weight_only
        return op(a, codes, *a_scale, scale, alpha, backend=self.backend)

    def fc2_error(self, x: torch.Tensor) -> float:
        """The relative error of the second GEMM, against float64 on the same numbers."""
        activations, alpha = self.first(x), self.alpha(x)
        a = decoded(*activations) if self.in_fp4 else activations[0].double()
        a = (a.unflatten(1, (alpha.shape[1], -1)) * alpha.double().unsqueeze(-1)).flatten(1)
        # 128 rows at a time, which have whole tiles of scales: the whole weight is large in float64.
        parts = zip(*(tensor.split(128) for tensor in self.down), strict=True)
        want = torch.cat([a @ decoded(*part).t() for part in parts], dim=1)
        return relative_error(self.second(activations, alpha).double(), want)


def decoded(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The numbers as GEMMs decode them, without the global scale, in float64."""
    return torch_cute_ops.fp4_dequantize(codes, scale, out_dtype=torch.float32).double()


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


if __name__ == "__main__":
    sys.exit(main())
