"""GEMMs with an FP4 weight that is decoded in registers, by Hopper's wgmma, for any number of rows:
``kernels/fp4_wgmma``."""

from typing import NamedTuple

import torch

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp4 import FP4KernelBackend
from torch_cute_ops.gemm.decode import fp4_format, fp4_operands, reason_not_linear
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp4_wgmma
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import new_bytes
from torch_cute_ops.runtime.arch import Arch

STREAM_K = 0
"""Value of ``split_k`` for stream-K: one CTA per SM, each with the same number of k tiles. A CTA's work may begin and
end inside a tile."""
EXPERT_SPLIT_K = (1, 2, 3, 4)
"""Supported numbers of CTAs per n tile, with experts over K."""
DECODE_CLOCKS, ROW_CLOCKS, CODES_CLOCKS = 0.0265, 0.0245, 0.013
"""SM clocks to decode one weight element: in tiles of several rows, in tiles of one row, and in tiles of one row whose
codes are multiplied without decoding."""
MMA_FACTOR, EXPERTS_MMA_FACTOR = 0.8, 1.0
"""Time of the MMAs, divided by their time in a good large GEMM: without experts, and with experts over K. The MMAs take
longer because they alternate with decoding."""
READ_ORDER, EXPERTS_READ_ORDER = 4.0, 8.0
"""Exponent p of the p-norm that models how reading and computing overlap (``cost.overlapped``): without experts, and
with experts over K."""
L2_FACTOR = 0.45
"""Time to read a weight byte again from L2, for another m tile, divided by the time to read it from memory."""
MAX_WORKSPACE_BYTES = 2**28
"""Largest number of bytes of a call's partial sums."""
RAMP_SECONDS = 8e-7
"""Time in seconds that a CTA takes to fill and drain the pipeline."""
REARRANGE_SECONDS = 1.9e-6
"""Time in seconds of the kernel that rearranges the activations."""
REARRANGE_FP4_SECONDS = {1: 2e-8, 8: 5e-7, 16: 4.5e-7, 32: 7e-7}
REARRANGE_16_BIT_SECONDS = {1: 2.2e-7, 8: 7e-7, 16: 7.7e-7, 32: 1e-6}
"""Time in seconds that a CTA takes to rearrange one k tile, keyed by ``tile_m``: of FP4 activations, and of 16-bit
activations."""
GATE_SECONDS = 6e-8
"""Additional time in seconds that a CTA takes to gate one row of a k tile.

With this value, the model chooses one launch on an H100 and two launches on an H200 for a GEMM of 8 rows and a weight
of 4,096 × 14,336. In a layer, these choices are faster on the two GPUs (measured). Two special-function operations per
element alone would take 2.4e-8 s in three warps."""
QUANTISE_SECONDS = 3e-8
"""Additional time in seconds that a CTA takes to quantise one row of a k tile (a guess from the number of
instructions)."""
EXPERT_CLOCKS = 0.03
"""SM clocks to add one element of an expert's accumulator to the sum over experts (measured on an H200)."""
SEND_SECONDS = 4e-7
"""Time in seconds that a cluster saves if its CTAs send their partial sums to each other, instead of reading them."""
CLUSTER_BYTES_PER_SECOND = 4.1e10
"""Rate at which a CTA of a cluster exchanges and adds partial sums."""
CLUSTER_SECONDS = 9e-8
"""Fixed time in seconds to exchange partial sums in a cluster, for each CTA after the first."""
COLLECT_BYTES_PER_SECOND = 3e10
"""Rate at which a CTA adds partial sums from the workspace."""


class WgmmaTactic(NamedTuple):
    """Tactic of ``FP4Wgmma``.

    Attributes:
        tile_m: number of rows of ``a`` in a tile.
        tile_n: number of rows of the weight in a tile.
        split_k: number of CTAs that compute a tile, each over a range of K, or ``STREAM_K``. These CTAs form a
            cluster, unless each expert owns a range of K. With small ``tile_m``, they also rearrange the activations.
    """

    tile_m: int
    tile_n: int
    split_k: int


class FP4Wgmma(FP4KernelBackend):
    """Backend for every number of rows, without experts or with experts that each own a range of K."""

    name = "wgmma"
    tactic_type = WgmmaTactic
    computes_prologue = True
    kernel = fp4_wgmma.KERNEL
    groupings = ("none", "k")

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        if problem.grouping.over == "k" and problem.expert_k % K_TILE:
            return f"an expert's width is {problem.expert_k}; it has to be a multiple of {K_TILE}"
        return reason_not_linear(problem, problem.k, "k")

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[WgmmaTactic, ...]:
        sizes = fp4_wgmma.EXPERT_TILES_M if problem.grouping.over == "k" else tuple(fp4_wgmma.TILES_M)
        widest = fp4_wgmma.mma_n(cost.smallest_tile(sizes, m))
        # A tile of one row is useful only for a call of one row, because each tile reads the whole weight.
        is_row = m == 1 and fp4_format(problem) == NVFP4
        if problem.prologue_quant is not None:
            widest = min(widest, fp4_wgmma.MAX_QUANTISED_M) if m <= fp4_wgmma.MAX_QUANTISED_M else 0
        every = [
            WgmmaTactic(tile_m, tile_n, split_k)
            for tile_m in sizes
            if tile_m <= widest and (tile_m > 1 or is_row)
            for split_k in _splits(problem, tile_m)
            if problem.prologue_quant is None or _rearranges(problem, tile_m, split_k)
            for tile_n in _tiles_n(problem, m, tile_m, split_k, target)
        ]
        return tuple(tactic for tactic in every if _is_useful(problem, m, tactic, target))

    def estimate(self, problem: GemmProblem, m: int, tactic: WgmmaTactic, target: Target) -> float:
        """Estimate the time of a call in seconds.

        The constants are fitted to two sets of measurements. The first set contains all tactics for the matrices of 18
        layers with 1 to 64 rows, on an H100 and an H200. In this set, the chosen tactic takes on average 1.0 % longer
        than the fastest tactic. The second set contains all tactics for the matrices of 12 layers with 96 to 1,024
        rows, on an H100. In this set, the average is 0.4 %. In both sets, the chosen tactic takes at most 12 % longer
        than the fastest tactic. The sets contain no GEMMs with experts or prologues.
        """
        tile_m, tile_n, split_k = tactic
        schedule = _schedule(problem, tactic, target)
        m_tiles = -(-m // tile_m)
        ctas = schedule.num_ctas * m_tiles
        waves = -(-ctas // cost.places(target.sms, split_k if schedule.has_clusters else 1))
        k_tiles = -(-schedule.n_tiles * schedule.k_tiles // schedule.num_ctas)
        weights = tile_n * K_TILE
        over_k = problem.grouping.over == "k"
        factor, order = (EXPERTS_MMA_FACTOR, EXPERTS_READ_ORDER) if over_k else (MMA_FACTOR, READ_ORDER)
        # Time per k tile. Each of the two warpgroups alternates between decoding and MMAs. The work of the
        # other warpgroup fills half of the gaps.
        computed = cost.overlapped(
            cost.weight_seconds(weights, _decode_clocks(problem, tile_m, tile_n)),
            factor * cost.tensor_core_seconds(2 * weights * fp4_wgmma.mma_n(tile_m), target, sms=1),
            order=2,
        )
        if schedule.rearranges:
            rearranged = (REARRANGE_FP4_SECONDS if problem.a.is_fp4 else REARRANGE_16_BIT_SECONDS)[tile_m]
            rearranged += GATE_SECONDS * tile_m if problem.prologue_gate is not None else 0.0
            rearranged += QUANTISE_SECONDS * tile_m if problem.prologue_quant is not None else 0.0
            computed = cost.overlapped(computed, rearranged, order=4)
        if over_k:
            computed += cost.weight_seconds(tile_n * tile_m, EXPERT_CLOCKS) * K_TILE / problem.expert_k
        # The CTAs of a wave share the bandwidth, even if the wave is not full. Each n tile of the weight is read from
        # memory once, and then from L2.
        readers = min(target.sms, ctas / waves) * (1 + (m_tiles - 1) * L2_FACTOR) / m_tiles
        read = readers * weights * (0.5 + 1 / fp4_format(problem).block_size) / cost.bytes_per_second(target)
        wave = RAMP_SECONDS + k_tiles * cost.overlapped(computed, read, order=order)
        seconds = cost.LAUNCH_SECONDS + waves * wave
        if not schedule.rearranges:
            # With a gate, the input holds twice the bytes of the activations.
            seconds += REARRANGE_SECONDS + cost.memory_seconds(m * (problem.a_width - problem.k) * 2, 0, target)
        if schedule.has_clusters:
            seconds += waves * CLUSTER_SECONDS * (split_k - 1)
            seconds += waves * 2 * schedule.acc_bytes / CLUSTER_BYTES_PER_SECOND if split_k > 1 else 0.0
            seconds -= waves * SEND_SECONDS if fp4_wgmma.sends(tile_m, split_k) else 0.0
        elif schedule.has_partial_sums:
            # The CTAs of a tile write partial sums. The last CTA waits for all other CTAs of the tile, and reads their
            # partial sums one after another.
            others = max(1.0, schedule.num_ctas / max(1, schedule.n_tiles) - 1)
            seconds += cost.LAUNCH_SECONDS + waves * others * schedule.acc_bytes / COLLECT_BYTES_PER_SECOND
        return seconds

    def config(self, problem: GemmProblem, tactic: WgmmaTactic, arch: Arch) -> fp4_wgmma.Config | None:
        return fp4_wgmma.plan(
            operands=fp4_operands(problem),
            epilogue=problem.epilogue,
            expert_k=problem.expert_k if problem.grouping.over == "k" else None,
            tile_m=tactic.tile_m,
            tile_n=tactic.tile_n,
            split_k=tactic.split_k if _has_clusters(problem, tactic) else 0,
            arch=arch,
            pdl=settings.PDL,
            static_weight=problem.static_weight,
            prefetches=problem.prefetches,
        )

    def launcher(self, problem: GemmProblem, tactic: WgmmaTactic, target: Target) -> Launch:
        function, config = self.compiled(problem, tactic, target)
        prefetches = config.prefetches

        def launch_rearranging(given: Operands, out: torch.Tensor) -> None:
            a, b, a_scale, b_scale, alpha, bias, _, _, prefetch, row_scale = given
            following = prefetch if prefetches else None
            function(a, a_scale, b, b_scale, alpha, bias, row_scale, out, None, following, 0, 0)

        if config.rearranges:
            return launch_rearranging
        schedule = _schedule(problem, tactic, target)
        device, num_ctas, tile_m = target.device, schedule.num_ctas, config.tile_m
        size = config.workspace_bytes(problem.k, num_ctas, has_partial_sums=schedule.has_partial_sums)
        has_partial_sums = int(schedule.has_partial_sums)

        def launch(given: Operands, out: torch.Tensor) -> None:
            a, b, a_scale, b_scale, alpha, bias, _, _, _, row_scale = given
            workspace = new_bytes(device, -(-a.shape[0] // tile_m) * size)
            terms = alpha, bias, row_scale
            function(a, a_scale, b, b_scale, *terms, out, workspace, None, num_ctas, has_partial_sums)

        return launch

    def checks_operands(self, problem: GemmProblem, tactic: WgmmaTactic) -> bool:
        return True


class _Schedule(NamedTuple):
    """Division of the work of one m tile among CTAs.

    Attributes:
        n_tiles, k_tiles: number of n tiles, and number of k tiles of an n tile.
        num_ctas: number of CTAs.
        has_clusters: True if the CTAs of an n tile form a cluster.
        rearranges: True if the CTAs rearrange the activations themselves.
        acc_bytes: bytes of a CTA's accumulators.
        has_partial_sums: True if CTAs exchange partial sums through the workspace.
    """

    n_tiles: int
    k_tiles: int
    num_ctas: int
    has_clusters: bool
    rearranges: bool
    acc_bytes: int
    has_partial_sums: bool


def _schedule(problem: GemmProblem, tactic: WgmmaTactic, target: Target) -> _Schedule:
    tile_m, tile_n, split_k = tactic
    n_tiles, k_tiles = -(-problem.n // tile_n), -(-problem.k // K_TILE)
    has_clusters = _has_clusters(problem, tactic)
    # Give each CTA at least one k tile, because the kernel waits for the partial sums of every CTA.
    num_ctas = max(1, min(target.sms, n_tiles * k_tiles) if split_k == STREAM_K else n_tiles * split_k)
    rearranges, has_partial_sums = _rearranges(problem, tile_m, split_k), not has_clusters and num_ctas != n_tiles
    return _Schedule(n_tiles, k_tiles, num_ctas, has_clusters, rearranges, 4 * tile_n * tile_m, has_partial_sums)


def _rearranges(problem: GemmProblem, tile_m: int, split_k: int) -> bool:
    """Return True if the CTAs of the GEMM rearrange the activations, False if a separate kernel does."""
    return problem.grouping.over == "none" and fp4_wgmma.rearranges(tile_m, split_k)


def _has_clusters(problem: GemmProblem, tactic: WgmmaTactic) -> bool:
    """Return True if the CTAs of an n tile form a cluster. A tile with a single CTA counts as a cluster if the CTA
    rearranges the activations."""
    if problem.grouping.over != "none":
        return False
    return tactic.split_k > 1 or fp4_wgmma.rearranges(tactic.tile_m, tactic.split_k)


def _decode_clocks(problem: GemmProblem, tile_m: int, tile_n: int) -> float:
    if tile_m > 1:
        return DECODE_CLOCKS
    return CODES_CLOCKS if fp4_wgmma.by_codes(fp4_operands(problem), tile_m, tile_n) else ROW_CLOCKS


def _splits(problem: GemmProblem, tile_m: int) -> tuple[int, ...]:
    if problem.grouping.over == "k":
        return (STREAM_K, *EXPERT_SPLIT_K)
    if tile_m == 1:
        return fp4_wgmma.SPLIT_K
    return (STREAM_K, *fp4_wgmma.SPLIT_K) if tile_m <= fp4_wgmma.MAX_CLUSTER_M else (STREAM_K, 1)


def _tiles_n(problem: GemmProblem, m: int, tile_m: int, split_k: int, target: Target) -> tuple[int, ...]:
    """Return the values of ``tile_n`` to try: the largest value, and the value with the least work per SM.

    Only clusters that rearrange the activations may use several values. With some values, the kernel multiplies codes
    of one-row tiles without decoding them. For these tiles, the result also contains the value with the least work per
    SM among such values.
    """
    sizes = fp4_wgmma.tiles_n(tile_m)
    if problem.grouping.over != "none" or not fp4_wgmma.rearranges(tile_m, split_k):
        return sizes[:1]
    ctas, m_tiles = cost.places(target.sms, split_k), -(-m // tile_m)
    work = {tile_n: -(-(-(-problem.n // tile_n) * split_k * m_tiles) // ctas) * tile_n for tile_n in sizes}
    offered = [sizes[0], min(sizes, key=work.__getitem__)]
    if tile_m == 1:
        operands = fp4_operands(problem)
        codes = [tile_n for tile_n in sizes if fp4_wgmma.by_codes(operands, tile_m, tile_n)]
        if codes:
            offered.append(min(codes, key=work.__getitem__))
    return tuple(dict.fromkeys(offered))


def _is_useful(problem: GemmProblem, m: int, tactic: WgmmaTactic, target: Target) -> bool:
    """Return True if every CTA has work, and the workspace for partial sums is not too large."""
    schedule = _schedule(problem, tactic, target)
    if tactic.split_k > schedule.k_tiles:
        return False
    m_tiles = -(-m // tactic.tile_m)
    return not schedule.has_partial_sums or m_tiles * schedule.num_ctas * schedule.acc_bytes <= MAX_WORKSPACE_BYTES
