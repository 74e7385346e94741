"""FP4 GEMMs in which each expert owns a range of K, and only routed (token, expert) pairs are computed
(``kernels/fp4_experts``)."""

import functools
from typing import NamedTuple

import torch

from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._routed import (
    FIXED_SECONDS,
    HALF_K_TILE_SLOWDOWN,
    RoutedBackend,
    clocks_per_weight,
    mean_m_tiles,
)
from torch_cute_ops.gemm.cost import bytes_per_second, overlapped, smallest_tile, weight_seconds
from torch_cute_ops.gemm.decode import fp4_operands, multiplies_codes, reason_not_linear
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp4_experts
from torch_cute_ops.kernels.common.experts.layouts import table_experts
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import new_bytes
from torch_cute_ops.runtime.arch import KIB, Arch

SMALL_SMEM = 128 * KIB
"""Shared memory per CTA, in bytes, below which small token blocks are tried, too."""
LEAST_TOKEN_BLOCK = {False: 256, True: 64}
"""Smallest token block that is tried although the tokens fill a larger block, keyed by True if a CTA has less shared
memory than ``SMALL_SMEM``."""
K_WARPS_SLOWDOWN = 1.3
"""Factor by which a call takes longer if warps split the K of a work tile (measured on an H200)."""
PARTIAL_SUMS_SECONDS = 3e-6
PARTIAL_SUMS_PASSES = 4
"""Time to exchange partial sums through the workspace (measured on an H200): fixed seconds, and number of times that
the partial sums are moved."""


class RoutedTactic(NamedTuple):
    """Tactic of ``Routed``.

    Attributes:
        tile_m: number of rows of ``a`` in a work tile of an expert.
        token_block: number of tokens whose results a CTA accumulates.
        classes: number of classes into which the experts are divided. Each CTA sums over the experts of some classes.
    """

    tile_m: int
    token_block: int
    classes: int


class Routed(RoutedBackend):
    """Backend for GEMMs in which each expert owns a range of K. The backend multiplies only routed (token, expert)
    pairs."""

    tactic_type = RoutedTactic
    kernel = fp4_experts.KERNEL
    groupings = ("k",)
    adds_expert_bias = True

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        width = problem.expert_k
        reason = super().reason_unfit(problem) or reason_not_linear(problem, width, "an expert's width")
        return reason or fp4_experts.reason_expert_k_unsupported(width)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[RoutedTactic, ...]:
        widest = smallest_tile(fp4_experts.TOKEN_BLOCKS, m)
        # Accumulators of many tokens leave little shared memory for pipeline stages. So also try smaller blocks: blocks
        # of 256 tokens instead of 512, and even smaller blocks on GPUs with less than half of Hopper's shared memory.
        least = LEAST_TOKEN_BLOCK[target.arch is not None and target.arch.smem_per_cta < SMALL_SMEM]
        token_blocks = [size for size in fp4_experts.TOKEN_BLOCKS if size == widest or least <= size < widest]
        every = [
            RoutedTactic(tile_m, token_block, classes)
            for token_block in token_blocks
            for tile_m in fp4_experts.TILES_M
            for classes in _classes(problem, target)
            if tile_m <= max(m, 8)
        ]
        return self.buildable(problem, every, target)

    def estimate(self, problem: GemmProblem, m: int, tactic: RoutedTactic, target: Target) -> float:
        assert target.arch is not None
        config = self.built(problem, tactic, target.arch)
        assert config is not None
        width, tile_n, classes = problem.expert_k, fp4_experts.TILE_N, tactic.classes
        probability = problem.topk / problem.experts
        blocks, block_tokens = -(-m // tactic.token_block), min(m, tactic.token_block)
        routed_experts = problem.experts * (1 - (1 - probability) ** block_tokens)
        m_tiles = problem.experts * mean_m_tiles(block_tokens, probability, tactic.tile_m)
        n_tiles, num_ctas = -(-problem.n // tile_n), config.num_ctas(problem.n, target.sms)
        # ``most`` is the work of the busiest CTA, measured in n tiles.
        most = -(-n_tiles * classes // num_ctas) / classes
        waves = -(-num_ctas * blocks // target.sms)
        clocks = clocks_per_weight(tactic.tile_m, target.arch, by_codes=config.operands.by_codes)
        computed = weight_seconds(int(tile_n * width * m_tiles), clocks)
        computed *= HALF_K_TILE_SLOWDOWN if config.k_tile < K_TILE else 1.0
        computed *= K_WARPS_SLOWDOWN if config.k_warps > 1 else 1.0
        read_bytes = blocks * n_tiles * routed_experts * tile_n * problem.b.row_bytes(width)
        seconds = FIXED_SECONDS + overlapped(waves * most * computed, read_bytes / bytes_per_second(target), order=8)
        if classes > 1:
            partial_sums = 4 * blocks * num_ctas * tile_n * tactic.token_block
            seconds += PARTIAL_SUMS_SECONDS + PARTIAL_SUMS_PASSES * partial_sums / bytes_per_second(target)
        return seconds

    def config(self, problem: GemmProblem, tactic: RoutedTactic, arch: Arch) -> fp4_experts.Config | None:
        return fp4_experts.plan(
            operands=fp4_operands(problem, by_codes=multiplies_codes(problem, arch)),
            out_dtype=problem.out_dtype,
            bias_dtype=problem.epilogue.bias_dtype,
            expert_k=problem.expert_k,
            **tactic._asdict(),
            arch=arch,
            pdl=settings.PDL,
            max_experts=table_experts(problem.experts),
        )

    def launcher(self, problem: GemmProblem, tactic: RoutedTactic, target: Target) -> Launch:
        function, config = self.compiled(problem, tactic, target)
        device, experts, num_ctas = target.device, problem.experts, config.num_ctas(problem.n, target.sms)
        # Computing the size takes up to 2 µs on the host.
        workspace_bytes = functools.lru_cache(1024)(config.workspace_bytes)

        def launch(given: Operands, out: torch.Tensor) -> None:
            a, b, a_scale, b_scale, alpha, bias, _, _, _, _ = given
            workspace = new_bytes(device, workspace_bytes(a.shape[0], experts, num_ctas))
            function(a, a_scale, b, b_scale, alpha, bias, out, workspace, num_ctas)

        return launch


def _classes(problem: GemmProblem, target: Target) -> tuple[int, ...]:
    """Return the numbers of classes to try. Several classes are tried only if they make more SMs busy."""
    divides = problem.experts >= fp4_experts.CLASSES and -(-problem.n // fp4_experts.TILE_N) < target.sms
    return (1, fp4_experts.CLASSES) if divides else (1,)
