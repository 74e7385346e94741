"""Kernels with block-scaled ``tcgen05.mma``: the copies and MMAs of a pipeline stage, and the roles of the warps.

``BlockScaledMma`` issues the copies and MMAs. Rows of the operand on the M side become lanes of tensor memory, and rows
of the operand on the N side become columns. ``BlockScaledStage`` defines the layout of a stage.

``BlockScaledKernel`` is the base class of the kernels. A subclass defines the four methods ``_produce``,
``_issue_mmas``, ``_run_epilogue`` and ``_load_linear_scales``. All four loop over the same tiles and k tiles in the
same order.
"""

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from torch_cute_ops.formats import MXFP4, ScaleLayout
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.blackwell import tcgen05
from torch_cute_ops.kernels.common.blackwell.layouts import (
    ALIGNMENT,
    EPILOGUE_WARPS,
    K_TILE_BYTES,
    MMA_K,
    MMA_M,
    SCALE_LOADER_WARPS,
    SCALE_STAGES,
    BlockScaledConfig,
    BlockScaledStage,
)
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import store_words
from torch_cute_ops.kernels.common.core.pipeline import Pipeline, fence_async, next_stage
from torch_cute_ops.kernels.common.fp4.codes import scale_argument, scale_matrix
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE, SCALE_TILE_BYTES
from torch_cute_ops.runtime.argspec import Dim, TensorArg

WARP = 32
PRODUCER_WARP, MMA_WARP = EPILOGUE_WARPS, EPILOGUE_WARPS + 1
LEADER = 0  # rank of the CTA that issues the MMAs of a CTA pair
MMAS_PER_K_TILE = K_TILE // MMA_K


class BlockScaledMma:
    """Device code that copies operands to a stage and multiplies them. A ``BlockScaledStage`` describes the stage."""

    def __init__(self, stage: BlockScaledStage):
        self.stage = stage
        self.mmas_per_scale_tile = stage.scale_tile_k // MMA_K

    def arguments(self, m: Dim, n: Dim) -> tuple[TensorArg, ...]:
        """Return descriptions of ``a``, ``a_scale``, ``b`` and ``b_scale``, for M rows of activations and N rows of a
        weight."""
        half = Dim("k_bytes", divisibility=MMA_K // 2)
        blocks, layout = Dim("blocks", divisibility=TILE_BLOCKS), self.stage.layout
        return (
            TensorArg("Uint8", (m, half), (half, 1), align=16),
            scale_argument(self.stage.fmt, layout, m, blocks, name="a_"),
            TensorArg("Uint8", (half, n), (1, half), align=16),
            scale_argument(self.stage.fmt, layout, n, blocks, name="b_"),
        )

    # Copies of codes by TMA

    def map(self, codes: cute.Tensor, rows: int) -> tuple:
        """Return the TMA descriptor of a matrix of FP4 codes, as a CuTe copy atom and tensor. A box is ``rows`` rows of
        a k tile.

        ``codes`` is (rows, bytes), or (rows, bytes, experts). TMA fills the part of the last k tile that lies beyond an
        expert's range of k with zeros.
        """
        rank = len(codes.shape)
        box = self._box(rows, rank)
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), codes, box, (rows, K_TILE_BYTES, 1)[:rank]
        )

    def _box(self, rows: int, rank: int):
        """Return the shared-memory layout of a k tile's codes, (rows, bytes of a row)."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Uint8)
        return cute.tile_to_shape(atom, (rows, K_TILE_BYTES, 1)[:rank], order=(0, 1, 2)[:rank])

    def boxes(self, map: tuple, rows: int):
        """Divide the matrix that ``map`` describes into boxes. The result is indexed by row tile, k tile and expert."""
        rank = len(map[1].shape)
        return cute.local_tile(map[1], (rows, K_TILE_BYTES, 1)[:rank], (None,) * rank)

    def copy_box(self, map: tuple, boxes, rows: int, to: cute.Pointer, place: tuple, barrier, policy) -> None:
        """Start the TMA copy of box ``place`` to shared memory at ``to``. ``barrier`` counts the bytes."""
        rank = len(map[1].shape)
        layout = self._box(rows, rank)
        box = cute.make_tensor(cute.recast_ptr(to, layout.inner, dtype=Uint8), layout.outer)
        target, source = cpasync.tma_partition(
            map[0], 0, cute.make_layout(1), cute.group_modes(box, 0, rank), cute.group_modes(boxes, 0, rank)
        )
        options = {} if policy is None else {"cache_policy": Int64(policy)}
        cute.copy(map[0], source[(None, *place)], target, tma_bar_ptr=barrier, **options)

    # Scales

    @cute.jit
    def copy_scale_tiles(self, scales, row_tile, count: int, exist, first, size, to, barrier, policy):
        """Start the copies of up to ``count`` rows of scale tiles, in one thread.

        The function copies ``size`` bytes from each row of scale tiles, starting at tile ``first`` of the row.
        ``row_tile`` is the index of the first row of tiles. Only ``exist`` rows of tiles exist from ``row_tile`` on,
        and no others are copied.
        """
        pitch = scales.shape[1] // TILE_BLOCKS
        for i in range_constexpr(count):
            if i < exist:
                source = (Int64(row_tile + i) * pitch + first) * SCALE_TILE_BYTES
                ptx.copy_bulk(
                    to + i * self.stage.scale_tiles * SCALE_TILE_BYTES,
                    scales.iterator + cute.assume(source, divby=SCALE_TILE_BYTES),
                    size,
                    barrier,
                    policy=policy,
                )

    @cute.jit
    def store_linear_scales(self, m_side: tuple, n_side: tuple, first, blocks, lane, base, empty, empty_parity, full):
        """Copy a k tile's scales from the linear layout to a stage, in the 128x4 layout. One warp calls this method.

        The warp waits on ``empty`` before it writes to the stage. In each group of 128 rows, a lane copies four rows
        that are 32 apart, because their scales are adjacent in the 128x4 layout.

        Args:
            m_side, n_side: (scales, first row of this lane, number of existing rows) of an operand.
            first: index of the k tile's first block in its row.
            blocks: number of blocks of a whole row.
        """
        stage = self.stage
        # Load the scales before the wait, so that the loads overlap the MMAs that still read the stage.
        scales, row, rows = n_side
        used = min(stage.mma_n, MMA_M)
        row_tiles = range(stage.scale_row_tiles)
        loaded = [self._load_scales(scales, row + i * MMA_M, rows, used, first, blocks) for i in row_tiles]
        loaded.append(self._load_scales(*m_side, MMA_M, first, blocks))
        ptx.wait(empty, empty_parity)
        at = base + cute.assume(stage.code_bytes + lane * 16, divby=16)
        for i, words_of_rows in enumerate(loaded):
            for j, words in enumerate(zip(*words_of_rows, strict=True)):
                to = cute.recast_ptr(at + (i * stage.scale_tiles + j) * SCALE_TILE_BYTES, dtype=Uint32)
                store_words(list(words), cute.make_tensor(to, cute.make_layout(len(words))))
        fence_async()
        cute.arch.sync_warp()
        ptx.arrive_if(full, Uint32(lane == 0))

    def _load_scales(self, scales, row, rows, used: int, first, blocks) -> list:
        """Return a k tile's scales of rows ``row``, ``row + 32``, ``row + 64`` and ``row + 96``, as a list of words per
        row.

        Scales outside of the matrix are returned as zero, and so are the scales from row ``row + used`` on.
        """
        tiles = range(self.stage.scale_tiles)
        loaded = []
        for after in range(0, MMA_M, 32):
            at = scales.iterator + cute.assume(Int64(row + after) * blocks + first, divby=4)
            exist = [(row + after < rows) & (first + TILE_BLOCKS * j < blocks) for j in tiles]
            words = [ptx.load_if(at, exist[j], 1, TILE_BLOCKS * j)[0] for j in tiles if after < used]
            loaded.append(words or [Uint32(0) for _ in tiles])
        return loaded

    # MMAs

    @cute.jit
    def multiply(self, acc, at, scales, num_mmas, first_n, adds, phase=None):
        """Copy a k tile's scales from shared to tensor memory, and issue the k tile's first ``num_mmas`` MMAs.

        Args:
            acc: first tensor-memory column of the accumulator.
            at: address of the stage in shared memory.
            scales: first tensor-memory column for the scales of the k tile.
            num_mmas: number of MMAs to issue.
            first_n: first row of the operand on the N side.
            adds: True if the first MMA adds to the accumulator, False if it overwrites the accumulator.
            phase: number of MMAs whose scales share the first scale tile but belong to the previous expert, or None if
                always 0.
        """
        c = self.stage
        # An MMA with fewer than 128 rows on the N side may begin inside a scale tile. Find the lane and column of its
        # first row.
        lane, column = Uint32(0), Uint32(0)
        if const_expr(c.mma_n < MMA_M and not c.has_scale_loaders):
            first = first_n % MMA_M
            lane, column = Uint32(first % 32), Uint32(first // 32)
        n_scale_address = at + c.code_bytes
        m_scale_address = n_scale_address + c.n_scale_bytes
        n_scales = scales + c.scale_tiles * TILE_BLOCKS
        before = 0 if const_expr(phase is None) else phase
        for i in range_constexpr(c.scale_tiles):
            if i * self.mmas_per_scale_tile < num_mmas + before:
                source = tcgen05.scale_descriptor(m_scale_address + i * SCALE_TILE_BYTES)
                tcgen05.copy_scales(scales + i * TILE_BLOCKS, source, c.cta_group)
                for j in range_constexpr(c.scale_row_tiles):
                    source = n_scale_address + (j * c.scale_tiles + i) * SCALE_TILE_BYTES + lane * 16
                    to = n_scales + (i * c.scale_row_tiles + j) * TILE_BLOCKS
                    tcgen05.copy_scales(to, tcgen05.scale_descriptor(source), c.cta_group)
        for step in range_constexpr(MMAS_PER_K_TILE):
            if step < num_mmas:
                place = step + before
                tile, scale_id = place // self.mmas_per_scale_tile, place % self.mmas_per_scale_tile * 2
                tcgen05.multiply(
                    acc,
                    tcgen05.operand_descriptor(at + step * (MMA_K // 2)),
                    tcgen05.operand_descriptor(at + MMA_M * K_TILE_BYTES + step * (MMA_K // 2)),
                    tcgen05.instruction_descriptor(MMA_M * c.cta_group, c.mma_n, c.fmt == MXFP4, scale_id),
                    scales + tile * TILE_BLOCKS,
                    n_scales + tile * c.scale_row_tiles * TILE_BLOCKS + column,
                    adds if step == 0 else True,
                    c.fmt.block_size,
                    c.cta_group,
                )


@dataclass(frozen=True)
class Smem:
    """Shared memory of a CTA.

    Attributes:
        stages: stages of codes and scales.
        pipeline: barriers of the stages.
        peer_full: mbarriers, one per stage. In a CTA pair, they complete when the second CTA's stage is full.
        scales_empty: mbarriers, one per buffer for scales in tensor memory.
        acc_pipeline: barriers of the accumulators in tensor memory.
        tmem: word that holds the address of the allocated tensor memory.
    """

    stages: cute.Pointer
    pipeline: Pipeline
    peer_full: cute.Pointer
    scales_empty: cute.Pointer
    acc_pipeline: Pipeline
    tmem: cute.Pointer


class ScaleTiles(NamedTuple):
    """The 128-row scale tiles of one operand that a stage needs.

    Attributes:
        scales: matrix of scale bytes.
        row_tile: index of the first row of tiles.
        exist: number of existing rows of tiles from ``row_tile`` on.
        policy: L2 cache policy of the copies, or None.
    """

    scales: cute.Tensor
    row_tile: Any
    exist: Any
    policy: int | None


class MmaState(NamedTuple):
    """Position of the MMA thread in its two pipelines: stages in shared memory, and buffers for scales in tensor
    memory."""

    stage: Int32
    parity: Int32
    scale_stage: Int32
    scale_parity: Int32


class BlockScaledKernel:
    """Base class of the block-scaled kernels. ``config`` is a ``BlockScaledConfig``."""

    def __init__(self, config: BlockScaledConfig):
        self.config: Any = config
        self.stage = config.stage
        self.mma = BlockScaledMma(self.stage)

    # Roles

    @cute.jit
    def _set_up(self, tid) -> Smem:
        """Allocate shared memory and tensor memory, and initialise the barriers. Other warps may use the barriers after
        ``_sync``."""
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
        """Synchronise all threads of the CTA or, if two CTAs compute an MMA together, of both CTAs."""
        if const_expr(self.stage.cta_group > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _run_roles(self, tid, maps, work) -> tuple[Smem, Uint32]:
        """Set up the CTA, and run the code of this warp's role.

        All warps except the MMA warp first wait for the previous kernels. The MMA warp reads only data that the other
        warps copied.

        Returns:
            Shared memory, and the address of the allocated tensor memory.
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
        """Free the tensor memory. Before the call, the CTA must synchronise after its last load from tensor memory."""
        if cute.arch.make_warp_uniform(tid // WARP) == MMA_WARP:
            tcgen05.free(tmem, self.config.tmem_columns, self.stage.cta_group)

    # K tiles

    def _stage_at(self, stage, smem: Smem) -> cute.Pointer:
        return smem.stages + cute.assume(stage * self.stage.size_bytes, divby=ALIGNMENT)

    @cute.jit
    def _copy_scale_tiles(self, m_side: ScaleTiles, n_side: ScaleTiles, first, size, base, barrier):
        """Start the copies of a stage's scales if they are tiled, and tell the stage's barrier how many bytes to
        expect.

        The function copies ``size`` bytes of each row of scale tiles, starting at tile ``first``. The barrier then
        expects codes and scales. If the scales are linear, other warps write them. The function then copies nothing,
        and the barrier expects only the codes.
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
        """Write a k tile's linear scales to its stage, in the 128x4 layout, if ``turn`` is 0. Otherwise skip the k
        tile.

        The scale-loader warps take turns, so that they load the scales of several k tiles at the same time.

        Returns:
            Next turn, stage and parity.
        """
        if turn == 0:
            barriers = smem.pipeline.empty + stage, parity, smem.pipeline.full + stage
            self.mma.store_linear_scales(m_side, n_side, first, blocks, lane, self._stage_at(stage, smem), *barriers)
        else:
            # Also wait if another warp writes this k tile: after a skipped phase, the parity of a later phase is
            # ambiguous.
            smem.pipeline.wait_empty(stage, parity)
        return (turn + SCALE_LOADER_WARPS - 1) % SCALE_LOADER_WARPS, *smem.pipeline.next(stage, parity)

    def _first_mma_state(self) -> MmaState:
        # The parity 1 lets the first waits for empty scale buffers return at once.
        return MmaState(Int32(0), Int32(0), Int32(0), Int32(1))

    def _multiply_k_tile(self, at: MmaState, tmem, acc, num_mmas, first_n, adds, phase, smem) -> MmaState:
        """Wait for a k tile's operands and for an empty buffer for its scales, then issue the k tile's MMAs, in the MMA
        thread.

        The stage and the buffer become empty when the MMAs have ended, by ``tcgen05.commit``.
        ``BlockScaledMma.multiply`` describes the arguments from ``acc`` on.

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
        """Signal that this epilogue warp has loaded the accumulator. MMAs may overwrite the accumulator after all
        signals."""
        tcgen05.fence_before()
        cute.arch.sync_warp()
        leads = Uint32(tid % WARP == 0)
        if self.stage.cta_group == 2:
            ptx.arrive_at_if(barrier, Uint32(LEADER), leads)
        else:
            ptx.arrive_if(barrier, leads)


def as_bytes(scales: cute.Tensor, layout: ScaleLayout) -> cute.Tensor:
    """Return scales of either layout as a matrix of bytes."""
    scales = scale_matrix(scales, layout)
    return cute.make_tensor(cute.recast_ptr(scales.iterator, dtype=Uint8), scales.layout)
