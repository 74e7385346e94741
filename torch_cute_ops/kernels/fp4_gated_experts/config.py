"""Configuration of the gated FP4 GEMM over experts: no device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Final, Literal

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.core.layouts import WARP_MMA_TILE_M, WGMMA_M, first_fit
from torch_cute_ops.kernels.common.experts.layouts import M_TILE_LIST_BYTES, MAX_SCANNED_TOKENS, TokenListLayout
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE, ActivationLayout, FP4Operands, WeightTile
from torch_cute_ops.runtime.arch import Arch

CONSUMER_WARPS: Final = 16
"""Consumer warps."""
TILES_N: Final = (32, 64, 128, 256)
"""Rows of the weight of a slice: half of them are of the gate, half of up."""
SPLIT_K: Final = {32: (1,), 64: (1, 2), 128: (1, 4), 256: (1, 4)}
"""Parts of k that a worker may have of a task, by rows."""
TILES_M: Final = (8, 16, 24, 32)
"""Tokens of a unit."""
TOKEN_BLOCKS: Final = (32, 64, 128, 256, 512)
"""Tokens of a tile, of which there are lists."""
PIECES_PER_THREAD: Final = 2
"""Pieces of activations that a thread rearranges, about."""
MAX_LIST_CTAS: Final = 64
"""Most CTAs for each expert that rearrange activations."""
BARRIER_BYTES: Final = 512
MAX_TWO_ACC_TILE_M: Final = 24
"""Most tokens of a unit whose sums fit into registers twice."""
TOKEN_GAP_BYTES: Final = 64
"""Bytes between the tokens of a stage where warps multiply by themselves, against bank conflicts."""


class Arguments(
    namedtuple(
        "Arguments",
        "a a_scale b b_scale routing alpha bias global_scale "
        "swiglu_alpha swiglu_beta swiglu_limit y scale workspace num_ctas",
    )
):
    """The run-time arguments, in order. Sizes: M rows of activations, H elements of k, E experts with I columns each.

    Attributes:
        a, a_scale: as ``FP4Operands`` describes them.
        b: (E, 2 · I, H / 2) codes, contiguous: of each expert the rows of the gate, then those of up.
        b_scale: their scales: linear (E, 2 · I, H / B), or tiled over (E · 2 · I, H).
        routing: (M, E) float32, any strides; a pair where it is zero is not computed.
        alpha: float32 factors of the sums: (E,), or (E, 2) for gate and up; or ``None``.
        bias: (E, 2 · I) float32 or 16 bits, added to a sum behind its factor; or ``None``.
        global_scale: float32, (1,) or (E,), the encode scale of the result; or ``None``.
        swiglu_alpha, swiglu_beta, swiglu_limit: of the general gate, +inf for no limit; or ``None``.
        y: (M, E · I) in 16 bits, or (M, E · I / 2) codes, written where a token is routed.
        scale: block scales of the codes, written there too; padding is zero. ``None`` for 16 bits.
        workspace: ``Config.workspace_bytes``, uint8, written.
        num_ctas: CTAs for each tile of tokens.
    """


@dataclass(frozen=True)
class GatedEpilogue:
    """What becomes of an expert's sums.

    ``g = gate · alpha + bias``, ``u`` likewise, each operation rounded to fp32; then SwiGLU in fp32; and a rounding to
    16 bits, or the quantisation of blocks.

    Attributes:
        out: dtype of the result, or the format of its codes.
        out_layout: layout of the block scales; ``None`` for 16 bits.
        alpha: factors: one for an expert, or one for its gate and one for up; ``None``: there are none.
        bias_dtype: dtype of the biases; ``None``: there are none.
        global_scale: of the result: one, or one for each expert; ``None``: there is none.
        swiglu: whether the gate is the general one, with ``swiglu_alpha`` and the rest, and not ``silu``.
    """

    out: torch.dtype | FP4Format
    out_layout: ScaleLayout | None = None
    alpha: Literal["expert", "expert_half"] | None = None
    bias_dtype: torch.dtype | None = None
    global_scale: Literal["one", "expert"] | None = None
    swiglu: bool = False

    @property
    def block(self) -> int:
        """Columns that are stored together."""
        return self.out.block_size if isinstance(self.out, FP4Format) else 8

    def reason_unsupported(self) -> str | None:
        """Why sums are not finished so; ``None`` if they are."""
        is_fp4 = isinstance(self.out, FP4Format)
        if is_fp4 == (self.out_layout is None):
            return f"a result in {self.out} with scales in {self.out_layout}: codes have scales, others none"
        if self.global_scale is not None and not (isinstance(self.out, FP4Format) and self.out.has_global_scale):
            return f"a result in {self.out} has no global scale"
        return None


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel. I, M and the number of experts are not.

    Attributes:
        operands: formats of the activations and of the weight.
        epilogue: what becomes of the sums.
        width: elements of k.
        tile_n: rows of the weight of a slice.
        tile_m: tokens of a unit.
        split_k: parts of k; a task is divided between workers, if at all, between as many as it has parts at the most.
            Sums are added up part by part, whoever has them.
        token_block: tokens of a tile.
        stages: chunks in flight, of all slots.
        pdl: whether launches are programmatic dependent launches.
    """

    operands: FP4Operands
    epilogue: GatedEpilogue
    width: int
    tile_n: int
    tile_m: int
    split_k: int
    token_block: int
    stages: int
    pdl: bool

    @property
    def out_columns(self) -> int:
        """Columns of the result of a slice."""
        return self.tile_n // 2

    @property
    def n_warps(self) -> int:
        """Warps that share the rows of a slice: each has 8 of the gate, and 8 of up."""
        return self.tile_n // 16

    @property
    def pipelines(self) -> int:
        """Warps that share the k of the same rows, each with a ring and a producer warp of its own."""
        return CONSUMER_WARPS // self.n_warps

    @property
    def producer_warps(self) -> int:
        """Producer warps, in whole warpgroups."""
        return -(-self.pipelines // 4) * 4

    @property
    def threads(self) -> int:
        """Threads of a CTA of the GEMM."""
        return 32 * (CONSUMER_WARPS + self.producer_warps)

    @property
    def epilogue_threads(self) -> int:
        """Threads that finish a unit."""
        return 32 * self.n_warps

    @property
    def by_warp(self) -> bool:
        """Whether the MMAs are those of warps (mma.sync), not those of warpgroups."""
        return self.tile_m <= WARP_MMA_TILE_M

    @property
    def k_tiles(self) -> int:
        """Chunks of k."""
        return -(-self.width // K_TILE)

    @property
    def scans(self) -> bool:
        """Whether the CTAs of the GEMM scan the routing themselves: then there are no lists, and they start to read
        weights while the activations are rearranged."""
        return self.token_block <= MAX_SCANNED_TOKENS

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of consumers, and of other warps."""
        return (104, 56) if self.producer_warps == 4 else (96, 48)

    @property
    def arranged(self) -> ActivationLayout:
        """How the activations are rearranged."""
        return self.operands.arranged(by_warp=self.by_warp, k_tile=K_TILE)

    @property
    def lists(self) -> TokenListLayout:
        """The lists of tokens, if there are any."""
        return TokenListLayout(self.token_block, self.tile_m, 0, self.arranged.token_bytes)

    @property
    def token_pitch(self) -> int:
        """Bytes from a token of a stage to the next."""
        return self.arranged.token_bytes + (TOKEN_GAP_BYTES if self.by_warp else 0)

    @property
    def lag(self) -> int:
        """Chunks that a producer warp starts before it waits for the activations of one, for warpgroups. (Before it
        waits for a stage it hands over all of them.)"""
        return max(1, self.stages // self.pipelines - 2)

    @property
    def chunks(self) -> WeightTile:
        """Chunks of the gate's rows, or of up's: two for each stage."""
        return WeightTile(self.operands.fmt, self.operands.layout, self.out_columns)

    @property
    def stage_bytes(self) -> int:
        """A chunk of both operands."""
        return 2 * self.chunks.size_bytes + self.tile_m * self.token_pitch

    @property
    def acc_bytes(self) -> int:
        """Sums of a unit."""
        return self.tile_m * self.tile_n * 4

    @property
    def smem_acc_bytes(self) -> int:
        """Sums of a unit that warps leave for others with the same rows."""
        return self.acc_bytes if self.pipelines > 1 else 0

    @property
    def value_pitch(self) -> int:
        """Elements from a token's results to the next token's: four more than it has, to avoid bank conflicts."""
        return self.out_columns + 4

    @property
    def value_bytes(self) -> int:
        """Results of a unit."""
        return self.tile_m * self.value_pitch * 4

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA of the GEMM."""
        return (
            self.stages * self.stage_bytes + self.smem_acc_bytes + self.value_bytes + M_TILE_LIST_BYTES + BARRIER_BYTES
        )

    @property
    def partial_sum_bytes(self) -> int:
        """What a worker leaves for another one: a unit's sums, and a flag for each warp that has some of them."""
        return self.acc_bytes + 4 * self.n_warps if self.split_k > 1 else 0

    def workspace_bytes(self, m: int, experts: int, num_ctas: int) -> int:
        """Bytes of workspace: the rearranged activations; for each tile and expert the list of its tokens, if there are
        lists; and for each tile what ``num_ctas`` leave. Its parts are each contiguous over all tiles."""
        arranged = m * self.k_tiles * self.arranged.token_bytes
        lists = 0 if self.scans else experts * self.lists.size_bytes
        return arranged + -(-m // self.token_block) * (lists + num_ctas * self.partial_sum_bytes)

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if not self.by_warp and self.tile_n < WGMMA_M:
            return f"{self.tile_m} tokens are multiplied by warpgroups, which take {WGMMA_M} rows; not {self.tile_n}"
        if self.pipelines == 1 and self.split_k > 1 and self.tile_m > MAX_TWO_ACC_TILE_M:
            return f"warps have no registers for the sums of two parts of {self.tile_m} tokens"
        if self.out_columns % self.epilogue.block:
            return f"a slice has {self.out_columns} columns, but blocks of the result have {self.epilogue.block}"
        reason = self.epilogue.reason_unsupported()
        return reason or self.operands.reason_unsupported(self.arranged, self.chunks, self.smem_bytes, arch)


def plan(
    *,
    operands: FP4Operands,
    epilogue: GatedEpilogue,
    width: int,
    tile_n: int,
    tile_m: int,
    split_k: int,
    token_block: int,
    arch: Arch,
    pdl: bool,
) -> Config | None:
    """The configuration with the most stages that fit into an SM of ``arch``, up to six for each slot; ``None`` if not
    even two do."""
    pipelines = CONSUMER_WARPS * 16 // tile_n
    sizes, every = (width, tile_n, tile_m, split_k, token_block), range(6 * pipelines, pipelines, -pipelines)
    return first_fit((Config(operands, epilogue, *sizes, stages, pdl) for stages in every), arch)
