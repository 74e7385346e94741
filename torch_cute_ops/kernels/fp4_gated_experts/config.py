"""Configuration of the FP4 GEMM over experts with a gate. No device code."""

from dataclasses import dataclass
from typing import Final

from torch_cute_ops.formats.experts import USUAL_EXPERTS
from torch_cute_ops.kernels.common.core.layouts import WARP_MMA_TILE_M, WGMMA_M, first_fit
from torch_cute_ops.kernels.common.experts.gated_layouts import Arguments, GatedEpilogue
from torch_cute_ops.kernels.common.experts.layouts import (
    MAX_SCANNED_TOKENS,
    TokenListLayout,
    m_tile_list_bytes,
)
from torch_cute_ops.kernels.common.fp4.layouts import (
    K_TILE,
    ActivationLayout,
    FP4Operands,
    WeightTile,
    reason_undecodable,
)
from torch_cute_ops.runtime.arch import Arch

__all__ = ["Arguments", "Config", "GatedEpilogue", "plan"]

CONSUMER_WARPS: Final = 16
"""Usual number of consumer warps of a CTA."""
SHAPES: Final = ((CONSUMER_WARPS, K_TILE),)
"""Possible (number of consumer warps, elements of a k tile) on GPUs with wgmma."""
SMALL_SHAPES: Final = (
    *SHAPES,
    (CONSUMER_WARPS, K_TILE // 2),
    (CONSUMER_WARPS // 2, K_TILE),
    (CONSUMER_WARPS // 2, K_TILE // 2),
)
"""Possible combinations on GPUs without wgmma, some of which have only 99 KB of shared memory per CTA. ``plan`` uses
the first combination that fits."""
REGISTERS: Final = {(16, 4): (104, 56), (16, 8): (96, 48), (8, 4): (224, 56)}
"""Registers per thread as (consumer warps, other warps), keyed by (number of consumer warps, number of producer warps).
In total, they do not exceed the registers that the CTA got at launch."""
TILES_N: Final = (32, 64, 128, 256)
"""Supported ``tile_n``, the number of weight rows of an n tile: half gate, half up."""
SPLIT_K: Final = {32: (1,), 64: (1, 2), 128: (1, 4), 256: (1, 4)}
"""Supported ``split_k``, keyed by ``tile_n``."""
TILES_M: Final = (8, 16, 24, 32)
"""Supported ``tile_m``, the number of tokens of an m tile."""
TOKEN_BLOCKS: Final = (32, 64, 128, 256, 512)
"""Supported sizes of token blocks, in tokens."""
PIECES_PER_THREAD: Final = 2
"""Approximate number of k groups of activations that a thread rearranges."""
MAX_LIST_CTAS: Final = 64
"""Largest number of CTAs per expert and token block in the first kernel."""
BARRIER_BYTES: Final = 512
MAX_TWO_ACC_TILE_M: Final = {True: 24, False: 16}
"""Largest ``tile_m`` for which two sets of accumulators fit into registers, with setmaxnreg and without."""
MAX_EARLY_TERMS_TILE_M: Final = 24
"""Largest ``tile_m`` for which warps that issue the MMAs have registers for the factors and biases of a work tile."""
TOKEN_GAP_BYTES: Final = 64
"""Number of unused bytes between the tokens of a stage, to avoid bank conflicts. Used for mma.sync with 16-bit
operands."""


@dataclass(frozen=True)
class Config:
    """Static properties of the FP4 GEMM over experts with a gate. I, M and the number of experts are run-time values.

    Attributes:
        operands: formats of the activations and of the weight.
        epilogue: epilogue of a work tile.
        k: number of elements along K.
        k_tile: number of elements along K of a stage.
        tile_n: number of weight rows of an n tile.
        tile_m: number of tokens of an m tile.
        split_k: number of parts of k, and largest number of CTAs that share a work tile. Accumulators are added up part
            by part, even if one CTA computes several parts.
        token_block: number of tokens of a token block.
        pipelines: number of pipelines: number of warps that divide the k of the same rows. Each of these warps
            multiplies from its own pipeline, which has its own producer warp.
        stages: number of stages, over all pipelines.
        has_wgmma: True if the GPU has wgmma instructions.
        has_setmaxnreg: True if warps can exchange registers (setmaxnreg). For desktop Blackwell, ptxas accepts
            setmaxnreg, but emits no instruction for it.
        pdl: True to launch with programmatic dependent launch.
        max_experts: capacity of the lists of m tiles, in experts.
    """

    operands: FP4Operands
    epilogue: GatedEpilogue
    k: int
    k_tile: int
    tile_n: int
    tile_m: int
    split_k: int
    token_block: int
    pipelines: int
    stages: int
    has_wgmma: bool
    has_setmaxnreg: bool
    pdl: bool
    max_experts: int = USUAL_EXPERTS

    @property
    def out_columns(self) -> int:
        """Number of columns of the result that an n tile computes."""
        return self.tile_n // 2

    @property
    def n_warps(self) -> int:
        """Number of warps that divide the rows of an n tile. Each computes 8 rows of gate and 8 rows of up."""
        return self.tile_n // 16

    @property
    def consumer_warps(self) -> int:
        """Number of consumer warps of a CTA."""
        return self.n_warps * self.pipelines

    @property
    def producer_warps(self) -> int:
        """Number of producer warps, rounded up to whole warpgroups."""
        return -(-self.pipelines // 4) * 4

    @property
    def threads(self) -> int:
        """Number of threads of a CTA in the GEMM kernel."""
        return 32 * (self.consumer_warps + self.producer_warps)

    @property
    def epilogue_threads(self) -> int:
        """Number of threads that run the epilogue of a work tile."""
        return 32 * self.n_warps

    @property
    def by_warp(self) -> bool:
        """True if warps issue the MMAs (mma.sync), False if warpgroups do (wgmma)."""
        return self.tile_m <= WARP_MMA_TILE_M or not self.has_wgmma

    @property
    def k_tiles(self) -> int:
        """Number of k tiles that cover K."""
        return -(-self.k // self.k_tile)

    @property
    def scans(self) -> bool:
        """True if CTAs of the GEMM scan the routing themselves. No lists are then written, and the CTAs start to copy
        weights while the first kernel still rearranges the activations."""
        return self.token_block <= MAX_SCANNED_TOKENS

    @property
    def registers(self) -> tuple[int, int] | None:
        """Numbers of registers per thread, for (consumer warps, other warps), or None without setmaxnreg."""
        return REGISTERS[self.consumer_warps, self.producer_warps] if self.has_setmaxnreg else None

    @property
    def loads_terms_late(self) -> bool:
        """True if the factors and biases of a work tile are loaded after its accumulators are complete.

        Otherwise they are loaded before, to hide their latency. If warps issue the MMAs, loading them before would
        spill registers in two cases: in large tiles, and if the MMAs multiply codes and a thread holds two sets of
        accumulators.
        """
        has_two_accs = self.pipelines == 1 and self.split_k > 1
        return self.by_warp and (self.tile_m > MAX_EARLY_TERMS_TILE_M or (self.operands.by_codes and has_two_accs))

    @property
    def arranged(self) -> ActivationLayout:
        """Layout of the rearranged activations."""
        return self.operands.arranged(by_warp=self.by_warp, k_tile=self.k_tile)

    @property
    def lists(self) -> TokenListLayout:
        """Layout of the lists of tokens, which are written unless ``scans``."""
        return TokenListLayout(self.token_block, self.tile_m, 0, self.arranged.token_bytes)

    @property
    def token_pitch(self) -> int:
        """Distance in bytes between neighbouring tokens of a stage."""
        has_gap = self.by_warp and not self.operands.by_codes
        return self.arranged.token_bytes + (TOKEN_GAP_BYTES if has_gap else 0)

    @property
    def lag(self) -> int:
        """Number of k tiles between the start of a producer warp's activation copies (``cp.async``, for wgmma) and its
        wait for these copies.

        If no stage is empty, the producer waits for the activations of all started k tiles.
        """
        return max(1, self.stages // self.pipelines - 2)

    @property
    def weight_tile(self) -> WeightTile:
        """Layout of a k tile of the weight: the rows of gate, or the rows of up. A stage holds a k tile of gate and a k
        tile of up."""
        return WeightTile(self.operands.fmt, self.operands.layout, self.out_columns, self.k_tile)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: a k tile of both operands."""
        return 2 * self.weight_tile.size_bytes + self.tile_m * self.token_pitch

    @property
    def acc_bytes(self) -> int:
        """Bytes of the accumulators of a work tile."""
        return self.tile_m * self.tile_n * 4

    @property
    def smem_acc_bytes(self) -> int:
        """Bytes of shared memory for the accumulators that a warp passes to the next warp of its chain."""
        return self.acc_bytes if self.pipelines > 1 else 0

    @property
    def value_pitch(self) -> int:
        """Distance between the results of consecutive tokens, in elements: the columns of a token, plus four to avoid
        bank conflicts."""
        return self.out_columns + 4

    @property
    def value_bytes(self) -> int:
        """Bytes of shared memory for the results of a work tile."""
        return self.tile_m * self.value_pitch * 4

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory that a CTA of the GEMM takes."""
        lists_bytes = m_tile_list_bytes(self.max_experts)
        return self.stages * self.stage_bytes + self.smem_acc_bytes + self.value_bytes + lists_bytes + BARRIER_BYTES

    @property
    def partial_sum_bytes(self) -> int:
        """Bytes that a CTA writes to the workspace for another CTA: partial sums of a work tile, and one flag per warp
        along N."""
        return self.acc_bytes + 4 * self.n_warps if self.split_k > 1 else 0

    def workspace_bytes(self, m: int, experts: int, num_ctas: int) -> int:
        """Return the size of the workspace in bytes.

        The workspace holds the rearranged activations, and partial sums per token block and CTA. Unless ``scans``, the
        workspace also holds one list of tokens per token block and expert. Each of these three buffers is contiguous
        over all token blocks.
        """
        arranged = m * self.k_tiles * self.arranged.token_bytes
        lists = 0 if self.scans else experts * self.lists.size_bytes
        return arranged + -(-m // self.token_block) * (lists + num_ctas * self.partial_sum_bytes)

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Return the reason that the kernel cannot run on ``arch``, or None."""
        if not (self.by_warp or arch.has_wgmma):
            return f"{arch.name} has no wgmma instructions"
        if self.tile_m > WARP_MMA_TILE_M and self.tile_n < WGMMA_M:
            return f"tile_n is {self.tile_n}; with tile_m {self.tile_m} it must be {WGMMA_M} or more"
        if 8 * (2 * self.stages + self.consumer_warps) > BARRIER_BYTES:
            return f"the mbarriers of {self.stages} stages and {self.consumer_warps} warps exceed {BARRIER_BYTES} bytes"
        most = MAX_TWO_ACC_TILE_M[self.has_setmaxnreg]
        if self.pipelines == 1 and self.split_k > 1 and self.tile_m > most:
            return f"tile_m is {self.tile_m}; with one pipeline and split_k it must be at most {most}"
        if self.out_columns % self.epilogue.block:
            return f"an n tile has {self.out_columns} columns of the result, not whole blocks of {self.epilogue.block}"
        return (
            self.operands.reason_codes_unsupported(arch)
            or self.epilogue.reason_unsupported()
            or self.weight_tile.reason_not_copied
            or self.arranged.reason_unsupported()
            or reason_undecodable(self.operands.dtype, self.operands.fmt, self.smem_bytes, arch)
        )


def plan(
    *,
    operands: FP4Operands,
    epilogue: GatedEpilogue,
    k: int,
    tile_n: int,
    tile_m: int,
    split_k: int,
    token_block: int,
    arch: Arch,
    pdl: bool,
    max_experts: int = USUAL_EXPERTS,
) -> Config | None:
    """Return the configuration with the first shape for which two stages per pipeline fit into the shared memory of
    ``arch``, and with the most stages that fit, at most six per pipeline. Return None if no shape fits."""
    every = (
        (k, k_tile, tile_n, tile_m, split_k, token_block, pipelines, stages)
        for warps, k_tile in (SHAPES if arch.has_wgmma else SMALL_SHAPES)
        if (pipelines := warps * 16 // tile_n)
        for stages in range(6 * pipelines, pipelines, -pipelines)
    )
    has = arch.has_wgmma, arch.has_wgmma or arch.has_tcgen05
    return first_fit((Config(operands, epilogue, *sizes, *has, pdl, max_experts) for sizes in every), arch)
