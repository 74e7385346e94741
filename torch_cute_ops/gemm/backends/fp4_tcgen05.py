"""GEMMs of two FP4 operands on the block-scaled tensor cores of data-center Blackwell (``kernels/fp4_tcgen05``)."""

import torch

from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp4 import Tcgen05Backend
from torch_cute_ops.gemm.backends._tcgen05 import Tcgen05Tactic
from torch_cute_ops.gemm.decode import fp4_format, weight_scales
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp4_tcgen05
from torch_cute_ops.kernels.common.blackwell.layouts import MMA_M
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch


class FP4Tcgen05(Tcgen05Backend):
    """Backend that multiplies the FP4 codes of both operands by ``tcgen05.mma``."""

    tactic_type = Tcgen05Tactic
    kernel = fp4_tcgen05.KERNEL

    def handles(self, problem: GemmProblem) -> bool:
        return super().handles(problem) and problem.a.is_fp4

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tcgen05Tactic, ...]:
        k_tiles = -(-problem.k // K_TILE)
        widest = cost.smallest_tile(fp4_tcgen05.TILES_M[1], m)
        # Several narrow m tiles would each read the weight again. So try smaller tiles only for few rows.
        least = min(widest, self.least_mma_n)
        every = [
            Tcgen05Tactic(tile_m, cta_group, split_k)
            for cta_group, tiles in fp4_tcgen05.TILES_M.items()
            for tile_m in tiles
            for split_k in (fp4_tcgen05.SPLIT_K if cta_group == 1 and tile_m <= MMA_M else (1,))
            if least <= tile_m <= widest and split_k <= k_tiles
        ]
        return self.buildable(problem, every, target)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tcgen05Tactic, target: Target) -> float:
        tile_m, cta_group, split_k = tactic
        k_tiles, m_tiles = -(-problem.k // K_TILE), -(-m // tile_m)
        tiles = -(-problem.n // (MMA_M * cta_group)) * m_tiles
        ctas_per_tile = cta_group * split_k
        waves = -(-tiles // (cost.places(target.sms, ctas_per_tile) // ctas_per_tile))
        # Bytes that one CTA reads per k tile.
        row_bytes = problem.b.row_bytes(K_TILE)
        read = self.read_seconds(MMA_M * row_bytes, tile_m // cta_group * row_bytes, m_tiles, target)
        flops = 2 * MMA_M * max(tile_m, self.least_mma_n) * K_TILE
        computed = cost.fp4_tensor_core_seconds(flops, target, sms=1)
        seconds = waves * -(-k_tiles // split_k) * cost.overlapped(computed, read, order=8)
        stored = self.store_seconds(tile_m, problem.out_dtype.itemsize)
        # With 256 rows, only one accumulator fits into tensor memory. So no MMA runs while the accumulator is stored.
        seconds += stored * (waves if tile_m > MMA_M else 1)
        if split_k > 1:
            seconds += waves * self.exchange_seconds(tile_m)
        return cost.LAUNCH_SECONDS + self.ramp_seconds * (waves if split_k > 1 else 1) + seconds

    def config(self, problem: GemmProblem, tactic: Tcgen05Tactic, arch: Arch) -> fp4_tcgen05.Config | None:
        return fp4_tcgen05.plan(
            fmt=fp4_format(problem),
            layout=weight_scales(problem),
            epilogue=problem.epilogue,
            **tactic._asdict(),
            arch=arch,
            pdl=settings.PDL,
        )

    def launcher(self, problem: GemmProblem, tactic: Tcgen05Tactic, target: Target) -> Launch:
        function, _ = self.compiled(problem, tactic, target)
        num_ctas = target.sms

        def launch(given: Operands, out: torch.Tensor) -> None:
            a, b, a_scale, b_scale, alpha, bias, _, _, _, row_scale = given
            function(a, a_scale, b, b_scale, alpha, bias, row_scale, out, num_ctas)

        return launch
