"""Configuration of the FP4 GEMM over experts that skips pairs: no device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Final

import torch

from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.core.layouts import WARP_MMA_TILE_M, WGMMA_M, first_fit
from torch_cute_ops.kernels.common.experts.layouts import (
    M_TILE_LIST_BYTES,
    MAX_SCANNED_TOKENS,
    PAIR_BYTES,
    TokenListLayout,
)
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE, ActivationLayout, FP4Operands, WeightTile
from torch_cute_ops.runtime.arch import Arch

TILE_N: Final = WGMMA_M
"""Rows of the weight of a CTA: those of a warpgroup."""
N_WARPS: Final = TILE_N // 16
"""Warps that share the rows of a unit, 16 rows each."""
WIDTH_MULTIPLE: Final = 64
"""What an expert's width is a multiple of: half a tile of MXFP4's scales, a whole one of NVFP4's."""
PRODUCER_WARPS: Final = 4
"""Producer warps: one for each slot."""
TILES_M: Final = (8, 16, 24, 32)
"""Tokens of a unit."""
TOKEN_BLOCKS: Final = (16, 32, 64, 128, 256, 512)
"""Tokens of a tile. A wider tile has fewer stages."""
PIPELINE_SHAPES: Final = ((K_TILE, 4, 1), (K_TILE // 2, 4, 1), (K_TILE, 2, 2))
"""Elements of k of a chunk, slots (units that a CTA works on at a time), and warps that share the k of 16 rows.
``plan`` takes the first that fits."""
CLASSES: Final = 8
"""Classes of experts, by their number modulo this, by which work is divided."""
BARRIER_BYTES: Final = 512


class Arguments(namedtuple("Arguments", "a a_scale b b_scale alpha bias out workspace num_ctas")):
    """The run-time arguments, in order. Sizes: M rows of activations, N rows of the weight, E experts with
    ``Config.width`` elements of k each, K elements in all; N is a multiple of 8.

    Attributes:
        a, a_scale, b, b_scale: as ``FP4Operands`` describes them.
        alpha: (M, E) float32, any strides; a pair whose factor is zero is not computed.
        bias: (E, N) float32 or the result's dtype, added to an expert's sum before the factor; or ``None``.
        out: (M, N), written.
        workspace: ``Config.workspace_bytes``, uint8, written.
        num_ctas: CTAs for each tile of tokens, ``Config.num_ctas``.
    """


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel. N, M and the number of experts are not.

    Attributes:
        operands: formats of the activations and of the weight.
        out_dtype: dtype of the result.
        width: elements of k of an expert.
        k_tile: elements of k of a stage.
        tile_m: tokens of a unit.
        token_block: tokens of a tile.
        pipelines: units that a CTA works on at a time.
        k_warps: warps that share the k of 16 rows of a unit.
        stages: chunks in flight, of all slots.
        classes: number of classes of experts. A CTA has some classes of one slice of rows, or of two slices. 1: each
            CTA has a slice.
        pdl: whether launches are programmatic dependent launches.
        bias_dtype: dtype of the experts' biases; ``None``: there are none.
    """

    operands: FP4Operands
    out_dtype: torch.dtype
    width: int
    k_tile: int
    tile_m: int
    token_block: int
    pipelines: int
    k_warps: int
    stages: int
    classes: int
    pdl: bool
    bias_dtype: torch.dtype | None = None

    @property
    def threads(self) -> int:
        """Threads of a CTA of the GEMM."""
        return 32 * (self.consumer_warps + PRODUCER_WARPS)

    @property
    def chain_warps(self) -> int:
        """Warps that have the same rows, of all slots."""
        return self.pipelines * self.k_warps

    @property
    def consumer_warps(self) -> int:
        """Consumer warps."""
        return N_WARPS * self.chain_warps

    @property
    def by_warp(self) -> bool:
        """Whether the MMAs are those of warps (mma.sync), not those of warpgroups."""
        return self.tile_m <= WARP_MMA_TILE_M

    @property
    def expert_k_tiles(self) -> int:
        """Chunks of an expert."""
        return -(-self.width // self.k_tile)

    @property
    def spread(self) -> bool:
        """Whether every second expert begins in the middle of a tile of scales."""
        return self.width % (TILE_BLOCKS * self.operands.fmt.block_size) != 0

    @property
    def lists(self) -> TokenListLayout:
        """The lists of tokens."""
        return TokenListLayout(self.token_block, self.tile_m, self.expert_k_tiles, self.arranged.token_bytes)

    @property
    def scans(self) -> bool:
        """Whether the CTAs of the GEMM scan the factors themselves, and so start to read weights before the lists are
        there."""
        return self.token_block <= MAX_SCANNED_TOKENS

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of consumers, and of other warps."""
        return 104, 56

    @property
    def arranged(self) -> ActivationLayout:
        """How the activations are rearranged."""
        return self.operands.arranged(by_warp=self.by_warp, k_tile=self.k_tile)

    @property
    def chunks(self) -> WeightTile:
        """Chunks of the weight, one a stage."""
        return WeightTile(self.operands.fmt, self.operands.layout, TILE_N, self.k_tile, self.spread)

    @property
    def stage_bytes(self) -> int:
        """A chunk of both operands, and the pairs of the unit's tokens."""
        return self.chunks.size_bytes + self.tile_m * (self.arranged.token_bytes + PAIR_BYTES)

    @property
    def acc_bytes(self) -> int:
        """Sums of a tile."""
        return self.token_block * TILE_N * 4

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA of the GEMM."""
        return self.stages * self.stage_bytes + self.acc_bytes + M_TILE_LIST_BYTES + BARRIER_BYTES

    def num_ctas(self, n: int, sms: int) -> int:
        """CTAs that share the work on a tile: one per SM, unless a CTA would have parts of more than two slices."""
        n_tiles = -(-n // TILE_N)
        return n_tiles if self.classes == 1 or n_tiles > sms else min(sms, n_tiles * self.classes)

    def workspace_bytes(self, m: int, experts: int, num_ctas: int) -> int:
        """Bytes of workspace: for each tile and expert the list of its tokens; and, if CTAs share slices, for each tile
        and worker its partial sums, and a flag. Each of these parts is contiguous over all tiles."""
        partial_sums = num_ctas * (self.acc_bytes + 4) if self.classes > 1 else 0
        return -(-m // self.token_block) * (experts * self.lists.size_bytes + partial_sums)

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        reason = self.operands.reason_unsupported(self.arranged, self.chunks, self.smem_bytes, arch)
        return reason_width_unsupported(self.width) or reason


def reason_width_unsupported(width: int) -> str | None:
    """Why there is no kernel for experts of this width; ``None`` if there is."""
    if width % WIDTH_MULTIPLE:
        return f"an expert's width is {width}; it has to be a multiple of {WIDTH_MULTIPLE}"
    return None


def plan(
    *,
    operands: FP4Operands,
    out_dtype: torch.dtype,
    width: int,
    tile_m: int,
    token_block: int,
    classes: int,
    arch: Arch,
    pdl: bool,
    bias_dtype: torch.dtype | None = None,
) -> Config | None:
    """The configuration with the first of ``PIPELINE_SHAPES``, and then the most stages, that fits into an SM of
    ``arch``; ``None`` if none does with two stages a slot."""
    every = (
        (width, k_tile, tile_m, token_block, pipelines, k_warps, stages, classes)
        for k_tile, pipelines, k_warps in PIPELINE_SHAPES
        for stages in range(4 * pipelines, pipelines, -pipelines)
    )
    return first_fit((Config(operands, out_dtype, *sizes, pdl, bias_dtype) for sizes in every), arch)
