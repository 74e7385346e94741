"""GEMMs of two FP4 operands with a gate in which each expert owns columns of the result, on the block-scaled tensor
cores of data-center Blackwell (``kernels/fp4_tcgen05_gated_experts``)."""

import functools
from typing import Final, NamedTuple

import torch

from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp4 import Tcgen05Backend
from torch_cute_ops.gemm.backends._gated import gated_arguments, gated_epilogue, reason_ungated
from torch_cute_ops.gemm.decode import fp4_format, weight_scales
from torch_cute_ops.gemm.operands import GatedOperands
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp4_tcgen05_gated_experts
from torch_cute_ops.kernels.common.blackwell.layouts import MMA_M
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import new_bytes
from torch_cute_ops.runtime.arch import CLOCK_HZ, Arch

GATE_CLOCKS: Final = 48.0
"""Number of clocks in which a warp applies the gate to one column and stores it (a guess)."""
LIST_SECONDS: Final = 2.5e-6
LIST_BYTES_PER_SECOND: Final = 1e11
"""Estimate of the kernel that lists touched m tiles: its time in seconds with few tokens, and the rate in bytes per
second at which one of its CTAs reads the routing of 1,024 tokens (guesses)."""


class Tcgen05GatedTactic(NamedTuple):
    """Tactic of ``FP4Tcgen05GatedExperts``.

    Attributes:
        tile_n: number of weight rows in a work tile. Half of the rows belong to the gate.
    """

    tile_n: int


class FP4Tcgen05GatedExperts(Tcgen05Backend):
    """Backend for GEMMs with a gate in which each expert owns columns of the result. The backend multiplies the FP4
    codes of both operands by ``tcgen05.mma``. If an m tile contains a token that is routed to an expert, the backend
    computes all tokens of the m tile for this expert."""

    tactic_type = Tcgen05GatedTactic
    kernel = fp4_tcgen05_gated_experts.KERNEL
    groupings = ("n",)

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        reason = reason_ungated(problem)
        if reason is None and problem.experts > MAX_EXPERTS:
            reason = f"there are {problem.experts} experts; tcgen05 takes at most {MAX_EXPERTS}"
        return reason or super().reason_unfit(problem) or gated_epilogue(problem).reason_unsupported()

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tcgen05GatedTactic, ...]:
        return self.buildable(problem, map(Tcgen05GatedTactic, fp4_tcgen05_gated_experts.TILES_N), target)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tcgen05GatedTactic, target: Target) -> float:
        assert target.arch is not None
        config = self.built(problem, tactic, target.arch)
        m_tiles, tile_m = -(-m // MMA_M), min(m, MMA_M)
        routed = 1 - (1 - problem.topk / problem.experts) ** tile_m
        work_tiles = m_tiles * problem.experts * routed * (problem.expert_n // config.out_columns)
        # On average, a CTA is idle for half a work tile at the end.
        most = max(1.0, work_tiles / target.sms + 0.5)
        row_bytes = problem.b.row_bytes(problem.k)
        read = self.read_seconds(tactic.tile_n * row_bytes, tile_m * row_bytes, m_tiles, target)
        # Gate and up have separate MMAs.
        flops = 2 * MMA_M * max(tactic.tile_n, 2 * self.least_mma_n) * problem.k
        computed = cost.fp4_tensor_core_seconds(flops, target, sms=1)
        gated = config.out_columns * GATE_CLOCKS / CLOCK_HZ
        if config.accumulators == 2:
            seconds = cost.overlapped(computed, read, gated, order=8)
        else:
            seconds = cost.overlapped(computed, read, order=8) + gated
        routing_bytes = 4 * min(m, fp4_tcgen05_gated_experts.TOKEN_BLOCK) * problem.experts
        listed = LIST_SECONDS + routing_bytes / LIST_BYTES_PER_SECOND
        return cost.LAUNCH_SECONDS + listed + self.ramp_seconds + most * seconds

    def config(
        self, problem: GemmProblem, tactic: Tcgen05GatedTactic, arch: Arch
    ) -> fp4_tcgen05_gated_experts.Config | None:
        if problem.expert_n % (tactic.tile_n // 2):
            return None
        return fp4_tcgen05_gated_experts.plan(
            fmt=fp4_format(problem),
            layout=weight_scales(problem),
            epilogue=gated_epilogue(problem),
            tile_n=tactic.tile_n,
            arch=arch,
            pdl=settings.PDL,
        )

    def launcher(self, problem: GemmProblem, tactic: Tcgen05GatedTactic, target: Target) -> Launch:
        function, config = self.compiled(problem, tactic, target)
        device, experts, num_ctas = target.device, problem.experts, target.sms
        # Computing the size takes up to 2 µs on the host.
        workspace_bytes = functools.lru_cache(1024)(config.workspace_bytes)

        def launch(given: GatedOperands, out: tuple[torch.Tensor, torch.Tensor | None]) -> None:
            workspace = new_bytes(device, workspace_bytes(given.a.shape[0], experts))
            function(*gated_arguments(given, out), workspace, num_ctas)

        return launch
