"""Configuration of the FP4 GEMM over experts that computes only routed pairs. No device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Final

import torch

from torch_cute_ops.formats.experts import USUAL_EXPERTS
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.core.layouts import WARP_MMA_TILE_M, WGMMA_M, first_fit
from torch_cute_ops.kernels.common.experts.layouts import (
    MAX_SCANNED_TOKENS,
    PAIR_BYTES,
    TokenListLayout,
    m_tile_list_bytes,
)
from torch_cute_ops.kernels.common.fp4.layouts import (
    CODE_MMA_K,
    K_TILE,
    ActivationLayout,
    FP4Operands,
    WeightTile,
    reason_undecodable,
)
from torch_cute_ops.runtime.arch import Arch

TILE_N: Final = WGMMA_M
"""Number of weight rows of an n tile: the rows that a warpgroup multiplies."""
N_WARPS: Final = TILE_N // 16
"""Number of warps that share the rows of an n tile. Each multiplies 16 rows."""
EXPERT_K_MULTIPLE: Final = 64
"""Divisor of every expert's width: half a scale tile of MXFP4, or a whole scale tile of NVFP4."""
PRODUCER_WARPS: Final = 4
"""Number of producer warps: one for each pipeline, rounded up to a whole warpgroup."""
TILES_M: Final = (8, 16, 24, 32)
"""Supported ``tile_m``, the number of tokens of an m tile."""
TOKEN_BLOCKS: Final = (16, 32, 64, 128, 256, 512)
"""Supported sizes of token blocks, in tokens. Larger blocks leave room for fewer stages."""
PIPELINE_SHAPES: Final = ((K_TILE, 4, 1), (K_TILE // 2, 4, 1), (K_TILE, 2, 2))
"""Possible (elements of a k tile, number of pipelines, number of warps that divide the k of the same rows). ``plan``
uses the first combination that fits into shared memory."""
SMALL_PIPELINE_SHAPES: Final = ((K_TILE // 2, 2, 2), (K_TILE, 1, 4), (K_TILE // 2, 1, 4))
"""Further combinations for GPUs without wgmma, some of which have only 99 KB of shared memory per CTA. ``plan`` uses
them if no combination of ``PIPELINE_SHAPES`` fits."""
CODE_PIPELINE_SHAPES: Final = (*PIPELINE_SHAPES, (K_TILE // 2, 2, 2), (K_TILE, 1, 4), (K_TILE // 2, 1, 2))
"""Possible combinations if block-scaled MMAs multiply FP4 codes. Each warp multiplies whole steps of 64 elements."""
CLASSES: Final = 8
"""Number of classes of experts among which work is divided. The class of an expert is its index modulo ``CLASSES``."""
BARRIER_BYTES: Final = 512


class Arguments(namedtuple("Arguments", "a a_scale b b_scale alpha bias out workspace num_ctas")):
    """Run-time arguments, in order, for M rows of activations, N rows of the weight, and E experts with
    ``Config.expert_k`` elements of k each. N is a multiple of 8.

    Attributes:
        a, a_scale, b, b_scale: operands, as ``FP4Operands`` describes them.
        alpha: (M, E) float32 factors with any strides. Pairs with a factor of zero are not computed.
        bias: (E, N) in float32 or the dtype of ``out``, or None. The bias is added to an expert's accumulator before
            the multiplication by the factor.
        out: (M, N) in ``Config.out_dtype``, written.
        workspace: ``Config.workspace_bytes`` uint8, written.
        num_ctas: int32, number of CTAs per token block, from the method ``Config.num_ctas``.
    """


@dataclass(frozen=True)
class Config:
    """Static properties of the FP4 GEMM over experts. N, M and the number of experts are run-time values.

    Attributes:
        operands: formats of the activations and of the weight.
        out_dtype: dtype of the result.
        expert_k: number of elements along K that each expert owns.
        k_tile: number of elements along K of a stage.
        tile_m: number of tokens of an m tile.
        token_block: number of tokens of a token block.
        pipelines: number of m tiles that a CTA computes at the same time.
        k_warps: number of warps that divide the k of 16 weight rows of an m tile.
        stages: number of stages, over all pipelines.
        classes: number of classes of experts. With several classes, a CTA computes some classes of one or two n tiles.
            With one class, a CTA computes all experts of one n tile.
        has_wgmma: True if the GPU has wgmma instructions.
        has_setmaxnreg: True if warps can exchange registers (setmaxnreg). For desktop Blackwell, ptxas accepts
            setmaxnreg, but emits no instruction for it.
        pdl: True to launch with programmatic dependent launch.
        bias_dtype: dtype of the experts' biases, or None without biases.
        max_experts: capacity of the lists of m tiles, in experts.
    """

    operands: FP4Operands
    out_dtype: torch.dtype
    expert_k: int
    k_tile: int
    tile_m: int
    token_block: int
    pipelines: int
    k_warps: int
    stages: int
    classes: int
    has_wgmma: bool
    has_setmaxnreg: bool
    pdl: bool
    bias_dtype: torch.dtype | None = None
    max_experts: int = USUAL_EXPERTS

    @property
    def threads(self) -> int:
        """Number of threads of a CTA in the GEMM kernel."""
        return 32 * (self.consumer_warps + PRODUCER_WARPS)

    @property
    def chain_warps(self) -> int:
        """Number of warps that compute the same rows, over all pipelines. These warps form a chain."""
        return self.pipelines * self.k_warps

    @property
    def consumer_warps(self) -> int:
        """Number of consumer warps."""
        return N_WARPS * self.chain_warps

    @property
    def by_warp(self) -> bool:
        """True if warps issue the MMAs (mma.sync), False if warpgroups do (wgmma)."""
        return self.tile_m <= WARP_MMA_TILE_M or not self.has_wgmma

    @property
    def expert_k_tiles(self) -> int:
        """Number of k tiles of an expert."""
        return -(-self.expert_k // self.k_tile)

    @property
    def spread(self) -> bool:
        """True if every second expert begins in the middle of a scale tile."""
        return self.expert_k % (TILE_BLOCKS * self.operands.fmt.block_size) != 0

    @property
    def lists(self) -> TokenListLayout:
        """Layout of the lists of tokens."""
        return TokenListLayout(self.token_block, self.tile_m, self.expert_k_tiles, self.arranged.token_bytes)

    @property
    def scans(self) -> bool:
        """True if CTAs of the GEMM scan the factors themselves. These CTAs can start to copy weights before the lists
        exist."""
        return self.token_block <= MAX_SCANNED_TOKENS

    @property
    def registers(self) -> tuple[int, int] | None:
        """Numbers of registers per thread, for (consumer warps, other warps), or None without setmaxnreg."""
        return (104, 56) if self.has_setmaxnreg else None

    @property
    def arranged(self) -> ActivationLayout:
        """Layout of the rearranged activations."""
        return self.operands.arranged(by_warp=self.by_warp, k_tile=self.k_tile)

    @property
    def weight_tile(self) -> WeightTile:
        """Layout of a k tile of the weight. A stage holds one such k tile."""
        return WeightTile(self.operands.fmt, self.operands.layout, TILE_N, self.k_tile, self.spread)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: a k tile of both operands, and two words (offset and factor) per token."""
        return self.weight_tile.size_bytes + self.tile_m * (self.arranged.token_bytes + PAIR_BYTES)

    @property
    def acc_bytes(self) -> int:
        """Bytes of the accumulators of a token block, for one n tile."""
        return self.token_block * TILE_N * 4

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory that a CTA of the GEMM takes."""
        return self.stages * self.stage_bytes + self.acc_bytes + m_tile_list_bytes(self.max_experts) + BARRIER_BYTES

    def num_ctas(self, n: int, sms: int) -> int:
        """Return the number of CTAs per token block: one per SM. With a single class, or with more n tiles than SMs,
        return one CTA per n tile."""
        n_tiles = -(-n // TILE_N)
        return n_tiles if self.classes == 1 or n_tiles > sms else min(sms, n_tiles * self.classes)

    def workspace_bytes(self, m: int, experts: int, num_ctas: int) -> int:
        """Return the size of the workspace in bytes.

        The workspace holds one list of tokens per token block and expert. If CTAs share n tiles, the workspace also
        holds partial sums and a flag per token block and CTA. All lists are contiguous, all partial sums are
        contiguous, and all flags are contiguous.
        """
        partial_sums = num_ctas * (self.acc_bytes + 4) if self.classes > 1 else 0
        return -(-m // self.token_block) * (experts * self.lists.size_bytes + partial_sums)

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Return the reason that the kernel cannot run on ``arch``, or None."""
        if not (self.by_warp or arch.has_wgmma):
            return f"{arch.name} has no wgmma instructions"
        if self.operands.by_codes and self.k_tile // CODE_MMA_K % self.k_warps:
            return f"{self.k_warps} warps cannot divide the {self.k_tile // CODE_MMA_K} steps of a k tile"
        return (
            self.operands.reason_codes_unsupported(arch)
            or reason_expert_k_unsupported(self.expert_k)
            or self.weight_tile.reason_not_copied
            or self.arranged.reason_unsupported()
            or reason_undecodable(self.operands.dtype, self.operands.fmt, self.smem_bytes, arch)
        )


def reason_expert_k_unsupported(expert_k: int) -> str | None:
    """Return the reason that no kernel supports experts with this many elements of k, or None."""
    if expert_k % EXPERT_K_MULTIPLE:
        return f"an expert's width is {expert_k}; it has to be a multiple of {EXPERT_K_MULTIPLE}"
    return None


def plan(
    *,
    operands: FP4Operands,
    out_dtype: torch.dtype,
    expert_k: int,
    tile_m: int,
    token_block: int,
    classes: int,
    arch: Arch,
    pdl: bool,
    bias_dtype: torch.dtype | None = None,
    max_experts: int = USUAL_EXPERTS,
) -> Config | None:
    """Return the configuration with the first shape for which two stages per pipeline fit into the shared memory of
    ``arch``, and with the most stages that fit. Return None if no shape fits."""
    shapes = PIPELINE_SHAPES if arch.has_wgmma else PIPELINE_SHAPES + SMALL_PIPELINE_SHAPES
    if operands.by_codes:
        shapes = CODE_PIPELINE_SHAPES
    every = (
        (expert_k, k_tile, tile_m, token_block, pipelines, k_warps, stages, classes)
        for k_tile, pipelines, k_warps in shapes
        for stages in range(4 * pipelines, pipelines, -pipelines)
    )
    has = arch.has_wgmma, arch.has_wgmma or arch.has_tcgen05
    return first_fit((Config(operands, out_dtype, *sizes, *has, pdl, bias_dtype, max_experts) for sizes in every), arch)
