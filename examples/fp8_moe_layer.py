#!/usr/bin/env python3
"""Run an expert layer of DeepSeek-V3 with FP8 activations and FP8 or FP4 weights, and compare it with bf16.

    python examples/fp8_moe_layer.py                          # rows of experts one after the other
    python examples/fp8_moe_layer.py --layout masked          # an equal number of rows for each expert, for decoding
    python examples/fp8_moe_layer.py --weights mxfp4          # or nvfp4: half of the weights' bytes
    python examples/fp8_moe_layer.py --tokens 1 64 --experts 64 --hidden 2048 --intermediate 512

A router chooses 8 experts for each token, from at most 4 of 8 groups. Each step is one op:

1. `moe_route` chooses experts, and assigns a row to each pair of a token and an expert.
2. `moe_permute_fp8quant` writes the tokens to these rows, in FP8 with a scale for each 128 elements.
3. `grouped_mm_fp8` multiplies by the experts' gate and up weights, which have a scale per 128 x 128 elements.
4. `moe_swiglu_fp8quant` applies SwiGLU and quantises the result.
5. `grouped_mm_fp8` multiplies by the experts' down weights.
6. `moe_finalize` computes the weighted sum of each token's rows.

With FP4 weights, `grouped_mm_fp8_fp4` replaces `grouped_mm_fp8`. Nothing waits for the host, and no shape depends on
the routing, so the layer can be captured as one CUDA graph.

Weights are random. The layer is compared with a layer in bf16, which uses the original weights, or for FP4 the decoded
weights. Without a GPU the ops run their references in plain torch, and no time is measured. The bf16 layer loops over
the experts and waits for the device, so it is timed call by call, not as a graph. The last line starts with SUCCESS or
FAILURE; the exit status is 0 or 1 accordingly.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

import torch_cute_ops
from moe_layer import (
    Sizes,
    called_us,
    captured_us,
    chosen_sizes,
    compared,
    inputs,
    layer_parser,
    print_device,
    print_weights,
)
from quickstart import conclude, pick_device

BLOCK = 128
LARGEST_CODE = 448.0
SCALING = 2.5  # DeepSeek-V3's ``routed_scaling_factor``
SIZES: dict[str, Sizes] = {"cpu": (256, 16, 128, (1, 8, 33)), "cuda": (7168, 32, 2048, (1, 8, 64, 512, 4096, 8192))}
"""Hidden size, experts, intermediate size and numbers of tokens, by device: small sizes for a CPU. For a GPU, the sizes
of DeepSeek-V3 with an eighth of its experts, as on one of eight GPUs."""

LEAST_COSINE = {"fp8": 0.995, "mxfp4": 0.998, "nvfp4": 0.9965}
LARGEST_ERROR = {"fp8": 0.1, "mxfp4": 0.06, "nvfp4": 0.075}
"""Limits of the checks for each token. On a CPU we measured 60 layers of three sizes in FP8: cosines were at least
0.9965, and errors at most 0.081. For 12 layers of two sizes in MXFP4 and NVFP4, cosines were at least 0.9986 and
0.9976, and errors at most 0.045 and 0.059."""


class Weights(NamedTuple):
    """Weights of an expert layer in bf16, and the fp32 bias of the router. In `up`, an expert's gate rows precede its
    up rows."""

    router: torch.Tensor
    """(E, H)."""
    bias: torch.Tensor
    """(E,), fp32: added to the scores when experts are chosen."""
    up: torch.Tensor
    """(E, 2·I, H)."""
    down: torch.Tensor
    """(E, H, I)."""


class Routing(NamedTuple):
    """Parameters of the routing: the number of expert groups, groups per token, and experts per token."""

    num_groups: int
    topk_groups: int
    topk: int


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device, kernels = pick_device()
    hidden, experts, intermediate, tokens = chosen_sizes(options, SIZES[device.type])
    torch.manual_seed(options.seed)
    groups, used = (8, 4) if experts % 16 == 0 else (1, 1)
    routing = Routing(groups, used, min(options.top, experts * used // groups))
    weights = random_weights(hidden, experts, intermediate, device)
    up, down = (EXPERTS[options.weights](weight) for weight in (weights.up, weights.down))
    weights = weights._replace(up=up.represented, down=down.represented)
    in_bf16 = BF16Layer(weights, routing)
    layer = FP8Layer(weights.router, weights.bias, up, down, routing, options.layout == "masked")
    print_device(device, kernels)
    print(f"layer      {experts} experts of {intermediate}, {routing.topk} a token, hidden {hidden}, {options.layout}")
    print_weights(weights[2:], (*up.tensors, *down.tensors))

    problems = []
    is_timed = device.type == "cuda"
    head = f"{'tokens':>9}  {'cosine':>8}  {'relative error':>14}"
    print(f"\n{head}   ours µs    bf16 µs" if is_timed else f"\n{head}")
    least, largest = LEAST_COSINE[options.weights], LARGEST_ERROR[options.weights]
    for count, x in inputs(tokens, hidden, device):
        cosine, error = compared(layer(x), in_bf16(x))
        line = f"{count:9}  {cosine:8.5f}  {error:14.4f}"
        if is_timed:
            line += f"  {captured_us(layer, x):8.1f}  {called_us(in_bf16, x):9.1f}"
        print(line)
        if not cosine >= least:
            problems.append(f"{count} tokens: a cosine of {cosine:.5f} is below {least}")
        if not error <= largest:
            problems.append(f"{count} tokens: error {error:.3g} is above {largest}")
    print()
    return conclude(problems)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = layer_parser(__doc__, hidden_step=BLOCK, intermediate_step=BLOCK)
    parser.add_argument("--layout", choices=("contiguous", "masked"), default="contiguous", help="of experts' rows")
    parser.add_argument("--weights", choices=tuple(EXPERTS), default="fp8", help="format of the experts' weights")
    return parser.parse_args(arguments)


def random_weights(hidden: int, experts: int, intermediate: int, device: torch.device) -> Weights:
    """Return random weights, scaled so that the result of each GEMM is about as large as its input."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16).div_(shape[-1] ** 0.5)

    bias = torch.randn(experts, device=device) * 0.01
    return Weights(
        random(experts, hidden), bias, random(experts, 2 * intermediate, hidden), random(experts, hidden, intermediate)
    )


class BF16Layer:
    """Expert layer in bf16 and plain torch, which loops over the experts."""

    def __init__(self, weights: Weights, routing: Routing) -> None:
        self.weights = weights
        self.routing = routing

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's result (M, H) for tokens (M, H)."""
        factors, ids = self.route(x)
        total = torch.zeros(x.shape, device=x.device)
        for expert in ids.unique().tolist():
            token, place = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], self.weights.up[expert]).chunk(2, dim=-1)
            result = F.linear(F.silu(gate) * up, self.weights.down[expert])
            total.index_add_(0, token, factors[token, place, None] * result)
        return total.to(x.dtype)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the routing weights and the chosen experts of each token, each (M, topk)."""
        scores = F.linear(x.float(), self.weights.router.float()).sigmoid()
        groups = (scores + self.weights.bias).unflatten(1, (self.routing.num_groups, -1))
        best_groups = groups.topk(2, dim=2).values.sum(2).topk(self.routing.topk_groups, dim=1).indices
        is_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=x.device).scatter(1, best_groups, False)
        ids = groups.masked_fill(is_out[..., None], -torch.inf).flatten(1).topk(self.routing.topk, dim=1).indices
        chosen = scores.gather(1, ids)
        return chosen / chosen.sum(1, keepdim=True) * SCALING, ids


class FP8Experts:
    """Weights (E, N, K) of experts in FP8, with a scale per 128 x 128 elements.

    Attributes:
        tensors: codes and scales.
        represented: bf16 weights of the layer that results are compared with. For FP8 these are the original weights.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.tensors, self.represented = in_fp8(weight), weight

    def __call__(
        self, a: torch.Tensor, a_scale: torch.Tensor, offsets: torch.Tensor | None, counts: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply each expert's rows of ``a`` by the expert's weight."""
        b, b_scale = self.tensors
        return torch_cute_ops.grouped_mm_fp8(a, b.mT, a_scale, b_scale, offsets, counts)


class FP4Experts:
    """Weights of experts in FP4: codes and scales as in a checkpoint, and the decoded weights. For NVFP4, ``alpha`` of
    the GEMM divides out the global scale."""

    def __init__(self, weight: torch.Tensor, block_size: int) -> None:
        self.block_size = block_size
        scale = torch_cute_ops.nvfp4_global_scale(weight.abs().amax()) if block_size == 16 else None
        self.alpha = None if scale is None else 1 / scale
        self.tensors = torch_cute_ops.fp4_quantize(weight, scale, block_size)
        self.represented = torch_cute_ops.fp4_dequantize(*self.tensors, scale, block_size, out_dtype=weight.dtype)

    def __call__(
        self, a: torch.Tensor, a_scale: torch.Tensor, offsets: torch.Tensor | None, counts: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply each expert's rows of ``a`` by the expert's weight."""
        b, b_scale = self.tensors
        return torch_cute_ops.grouped_mm_fp8_fp4(
            a, b.mT, a_scale, b_scale, offsets, counts, self.alpha, block_size=self.block_size
        )


EXPERTS: dict[str, Callable[[torch.Tensor], FP8Experts | FP4Experts]] = {
    "fp8": FP8Experts,
    "mxfp4": partial(FP4Experts, block_size=32),
    "nvfp4": partial(FP4Experts, block_size=16),
}


class FP8Layer:
    """Expert layer with FP8 activations. The router computes in bf16.

    Args:
        router, bias: the router's weight and bias, the same tensors as in the bf16 layer.
        up, down: the experts' GEMMs.
        routing: parameters of the routing, the same as in the bf16 layer.
        is_masked: True for a buffer in which each expert owns space for all tokens, False for packed rows.
    """

    def __init__(
        self,
        router: torch.Tensor,
        bias: torch.Tensor,
        up: FP8Experts | FP4Experts,
        down: FP8Experts | FP4Experts,
        routing: Routing,
        is_masked: bool,
    ) -> None:
        self.router, self.bias = router, bias
        self.routing = routing
        self.is_masked = is_masked
        self.up, self.down = up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's result (M, H) for tokens (M, H)."""
        logits = F.linear(x.float(), self.router.float())
        weights, _, expanded, permuted, offsets, counts = torch_cute_ops.moe_route(
            logits,
            self.routing.topk,
            self.bias,
            "sigmoid",
            self.routing.num_groups,
            self.routing.topk_groups,
            scaling_factor=SCALING,
            alignment=1,  # no padding, because `grouped_mm_fp8` needs no alignment
            max_rows=len(x) if self.is_masked else None,
        )
        a, a_scale = torch_cute_ops.moe_permute_fp8quant(x, permuted, self.routing.topk, expanded)
        if self.is_masked:
            # View the rows as (E, max_rows, ...), the masked layout.
            a, a_scale = (each.unflatten(0, (len(counts), -1)) for each in (a, a_scale))
            offsets = None
        else:
            # Packed rows need no counts: the offsets alone locate the rows. Without counts, GEMMs choose tiles for
            # packed rows.
            counts = None
        both = self.up(a, a_scale, offsets, counts)
        h, h_scale = torch_cute_ops.moe_swiglu_fp8quant(both, offsets, counts)
        y = self.down(h, h_scale, offsets, counts)
        return torch_cute_ops.moe_finalize(y.flatten(0, -2), expanded, weights)


def in_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight (E, N, K) to e4m3. Return the codes, and a scale for each 128 x 128 elements. The scale maps
    the largest magnitude of these elements to 448."""
    experts, n, k = weight.shape
    rows = -(-n // BLOCK)
    codes, scale = (
        weight.new_empty(weight.shape, dtype=torch.float8_e4m3fn),
        weight.new_empty(experts, rows, k // BLOCK),
    )
    scale = scale.float()
    for expert, matrix in enumerate(weight):
        padded = F.pad(matrix.float(), (0, 0, 0, rows * BLOCK - n))
        blocks = padded.view(rows, BLOCK, k // BLOCK, BLOCK)
        scale[expert] = blocks.abs().amax((1, 3)) / LARGEST_CODE
        divided = blocks / scale[expert][:, None, :, None].clamp(min=torch.finfo(torch.float32).tiny)
        codes[expert] = divided.view(-1, k)[:n].to(torch.float8_e4m3fn)
    return codes, scale


if __name__ == "__main__":
    sys.exit(main())
