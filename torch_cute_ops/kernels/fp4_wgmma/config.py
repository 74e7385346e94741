"""Configuration of the FP4 wgmma GEMM. No device code."""

from collections import namedtuple
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.kernels.common.core.layouts import (
    SCHEDULERS,
    WARP_MMA_TILE_M,
    WARPGROUP,
    WGMMA_M,
    Epilogue,
    PartialSums,
    first_fit,
)
from torch_cute_ops.kernels.common.fp4.layouts import (
    ATOM_BYTES,
    ATOM_M,
    ATOM_ROW_BYTES,
    K_TILE,
    SCALE_TILE_BYTES,
    ActivationLayout,
    FP4Operands,
    WeightTile,
)
from torch_cute_ops.runtime.arch import Arch

K_SLICES: Final = 4
"""Number of slices of a k tile. A slice is 64 elements along K: 128 bytes of activations per token."""
TILES_M: Final = {1: 4, 8: 4, 16: 4, 32: 4, 64: 4, 128: 2, 256: 2}
"""Largest number of consumer warpgroups, keyed by ``tile_m``. More warpgroups would need too many registers for
accumulators."""
_WARP_MMA_TILES_N: Final = (256, 224, 208, 192, 160)
TILES_N: Final = {1: _WARP_MMA_TILES_N, 8: _WARP_MMA_TILES_N, 16: (256, 192), 32: (256, 192)}
"""Supported ``tile_n``, keyed by ``tile_m``. A ``tile_m`` without an entry supports only one ``tile_n``. With mma.sync,
``tile_n`` is a multiple of a warp's 16 columns; with wgmma, of a warpgroup's 64 columns."""
WARP_N: Final = 16
"""Number of columns of the result that a warp computes, with mma.sync or as its part of a wgmma."""
DECODERS: Final = {1: (3, 1), 8: (3, 1), 16: (3, 2), 32: (1, 4)}
"""(decoder groups, warps per group), keyed by ``tile_m``. Each group rearranges one k tile at a time. The warps of a
group take turns at groups of eight tokens. With 32 tokens, a single warp would rearrange a k tile more slowly than the
consumers multiply it."""
REGISTERS: Final = {(3, 1): (88, 128), (4, 1): (88, 128), (3, 2): (88, 104), (4, 2): (80, 80)}
"""Registers per thread as (consumers, other warps), keyed by (number of consumer warpgroups, number of other
warpgroups). These numbers apply if the CTAs rearrange the activations."""
BARRIER_BYTES: Final = 512
"""Bytes of shared memory that are reserved for mbarriers."""
K_TILE_BLOCKS: Final = K_TILE // 16
"""Number of NVFP4 blocks of a row in a k tile."""
ROW_BYTES: Final = K_TILE * 2
"""Bytes of a k tile of one row of activations in float16."""
ROW_STAGE_BYTES: Final = 640
"""Bytes of a stage of activations if a tile has one row: a k tile and a float32 factor per block, rounded up to a
multiple of 128."""
CODE_ATOMS: Final = 3
"""Number of swizzle atoms of a stage if a tile has one row of FP4 codes: one atom for each half of the k tile, and one
for the factors."""
ZEROS_AT: Final = -192
"""Offset, in bytes, of an area of 128 zero bytes, relative to the stages of activations of a one-row tile. The offset
is not a multiple of 128, to avoid bank conflicts."""
ZEROS_BYTES: Final = 256
"""Number of bytes before the stages of activations of a one-row tile. The number includes the 128 zero bytes."""
MAX_REARRANGED_M: Final = 32
"""Largest ``tile_m`` whose activations the CTAs rearrange themselves."""
MAX_PREFETCHING_M: Final = 16
"""Largest ``tile_m`` for which the producer prefetches into L2. On an H100, prefetching makes a decoder layer of an 8B
model faster by 3.4 µs with 1 row, 2.6 µs with 8 rows and 2.4 µs with 16 rows, and slower by 0.8 µs with 32 rows."""
MAX_QUANTISED_M: Final = 8
"""Largest ``tile_m`` whose activations the CTAs quantise. The lanes that share a block exchange values. Only up to this
size, the distance between these lanes is the same in decoders and in consumers (which rearrange the first k tiles)."""
AHEAD_TILE_M: Final = {True: 16, False: 64}
"""Smallest ``tile_m`` for which only one k tile of the weight is copied ahead, keyed by True if the CTAs rearrange the
activations. The alternative is to fill the whole pipeline ahead. Copying only one k tile makes a decoder layer of an 8B
model in W4A4 faster on an H200: by 3.6 µs with 16 rows, 1.3 µs with 32, 4.4 µs with 64 and 4 µs with 128; with 16-bit
activations, by up to 2 µs. With 1 row, it would make the layer 1.5 µs slower. With 16 rows that another kernel
rearranges, it would make a layer of a 32B or 70B model 3 µs slower, because memory bandwidth is the limit."""
MAX_CLUSTER_M: Final = 128
"""Largest ``tile_m`` with clusters. Up to this size, the partial sums fit in the shared memory of the weight's
codes."""
SPLIT_K: Final = (1, 2, 3, 4, 5, 6, 8)
"""Supported ``split_k``, the number of CTAs of a cluster."""
EXPERT_TILES_M: Final = (16, 32, 64, 128)
"""Supported ``tile_m`` with experts over k, where a thread holds two sets of accumulators."""


def tiles_n(tile_m: int) -> tuple[int, ...]:
    """Return the supported values of ``tile_n``, starting with the largest. Without clusters, only the largest is
    supported. The smaller values give work to more SMs."""
    return TILES_N.get(tile_m, (TILES_M[tile_m] * WGMMA_M,))


def mma_n(tile_m: int) -> int:
    """Return the N of a tile's MMAs: the number of tokens, but at least 8."""
    return max(tile_m, ATOM_M)


def rearranges(tile_m: int, split_k: int) -> bool:
    """Return True if the CTAs rearrange the activations themselves, False if another kernel does."""
    return split_k > 0 and tile_m <= MAX_REARRANGED_M


def by_codes(operands: FP4Operands, tile_m: int, tile_n: int) -> bool:
    """Return True if FP8 wgmma multiplies FP4 codes without decoding them.

    Codes can be multiplied for one row of FP4 activations, if ``tile_n`` is a multiple of a warpgroup's 64 columns.
    """
    return tile_m == 1 and operands.decodes_both and tile_n % WGMMA_M == 0


def sends(tile_m: int, split_k: int) -> bool:
    """Return True if the CTAs of a cluster send their partial sums to each other, False if they read each other's
    partial sums.

    Received partial sums need shared memory. With few tokens, shared memory suffices, although the pipeline may then
    have one stage less. On an H100, sending instead of reading makes a decoder layer of an 8B model 1 to 2 µs faster
    with 16 rows, and 5 µs faster with 32 rows.
    """
    return split_k > 1 and rearranges(tile_m, split_k)


def slices_per_stage(tile_m: int, expert_k: int | None) -> int:
    """Return the number of slices (64 elements along K) that a stage of activations holds."""
    if tile_m <= 32:
        return K_SLICES
    # On an H200, GEMMs of 64 tokens are 1.5 % faster with two slices per stage than with one. With experts, a thread
    # has enough registers for only one slice.
    return 2 if tile_m == 64 and expert_k is None else 1


class Arguments(
    namedtuple("Arguments", "a a_scale b b_scale alpha bias row_scale out workspace prefetch num_ctas has_partial_sums")
):
    """Run-time arguments, in order.

    M is the number of rows of activations, N the number of rows of the weight (a multiple of 8), and K the number of
    elements of a row (a multiple of 32). With E experts over k, each expert owns K / E of these elements.

    Attributes:
        a, a_scale, b, b_scale: operands and scales, as ``FP4Operands`` describes them.
        alpha: (1,) or (N,) float32 factors, or None, as ``Config.epilogue`` says. With experts over k, (M, E) float32
            factors with any strides.
        bias: (N,) in ``Config.epilogue``'s bias dtype, or None.
        row_scale: (M,) float32 factors of the rows of the result, or None.
        out: (M, N) in ``Config.epilogue``'s dtype, written.
        workspace: ``Config.workspace_bytes`` uint8 per m tile, written, or None if the CTAs rearrange the activations.
        prefetch: (rows, bytes) uint8, contiguous, to prefetch into L2 if ``Config.prefetches``, else None.
        num_ctas: int32, number of persistent CTAs that share an m tile's iterations; unused with clusters.
        has_partial_sums: 1 if the persistent CTAs pass partial sums through the workspace, else 0.
    """


@dataclass(frozen=True)
class Config:
    """Static parameters of the FP4 wgmma GEMM. M, N, K and the number of CTAs are run-time values.

    Attributes:
        operands: formats of the activations and of the weight.
        epilogue: operations on the finished accumulators. With experts, only the epilogue's dtype is used, and
            ``Arguments.alpha`` is never None.
        expert_k: number of elements along K that an expert owns, or None without experts. Each expert has one factor
            per token.
        tile_m: number of rows of activations of a tile. One row needs special MMAs (``mma.RowMma``, ``mma.CodeMma``).
        tile_n: number of weight rows of a tile.
        split_k: number of CTAs of a cluster that split a tile's K range, or 0 if persistent CTAs share all tiles.
        stages: number of stages of the weight's pipeline.
        a_stages: number of stages of the activations' pipeline.
        pdl: True to launch with programmatic dependent launch.
        static_weight: True if the weight was complete before the previous launch. ``plan`` sets the field only if it
            affects the kernel: with ``pdl``, and if the CTAs rearrange the activations.
        prefetches: True if the producer prefetches a matrix into L2 after its last copy. A kernel that prefetches has
            few tokens per tile, and its CTAs rearrange the activations.
    """

    operands: FP4Operands
    epilogue: Epilogue
    expert_k: int | None
    tile_m: int
    tile_n: int
    split_k: int
    stages: int
    a_stages: int
    pdl: bool
    static_weight: bool
    prefetches: bool = False

    @cached_property
    def n_warps(self) -> int:
        """Number of warps along N. Each computes ``WARP_N`` columns."""
        return self.tile_n // WARP_N

    @cached_property
    def split_n_warps(self) -> int:
        """Number of groups of 16 columns, at the end of N, whose k tiles are divided among warps on several schedulers,
        so that all schedulers do the same work."""
        return self.n_warps % SCHEDULERS

    @cached_property
    def warp_split_k(self) -> int:
        """Number of warps that share the same 16 columns at the end of N, and take turns at the k tiles."""
        return SCHEDULERS // self.split_n_warps if self.split_n_warps else 1

    @cached_property
    def consumer_warps(self) -> int:
        """Number of consumer warps."""
        return self.n_warps + (self.warp_split_k - 1) * self.split_n_warps

    @cached_property
    def consumer_groups(self) -> int:
        """Number of consumer warpgroups."""
        return self.consumer_warps // 4

    @cached_property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return (self.consumer_groups + self.other_groups) * WARPGROUP

    @cached_property
    def other_groups(self) -> int:
        """Number of warpgroups that contain the producer warp and the decoder warps."""
        return -(-(1 + self.decoder_groups * self.a_full_arrivals) // 4)

    @cached_property
    def decoder_groups(self) -> int:
        """Number of groups of decoder warps, which rearrange activations."""
        return DECODERS[self.tile_m][0] if self.rearranges else 0

    @cached_property
    def a_full_arrivals(self) -> int:
        """Number of warps that fill a stage of activations: all warps of a decoder group, or the producer warp."""
        return DECODERS[self.tile_m][1] if self.rearranges else 1

    @cached_property
    def rearranges(self) -> bool:
        """Return True if the CTAs rearrange the activations, False if an earlier kernel does."""
        return rearranges(self.tile_m, self.split_k)

    @cached_property
    def by_codes(self) -> bool:
        """Return True if the tile has one row of FP4 activations, whose codes are multiplied without decoding."""
        return by_codes(self.operands, self.tile_m, self.tile_n)

    @cached_property
    def by_warp(self) -> bool:
        """Return True if the MMAs are warp-level (mma.sync), not wgmma."""
        return self.tile_m <= WARP_MMA_TILE_M and not self.by_codes

    @cached_property
    def registers(self) -> tuple[int, int]:
        """Registers per thread, for (consumers, other warps). In total, they do not exceed the registers that the CTA
        got at launch."""
        if self.rearranges:
            return REGISTERS[self.consumer_groups, self.other_groups]
        return {2: (232, 40) if self.expert_k is not None else (240, 24), 4: (112, 32)}[self.consumer_groups]

    @cached_property
    def max_k_groups(self) -> int:
        """Largest number of k groups of activations that a lane of a decoder warp loads before it stores the first of
        these k groups. Registers limit this number."""
        return 4 // self.other_groups // (1 if self.operands.prologue_gate is None else 2)

    @cached_property
    def reduces(self) -> bool:
        """Return True if partial sums are reduced through shared memory: with clusters, if warps divide k, or for tiles
        of one row."""
        return self.split_k > 1 or self.warp_split_k > 1 or self.tile_m == 1

    @cached_property
    def partial_sums(self) -> PartialSums:
        """Layout of a CTA's partial sums in shared memory, where they overwrite the weight's codes."""
        return PartialSums(self.tile_m, self.tile_n, self.split_n_warps * WARP_N, self.warp_split_k)

    @cached_property
    def acc_size(self) -> int:
        """Number of accumulators per thread."""
        return mma_n(self.tile_m) // 2

    @cached_property
    def m_atoms(self) -> int:
        """Number of groups of eight tokens of a tile, rounded up."""
        return mma_n(self.tile_m) // ATOM_M

    @cached_property
    def arranged(self) -> ActivationLayout:
        """Layout of the rearranged activations."""
        return self.operands.arranged(by_warp=self.by_warp, k_tile=K_TILE)

    @cached_property
    def ahead(self) -> int | None:
        """Number of the weight's k tiles that are copied before the previous kernel ends, or None if the producer need
        not wait for that kernel. The number is used only with ``pdl``.

        If memory bandwidth limits the speed, the whole pipeline is filled. If decoding limits the speed, only one k
        tile is copied: more k tiles would not be used sooner, and would delay the previous kernel's loads and stores.
        """
        if self.rearranges and not self.static_weight:
            return 0
        if self.tile_m >= AHEAD_TILE_M[self.rearranges] and self.expert_k is None:
            return 1
        return None if self.rearranges else self.stages

    @cached_property
    def first_k_tiles(self) -> int:
        """Number of k tiles of activations that all consumers rearrange together before they multiply.

        For 16-bit activations, this is one k tile per decoder group, which makes a layer of an 8B model 1 µs faster on
        an H200. For FP4 activations the number is 0, because the speed does not improve.
        """
        few = self.tile_m <= WARP_MMA_TILE_M and self.operands.a_layout is None
        return self.decoder_groups if few else 0

    @cached_property
    def sends(self) -> bool:
        """Return True if the CTAs of a cluster send their partial sums to each other, False if they read each other's
        partial sums."""
        return sends(self.tile_m, self.split_k)

    def workspace_bytes(self, k: int, num_ctas: int, *, has_partial_sums: bool) -> int:
        """Return the bytes of workspace per m tile.

        The workspace holds the rearranged activations. With experts over k, the workspace also holds the factors. If
        ``has_partial_sums``, the workspace also holds the partial sums and flags of ``num_ctas`` CTAs. Each of these
        buffers is contiguous over all m tiles.
        """
        activations = self.tile_m * -(-k // K_TILE) * self.arranged.token_bytes
        factors = 0 if self.expert_k is None else self.tile_m * (k // self.expert_k) * 4
        partial_sums = num_ctas * (self.tile_n * self.tile_m * 4 + self.consumer_groups * 4) if has_partial_sums else 0
        return activations + factors + partial_sums

    @cached_property
    def weight_tile(self) -> WeightTile:
        """Layout of a k tile of the weight. A stage holds one such k tile."""
        return WeightTile(self.operands.fmt, self.operands.layout, self.tile_n)

    @cached_property
    def slices_per_stage(self) -> int:
        """Number of slices (64 elements along K) that a stage of activations holds."""
        return slices_per_stage(self.tile_m, self.expert_k)

    @cached_property
    def a_stage_bytes(self) -> int:
        """Bytes of a stage of activations, without factors."""
        if self.by_codes:
            return CODE_ATOMS * ATOM_BYTES
        return ROW_STAGE_BYTES if self.tile_m == 1 else self.slices_per_stage * self.tile_m * ATOM_ROW_BYTES

    @cached_property
    def zeros_bytes(self) -> int:
        """Number of zero bytes before the stages of activations. In tiles of one row, mma.sync reads these zeros."""
        return ZEROS_BYTES if self.tile_m == 1 and not self.by_codes else 0

    @cached_property
    def cleared_bytes(self) -> int:
        """Bytes of shared memory that a CTA sets to zero when it starts.

        If codes are multiplied (``by_codes``), all stages of activations are set to zero, because later copies write
        only codes and factors. Otherwise, only the bytes before the stages are set to zero.
        """
        return self.a_stages * self.a_stage_bytes if self.by_codes else self.zeros_bytes

    @cached_property
    def a_bytes(self) -> int:
        """Bytes of the stages of activations, and of the zero bytes before the stages. The sum is rounded up to the
        alignment of the scale tiles, which follow."""
        size = self.zeros_bytes + self.a_stages * self.a_stage_bytes
        return -(-size // SCALE_TILE_BYTES) * SCALE_TILE_BYTES

    @cached_property
    def factor_bytes(self) -> int:
        """Bytes of an expert's factors in each stage of activations, or 0 without experts."""
        return 0 if self.expert_k is None else self.tile_m * 4

    @cached_property
    def smem_bytes(self) -> int:
        """Bytes of shared memory that a CTA takes."""
        stages = self.stages * self.weight_tile.size_bytes + self.a_bytes + self.a_stages * self.factor_bytes
        return stages + (self.partial_sums.received_bytes(self.split_k) if self.sends else 0) + BARRIER_BYTES

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Return the reason that the kernel cannot run on ``arch``, or None."""
        every_n = tiles_n(self.tile_m)
        if self.tile_n not in every_n or (not self.split_k and self.tile_n != every_n[0]):
            return f"with tile_m {self.tile_m}, tile_n has to be one of {every_n}; without clusters, the first of these"
        if self.tile_m == 1 and (self.operands.fmt != NVFP4 or not self.split_k):
            return "tiles of one row need an NVFP4 weight and clusters (of one CTA or more)"
        if self.operands.prologue_quant is not None and (self.tile_m > MAX_QUANTISED_M or not self.rearranges):
            return f"CTAs quantise activations only if they rearrange them and tile_m is at most {MAX_QUANTISED_M}"
        if self.split_k and self.tile_m > MAX_CLUSTER_M:
            return f"with clusters, tile_m has to be at most {MAX_CLUSTER_M}"
        if self.reduces and self.partial_sums.size_bytes > self.stages * self.weight_tile.code_bytes:
            return f"{self.partial_sums.size_bytes} bytes of partial sums exceed {self.stages} stages of codes"
        if self.expert_k is not None and (self.expert_k % K_TILE or self.tile_m not in EXPERT_TILES_M or self.split_k):
            return (
                f"GEMMs over experts need an expert_k that is a multiple of {K_TILE}, a tile_m that is one of "
                f"{EXPERT_TILES_M}, and no clusters"
            )
        if self.expert_k is not None and self.epilogue != Epilogue(self.epilogue.out_dtype):
            return "GEMMs over experts have no bias, and alpha has a factor per token and expert"
        reason = self.operands.reason_unsupported(self.arranged, self.weight_tile, self.smem_bytes, arch)
        return reason or self.epilogue.reason_unsupported()


def plan(
    *,
    operands: FP4Operands,
    epilogue: Epilogue,
    expert_k: int | None = None,
    tile_m: int,
    tile_n: int | None = None,
    split_k: int = 0,
    arch: Arch,
    pdl: bool,
    static_weight: bool = False,
    prefetches: bool = False,
) -> Config | None:
    """Return the configuration with the most stages that fit into the shared memory of ``arch``, or None if none fits.

    If ``tile_n`` is None, the largest supported value is used. The other arguments are attributes of ``Config``.
    """
    tile_n = tile_n or tiles_n(tile_m)[0]
    is_static = static_weight and pdl and rearranges(tile_m, split_k)
    prefetches = prefetches and tile_m <= MAX_PREFETCHING_M and rearranges(tile_m, split_k)
    # With up to 32 tokens per tile, the number of stages of activations equals the number of stages of the weight. For
    # larger tiles the number is fixed, because shared memory holds only 8, 7 or 5 slices of 64, 128 or 256 tokens.
    fixed = None if tile_m <= 32 else {64: 8, 128: 7, 256: 5}[tile_m] // slices_per_stage(tile_m, expert_k)
    sizes = expert_k, tile_m, tile_n, split_k
    hints = pdl, is_static, prefetches
    return first_fit((Config(operands, epilogue, *sizes, n, fixed or n, *hints) for n in range(6, 2, -1)), arch)
