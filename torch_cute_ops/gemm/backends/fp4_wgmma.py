"""FP4 weights by Hopper's warpgroup MMA, decoded in registers, for any number of rows: ``kernels/fp4_wgmma``."""

from typing import NamedTuple

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp4 import FP4KernelBackend
from torch_cute_ops.gemm.decode import fp4_format, fp4_operands, reason_not_linear
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels import fp4_wgmma
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import new_bytes
from torch_cute_ops.runtime.arch import Arch

BALANCED = 0
"""A ``split`` that means: one CTA per SM, all with equal work (stream-K)."""
EXPERT_SPLITS = (1, 2, 3, 4)
"""CTAs per row tile of the weight, with experts over K."""
DECODE_CLOCKS, ROW_CLOCKS, CODES_CLOCKS = 0.0265, 0.0245, 0.013
"""SM clocks to decode a weight, in general and in tiles of one row: of numbers, and of codes."""
MMA_SHARE, EXPERTS_MMA_SHARE = 0.8, 1.0
"""Time of the MMAs, which alternate with decoding, over that at a good GEMM's rate; and where experts divide k."""
READ_ORDER, EXPERTS_READ_ORDER = 4.0, 8.0
"""How well reading overlaps with computing (``cost.overlapped``)."""
L2_SHARE = 0.45
"""Time to read a byte of the weight from L2 once more, for another tile of tokens, over that to read it from memory."""
MOST_LEFT = 2**28
"""Limit on the workspace for partial sums of a call, bytes."""
RAMP_SECONDS = 8e-7
"""Pipeline fill and drain of a CTA."""
ARRANGE_SECONDS = 1.9e-6
"""Time of the kernel that rearranges the activations."""
ARRANGE_FP4_SECONDS = {1: 2e-8, 8: 5e-7, 16: 4.5e-7, 32: 7e-7}
"""Time for a CTA to rearrange a chunk of FP4 activations itself, by tokens of the tile."""
ARRANGE_16_BIT_SECONDS = {1: 2.2e-7, 8: 7e-7, 16: 7.7e-7, 32: 1e-6}
"""The same of 16 bits."""
GATE_SECONDS = 6e-8
"""Time for a CTA to gate a chunk of activations of a token, beside the time to rearrange it: so long that 8 rows of
4,096 × 14,336 have one launch on an H100, where it is faster than two, and two on an H200, where it is slower (measured
in a layer; two operations of the special function units an element alone take 2.4e-8 in three warps)."""
QUANTISE_SECONDS = 3e-8
"""The same to quantise one (a guess by instructions)."""
EXPERT_CLOCKS = 0.03
"""SM clocks to add one element of an expert's sums to the totals (measured on an H200)."""
SENT_SECONDS = 4e-7
"""How much sooner a cluster ends whose CTAs send their sums, and do not read each other's."""
CLUSTER_BYTES_PER_SECOND = 4.1e10
"""Rate at which a CTA of a cluster exchanges and adds up partial sums."""
CLUSTER_SECONDS = 9e-8
"""The time for it that does not depend on their size, for each CTA of the cluster after the first."""
COLLECT_BYTES_PER_SECOND = 3e10
"""Rate at which a CTA adds up partial sums from the workspace."""


class FP4Wgmma(FP4KernelBackend):
    """A tactic is (rows of ``a`` in a tile, rows of ``b`` in a tile, CTAs per row tile of ``b``). Those CTAs are a
    cluster, except in GEMMs with experts; with few rows of ``a`` they rearrange these themselves."""

    name = "wgmma"
    makes_input = True
    kernel = fp4_wgmma.KERNEL
    groupings = ("none", "k")

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        if problem.grouping.over == "k" and problem.expert_k % K_TILE:
            return f"an expert's width is {problem.expert_k}; it has to be a multiple of {K_TILE}"
        return reason_not_linear(problem, problem.k, "k")

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        sizes = fp4_wgmma.EXPERT_TILES_M if problem.grouping.over == "k" else tuple(fp4_wgmma.TILES_M)
        widest = fp4_wgmma.mma_n(cost.smallest_tile(sizes, m))
        tiles = [tokens for tokens in sizes if tokens <= widest and (tokens > 1 or _is_row(problem, m))]
        every = [
            (tokens, rows, split)
            for tokens in tiles
            for split in _splits(problem, tokens)
            for rows in _rows(problem, m, tokens, split, target)
        ]
        if problem.quantises_input is not None:
            most = fp4_wgmma.MAX_QUANTISED_M
            every = [tactic for tactic in every if m <= most and tactic[0] <= most and _arranges(problem, tactic)]
        return tuple(tactic for tactic in every if _is_useful(problem, m, tactic, target))

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        """The constants are fitted to all tactics of 18 layers' matrices, of 1 to 64 rows, on an H100 and an H200, and
        of 12 of 96 to 1,024 rows on an H100: of these the chosen one takes 1.0 and 0.4 % longer than the fastest on
        average, and 12 % at most. Not in the fit: experts, and what is done to the activations in the same launch."""
        tokens, _, split = map(int, tactic)
        parts = _parts(problem, tactic, target)
        tiles = -(-m // tokens)
        ctas = parts.workers * tiles
        waves = -(-ctas // cost.places(target.sms, split if parts.clusters else 1))
        chunks = -(-parts.row_tiles * parts.chunks // parts.workers)
        weights = parts.rows * K_TILE
        width = _width(problem)
        share, order = (MMA_SHARE, READ_ORDER) if width is None else (EXPERTS_MMA_SHARE, EXPERTS_READ_ORDER)
        # Per chunk. Decoding and MMAs alternate in a warpgroup, and the other one fills half of the gaps.
        computed = cost.overlapped(
            cost.weight_seconds(weights, _decode_clocks(problem, tokens, parts.rows)),
            share * cost.tensor_core_seconds(2 * weights * fp4_wgmma.mma_n(tokens), target, sms=1),
            order=2,
        )
        if parts.arranges:
            arranged = (ARRANGE_FP4_SECONDS if problem.a.is_fp4 else ARRANGE_16_BIT_SECONDS)[tokens]
            arranged += GATE_SECONDS * tokens if problem.gates_input else 0.0
            arranged += QUANTISE_SECONDS * tokens if problem.quantises_input is not None else 0.0
            computed = cost.overlapped(computed, arranged, order=4)
        if width is not None:
            computed += cost.weight_seconds(parts.rows * tokens, EXPERT_CLOCKS) * K_TILE / width
        # The CTAs of a wave share the bandwidth, however few they are. A tile of the weight is read from memory once.
        sharing = min(target.sms, ctas / waves) * (1 + (tiles - 1) * L2_SHARE) / tiles
        read = sharing * weights * (0.5 + 1 / fp4_format(problem).block_size) / cost.bytes_per_second(target)
        wave = RAMP_SECONDS + chunks * cost.overlapped(computed, read, order=order)
        seconds = cost.LAUNCH_SECONDS + waves * wave
        if not parts.arranges:
            # Of gate and up twice as much is read.
            seconds += ARRANGE_SECONDS + cost.memory_seconds(m * (problem.a_width - problem.k) * 2, 0, target)
        if parts.clusters:
            seconds += waves * CLUSTER_SECONDS * (split - 1)
            seconds += waves * 2 * parts.sum_bytes / CLUSTER_BYTES_PER_SECOND if split > 1 else 0.0
            seconds -= waves * SENT_SECONDS if fp4_wgmma.sends(tokens, split) else 0.0
        elif parts.shares:
            # Partial sums of tiles that workers share are written, waited for and read again, one after the other.
            others = max(1.0, parts.workers / max(1, parts.row_tiles) - 1)
            seconds += cost.LAUNCH_SECONDS + waves * others * parts.sum_bytes / COLLECT_BYTES_PER_SECOND
        return seconds

    def config(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> fp4_wgmma.Config | None:
        tokens, rows, split = map(int, tactic)
        return fp4_wgmma.plan(
            operands=fp4_operands(problem),
            epilogue=problem.epilogue,
            expert_k=_width(problem),
            tile_m=tokens,
            tile_n=rows,
            split_k=split if _clusters(problem, tactic) else 0,
            arch=arch,
            pdl=settings.PDL,
            static_weight=problem.static_weight,
            prefetches=problem.prefetches,
        )

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        function, config = self.compiled(problem, tactic, target)
        if config.rearranges:
            prefetches = config.prefetches
            return lambda a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, out: function(
                a, a_scale, b, b_scale, alpha, bias, out, None, prefetch if prefetches else None, 0, 0
            )
        parts = _parts(problem, tactic, target)
        device, rows, workers, shares = target.device, config.tile_m, parts.workers, int(parts.shares)
        size = config.workspace_bytes(problem.k, workers, has_partial_sums=parts.shares)
        return lambda a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, out: function(
            a, a_scale, b, b_scale, alpha, bias, out,
            new_bytes(device, -(-a.shape[0] // rows) * size), None, workers, shares,
        )  # fmt: skip

    def checks_operands(self, problem: GemmProblem, tactic: Tactic) -> bool:
        return True


class _Parts(NamedTuple):
    """How the work on a row tile of ``a`` is divided.

    Attributes:
        rows: rows of ``b`` in a tile.
        row_tiles, chunks: row tiles of ``b``, and chunks of k.
        workers: CTAs.
        clusters: whether the CTAs of a row tile are a cluster.
        arranges: whether they rearrange the activations themselves.
        sum_bytes: size of a CTA's accumulators.
        shares: whether CTAs exchange partial sums through the workspace.
    """

    rows: int
    row_tiles: int
    chunks: int
    workers: int
    clusters: bool
    arranges: bool
    sum_bytes: int
    shares: bool


def _parts(problem: GemmProblem, tactic: Tactic, target: Target) -> _Parts:
    tokens, rows, split = map(int, tactic)
    chunks = -(-problem.k // K_TILE)
    arranges, clusters = _arranges(problem, tactic), _clusters(problem, tactic)
    row_tiles = -(-problem.n // rows)
    # At least a chunk each, because the kernel waits for the partial sums of every worker.
    workers = max(1, min(target.sms, row_tiles * chunks) if split == BALANCED else row_tiles * split)
    shares = not clusters and workers != row_tiles
    return _Parts(rows, row_tiles, chunks, workers, clusters, arranges, 4 * rows * tokens, shares)


def _width(problem: GemmProblem) -> int | None:
    """Elements of k of an expert; ``None``: experts do not divide k."""
    return problem.expert_k if problem.grouping.over == "k" else None


def _arranges(problem: GemmProblem, tactic: Tactic) -> bool:
    """Whether the CTAs of the GEMM rearrange the activations themselves."""
    tokens, _, split = map(int, tactic)
    return problem.grouping.over == "none" and fp4_wgmma.rearranges(tokens, split)


def _clusters(problem: GemmProblem, tactic: Tactic) -> bool:
    """Whether the CTAs of a row tile are a cluster; of one CTA, if that rearranges the activations."""
    return _arranges(problem, tactic) or (problem.grouping.over == "none" and int(tactic[2]) > 1)


def _decode_clocks(problem: GemmProblem, tokens: int, rows: int) -> float:
    if tokens > 1:
        return DECODE_CLOCKS
    return CODES_CLOCKS if fp4_wgmma.by_codes(fp4_operands(problem), tokens, rows) else ROW_CLOCKS


def _is_row(problem: GemmProblem, m: int) -> bool:
    """Whether tiles of one row are for this: others read the weight once for several."""
    return m == 1 and fp4_format(problem) == NVFP4


def _splits(problem: GemmProblem, tokens: int) -> tuple[int, ...]:
    if problem.grouping.over == "k":
        return (BALANCED, *EXPERT_SPLITS)
    if tokens == 1:
        return fp4_wgmma.SPLIT_K
    return (BALANCED, *fp4_wgmma.SPLIT_K) if tokens <= fp4_wgmma.MAX_CLUSTER_M else (BALANCED, 1)


def _rows(problem: GemmProblem, m: int, tokens: int, split: int, target: Target) -> tuple[int, ...]:
    """The most rows of a tile, and those with which an SM has the least work, where a choice is possible: where a
    cluster has a tile, and its CTAs arrange the activations. Of one row of codes also the best for ``codes``."""
    every = fp4_wgmma.tiles_n(tokens)
    if problem.grouping.over != "none" or not fp4_wgmma.rearranges(tokens, split):
        return every[:1]
    ctas = cost.places(target.sms, split)

    def work(rows: int) -> int:
        return -(-(-(-problem.n // rows) * split * -(-m // tokens)) // ctas) * rows

    offered = [every[0], min(every, key=work)]
    codes = [rows for rows in every if fp4_wgmma.by_codes(fp4_operands(problem), tokens, rows)]
    if codes:
        offered.append(min(codes, key=work))
    return tuple(dict.fromkeys(offered))


def _is_useful(problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> bool:
    """Whether every worker has something to do, and the workspace for partial sums stays small."""
    tokens, _, split = map(int, tactic)
    parts = _parts(problem, tactic, target)
    left_bytes = -(-m // tokens) * parts.workers * parts.sum_bytes if parts.shares else 0
    return split <= parts.chunks and left_bytes <= MOST_LEFT
