"""FP8 GEMMs by ``mma.sync``, plain or grouped by rows, on every GPU: ``kernels/fp8_mma``."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp8 import FP8Backend, FP8TokenBackend, has_mxfp8
from torch_cute_ops.gemm.fp8_tiles import K_TILE, Tile, rows_of_expert
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp8_mma
from torch_cute_ops.kernels.common.core.layouts import RASTER_WIDTH
from torch_cute_ops.kernels.common.fp8.warp_layouts import TILE_N, WarpGemmConfig
from torch_cute_ops.reference.mm_fp8_block import linear_mx_scales
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import CLOCK_HZ, Arch
from torch_cute_ops.runtime.compiler import KernelSpec

Tensor = torch.Tensor

FP8_RATE: Final = 2.0
"""Rate of FP8 MMAs, divided by the rate of 16-bit MMAs (data sheets of compute capability 12)."""
K_TILE_CLOCKS: Final = 340.0
"""SM clocks per k tile in addition to the MMAs: barriers, and the latency of loads and of dependent MMAs. A guess, not
measured."""
REDUCE_SECONDS: Final = 0.4e-6
"""Time in seconds to add the accumulators of one more CTA of a cluster, including its part of the cluster's barriers
(an assumption)."""
SCALING_CLOCKS: Final = 62.0
"""SM clocks that a CTA needs, per k tile and row of ``a``, to scale the results of MXFP8 MMAs and to add them in fp32
(fitted to eight GEMMs with 64 to 4,096 rows on an H200)."""


class FP8MmaTactic(NamedTuple):
    """Tactic of ``FP8MmaSync``.

    Attributes:
        tile_m: number of rows of ``a`` in a tile.
        split_k: number of CTAs that compute one tile, each over a range of K. They form a cluster.
    """

    tile_m: int
    split_k: int = 1


class FP8MmaSync(FP8Backend):
    """Backend for FP8 operands with block scales, which multiplies with ``mma.sync``, on every GPU."""

    name = "mma_sync"
    tactic_type = FP8MmaTactic
    has_blocks = True
    is_mx = False
    takes_row_scales = True

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[FP8MmaTactic, ...]:
        assert target.arch is not None
        return tuple(
            FP8MmaTactic(tile_m, split_k)
            for tile_m in self.tile_sizes(problem, target.arch)
            for split_k in fp8_mma.SPLIT_K
            if split_k == 1 or self.is_worth_splitting(problem, m, FP8MmaTactic(tile_m, split_k), target)
        )

    def tile_sizes(self, problem: GemmProblem, arch: Arch) -> tuple[int, ...]:
        """Return the numbers of rows of ``a`` in the tiles of ``arch``."""
        return tuple(fp8_mma.MX_TILES if problem.b.scales_by_row else fp8_mma.TILES)

    def is_worth_splitting(self, problem: GemmProblem, m: int, tactic: FP8MmaTactic, target: Target) -> bool:
        """Return True if split-K can make a call faster: the tiles do not fill the GPU, and each CTA has at least one k
        tile. Only GPUs of compute capability 12 are considered, because other GPUs have faster kernels."""
        assert target.arch is not None
        if not target.arch.has_block_scaled_mma or problem.grouping.over != "none":
            return False
        tiles = self.tile(tactic).tiles_of(problem, m)
        return tiles * tactic.split_k <= 2 * target.sms and tactic.split_k <= -(-problem.k // K_TILE)

    def estimate(self, problem: GemmProblem, m: int, tactic: FP8MmaTactic, target: Target) -> float:
        assert target.arch is not None
        if target.arch.has_wgmma or (target.arch.has_tcgen05 and not problem.b.scales_by_row):
            # wgmma and tcgen05 are faster at any size. This backend's estimates are guesses. They must not be compared
            # with the estimates for wgmma, which are fitted to measurements. On data-center GPUs, FP8 mma.sync is
            # executed as 16-bit MMAs, on data-center Blackwell at a small fraction of the rate of tcgen05.
            return math.inf
        return self.seconds(problem, m, tactic, target)

    def seconds(self, problem: GemmProblem, m: int, tactic: FP8MmaTactic, target: Target) -> float:
        """Return the estimated time of a call."""
        assert target.arch is not None
        ctas_per_sm = self.ctas_per_sm(problem, tactic, target.arch)
        tile = Tile(tactic.tile_m, TILE_N, tactic.split_k, ctas_per_sm)
        tiles, k_tiles = tile.tiles_of(problem, m), -(-problem.k // (K_TILE * tactic.split_k))
        flops = 2 * tile.tile_m * tile.tile_n * K_TILE
        multiplied = cost.tensor_core_seconds(flops, target, sms=1) / FP8_RATE
        # CTAs of an SM that share its units
        sharing = min(ctas_per_sm, math.ceil(tiles * tactic.split_k / target.sms))
        busy = sharing * (multiplied + self.more_clocks(problem, tactic, target.arch) / CLOCK_HZ)
        waves = math.ceil(tiles / tile.clusters(target.sms))
        computed = waves * (k_tiles * (K_TILE_CLOCKS / CLOCK_HZ + busy) + REDUCE_SECONDS * (tactic.split_k - 1))
        # M tiles that run at the same time share one read of the weight.
        reads = tiles / min(-(-rows_of_expert(problem, m) // tile.tile_m), RASTER_WIDTH)
        row_bytes = problem.b.row_bytes(problem.k) if problem.b.is_fp4 else problem.k
        read = reads * TILE_N * row_bytes / cost.bytes_per_second(target)
        return cost.LAUNCH_SECONDS + cost.overlapped(computed, read, order=8)

    def more_clocks(self, problem: GemmProblem, tactic: FP8MmaTactic, arch: Arch) -> float:
        """Return the SM clocks that a CTA spends per k tile on work other than MMAs, such as decoding the weight."""
        return 0.0

    def config(self, problem: GemmProblem, tactic: FP8MmaTactic, arch: Arch) -> WarpGemmConfig | None:
        """Return the configuration of the kernel, or None if no number of stages fits."""
        return fp8_mma.plan(
            rows=problem.grouping.rows,
            epilogue=self.epilogue(problem),
            tile_m=tactic.tile_m,
            arch=arch,
            pdl=settings.PDL,
            has_blocks=self.has_blocks,
            is_mx=self.is_mx,
            split_k=tactic.split_k,
            scales_by_row=problem.b.scales_by_row,
        )

    def kernels(self, problem: GemmProblem, tactic: FP8MmaTactic, arch: Arch) -> tuple[KernelSpec, ...]:
        return (KernelSpec(fp8_mma.KERNEL, self.config(problem, tactic, arch)),)

    def tile(self, tactic: FP8MmaTactic) -> Tile:
        return Tile(tactic.tile_m, TILE_N, tactic.split_k)

    def ctas(self, problem: GemmProblem, tactic: FP8MmaTactic, target: Target) -> int:
        assert target.arch is not None
        tile = self.tile(tactic)._replace(ctas_per_sm=self.ctas_per_sm(problem, tactic, target.arch))
        return tile.clusters(target.sms) * tile.cluster

    def ctas_per_sm(self, problem: GemmProblem, tactic: FP8MmaTactic, arch: Arch) -> int:
        """Return the number of CTAs that run on an SM at the same time."""
        config = self.config(problem, tactic, arch)
        return 1 if config is None else config.ctas_per_sm(arch)


class FP8TokenMmaSync(FP8TokenBackend, FP8MmaSync):
    """Backend for FP8 operands without block scales, on every GPU. Sums leave the tensor cores each 128 elements of K,
    regardless of ``fast_accum``."""

    has_blocks = False


class MXFP8MmaSync(FP8MmaSync):
    """Backend for MXFP8 operands, on every GPU. ``"auto"`` takes ``wgmma`` instead on Hopper, and ``tcgen05`` for GEMMs
    without experts on data-center Blackwell. On compute capabilities 12.0 and 12.1, block-scaled MMAs apply the scales.
    On other GPUs, the kernel scales the result of each MMA (32 elements of K) and adds it in fp32. The kernel reads
    scales as words of four bytes. Each call first rearranges scales that are not stored in this order. Linear scales of
    ``b`` are already in this order if K is a multiple of 128."""

    is_mx = True

    def tile_sizes(self, problem: GemmProblem, arch: Arch) -> tuple[int, ...]:
        return fp8_mma.mx_tiles(arch)

    def handles(self, problem: GemmProblem) -> bool:
        return has_mxfp8(problem)

    def more_clocks(self, problem: GemmProblem, tactic: FP8MmaTactic, arch: Arch) -> float:
        return 0.0 if arch.has_block_scaled_mma else SCALING_CLOCKS * tactic.tile_m

    def estimate(self, problem: GemmProblem, m: int, tactic: FP8MmaTactic, target: Target) -> float:
        assert target.arch is not None
        # Take ``wgmma`` or ``tcgen05`` wherever it can compute the call (``tcgen05``: without experts). The estimates
        # cannot be compared.
        has_other = target.arch.has_wgmma or (target.arch.has_tcgen05 and problem.grouping.over == "none")
        return math.inf if has_other else self.seconds(problem, m, tactic, target)

    def launcher(self, problem: GemmProblem, tactic: FP8MmaTactic, target: Target) -> Launch:
        function, max_ctas, _ = self.compiled(problem, tactic, target)

        def launch(given: Operands, out: Tensor) -> None:
            assert given.a_scale is not None
            a_scale = mx_words_of(given.a_scale, given.a.shape, column_major=True)
            b_scale = mx_words_of(given.b_scale, given.b.mT.shape)
            rows, epilogue = (given.offsets, given.counts), (given.alpha, given.bias)
            function(given.a, given.b, a_scale, b_scale, *rows, *epilogue, out, None, max_ctas)

        return launch


def mx_words_of(scale: Tensor, shape: Sequence[int], column_major: bool = False) -> Tensor:
    """Arrange the MXFP8 scales of a tensor (..., K) as ``mx_words``, (..., ⌈K/128⌉), from any layout.

    Column-major words form one column over all leading dimensions.
    """
    *lead, k = shape
    words = mx_words(linear_mx_scales(scale, math.prod(lead), k), column_major)
    return words.unflatten(0, lead) if len(lead) > 1 else words


def mx_words(scale: Tensor, column_major: bool = False) -> Tensor:
    """Arrange linear MXFP8 scales (rows, K/32) as words of four bytes, (rows, ⌈K/128⌉), viewed as float32.

    Missing bytes at the end of a row are zero.
    """
    blocks = scale.shape[1]
    if blocks % 4:
        scale = torch.nn.functional.pad(scale, (0, -blocks % 4))
    scale = scale.contiguous()
    if scale.storage_offset() % 4:
        scale = scale.clone()
    words = scale.view(torch.int32)
    if column_major:
        words = words.t().contiguous().t()
    return words.view(torch.float32)
