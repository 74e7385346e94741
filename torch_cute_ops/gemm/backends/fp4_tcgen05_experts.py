"""FP4 GEMMs with experts over K on the block-scaled tensor cores of data-center Blackwell, both operands in FP4:
``kernels/fp4_tcgen05_experts``."""

from typing import Final

from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp4 import Tcgen05Backend
from torch_cute_ops.gemm.decode import fp4_format, weight_scales
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels import fp4_tcgen05_experts
from torch_cute_ops.kernels.common.blackwell.layouts import MMA_M
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import new_bytes
from torch_cute_ops.runtime.arch import CLOCK_HZ, Arch

DENSE: Final = "dense"
ROUTED: Final = "routed"
SUM_CLOCKS: Final = 3.0
"""Clocks of a warp to load a column of an expert's sums and to add it to the totals."""
STEP_SECONDS: Final = 1e-6
"""From a kernel of a call to the next, which has started by then (a guess)."""
MOST_UNITS: Final = 16
"""Units for each SM beyond which experts are not divided: it would cost memory, and gain nothing."""


class FP4Tcgen05Experts(Tcgen05Backend):
    """A tactic is (rows of the weight in a tile, parts of the experts, ``DENSE`` or ``ROUTED``: whether all experts are
    computed, or those alone that some token of the tile is routed to)."""

    kernel = fp4_tcgen05_experts.KERNEL
    groupings = ("k",)
    adds_expert_bias = True

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        every = [
            (columns, parts, mode)
            for columns in reversed(fp4_tcgen05_experts.TILES_N)
            for parts in fp4_tcgen05_experts.CLASSES
            for mode in ((DENSE, ROUTED) if problem.topk < problem.experts else (DENSE,))
            if parts == 1
            or (parts <= problem.experts and _units(problem, m, columns, parts) <= MOST_UNITS * target.sms)
        ]
        return self.buildable(problem, every, target)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        columns, parts, mode = int(tactic[0]), int(tactic[1]), tactic[2]
        token_tiles = -(-m // MMA_M)
        tokens = min(m, MMA_M)
        units = -(-_units(problem, m, columns, parts) // target.sms)
        own = units * problem.experts / parts
        if mode == ROUTED:
            touched = 1 - (1 - problem.topk / problem.experts) ** tokens
            # A CTA has units of so many parts, which are not all alike.
            several = min(units, parts)
            own = own * touched + (several * (1 - several / parts) * problem.experts / parts * touched) ** 0.5
        # Of an expert. Tiles of tokens that run together read the weight from memory once.
        line = problem.b.row_bytes(problem.expert_k)
        weight, activations = columns * line / min(token_tiles, self.l2_shares), tokens * line / self.l2_shares
        read = (weight + activations) / (cost.bytes_per_second(target) / target.sms)
        flops = 2 * MMA_M * max(columns, self.least_columns) * problem.expert_k
        computed = cost.fp4_tensor_core_seconds(flops, target, sms=1)
        summed = columns * SUM_CLOCKS / CLOCK_HZ
        seconds = own * cost.overlapped(computed, read, summed, order=8)
        if mode == ROUTED:
            seconds += STEP_SECONDS
        if parts > 1:
            # Each total is written once, and read once, in L2.
            size = 2 * 4 * m * problem.n * parts
            seconds += STEP_SECONDS + size / (self.l2_shares * cost.bytes_per_second(target))
        return cost.LAUNCH_SECONDS + self.ramp_seconds + seconds

    def config(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> fp4_tcgen05_experts.Config | None:
        columns, parts, mode = int(tactic[0]), int(tactic[1]), tactic[2]
        return fp4_tcgen05_experts.plan(
            fmt=fp4_format(problem),
            layout=weight_scales(problem),
            out_dtype=problem.out_dtype,
            width=problem.expert_k,
            tile_n=columns,
            classes=parts,
            routed=mode == ROUTED,
            arch=arch,
            pdl=settings.PDL,
            bias_dtype=problem.epilogue.bias_dtype,
        )

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        function, config = self.compiled(problem, tactic, target)
        device, n, experts, ctas = target.device, problem.n, problem.experts, target.sms
        size = config.workspace_bytes
        if not config.has_workspace:
            return lambda a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, out: function(
                a, a_scale, b, b_scale, alpha, bias, out, None, ctas
            )
        return lambda a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, out: function(
            a, a_scale, b, b_scale, alpha, bias, out, new_bytes(device, size(a.shape[0], n, experts)), ctas
        )


def _units(problem: GemmProblem, m: int, columns: int, parts: int) -> int:
    """Units of work of all CTAs."""
    return -(-m // MMA_M) * -(-problem.n // columns) * parts
