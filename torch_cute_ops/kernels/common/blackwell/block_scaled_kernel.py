"""What kernels of block-scaled ``tcgen05.mma`` share: the roles of warps, the ring of stages and its barriers, and what
each role does with a chunk.

A kernel derives from ``BlockScaledKernel``. Which tiles a CTA has, which chunks are of a tile, and what becomes of its
sums is the kernel's own: its ``_produce``, ``_issue_mmas``, ``_run_epilogue`` and ``_load_linear_scales`` go through
tiles and chunks, each in the same order.
"""

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32, const_expr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.blackwell import tcgen05
from torch_cute_ops.kernels.common.blackwell.block_scaled_mma import BlockScaledMma
from torch_cute_ops.kernels.common.blackwell.layouts import (
    ALIGNMENT,
    EPILOGUE_WARPS,
    SCALE_LOADER_WARPS,
    SCALE_STAGES,
    BlockScaledConfig,
)
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.pipeline import Pipeline, next_stage

WARP = 32
PRODUCER_WARP, MMA_WARP = EPILOGUE_WARPS, EPILOGUE_WARPS + 1
LEADER = 0  # the CTA of a pair that issues MMAs


@dataclass(frozen=True)
class Smem:
    """Shared memory: the stages, and barriers. A stage is full, in this CTA or its pair's second, or free; columns of
    scales are free; sums are complete, or their columns free. ``columns`` is where those of tensor memory begin."""

    stages: cute.Pointer
    pipeline: Pipeline
    peer_full: cute.Pointer
    scales_empty: cute.Pointer
    acc_pipeline: Pipeline
    tmem: cute.Pointer


class ScaleTiles(NamedTuple):
    """Tiles of an operand's scales that a stage needs: of 128 rows each, from ``row_tile`` on, of which so many
    ``exist``; and the cache policy of their copies."""

    scales: cute.Tensor
    row_tile: Any
    exist: Any
    policy: int | None


class MmaState(NamedTuple):
    """Where the multiplying thread is in its rings: a stage, and a set of columns for scales."""

    stage: Int32
    parity: Int32
    scale_stage: Int32
    scale_parity: Int32


class BlockScaledKernel:
    """The kernel of one ``BlockScaledConfig``."""

    def __init__(self, config: BlockScaledConfig):
        self.config: Any = config
        self.stage = config.stage
        self.mma = BlockScaledMma(self.stage)

    # Roles

    @cute.jit
    def _set_up(self, tid) -> Smem:
        """Allocate shared memory and tmem of tensor memory, and initialise the barriers. Others see it when the CTA
        has met."""
        c = self.config
        smem = self._allocate()
        if cute.arch.make_warp_uniform(tid // WARP) == MMA_WARP:
            tcgen05.allocate(smem.tmem, c.tmem_columns, self.stage.cta_group)
        if tid == 0:
            self._init_barriers(smem)
        cute.arch.mbarrier_init_fence()
        return smem

    def _allocate(self) -> Smem:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, ALIGNMENT)
        barriers = cute.recast_ptr(base + c.stages * self.stage.size_bytes, dtype=Int64)
        peers = c.stages * (self.stage.cta_group - 1)
        counts = (c.stages, peers, c.stages, SCALE_STAGES, c.accumulators, c.acc_empty_barriers)
        full, peer_full, empty, scales_empty, acc_full, acc_empty, end = (
            barriers + start for start in itertools.accumulate(counts, initial=0)
        )
        return Smem(
            stages=base,
            pipeline=Pipeline(full, empty, c.stages),
            peer_full=peer_full,
            scales_empty=scales_empty,
            acc_pipeline=Pipeline(acc_full, acc_empty, c.accumulators),
            tmem=cute.recast_ptr(end, dtype=Uint32),
        )

    def _init_barriers(self, smem: Smem) -> None:
        c = self.config
        for i in range(c.stages):
            cute.arch.mbarrier_init(smem.pipeline.full + i, 1 + self.stage.has_scale_loaders)
            if self.stage.cta_group == 2:
                cute.arch.mbarrier_init(smem.peer_full + i, 1)
            cute.arch.mbarrier_init(smem.pipeline.empty + i, 1)
        for i in range(SCALE_STAGES):
            cute.arch.mbarrier_init(smem.scales_empty + i, 1)
        for i in range(c.accumulators):
            cute.arch.mbarrier_init(smem.acc_pipeline.full + i, 1)
        for i in range(c.acc_empty_barriers):
            cute.arch.mbarrier_init(smem.acc_pipeline.empty + i, EPILOGUE_WARPS * self.stage.cta_group)

    @cute.jit
    def _sync(self):
        """A barrier of the CTA, or of a pair."""
        if const_expr(self.stage.cta_group > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _run_roles(self, tid, maps, work) -> tuple[Smem, Uint32]:
        """Set the CTA up, and do what the thread's warp does. All warps but the multiplying one wait for the kernels
        before this one first. Returns where the tmem of tensor memory begin, too."""
        c = self.config
        smem = self._set_up(tid)
        self._sync()
        warp = cute.arch.make_warp_uniform(tid // WARP)
        tmem = Uint32(cute.make_tensor(smem.tmem, cute.make_layout(1))[0])
        if warp == PRODUCER_WARP:
            if const_expr(c.pdl):
                cute.arch.griddepcontrol_wait()
            self._produce(*maps, work, smem)
            if const_expr(c.pdl):
                cute.arch.griddepcontrol_launch_dependents()
        elif warp == MMA_WARP:
            if tid % WARP == 0:
                self._issue_mmas(tmem, work, smem)
        elif warp < EPILOGUE_WARPS:
            if const_expr(c.pdl):
                cute.arch.griddepcontrol_wait()
            self._run_epilogue(tmem, tid, work, smem)
        elif const_expr(self.stage.has_scale_loaders):
            scale_loader = tid - WARP * (MMA_WARP + 1)
            if const_expr(c.pdl):
                cute.arch.griddepcontrol_wait()
            self._load_linear_scales(scale_loader, work, smem)
        cute.arch.sync_warp()
        return smem, tmem

    @cute.jit
    def _free_tmem(self, tid, tmem):
        """Give the tmem back, when the CTA has met: all loads of them are done."""
        if cute.arch.make_warp_uniform(tid // WARP) == MMA_WARP:
            tcgen05.free(tmem, self.config.tmem_columns, self.stage.cta_group)

    # Chunks

    def _stage_at(self, stage, smem: Smem) -> cute.Pointer:
        return smem.stages + cute.assume(stage * self.stage.size_bytes, divby=ALIGNMENT)

    @cute.jit
    def _copy_scale_tiles(self, m_side: ScaleTiles, n_side: ScaleTiles, first, size, base, barrier):
        """Start the copies of a stage's scales, if they are in tiles: ``size`` bytes of each row of tiles from tile
        ``first`` on. The stage's barrier expects all of its bytes."""
        stage = self.stage
        if const_expr(stage.has_scale_loaders):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, stage.code_bytes)
        else:
            with cute.arch.elect_one():
                expected = stage.code_bytes + size * (n_side.exist + m_side.exist)
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, expected)
                at = base + stage.code_bytes
                for tiles, count in ((n_side, stage.scale_row_tiles), (m_side, 1)):
                    self.mma.copy_scale_tiles(
                        tiles.scales, tiles.row_tile, count, tiles.exist, first, size, at, barrier, tiles.policy
                    )
                    at = at + stage.n_scale_bytes

    @cute.jit
    def _load_linear_scales_of_k_tile(
        self, turn, lane, m_side: tuple, n_side: tuple, first, blocks, stage, parity, smem
    ) -> tuple:
        """An arranging warp: where it is the chunk's ``turn``, write linear scales to its stage in the order of tiles.
        So the warps have several chunks in flight. The next turn, stage and parity."""
        if turn == 0:
            barriers = smem.pipeline.empty + stage, parity, smem.pipeline.full + stage
            self.mma.store_linear_scales(m_side, n_side, first, blocks, lane, self._stage_at(stage, smem), *barriers)
        else:
            # A warp that left out phases could take one for the next but one, which has the same parity.
            smem.pipeline.wait_empty(stage, parity)
        return (turn + SCALE_LOADER_WARPS - 1) % SCALE_LOADER_WARPS, *smem.pipeline.next(stage, parity)

    def _first_mma_state(self) -> MmaState:
        # With parity 1, tmem that were never used count as free.
        return MmaState(Int32(0), Int32(0), Int32(0), Int32(1))

    def _multiply_k_tile(self, at: MmaState, tmem, acc, num_mmas, first_n, adds, phase, smem) -> MmaState:
        """The multiplying thread: a chunk's MMAs, ``num_mmas`` of them if so many are in a chunk, once its operands and
        tmem for its scales are there; what these take is free when the MMAs are done. Other arguments are those of
        ``BlockScaledMma.multiply``."""
        c = self.config
        pair = self.stage.cta_group == 2
        ptx.wait(smem.scales_empty + at.scale_stage, at.scale_parity)
        smem.pipeline.wait_full(at.stage, at.parity)
        if pair:
            ptx.wait(smem.peer_full + at.stage, at.parity)
        tcgen05.fence_after()
        scales = tmem + Uint32(c.acc_columns + at.scale_stage * self.stage.scale_columns)
        stage = Uint32(smem.stages.toint()) + Uint32(at.stage * self.stage.size_bytes)
        self.mma.multiply(acc, stage, scales, num_mmas, first_n, adds, phase)
        tcgen05.commit(smem.pipeline.empty + at.stage, self.stage.cta_group, pair)
        tcgen05.commit(smem.scales_empty + at.scale_stage, self.stage.cta_group, False)
        return MmaState(
            *smem.pipeline.next(at.stage, at.parity), *next_stage(at.scale_stage, at.scale_parity, SCALE_STAGES)
        )

    def _signal_acc_loaded(self, barrier, tid) -> None:
        """A storing warp has loaded what others may overwrite now."""
        tcgen05.fence_before()
        cute.arch.sync_warp()
        leads = Uint32(tid % WARP == 0)
        if self.stage.cta_group == 2:
            ptx.arrive_at_if(barrier, Uint32(LEADER), leads)
        else:
            ptx.arrive_if(barrier, leads)


def as_bytes(scales: cute.Tensor) -> cute.Tensor:
    """A matrix of scales as bytes."""
    return cute.make_tensor(cute.recast_ptr(scales.iterator, dtype=Uint8), scales.layout)
