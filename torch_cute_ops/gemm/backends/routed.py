"""FP4 GEMMs with experts over K that compute only routed pairs of token and expert: ``kernels/fp4_experts``."""

from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._routed import FIXED_SECONDS, RoutedBackend, mean_units, unit_clocks
from torch_cute_ops.gemm.cost import bytes_per_second, overlapped, smallest_tile, weight_seconds
from torch_cute_ops.gemm.decode import fp4_operands, reason_not_linear
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels import fp4_experts
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import new_bytes
from torch_cute_ops.runtime.arch import Arch

HALVED = 1.2
"""Slowdown of chunks half as wide (measured on an H200)."""
PARTED = 1.3
"""Slowdown where warps split the K of a unit (measured on an H200)."""
SHARED_SECONDS = 3e-6
SHARED_PASSES = 4
"""Time to exchange partial sums through the workspace: fixed, and passes over them (measured on an H200)."""


class Routed(RoutedBackend):
    """A tactic is (tokens of a unit, tokens of a tile, classes of experts by which work is divided)."""

    kernel = fp4_experts.KERNEL
    groupings = ("k",)
    adds_expert_bias = True

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        width = problem.expert_k
        reason = super().reason_unfit(problem) or reason_not_linear(problem, width, "an expert's width")
        return reason or fp4_experts.reason_width_unsupported(width)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        widest = smallest_tile(fp4_experts.TOKEN_BLOCKS, m)
        # The sums of 512 tokens leave little room for stages: two tiles of 256 may be faster.
        tiles = [tokens for tokens in (256, widest) if tokens <= widest] if widest > 256 else [widest]
        every = [
            (group, tokens, classes)
            for tokens in tiles
            for group in fp4_experts.TILES_M
            for classes in _classes(problem, target)
            if group <= max(m, 8)
        ]
        return self.buildable(problem, every, target)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        assert target.arch is not None
        group, tokens, classes = map(int, tactic)
        config = self.config(problem, tactic, target.arch)
        assert config is not None
        width, rows = problem.expert_k, fp4_experts.TILE_N
        share = problem.topk / problem.experts
        tiles = -(-m // tokens)
        tile_tokens = min(m, tokens)
        touched = problem.experts * (1 - (1 - share) ** tile_tokens)
        units = problem.experts * mean_units(tile_tokens, share, group)
        # The largest share of a slice's classes that a worker has
        slices, workers = -(-problem.n // rows), config.num_ctas(problem.n, target.sms)
        most = -(-slices * classes // workers) / classes
        waves = -(-workers * tiles // target.sms)
        weights = rows * width
        computed = weight_seconds(int(weights * units), unit_clocks(group))
        computed *= (HALVED if config.k_tile < K_TILE else 1.0) * (PARTED if config.k_warps > 1 else 1.0)
        read = tiles * slices * touched * rows * problem.b.row_bytes(width) / bytes_per_second(target)
        seconds = FIXED_SECONDS + overlapped(waves * most * computed, read, order=8)
        if classes > 1:
            seconds += SHARED_SECONDS + SHARED_PASSES * tiles * workers * rows * tokens * 4 / bytes_per_second(target)
        return seconds

    def config(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> fp4_experts.Config | None:
        group, tokens, classes = map(int, tactic)
        return fp4_experts.plan(
            operands=fp4_operands(problem),
            out_dtype=problem.out_dtype,
            bias_dtype=problem.epilogue.bias_dtype,
            width=problem.expert_k,
            tile_m=group,
            token_block=tokens,
            classes=classes,
            arch=arch,
            pdl=settings.PDL,
        )

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        function, config = self.compiled(problem, tactic, target)
        device, experts, workers = target.device, problem.experts, config.num_ctas(problem.n, target.sms)
        size = config.workspace_bytes
        return lambda a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, out: function(
            a, a_scale, b, b_scale, alpha, bias, out, new_bytes(device, size(a.shape[0], experts, workers)), workers
        )


def _classes(problem: GemmProblem, target: Target) -> tuple[int, ...]:
    """Numbers of classes to try: several where that gives more SMs work."""
    divides = problem.experts >= fp4_experts.CLASSES and -(-problem.n // fp4_experts.TILE_N) < target.sms
    return (1, fp4_experts.CLASSES) if divides else (1,)
