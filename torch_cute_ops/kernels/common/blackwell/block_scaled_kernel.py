"""Base of kernels with block-scaled ``tcgen05.mma``: roles of warps, pipelines, and the work of each role on a k tile.

A kernel derives from ``BlockScaledKernel`` and defines ``_produce``, ``_issue_mmas``, ``_run_epilogue`` and
``_load_linear_scales``. Each of these goes through the CTA's tiles and their k tiles in the same order.
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
LEADER = 0  # CTA of a pair that issues the MMAs


@dataclass(frozen=True)
class Smem:
    """Shared memory.

    Attributes:
        stages: codes and scales of the k tiles in flight.
        pipeline: pipeline of the stages.
        peer_full: mbarriers, one per stage: the stage of the pair's second CTA is full.
        scales_empty: mbarriers, one per set of tensor-memory columns for scales.
        acc_pipeline: pipeline of the accumulators in tensor memory.
        tmem: address of the allocated columns of tensor memory.
    """

    stages: cute.Pointer
    pipeline: Pipeline
    peer_full: cute.Pointer
    scales_empty: cute.Pointer
    acc_pipeline: Pipeline
    tmem: cute.Pointer


class ScaleTiles(NamedTuple):
    """Scale tiles of an operand that a stage needs, 128 rows each.

    Attributes:
        scales: matrix of scales, bytes.
        row_tile: first tile along the rows.
        exist: number of existing tiles along the rows.
        policy: cache policy of their copies, or None.
    """

    scales: cute.Tensor
    row_tile: Any
    exist: Any
    policy: int | None


class MmaState(NamedTuple):
    """Position of the MMA thread in its pipelines: a stage, and a set of tensor-memory columns for scales."""

    stage: Int32
    parity: Int32
    scale_stage: Int32
    scale_parity: Int32


class BlockScaledKernel:
    """Base of the kernels of one ``BlockScaledConfig``."""

    def __init__(self, config: BlockScaledConfig):
        self.config: Any = config
        self.stage = config.stage
        self.mma = BlockScaledMma(self.stage)

    # Roles

    @cute.jit
    def _set_up(self, tid) -> Smem:
        """Allocate shared memory and tensor memory, and initialise the barriers. ``_sync`` makes them visible to
        other warps."""
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
        """Synchronise the CTA, or the pair."""
        if const_expr(self.stage.cta_group > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _run_roles(self, tid, maps, work) -> tuple[Smem, Uint32]:
        """Set up the CTA, and run the role of the thread's warp.

        All warps except the MMA warp first wait for the previous kernels.

        Returns:
            Shared memory, and the address of the allocated columns of tensor memory.
        """
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
        """Free the tensor memory. The CTA must have synchronised after its last load."""
        if cute.arch.make_warp_uniform(tid // WARP) == MMA_WARP:
            tcgen05.free(tmem, self.config.tmem_columns, self.stage.cta_group)

    # K tiles

    def _stage_at(self, stage, smem: Smem) -> cute.Pointer:
        return smem.stages + cute.assume(stage * self.stage.size_bytes, divby=ALIGNMENT)

    @cute.jit
    def _copy_scale_tiles(self, m_side: ScaleTiles, n_side: ScaleTiles, first, size, base, barrier):
        """Start the copies of a stage's tiled scales.

        The stage's barrier expects all bytes of the stage. ``size`` is the number of bytes of each row of scale tiles,
        from tile ``first`` on. With linear scales, the barrier expects the codes only.
        """
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
        """Write a k tile's linear scales to its stage in tile order, if it is the warp's ``turn``. One scale-loader
        warp.

        The warps take turns, so that several k tiles are in flight.

        Returns:
            Next turn, stage and parity.
        """
        if turn == 0:
            barriers = smem.pipeline.empty + stage, parity, smem.pipeline.full + stage
            self.mma.store_linear_scales(m_side, n_side, first, blocks, lane, self._stage_at(stage, smem), *barriers)
        else:
            # A warp must not skip phases: it would take the next phase but one, which has the same parity, for the next
            # one.
            smem.pipeline.wait_empty(stage, parity)
        return (turn + SCALE_LOADER_WARPS - 1) % SCALE_LOADER_WARPS, *smem.pipeline.next(stage, parity)

    def _first_mma_state(self) -> MmaState:
        # Producers start with parity 1, so that unused columns count as empty.
        return MmaState(Int32(0), Int32(0), Int32(0), Int32(1))

    def _multiply_k_tile(self, at: MmaState, tmem, acc, num_mmas, first_n, adds, phase, smem) -> MmaState:
        """Issue the MMAs of a k tile, in the MMA thread, once its operands and a set of columns for scales are ready.

        Commits release the stage and the columns when the MMAs have ended. ``BlockScaledMma.multiply`` describes the
        arguments from ``acc`` on.

        Returns:
            Next position in the pipelines.
        """
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
        """Signal, as an epilogue warp, that it has loaded the accumulator, so that MMAs may overwrite it."""
        tcgen05.fence_before()
        cute.arch.sync_warp()
        leads = Uint32(tid % WARP == 0)
        if self.stage.cta_group == 2:
            ptx.arrive_at_if(barrier, Uint32(LEADER), leads)
        else:
            ptx.arrive_if(barrier, leads)


def as_bytes(scales: cute.Tensor) -> cute.Tensor:
    """Return a matrix of scales as bytes."""
    return cute.make_tensor(cute.recast_ptr(scales.iterator, dtype=Uint8), scales.layout)
