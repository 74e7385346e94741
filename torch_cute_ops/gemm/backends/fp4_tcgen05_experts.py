"""GEMMs of two FP4 operands in which each expert owns a range of K, on the block-scaled tensor cores of data-center
Blackwell (``kernels/fp4_tcgen05_experts``)."""

import functools
from typing import Final, NamedTuple

import torch

from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp4 import Tcgen05Backend
from torch_cute_ops.gemm.decode import fp4_format, weight_scales
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp4_tcgen05_experts
from torch_cute_ops.kernels.common.blackwell.layouts import MMA_M
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import new_bytes
from torch_cute_ops.runtime.arch import CLOCK_HZ, Arch

DENSE: Final = "dense"
ROUTED: Final = "routed"
ACC_CLOCKS: Final = 3.0
"""Number of clocks in which a warp loads one column of an expert's accumulator and adds it to the sum over experts."""
STEP_SECONDS: Final = 1e-6
"""Time in seconds from the end of one kernel of a call until the next kernel, which has already started, continues (a
guess)."""
MAX_WORK_TILES: Final = 16
"""Largest number of work tiles per SM for which experts are divided into classes. With more work tiles, partial sums
would only cost memory traffic."""


class Tcgen05ExpertsTactic(NamedTuple):
    """Tactic of ``FP4Tcgen05Experts``.

    Attributes:
        tile_n: number of rows of the weight in a tile.
        classes: number of classes into which experts are divided. A work tile is one output tile, summed over one
            class.
        mode: ``DENSE`` to compute all experts, or ``ROUTED`` to compute only the experts to which some token of the
            tile is routed.
    """

    tile_n: int
    classes: int
    mode: str


class FP4Tcgen05Experts(Tcgen05Backend):
    """Backend for GEMMs in which each expert owns a range of K. The backend multiplies the FP4 codes of both operands
    by ``tcgen05.mma``."""

    tactic_type = Tcgen05ExpertsTactic
    kernel = fp4_tcgen05_experts.KERNEL
    groupings = ("k",)
    adds_expert_bias = True

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tcgen05ExpertsTactic, ...]:
        every = [
            Tcgen05ExpertsTactic(tile_n, classes, mode)
            for tile_n in reversed(fp4_tcgen05_experts.TILES_N)
            for classes in fp4_tcgen05_experts.CLASSES
            for mode in ((DENSE, ROUTED) if problem.topk < problem.experts else (DENSE,))
            if classes == 1
            or (classes <= problem.experts and _work_tiles(problem, m, tile_n, classes) <= MAX_WORK_TILES * target.sms)
        ]
        return self.buildable(problem, every, target)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tcgen05ExpertsTactic, target: Target) -> float:
        tile_n, classes, mode = tactic
        m_tiles, tile_m = -(-m // MMA_M), min(m, MMA_M)
        work_tiles = -(-_work_tiles(problem, m, tile_n, classes) // target.sms)
        experts = work_tiles * problem.experts / classes
        if mode == ROUTED:
            routed = 1 - (1 - problem.topk / problem.experts) ** tile_m
            # The classes contain unequal numbers of routed experts. If a CTA computes several classes, the work of the
            # CTAs differs less.
            several = min(work_tiles, classes)
            spread = several * (1 - several / classes) * problem.experts / classes * routed
            experts = experts * routed + spread**0.5
        # Bytes that a tile reads per expert.
        row_bytes = problem.b.row_bytes(problem.expert_k)
        read = self.read_seconds(tile_n * row_bytes, tile_m * row_bytes, m_tiles, target)
        flops = 2 * MMA_M * max(tile_n, self.least_mma_n) * problem.expert_k
        computed = cost.fp4_tensor_core_seconds(flops, target, sms=1)
        accumulated = tile_n * ACC_CLOCKS / CLOCK_HZ
        seconds = experts * cost.overlapped(computed, read, accumulated, order=8)
        if mode == ROUTED:
            seconds += STEP_SECONDS
        if classes > 1:
            # Each partial sum is written once and read once, in L2.
            size = 2 * 4 * m * problem.n * classes
            seconds += STEP_SECONDS + size / (self.l2_rate * cost.bytes_per_second(target))
        return cost.LAUNCH_SECONDS + self.ramp_seconds + seconds

    def config(
        self, problem: GemmProblem, tactic: Tcgen05ExpertsTactic, arch: Arch
    ) -> fp4_tcgen05_experts.Config | None:
        return fp4_tcgen05_experts.plan(
            fmt=fp4_format(problem),
            layout=weight_scales(problem),
            out_dtype=problem.out_dtype,
            expert_k=problem.expert_k,
            tile_n=tactic.tile_n,
            classes=tactic.classes,
            routed=tactic.mode == ROUTED,
            arch=arch,
            pdl=settings.PDL,
            bias_dtype=problem.epilogue.bias_dtype,
        )

    def launcher(self, problem: GemmProblem, tactic: Tcgen05ExpertsTactic, target: Target) -> Launch:
        function, config = self.compiled(problem, tactic, target)
        device, n, experts, num_ctas = target.device, problem.n, problem.experts, target.sms
        # Computing the size takes up to 2 µs on the host.
        has_workspace, workspace_bytes = config.has_workspace, functools.lru_cache(1024)(config.workspace_bytes)

        def launch(given: Operands, out: torch.Tensor) -> None:
            a, b, a_scale, b_scale, alpha, bias, _, _, _, _ = given
            workspace = new_bytes(device, workspace_bytes(a.shape[0], n, experts)) if has_workspace else None
            function(a, a_scale, b, b_scale, alpha, bias, out, workspace, num_ctas)

        return launch


def _work_tiles(problem: GemmProblem, m: int, tile_n: int, classes: int) -> int:
    """Return the number of work tiles of a call."""
    return -(-m // MMA_M) * -(-problem.n // tile_n) * classes
