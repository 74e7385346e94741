"""FP8 GEMMs on the tensor cores of data-center Blackwell, plain or with experts over rows: ``kernels/fp8_tcgen05``."""

import math
from collections.abc import Mapping
from typing import Final

from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.backends._fp8 import FP8Backend, FP8TokenBackend
from torch_cute_ops.gemm.backends._tcgen05 import Tcgen05Model, Tcgen05Tactic
from torch_cute_ops.gemm.backends.fp8_scaled_mm import RATES
from torch_cute_ops.gemm.decode import reason_no_tcgen05
from torch_cute_ops.gemm.fp8_tiles import K_TILE, Tile, has_random_rows, rows_of_expert
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp8_tcgen05
from torch_cute_ops.kernels.common.blackwell.layouts import MMA_M
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import CLOCK_HZ, Arch
from torch_cute_ops.runtime.compiler import KernelSpec

FP8_RATE: Final = 2.0
"""Rate of FP8 MMAs with block scales, divided by the rate of 16-bit MMAs (data sheet)."""
PROMOTION_CLOCKS: Final = 2.5
"""Clocks in which a warp loads a column of a k tile's accumulator, scales it and adds it to the sums: one to load, one
for the fma, and a share of the loads of scales (a guess)."""


class FP8Tcgen05(Tcgen05Model, FP8Backend):
    """Backend for FP8 activations and an FP8 weight with block scales."""

    name = "tcgen05"
    tactic_type = Tcgen05Tactic
    has_blocks = True

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return reason_no_tcgen05(target)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tcgen05Tactic, ...]:
        k_tiles, layout = -(-problem.k // K_TILE), problem.grouping.rows
        tiles_m = self.tiles_m(problem)
        sizes = tiles_m[self.has_blocks, 1]
        widest = cost.smallest_tile(sizes, rows_of_expert(problem, m))
        # Do not try narrower tiles, because each of several m tiles reads the weight again.
        least = min(widest, self.least_mma_n)
        if has_random_rows(problem):
            # Some experts own more rows than the average.
            widest = cost.smallest_tile(sizes, 2 * widest)
        return tuple(
            Tcgen05Tactic(tile_m, cta_group, split_k)
            for (has_blocks, cta_group), tiles in tiles_m.items()
            for tile_m in tiles
            for split_k in fp8_tcgen05.splits(layout, has_blocks, tile_m, cta_group)
            if has_blocks == self.has_blocks and least <= tile_m <= widest and split_k <= k_tiles
        )

    def estimate(self, problem: GemmProblem, m: int, tactic: Tcgen05Tactic, target: Target) -> float:
        tile_m, cta_group, split_k = tactic
        tile = self.tile(tactic)
        flops = 2 * MMA_M * max(tile_m, self.least_mma_n) * K_TILE
        computed = cost.tensor_core_seconds(flops, target, sms=1) / self.fp8_rate(problem)
        promoted = tile_m * self.promotion_clocks(problem) / CLOCK_HZ if self.has_blocks else 0.0
        decoded = self.decoding_clocks(problem, tile_m) / CLOCK_HZ
        weight_bytes = MMA_M * self.weight_row_bytes(problem)
        k_tiles = -(-problem.k // K_TILE // split_k)

        def main_loop(waves: int, m_tiles: int) -> float:
            read = self.read_seconds(weight_bytes, tile_m // cta_group * K_TILE, m_tiles, target)
            return waves * k_tiles * cost.overlapped(computed, read, promoted, decoded, order=8)

        waves, one_wave = (
            math.ceil(tile.tiles_of(problem, rows) / tile.clusters(target.sms)) for rows in (m, min(m, tile_m))
        )
        # Several m tiles share one read of the weight. They take at least as long as a single m tile.
        m_tiles = -(-rows_of_expert(problem, m) // tile_m)
        seconds = max(main_loop(waves, m_tiles), main_loop(one_wave, 1))
        store = self.store_seconds(tile_m, problem.out_dtype.itemsize)
        if self.has_blocks:
            # The same warps promote and store results. So they do not promote while they store.
            seconds += waves * store
        else:
            # Results are stored while the next tile is multiplied. The last tile's results are stored after all MMAs.
            seconds = max(seconds + store, waves * store)
        if split_k > 1:
            seconds += waves * self.exchange_seconds(tile_m)
        return cost.LAUNCH_SECONDS + self.ramp_seconds * (waves if split_k > 1 else 1) + seconds

    def tiles_m(self, problem: GemmProblem) -> Mapping[tuple[bool, int], tuple[int, ...]]:
        """Return the supported ``tile_m``, keyed by ``has_blocks`` and ``cta_group``."""
        return fp8_tcgen05.TILES_M

    def promotion_clocks(self, problem: GemmProblem) -> float:
        """Return the clocks that a warp takes to promote one column of a k tile's accumulator."""
        return PROMOTION_CLOCKS

    def weight_row_bytes(self, problem: GemmProblem) -> int:
        """Return the bytes of a weight row in a k tile."""
        return K_TILE

    def decoding_clocks(self, problem: GemmProblem, tile_m: int) -> float:
        """Return the clocks that a CTA takes to decode the weight of a k tile."""
        return 0.0

    def fp8_rate(self, problem: GemmProblem) -> float:
        """Return the rate of FP8 MMAs, divided by the rate of 16-bit MMAs."""
        return FP8_RATE

    def kernels(self, problem: GemmProblem, tactic: Tcgen05Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        config = fp8_tcgen05.plan(
            rows=problem.grouping.rows,
            epilogue=self.epilogue(problem),
            has_blocks=self.has_blocks,
            **tactic._asdict(),
            arch=arch,
            pdl=settings.PDL,
        )
        return (KernelSpec(fp8_tcgen05.KERNEL, config),)

    def tile(self, tactic: Tcgen05Tactic) -> Tile:
        tile_m, cta_group, split_k = tactic
        return Tile(tile_m, MMA_M * cta_group, split_k, cluster_m=cta_group)


class FP8TokenTcgen05(FP8TokenBackend, FP8Tcgen05):
    """Backend for FP8 activations with per-token or per-tensor scales, and an FP8 weight with per-channel or per-tensor
    scales. Accumulators are fp32 in tensor memory, over a CTA's whole range of K, whatever ``fast_accum`` is."""

    has_blocks = False

    def fp8_rate(self, problem: GemmProblem) -> float:
        # With the data sheet's rate, ``"auto"`` would take this unmeasured kernel instead of ``scaled_mm`` for many
        # rows.
        return RATES[problem.fast_accum]
