"""Configuration of the FP4 GEMM by wgmma: no device code."""

from collections import namedtuple
from dataclasses import dataclass
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
    WeightTile,
)
from torch_cute_ops.kernels.common.fp4.operands import FP4Operands
from torch_cute_ops.runtime.arch import Arch

QUARTERS: Final = 4
"""Quarters of a chunk: 64 elements of k, 128 bytes of activations a token."""
TILES: Final = {1: 4, 8: 4, 16: 4, 32: 4, 64: 4, 128: 2, 256: 2}
"""Tokens of a tile, and its consumer warpgroups at most: as many as leave registers for the accumulators."""
_ROWS_BY_WARP: Final = (256, 224, 208, 192, 160)
ROWS: Final = {1: _ROWS_BY_WARP, 8: _ROWS_BY_WARP, 16: (256, 192), 32: (256, 192)}
"""Rows of the weight of a tile, by tokens, where there is a choice: whole bands by ``mma.sync``, whole warpgroups by
wgmma."""
BAND_ROWS: Final = 16
"""Rows of a band: the M side of an ``mma.sync``, or what a warp has of a wgmma."""
TEAMS: Final = {1: (3, 1), 8: (3, 1), 16: (3, 2), 32: (1, 4)}
"""Teams that rearrange activations, a chunk each at a time, and warps of a team, which take turns with its groups of
eight tokens, by tokens of a tile. Single warps would take longer for a chunk of 32 tokens than the consumers do."""
REGISTERS: Final = {(3, 1): (88, 128), (4, 1): (88, 128), (3, 2): (88, 104), (4, 2): (80, 80)}
"""Registers per thread of consumers and of other warps, by the warpgroups of both, where the CTAs rearrange the
activations."""
BARRIER_BYTES: Final = 512
CHUNK_BLOCKS: Final = K_TILE // 16
"""Blocks of NVFP4 of a chunk."""
ROW_BYTES: Final = K_TILE * 2
"""A chunk of one row of activations, float16."""
ROW_STAGE_BYTES: Final = 640
"""A stage of one row: a chunk, and an fp32 factor for each block. Whole lines, for ``ZEROS_AT``."""
CODE_TILES: Final = 3
"""Tiles of a stage of one row of codes: the B operands of half a chunk each, and the factors."""
ZEROS_AT: Final = -192
"""Where 128 bytes of zeros lie, from the stages of one row on: in the other half of a line, against bank conflicts."""
ZEROS_BYTES: Final = 256
"""What lies before these stages."""
ARRANGED_TOKENS: Final = 32
"""Most tokens of a tile that a CTA rearranges itself."""
PREFETCHING_TOKENS: Final = 16
"""Most tokens of a tile behind which something is brought into L2: a layer of an 8B model is 3.4, 2.6 and 2.4 µs faster
with it on an H100, with 1, 8 and 16 rows, and with 32 0.8 slower."""
QUANTISED_TOKENS: Final = 8
"""Most tokens of a tile whose activations the CTAs quantise: lanes that have a block's pieces lie as far apart for the
consumers, which rearrange the first chunks, as for the helpers."""
AHEAD_TOKENS: Final = {True: 16, False: 64}
"""Tokens of a tile from which on one chunk of the weight is copied ahead, not all that fit, where the CTAs rearrange
the activations, and where another kernel does. On an H200 a layer of an 8B model in W4A4 takes 3.6, 1.3, 4.4 and 4 µs
less for it at 16, 32, 64 and 128 rows, with 16-bit activations up to 2. (One row would take 1.5 more; and 16 rows of a
32B or a 70B model, where another kernel rearranges them for some matrices, 3 more: there memory is the limit.)"""
CLUSTER_TOKENS: Final = 128
"""Most tokens of a tile whose accumulators fit in place of the codes, for a cluster to add up."""
SPLITS: Final = (1, 2, 3, 4, 5, 6, 8)
"""CTAs of a cluster."""
EXPERT_TILES: Final = (16, 32, 64, 128)
"""Tokens of a tile over experts, where a thread has two sets of accumulators."""


def rows_of(tokens: int) -> tuple[int, ...]:
    """Rows of the weight of a tile with this many tokens: what consumer warpgroups have, and fewer for clusters that
    then use more SMs."""
    return ROWS.get(tokens, (TILES[tokens] * WGMMA_M,))


def mma_tokens(tokens: int) -> int:
    """Columns of the MMAs of a tile with this many tokens: one for each, and at least those of one MMA."""
    return max(tokens, ATOM_M)


def arranges(tokens: int, splits: int) -> bool:
    """Whether the CTAs of a cluster rearrange the activations themselves."""
    return splits > 0 and tokens <= ARRANGED_TOKENS


def by_codes(operands: FP4Operands, tokens: int, rows: int) -> bool:
    """Whether a tile of one row is multiplied as codes, by FP8 MMAs of warpgroups: in FP4, beside whole warpgroups of
    rows of the weight."""
    return tokens == 1 and operands.decodes_both and rows % WGMMA_M == 0


def sends(tokens: int, splits: int) -> bool:
    """Whether the CTAs of a cluster send their sums, into room of their own, and do not read those of others. There is
    room for it with few tokens, though a stage less may fit: a layer of an 8B model is 1 to 2 µs faster with it on an
    H100 with 16 rows, and 5 with 32."""
    return splits > 1 and arranges(tokens, splits)


def span_of(tokens: int, width: int | None) -> int:
    """Quarters of a chunk in a stage of activations."""
    if tokens <= 32:
        return QUARTERS
    # Two are 1.5 % faster (measured on an H200); over experts there are registers for one only.
    return 2 if tokens == 64 and width is None else 1


class Arguments(namedtuple("Arguments", "a a_scale b b_scale alpha bias out workspace prefetch workers shares")):
    """The run-time arguments, in order. Sizes: M rows of activations, N rows of the weight, K elements of a sum, E
    experts with K / E elements each, if there are any; N is a multiple of 8, K of 32.

    Attributes:
        a, a_scale, b, b_scale: as ``FP4Operands`` describes them.
        alpha: (1,) or (N,) float32, or ``None``: as ``Config.epilogue`` says. With experts (M, E) float32, any strides.
        bias: (N,), or ``None``.
        out: (M, N), written.
        workspace: ``Config.workspace_bytes`` for each tile of tokens, uint8, written; ``None`` where the CTAs
            rearrange the activations themselves.
        prefetch: (rows, bytes) uint8, contiguous, which ``Config.prefetches`` is about; or ``None``.
        workers: CTAs that share the sums of a tile of tokens, a number; unused with clusters.
        shares: whether they exchange partial sums, 0 or 1.
    """


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel. N, K, M and the number of workers are not.

    Attributes:
        operands: formats of the activations and of the weight.
        epilogue: what is done to the sums. Over experts, whose factors are not a part of it, only its dtype.
        width: elements of k of an expert, for which each token has a factor. ``None``: there are no experts.
        tokens: rows of activations of a tile. 1: one row, by the MMAs of ``row`` or ``codes``.
        rows: rows of the weight of a tile.
        splits: CTAs of a cluster, which share the k of a tile. 0: workers share all tiles.
        stages: stages of the weight's ring.
        token_stages: stages of the activations' ring.
        pdl: whether launches are programmatic dependent launches.
        static_weight: whether the weight was complete before the previous launch, where that makes a difference: with
            ``pdl``, where no kernel of its own rearranges the activations.
        prefetches: whether the producer, when it has started its last copy, has something brought into L2: there too,
            with few tokens.
    """

    operands: FP4Operands
    epilogue: Epilogue
    width: int | None
    tokens: int
    rows: int
    splits: int
    stages: int
    token_stages: int
    pdl: bool
    static_weight: bool
    prefetches: bool = False

    @property
    def bands(self) -> int:
        """Bands of a tile."""
        return self.rows // BAND_ROWS

    @property
    def shared_bands(self) -> int:
        """The last bands, of which each has warps on several schedulers, so that all schedulers have equal work."""
        return self.bands % SCHEDULERS

    @property
    def turns(self) -> int:
        """Warps of a shared band, which take its chunks in turn."""
        return SCHEDULERS // self.shared_bands if self.shared_bands else 1

    @property
    def warps(self) -> int:
        """Consumer warps."""
        return self.bands + (self.turns - 1) * self.shared_bands

    @property
    def groups(self) -> int:
        """Consumer warpgroups."""
        return self.warps // 4

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return (self.groups + self.other_groups) * WARPGROUP

    @property
    def other_groups(self) -> int:
        """Warpgroups of the producer and the teams."""
        return -(-(1 + self.teams * self.members) // 4)

    @property
    def teams(self) -> int:
        """Teams that rearrange activations."""
        return TEAMS[self.tokens][0] if self.arranges else 0

    @property
    def members(self) -> int:
        """Warps that make a stage of activations full: those of a team, or the producer."""
        return TEAMS[self.tokens][1] if self.arranges else 1

    @property
    def arranges(self) -> bool:
        """Whether the CTAs rearrange the activations themselves, without a kernel before this one."""
        return arranges(self.tokens, self.splits)

    @property
    def by_codes(self) -> bool:
        """Whether one row is multiplied as codes."""
        return by_codes(self.operands, self.tokens, self.rows)

    @property
    def by_warp(self) -> bool:
        """Whether the MMAs are those of warps (mma.sync), not those of warpgroups."""
        return self.tokens <= WARP_MMA_TILE_M and not self.by_codes

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of consumers, and of other warps: together no more than at the launch."""
        if self.arranges:
            return REGISTERS[self.groups, self.other_groups]
        return {2: (232, 40) if self.width is not None else (240, 24), 4: (112, 32)}[self.groups]

    @property
    def pieces_together(self) -> int:
        """Most pieces of activations that a lane of a team loads before it stores, for lack of registers."""
        return 4 // self.other_groups // (1 + self.operands.gated)

    @property
    def adds_up(self) -> bool:
        """Whether sums go through shared memory: those of clusters, of warps that share bands, and of one row."""
        return self.splits > 1 or self.turns > 1 or self.tokens == 1

    @property
    def sum_tile(self) -> PartialSums:
        """The accumulators of a CTA, in place of the codes, where they go through shared memory."""
        return PartialSums(self.tokens, self.rows, self.shared_bands * BAND_ROWS, self.turns)

    @property
    def sums(self) -> int:
        """Accumulators of a thread."""
        return mma_tokens(self.tokens) // 2

    @property
    def groups_of_tokens(self) -> int:
        """Groups of tokens that are rearranged together."""
        return mma_tokens(self.tokens) // ATOM_M

    @property
    def arranged(self) -> ActivationLayout:
        """How the activations are rearranged."""
        return self.operands.arranged(by_warp=self.by_warp, k_tile=K_TILE)

    @property
    def ahead(self) -> int | None:
        """With ``pdl``, chunks of the weight that are copied before the kernel before this one has ended; ``None``: the
        producer does not wait for it at all. As many as the ring holds, where memory is the limit. Where decoding is,
        one: the others would not be used any sooner, and delay what that kernel reads and writes."""
        if self.arranges and not self.static_weight:
            return 0
        if self.tokens >= AHEAD_TOKENS[self.arranges] and self.width is None:
            return 1
        return None if self.arranges else self.stages

    @property
    def first_chunks(self) -> int:
        """Chunks of activations that the consumers rearrange together, before they have any of the weight: of 16 bits,
        one for each team (a layer of an 8B model is 1 µs faster on an H200; with FP4 activations it is no faster)."""
        return self.teams if self.tokens <= WARP_MMA_TILE_M and self.operands.a_layout is None else 0

    @property
    def sends(self) -> bool:
        """Whether the CTAs of a cluster send their sums."""
        return sends(self.tokens, self.splits)

    def workspace_bytes(self, k: int, workers: int, *, shares: bool) -> int:
        """Bytes of workspace for each tile of tokens: the rearranged activations, over experts the factors, and, if
        ``workers`` leave partial sums for each other, these and their flags. Each of these parts is contiguous over all
        tiles."""
        activations = self.tokens * -(-k // K_TILE) * self.arranged.token_bytes
        factors = 0 if self.width is None else self.tokens * (k // self.width) * 4
        return activations + factors + (workers * (self.rows * self.tokens * 4 + self.groups * 4) if shares else 0)

    @property
    def chunks(self) -> WeightTile:
        """Chunks of the weight, one a stage."""
        return WeightTile(self.operands.fmt, self.operands.layout, self.rows)

    @property
    def span(self) -> int:
        """Quarters of a chunk in a stage of activations."""
        return span_of(self.tokens, self.width)

    @property
    def quarter_bytes(self) -> int:
        """Activations of a quarter."""
        return self.tokens * ATOM_ROW_BYTES

    @property
    def token_bytes(self) -> int:
        """Activations of a stage."""
        if self.by_codes:
            return CODE_TILES * ATOM_BYTES
        return ROW_STAGE_BYTES if self.tokens == 1 else self.span * self.quarter_bytes

    @property
    def zeros_bytes(self) -> int:
        """Zeros before the stages of activations, which ``mma.sync`` with one row reads."""
        return ZEROS_BYTES if self.tokens == 1 and not self.by_codes else 0

    @property
    def cleared_bytes(self) -> int:
        """Bytes of shared memory that a CTA clears when it starts: the zeros before the stages of activations; or, by
        codes, all of these stages, to which codes and factors are then written."""
        return self.token_stages * self.token_bytes if self.by_codes else self.zeros_bytes

    @property
    def token_ring_bytes(self) -> int:
        """The stages of activations, and the zeros before them: whole tiles of scales, which follow."""
        size = self.zeros_bytes + self.token_stages * self.token_bytes
        return -(-size // SCALE_TILE_BYTES) * SCALE_TILE_BYTES

    @property
    def factor_bytes(self) -> int:
        """Factors of an expert, beside a stage of activations."""
        return 0 if self.width is None else self.tokens * 4

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        stages = self.stages * self.chunks.size_bytes + self.token_ring_bytes + self.token_stages * self.factor_bytes
        return stages + (self.sum_tile.received_bytes(self.splits) if self.sends else 0) + BARRIER_BYTES

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if self.rows not in rows_of(self.tokens) or (not self.splits and self.rows != rows_of(self.tokens)[0]):
            return f"tiles of {self.tokens} tokens have {rows_of(self.tokens)} rows, the first without clusters"
        if self.tokens == 1 and (self.operands.fmt != NVFP4 or not self.splits):
            return "tiles of one row have a weight in NVFP4, and clusters or CTAs of their own"
        if self.operands.quantises is not None and (self.tokens > QUANTISED_TOKENS or not self.arranges):
            return f"tiles quantise their activations with at most {QUANTISED_TOKENS} tokens, which they rearrange"
        if self.splits and self.tokens > CLUSTER_TOKENS:
            return f"clusters have tiles of at most {CLUSTER_TOKENS} tokens"
        if self.adds_up and self.sum_tile.size_bytes > self.stages * self.chunks.code_bytes:
            return f"{self.sum_tile.size_bytes} bytes of sums do not fit in place of {self.stages} stages of codes"
        if self.width is not None and (self.width % K_TILE or self.tokens not in EXPERT_TILES or self.splits):
            return f"over experts, widths are multiples of {K_TILE}, tiles have {EXPERT_TILES} tokens, without clusters"
        if self.width is not None and self.epilogue != Epilogue(self.epilogue.out_dtype):
            return "over experts there is no bias, and alpha is that of tokens and experts"
        reason = self.operands.reason_unsupported(self.arranged, self.chunks, self.smem_bytes, arch)
        return reason or self.epilogue.reason_unsupported()


def plan(
    *,
    operands: FP4Operands,
    epilogue: Epilogue,
    width: int | None = None,
    tokens: int,
    rows: int | None = None,
    splits: int = 0,
    arch: Arch,
    pdl: bool,
    static_weight: bool = False,
    prefetches: bool = False,
) -> Config | None:
    """The configuration with the most stages that fit into an SM of ``arch``; ``None`` if none does. ``rows``:
    ``None`` for the most."""
    rows = rows or rows_of(tokens)[0]
    ahead = static_weight and pdl and arranges(tokens, splits)
    prefetches = prefetches and tokens <= PREFETCHING_TOKENS and arranges(tokens, splits)
    # As many chunks in flight as in the ring of the weight, in wide tiles fewer.
    fixed = None if tokens <= 32 else {64: 8, 128: 7, 256: 5}[tokens] // span_of(tokens, width)
    sizes, every = (width, tokens, rows, splits), range(6, 2, -1)
    return first_fit((Config(operands, epilogue, *sizes, n, fixed or n, pdl, ahead, prefetches) for n in every), arch)
