"""Gated FP4 GEMMs over experts that compute only routed pairs of token and expert: ``kernels/fp4_gated_experts``."""

import math
from dataclasses import dataclass

import torch

from torch_cute_ops.formats import FP4Format
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._routed import (
    DECODE_CLOCKS,
    FIXED_SECONDS,
    TOKEN_CLOCKS,
    RoutedBackend,
    mean_units,
)
from torch_cute_ops.gemm.cost import bytes_per_second, overlapped, smallest_tile, weight_seconds
from torch_cute_ops.gemm.decode import fp4_format, fp4_operands, reason_not_linear
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels import fp4_gated_experts
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import new_bytes
from torch_cute_ops.runtime.arch import Arch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Model:
    """What the estimates are made of.

    Attributes:
        fixed_seconds: time of both kernels of a call with next to no work.
        decode_clocks: SM clocks to decode a weight.
        token_clocks: the same for each token of a unit beyond eight.
        left_seconds: from the end of one worker's parts of a task to the other worker's having their sums.
        l2_rate: rate of reads from L2, over that of memory.
        order: of the norm that decoding, memory and L2 overlap by.
    """

    fixed_seconds: float = FIXED_SECONDS
    decode_clocks: float = DECODE_CLOCKS
    token_clocks: float = TOKEN_CLOCKS
    left_seconds: float = 1.5e-6
    l2_rate: float = 1.3
    order: float = 8.0


MODEL = Model()
"""Clocks and seconds as with the second GEMM, whose activations come from L2 at 4.5 to 7 TB/s (measured on an H200);
``left_seconds`` is a guess."""
COLUMN_MULTIPLE = 64
"""What an expert's columns are a multiple of: whole slices of up to 128 rows."""


class RoutedGated(RoutedBackend):
    """A tactic is (rows of the weight of a slice, tokens of a unit, parts of k, tokens of a tile)."""

    kernel = fp4_gated_experts.KERNEL
    groupings = ("n",)

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        if problem.gate is None:
            return "it computes the experts' GEMM with a gate alone"
        if problem.expert_n % COLUMN_MULTIPLE:
            return f"an expert has {problem.expert_n} columns; they have to be a multiple of {COLUMN_MULTIPLE}"
        return super().reason_unfit(problem) or reason_not_linear(problem, problem.k, "k")

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        tokens = smallest_tile(fp4_gated_experts.TOKEN_BLOCKS, m)
        every = [
            (rows, group, parts, tokens)
            for rows in fp4_gated_experts.TILES_N
            for group in fp4_gated_experts.TILES_M
            for parts in fp4_gated_experts.SPLIT_K[rows]
            if group <= max(m, 8)
        ]
        return self.buildable(problem, every, target)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        assert target.arch is not None
        rows, group, parts, tokens = map(int, tactic)
        config = self.config(problem, tactic, target.arch)
        assert config is not None
        share = problem.topk / problem.experts
        tiles, tile_tokens = -(-m // tokens), min(m, tokens)
        touched = problem.experts * (1 - (1 - share) ** tile_tokens)
        slices = 2 * problem.expert_n // rows
        tasks = tiles * problem.experts * mean_units(tile_tokens, share, group) * slices
        # Workers have whole parts of tasks: at the end each is idle for half of one, on average.
        most = max(1.0, tasks * parts / target.sms + 0.5) / parts
        clocks = MODEL.decode_clocks + MODEL.token_clocks * (group - 8)
        computed = most * weight_seconds(rows * problem.k, clocks)
        # Of a task that several workers share, each waits for the one before it.
        left = (math.ceil(min(1.0 / most, parts)) - 1) * MODEL.left_seconds
        token = config.k_tiles * config.arranged.token_bytes
        weights = tiles * touched * 2 * problem.expert_n * problem.b.row_bytes(problem.k)
        memory = bytes_per_second(target)
        # Scales in whole tiles; and activations of a pair, once for each slice
        copied = tasks * config.k_tiles * 2 * config.chunks.size_bytes + slices * m * problem.topk * token
        arranged = m * (token + problem.a.row_bytes(problem.k)) / memory
        seconds = computed, weights / memory, copied / (MODEL.l2_rate * memory)
        return MODEL.fixed_seconds + arranged + left + overlapped(*seconds, order=MODEL.order)

    def config(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> fp4_gated_experts.Config | None:
        rows, group, parts, tokens = map(int, tactic)
        epilogue, quantised = problem.epilogue, problem.quantised
        assert epilogue.alpha in (None, "expert", "expert_half")
        if problem.expert_n % (rows // 2):
            return None
        out: torch.dtype | FP4Format = epilogue.out_dtype
        layout = None
        if quantised is not None:
            out, layout = fp4_format(problem), quantised.scale_layout
        gated_epilogue = fp4_gated_experts.GatedEpilogue(
            out, layout, epilogue.alpha, epilogue.bias_dtype, problem.global_scale, problem.gate == "swiglu"
        )
        return fp4_gated_experts.plan(
            operands=fp4_operands(problem),
            epilogue=gated_epilogue,
            width=problem.k,
            tile_n=rows,
            tile_m=group,
            split_k=parts,
            token_block=tokens,
            arch=arch,
            pdl=settings.PDL,
        )

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        function, config = self.compiled(problem, tactic, target)
        device, experts, workers = target.device, problem.experts, target.sms

        size = config.workspace_bytes
        return lambda a, b, a_scale, b_scale, alpha, bias, routing, *rest: function(
            a,
            a_scale,
            b,
            b_scale,
            routing,
            alpha,
            bias,
            *rest,
            new_bytes(device, size(a.shape[0], experts, workers)),
            workers,
        )
