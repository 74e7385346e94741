"""What kernels of block-scaled ``tcgen05.mma`` share: the roles of warps, the ring of stages and its barriers, and what
each role does with a chunk.

A kernel derives from ``BlockScaledKernel``. Which tiles a CTA has, which chunks are of a tile, and what becomes of its
sums is the kernel's own: its ``_copy``, ``_multiply``, ``_store`` and ``_arrange`` go through tiles and chunks, each in
the same order.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32, const_expr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.blackwell import tcgen05
from torch_cute_ops.kernels.common.blackwell.block_scaled_mma import BlockScaledMma
from torch_cute_ops.kernels.common.blackwell.layouts import (
    ALIGNMENT,
    ARRANGING_WARPS,
    SCALE_BUFFERS,
    STORING_WARPS,
    BlockScaledConfig,
)
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.pipeline import next_stage

WARP = 32
COPIER, MULTIPLIER = STORING_WARPS, STORING_WARPS + 1
LEADER = 0  # the CTA of a pair that issues MMAs


class Smem(NamedTuple):
    """Shared memory: the stages, and barriers. A stage is full, in this CTA or its pair's second, or free; columns of
    scales are free; sums are complete, or their columns free. ``columns`` is where those of tensor memory begin."""

    stages: cute.Pointer
    full: cute.Pointer
    peer_full: cute.Pointer
    free: cute.Pointer
    scales_free: cute.Pointer
    sums_full: cute.Pointer
    sums_free: cute.Pointer
    columns: cute.Pointer


class ScaleTiles(NamedTuple):
    """Tiles of an operand's scales that a stage needs: of 128 rows each, from ``row_tile`` on, of which so many
    ``exist``; and the cache policy of their copies."""

    scales: cute.Tensor
    row_tile: Any
    exist: Any
    policy: int | None


class Multiplier(NamedTuple):
    """Where the multiplying thread is in its rings: a stage, and a set of columns for scales."""

    stage: Int32
    parity: Int32
    buffer: Int32
    buffer_parity: Int32


class BlockScaledKernel:
    """The kernel of one ``BlockScaledConfig``."""

    def __init__(self, config: BlockScaledConfig):
        self.config: Any = config
        self.stage = config.stage
        self.mma = BlockScaledMma(self.stage)

    # Roles

    @cute.jit
    def _set_up(self, tid) -> Smem:
        """Allocate shared memory and columns of tensor memory, and initialise the barriers. Others see it when the CTA
        has met."""
        c = self.config
        smem = self._allocate()
        if cute.arch.make_warp_uniform(tid // WARP) == MULTIPLIER:
            tcgen05.allocate(smem.columns, c.tensor_columns, self.stage.group)
        if tid == 0:
            self._initialise(smem)
        cute.arch.mbarrier_init_fence()
        return smem

    def _allocate(self) -> Smem:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, ALIGNMENT)
        barriers = cute.recast_ptr(base + c.stages * self.stage.size_bytes, dtype=Int64)
        ends = [0]
        for count in (c.stages, c.stages * (self.stage.group - 1), c.stages, SCALE_BUFFERS, c.accumulators, c.frees):
            ends.append(ends[-1] + count)
        return Smem(base, *(barriers + end for end in ends[:-1]), cute.recast_ptr(barriers + ends[-1], dtype=Uint32))

    def _initialise(self, smem: Smem) -> None:
        c = self.config
        for i in range(c.stages):
            cute.arch.mbarrier_init(smem.full + i, 1 + self.stage.arranges)
            if self.stage.group == 2:
                cute.arch.mbarrier_init(smem.peer_full + i, 1)
            cute.arch.mbarrier_init(smem.free + i, 1)
        for i in range(SCALE_BUFFERS):
            cute.arch.mbarrier_init(smem.scales_free + i, 1)
        for i in range(c.accumulators):
            cute.arch.mbarrier_init(smem.sums_full + i, 1)
        for i in range(c.frees):
            cute.arch.mbarrier_init(smem.sums_free + i, STORING_WARPS * self.stage.group)

    @cute.jit
    def _meet(self):
        """A barrier of the CTA, or of a pair."""
        if const_expr(self.stage.group > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _work(self, tid, maps, part) -> tuple[Smem, Uint32]:
        """Set the CTA up, and do what the thread's warp does. All warps but the multiplying one wait for the kernels
        before this one first. Returns where the columns of tensor memory begin, too."""
        c = self.config
        smem = self._set_up(tid)
        self._meet()
        warp = cute.arch.make_warp_uniform(tid // WARP)
        columns = Uint32(cute.make_tensor(smem.columns, cute.make_layout(1))[0])
        if warp == COPIER:
            if const_expr(c.pdl):
                cute.arch.griddepcontrol_wait()
            self._copy(*maps, part, smem)
            if const_expr(c.pdl):
                cute.arch.griddepcontrol_launch_dependents()
        elif warp == MULTIPLIER:
            if tid % WARP == 0:
                self._multiply(columns, part, smem)
        elif warp < STORING_WARPS:
            if const_expr(c.pdl):
                cute.arch.griddepcontrol_wait()
            self._store(columns, tid, part, smem)
        elif const_expr(self.stage.arranges):
            arranger = tid - WARP * (MULTIPLIER + 1)
            if const_expr(c.pdl):
                cute.arch.griddepcontrol_wait()
            self._arrange(arranger, part, smem)
        cute.arch.sync_warp()
        return smem, columns

    @cute.jit
    def _free(self, tid, columns):
        """Give the columns back, when the CTA has met: all loads of them are done."""
        if cute.arch.make_warp_uniform(tid // WARP) == MULTIPLIER:
            tcgen05.free(columns, self.config.tensor_columns, self.stage.group)

    # Chunks

    def _stage_at(self, stage, smem: Smem) -> cute.Pointer:
        return smem.stages + cute.assume(stage * self.stage.size_bytes, divby=ALIGNMENT)

    @cute.jit
    def _copy_scales(self, lanes: ScaleTiles, columns: ScaleTiles, first, size, base, barrier):
        """Start the copies of a stage's scales, if they are in tiles: ``size`` bytes of each row of tiles from tile
        ``first`` on. The stage's barrier expects all of its bytes."""
        stage = self.stage
        if const_expr(stage.arranges):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, stage.code_bytes)
        else:
            with cute.arch.elect_one():
                expected = stage.code_bytes + size * (columns.exist + lanes.exist)
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, expected)
                at = base + stage.code_bytes
                for tiles, count in ((columns, stage.scale_row_tiles), (lanes, 1)):
                    self.mma.copy_scale_tiles(
                        tiles.scales, tiles.row_tile, count, tiles.exist, first, size, at, barrier, tiles.policy
                    )
                    at = at + stage.column_scale_bytes

    @cute.jit
    def _arrange_chunk(self, turn, lane, lanes: tuple, columns: tuple, first, blocks, stage, parity, smem) -> tuple:
        """An arranging warp: where it is the chunk's ``turn``, write linear scales to its stage in the order of tiles.
        So the warps have several chunks in flight. The next turn, stage and parity."""
        if turn == 0:
            barriers = smem.free + stage, parity, smem.full + stage
            self.mma.arrange(lanes, columns, first, blocks, lane, self._stage_at(stage, smem), *barriers)
        else:
            # A warp that left out phases could take one for the next but one, which has the same parity.
            ptx.wait(smem.free + stage, parity)
        return (turn + ARRANGING_WARPS - 1) % ARRANGING_WARPS, *next_stage(stage, parity, self.config.stages)

    def _first_chunk(self) -> Multiplier:
        # With parity 1, columns that were never used count as free.
        return Multiplier(Int32(0), Int32(0), Int32(0), Int32(1))

    def _multiply_chunk(self, at: Multiplier, columns, total, steps, first_column, adds, phase, smem) -> Multiplier:
        """The multiplying thread: a chunk's MMAs, ``steps`` of them if so many are in a chunk, once its operands and
        columns for its scales are there; what these take is free when the MMAs are done. Other arguments are those of
        ``BlockScaledMma.multiply``."""
        c = self.config
        pair = self.stage.group == 2
        ptx.wait(smem.scales_free + at.buffer, at.buffer_parity)
        ptx.wait(smem.full + at.stage, at.parity)
        if pair:
            ptx.wait(smem.peer_full + at.stage, at.parity)
        tcgen05.fence_after()
        scales = columns + Uint32(c.sum_columns + at.buffer * self.stage.scale_columns)
        stage = Uint32(smem.stages.toint()) + Uint32(at.stage * self.stage.size_bytes)
        self.mma.multiply(total, stage, scales, steps, first_column, adds, phase)
        tcgen05.commit(smem.free + at.stage, self.stage.group, pair)
        tcgen05.commit(smem.scales_free + at.buffer, self.stage.group, False)
        return Multiplier(
            *next_stage(at.stage, at.parity, c.stages), *next_stage(at.buffer, at.buffer_parity, SCALE_BUFFERS)
        )

    def _leave_columns(self, barrier, tid) -> None:
        """A storing warp has loaded what others may overwrite now."""
        tcgen05.fence_before()
        cute.arch.sync_warp()
        leads = Uint32(tid % WARP == 0)
        if self.stage.group == 2:
            ptx.arrive_at_if(barrier, Uint32(LEADER), leads)
        else:
            ptx.arrive_if(barrier, leads)


def as_bytes(scales: cute.Tensor) -> cute.Tensor:
    """A matrix of scales as bytes."""
    return cute.make_tensor(cute.recast_ptr(scales.iterator, dtype=Uint8), scales.layout)
