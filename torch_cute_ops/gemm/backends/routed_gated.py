"""FP4 GEMMs with a gate in which each expert owns columns of the result, and only routed (token, expert) pairs are
computed (``kernels/fp4_gated_experts``)."""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._gated import gated_arguments, gated_epilogue, reason_ungated
from torch_cute_ops.gemm.backends._routed import (
    FIXED_SECONDS,
    HALF_K_TILE_SLOWDOWN,
    RoutedBackend,
    clocks_per_weight,
    mean_m_tiles,
)
from torch_cute_ops.gemm.cost import bytes_per_second, overlapped, smallest_tile, weight_seconds
from torch_cute_ops.gemm.decode import fp4_operands, multiplies_codes, reason_not_linear
from torch_cute_ops.gemm.operands import GatedOperands
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp4_gated_experts
from torch_cute_ops.kernels.common.experts.layouts import table_experts
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import new_bytes
from torch_cute_ops.runtime.arch import Arch


@dataclass(frozen=True)
class Model:
    """Constants of the model that estimates the time of a call.

    Attributes:
        fixed_seconds: time of a call's two kernels with almost no work.
        handover_seconds: time from the end of a CTA's part of a work tile until the next CTA has received its partial
            sums.
        l2_rate: rate of reads from L2, divided by the rate of reads from memory.
        fewer_warps_slowdown: factor by which decoding and multiplying take longer with half of the usual consumer
            warps.
        order: exponent p of the p-norm that models how decoding, memory and L2 overlap (``cost.overlapped``).
    """

    fixed_seconds: float = FIXED_SECONDS
    handover_seconds: float = 1.5e-6
    l2_rate: float = 1.3
    fewer_warps_slowdown: float = 1.5
    order: float = 8.0


MODEL = Model()
"""Constants of the estimates. Most values are taken from the second GEMM, whose activations come from L2 at 4.5 to 7
TB/s (measured on an H200). ``handover_seconds`` and ``fewer_warps_slowdown`` are guesses."""


class GatedTactic(NamedTuple):
    """Tactic of ``RoutedGated``.

    Attributes:
        tile_n: number of weight rows in a work tile. Half of the rows belong to the gate.
        tile_m: number of rows of ``a`` in a work tile.
        split_k: number of equal ranges into which K of a work tile is divided. Each range is computed by one CTA.
        token_block: number of tokens whose work tiles are listed together.
    """

    tile_n: int
    tile_m: int
    split_k: int
    token_block: int


class RoutedGated(RoutedBackend):
    """Backend for GEMMs with a gate in which each expert owns columns of the result. The backend multiplies only routed
    (token, expert) pairs."""

    tactic_type = GatedTactic
    kernel = fp4_gated_experts.KERNEL
    groupings = ("n",)

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        reason = reason_ungated(problem) or super().reason_unfit(problem)
        return reason or reason_not_linear(problem, problem.k, "k")

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[GatedTactic, ...]:
        token_block = smallest_tile(fp4_gated_experts.TOKEN_BLOCKS, m)
        every = [
            GatedTactic(tile_n, tile_m, split_k, token_block)
            for tile_n in fp4_gated_experts.TILES_N
            for tile_m in fp4_gated_experts.TILES_M
            for split_k in fp4_gated_experts.SPLIT_K[tile_n]
            if tile_m <= max(m, 8)
        ]
        return self.buildable(problem, every, target)

    def estimate(self, problem: GemmProblem, m: int, tactic: GatedTactic, target: Target) -> float:
        assert target.arch is not None
        config = self.built(problem, tactic, target.arch)
        assert config is not None
        tile_n, split_k = tactic.tile_n, tactic.split_k
        probability = problem.topk / problem.experts
        blocks, block_tokens = -(-m // tactic.token_block), min(m, tactic.token_block)
        routed_experts = problem.experts * (1 - (1 - probability) ** block_tokens)
        n_tiles = 2 * problem.expert_n // tile_n
        work_tiles = blocks * problem.experts * mean_m_tiles(block_tokens, probability, tactic.tile_m) * n_tiles
        # A CTA computes whole ranges of K. So at the end of the launch, a CTA is idle for half the time of a range, on
        # average.
        most = max(1.0, work_tiles * split_k / target.sms + 0.5) / split_k
        clocks = clocks_per_weight(tactic.tile_m, target.arch, by_codes=config.operands.by_codes)
        computed = most * weight_seconds(tile_n * problem.k, clocks)
        computed *= HALF_K_TILE_SLOWDOWN if config.k_tile < K_TILE else 1.0
        computed *= MODEL.fewer_warps_slowdown if config.consumer_warps < fp4_gated_experts.CONSUMER_WARPS else 1.0
        # Each CTA of a work tile waits for the partial sums of the CTA before it.
        handed_over = (math.ceil(min(1.0 / most, split_k)) - 1) * MODEL.handover_seconds
        token_bytes = config.k_tiles * config.arranged.token_bytes
        weight_bytes = blocks * routed_experts * 2 * problem.expert_n * problem.b.row_bytes(problem.k)
        memory = bytes_per_second(target)
        # ``l2_bytes`` are the bytes that are read from L2: the weight's codes and scales once per work tile, and the
        # activations of each routed pair once per n tile.
        l2_bytes = work_tiles * config.k_tiles * 2 * config.weight_tile.size_bytes
        l2_bytes += n_tiles * m * problem.topk * token_bytes
        rearranged = m * (token_bytes + problem.a.row_bytes(problem.k)) / memory
        seconds = computed, weight_bytes / memory, l2_bytes / (MODEL.l2_rate * memory)
        return MODEL.fixed_seconds + rearranged + handed_over + overlapped(*seconds, order=MODEL.order)

    def config(self, problem: GemmProblem, tactic: GatedTactic, arch: Arch) -> fp4_gated_experts.Config | None:
        assert problem.gate is not None
        if problem.expert_n % (tactic.tile_n // 2):
            return None
        return fp4_gated_experts.plan(
            operands=fp4_operands(problem, by_codes=multiplies_codes(problem, arch)),
            epilogue=gated_epilogue(problem),
            k=problem.k,
            **tactic._asdict(),
            arch=arch,
            pdl=settings.PDL,
            max_experts=table_experts(problem.experts),
        )

    def launcher(self, problem: GemmProblem, tactic: GatedTactic, target: Target) -> Launch:
        function, config = self.compiled(problem, tactic, target)
        device, experts, num_ctas = target.device, problem.experts, target.sms
        # Computing the size takes up to 2 µs on the host.
        workspace_bytes = functools.lru_cache(1024)(config.workspace_bytes)

        def launch(given: GatedOperands, out: tuple[torch.Tensor, torch.Tensor | None]) -> None:
            workspace = new_bytes(device, workspace_bytes(given.a.shape[0], experts, num_ctas))
            function(*gated_arguments(given, out), workspace, num_ctas)

        return launch
