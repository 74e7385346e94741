"""FP4 GEMMs with experts over K on the block-scaled tensor cores of data-center Blackwell, both operands in FP4:
``kernels/fp4_tcgen05_experts``."""

from typing import Final

from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp4 import Tcgen05Backend
from torch_cute_ops.gemm.decode import fp4_format, weight_scales
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels import fp4_tcgen05_experts
from torch_cute_ops.kernels.common.block_scaled_stage import ROWS
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import CLOCK_HZ, Arch
from torch_cute_ops.runtime.compiler import KernelSpec

DENSE: Final = "dense"
ROUTED: Final = "routed"
SUM_CLOCKS: Final = 3.0
"""Clocks of a warp to load a column of an expert's sums and to add it to the totals."""
SCAN_SECONDS: Final = 4e-7
"""Time of a load from L2, of those by which a CTA finds the experts that are touched."""


class FP4Tcgen05Experts(Tcgen05Backend):
    """A tactic is (rows of the weight in a tile, CTAs that share the experts, ``DENSE`` or ``ROUTED``: whether all
    experts are computed, or those alone that some token of the tile is routed to)."""

    groupings = ("k",)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        skips = problem.topk < problem.experts <= fp4_tcgen05_experts.MAX_EXPERTS
        every = [
            (columns, splits, mode)
            for columns in reversed(fp4_tcgen05_experts.TILES)
            for splits in fp4_tcgen05_experts.SPLITS
            for mode in ((DENSE, ROUTED) if skips else (DENSE,))
            if splits <= problem.experts
        ]
        return tuple(one for one in every if target.arch is None or _config(problem, one, target.arch) is not None)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        columns, splits, mode = int(tactic[0]), int(tactic[1]), tactic[2]
        token_tiles = -(-m // ROWS)
        tokens = min(m, ROWS)
        teams = cost.places(target.sms, splits) // splits
        waves = -(-token_tiles * -(-problem.n // columns) // teams)
        own, scanned = problem.experts / splits, 0.0
        if mode == ROUTED:
            warps = _threads(problem, tactic, target) // 32
            rounds = -(-(-(-problem.experts // splits) // 32) // warps) * -(-tokens // 32)
            own, scanned = own * (1 - (1 - problem.topk / problem.experts) ** tokens), SCAN_SECONDS * rounds
        # Of an expert. Tiles of tokens that run together read the weight from memory once.
        line = problem.b.row_bytes(problem.expert_k)
        weight, activations = columns * line / min(token_tiles, self.l2_shares), tokens * line / self.l2_shares
        read = (weight + activations) / (cost.bytes_per_second(target) / target.sms)
        flops = 2 * ROWS * max(columns, self.least_columns) * problem.expert_k
        computed = cost.fp4_tensor_core_seconds(flops, target, sms=1)
        summed = columns * SUM_CLOCKS / CLOCK_HZ
        seconds = scanned + own * cost.overlapped(computed, read, summed, order=8)
        if splits > 1:
            seconds += 2 * 4 * ROWS * columns / self.cluster_bytes_per_second
        return cost.LAUNCH_SECONDS + waves * (self.ramp_seconds + seconds)

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        return (KernelSpec(fp4_tcgen05_experts.KERNEL, _config(problem, tactic, arch)),)

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        function, _ = self.compiled(problem, tactic, target)
        return lambda a, b, a_scale, b_scale, alpha, bias, offsets, counts, out: function(
            a, a_scale, b, b_scale, alpha, out
        )


def _threads(problem: GemmProblem, tactic: Tactic, target: Target) -> int:
    """Threads of a CTA."""
    assert target.arch is not None
    config = _config(problem, tactic, target.arch)
    assert config is not None
    return config.threads


def _config(problem: GemmProblem, tactic: Tactic, arch: Arch) -> fp4_tcgen05_experts.Config | None:
    """How the kernel is built; ``None`` if it cannot be, on ``arch``."""
    columns, splits, mode = int(tactic[0]), int(tactic[1]), tactic[2]
    return fp4_tcgen05_experts.plan(
        fmt=fp4_format(problem),
        layout=weight_scales(problem),
        out_dtype=problem.out_dtype,
        width=problem.expert_k,
        columns=columns,
        splits=splits,
        routed=mode == ROUTED,
        arch=arch,
        pdl=settings.PDL,
    )
