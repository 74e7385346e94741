"""Both operands in FP4 on the block-scaled tensor cores of data-center Blackwell: ``kernels/fp4_tcgen05``."""

from typing import Final

from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp4 import Tcgen05Backend
from torch_cute_ops.gemm.decode import fp4_format, weight_scales
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels import fp4_tcgen05
from torch_cute_ops.kernels.common.blackwell.layouts import MMA_M
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import CLOCK_HZ, Arch

STORE_BYTES_PER_CLOCK: Final = 32
"""Rate at which a CTA stores results, where no MMAs run meanwhile."""


class FP4Tcgen05(Tcgen05Backend):
    """A tactic is (rows of ``a`` in a tile, CTAs of an MMA, CTAs that split K)."""

    kernel = fp4_tcgen05.KERNEL

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        chunks = -(-problem.k // K_TILE)
        widest = cost.smallest_tile(fp4_tcgen05.TILES_M[1], m)
        # Several tiles of few rows read the weight again for each.
        least = min(widest, self.least_columns)
        every = [
            (tokens, group, splits)
            for group, tiles in fp4_tcgen05.TILES_M.items()
            for tokens in tiles
            for splits in (fp4_tcgen05.SPLIT_K if group == 1 and tokens <= MMA_M else (1,))
            if least <= tokens <= widest and splits <= chunks
        ]
        return self.buildable(problem, every, target)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        tokens, group, splits = map(int, tactic)
        rows, chunks = MMA_M * group, -(-problem.k // K_TILE)
        tiles = -(-problem.n // rows) * -(-m // tokens)
        teams = cost.places(target.sms, group * splits) // (group * splits)
        waves = -(-tiles // teams)
        # Of a CTA and a chunk. Tiles of tokens that run together read the weight from memory once.
        line = problem.b.row_bytes(K_TILE)
        again = min(-(-m // tokens), self.l2_shares)
        weight, activations = MMA_M * line / again, tokens // group * line / self.l2_shares
        read = (weight + activations) / (cost.bytes_per_second(target) / target.sms)
        flops = 2 * MMA_M * max(tokens, self.least_columns) * K_TILE
        computed = cost.fp4_tensor_core_seconds(flops, target, sms=1)
        seconds = waves * -(-chunks // splits) * cost.overlapped(computed, read, order=8)
        stored = MMA_M * tokens * problem.out_dtype.itemsize / STORE_BYTES_PER_CLOCK / CLOCK_HZ
        # Of 256 rows of activations, tensor memory has one accumulator: nothing is multiplied meanwhile.
        seconds += stored * (waves if tokens > MMA_M else 1)
        if splits > 1:
            seconds += waves * 2 * 4 * MMA_M * tokens / self.cluster_bytes_per_second
        return cost.LAUNCH_SECONDS + self.ramp_seconds * (waves if splits > 1 else 1) + seconds

    def config(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> fp4_tcgen05.Config | None:
        tokens, group, splits = map(int, tactic)
        return fp4_tcgen05.plan(
            fmt=fp4_format(problem),
            layout=weight_scales(problem),
            epilogue=problem.epilogue,
            tile_m=tokens,
            cta_group=group,
            split_k=splits,
            arch=arch,
            pdl=settings.PDL,
        )

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        function, _ = self.compiled(problem, tactic, target)
        ctas = target.sms
        return lambda a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, out: function(
            a, a_scale, b, b_scale, alpha, bias, out, ctas
        )
