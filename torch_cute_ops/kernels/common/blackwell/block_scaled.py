"""Base classes of kernels with block-scaled ``tcgen05.mma``: the copies of scales, and the MMAs of a stage.

``BlockScaledMma`` issues the copies and MMAs. Rows of the operand on the M side become lanes of tensor memory, and rows
of the operand on the N side become columns. ``BlockScaledStage`` defines the layout of a stage.

``BlockScaledKernel`` is the base class of the kernels. This class inherits the roles of ``roles.Tcgen05Kernel``.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32, const_expr, range_constexpr

from torch_cute_ops.formats import MXFP4, ScaleLayout
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.blackwell import tcgen05
from torch_cute_ops.kernels.common.blackwell.layouts import (
    K_TILE_BYTES,
    MMA_K,
    MMA_M,
    SCALE_LOADER_WARPS,
    SCALE_STAGES,
    BlockScaledConfig,
    BlockScaledStage,
)
from torch_cute_ops.kernels.common.blackwell.roles import OperandCopies, Tcgen05Kernel
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import store_words
from torch_cute_ops.kernels.common.core.pipeline import fence_async, next_stage
from torch_cute_ops.kernels.common.fp4.codes import scale_argument, scale_matrix
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE, SCALE_TILE_BYTES
from torch_cute_ops.runtime.argspec import Dim, TensorArg

MMAS_PER_K_TILE = K_TILE // MMA_K


class BlockScaledMma(OperandCopies):
    """Device code that copies scales to a stage and multiplies the stage's operands. A ``BlockScaledStage`` describes
    the stage."""

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

    # Scales

    @cute.jit
    def copy_scale_tiles(self, scales, row_tile, count: int, exist, first, size, to, barrier, policy):
        """Start the copies of up to ``count`` rows of scale tiles. One thread calls this method.

        ``row_tile`` is the index of the first row of scale tiles. From each row, the method copies ``size`` bytes,
        starting at tile ``first`` of the row. ``exist`` is the number of rows of tiles from ``row_tile`` to the end of
        the matrix; rows beyond the end are not copied.
        """
        for i in range_constexpr(count):
            if i < exist:
                of_row = to + i * self.stage.scale_tiles * SCALE_TILE_BYTES
                copy_tile_row(scales, row_tile + i, first, size, of_row, barrier, policy)

    @cute.jit
    def store_linear_scales(self, m_side: tuple, n_sides: tuple, first, blocks, lane, base, empty, empty_parity, full):
        """Copy a k tile's scales from the linear layout to a stage, in the 128x4 layout. One warp calls this method.

        The warp waits on ``empty`` before it writes to the stage. In each group of 128 rows, a lane copies four rows
        that are 32 apart, because their scales are adjacent in the 128x4 layout.

        Args:
            m_side: (scales, first row of this lane, number of existing rows) of the operand on the M side.
            n_sides: (scales, first row of this lane, number of existing rows) for each operand on the N side.
            first: index of the k tile's first block in its row.
            blocks: number of blocks of a whole row.
        """
        stage = self.stage
        # Load the scales before the wait, so that the loads overlap the MMAs that still read the stage.
        used = min(stage.mma_n, MMA_M)
        loaded = [
            self._load_scales(scales, row + i * MMA_M, rows, used, first, blocks)
            for scales, row, rows in n_sides
            for i in range(stage.scale_row_tiles)
        ]
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

        Scales outside of the matrix, and scales of the rows from ``row + used`` on, are returned as zero.
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
    def multiply(self, acc, at, scales, num_mmas, first_rows: tuple, adds, phase=None):
        """Copy a k tile's scales from shared to tensor memory, and issue the k tile's first ``num_mmas`` MMAs.

        Args:
            acc: first tensor-memory column of the accumulators. Each operand on the N side has its own accumulator, and
                the accumulators are adjacent.
            at: address of the stage in shared memory.
            scales: first tensor-memory column for the scales of the k tile.
            num_mmas: number of MMAs to issue.
            first_rows: first row of each operand on the N side.
            adds: True if the first MMA adds to its accumulator, False if it overwrites its accumulator.
            phase: number of MMAs at the beginning of the first scale tile that belong to the previous expert, or None
                if this number is always 0.
        """
        c = self.stage
        # An MMA with fewer than 128 rows on the N side may begin inside a scale tile. Find the lane and column of its
        # first row.
        places = [(Uint32(0), Uint32(0))] * c.n_operands
        if const_expr(c.mma_n < MMA_M and not c.has_scale_loaders):
            places = [(Uint32(row % MMA_M % 32), Uint32(row % MMA_M // 32)) for row in first_rows]
        n_scale_address = at + c.code_bytes
        m_scale_address = n_scale_address + c.n_operands * c.n_scale_bytes
        n_scales = scales + c.scale_tiles * TILE_BLOCKS
        before = 0 if const_expr(phase is None) else phase
        for i in range_constexpr(c.scale_tiles):
            if i * self.mmas_per_scale_tile < num_mmas + before:
                source = tcgen05.scale_descriptor(m_scale_address + i * SCALE_TILE_BYTES)
                tcgen05.copy_scales(scales + i * TILE_BLOCKS, source, c.cta_group)
                for j in range_constexpr(c.n_operands * c.scale_row_tiles):
                    lane, _ = places[j // c.scale_row_tiles]
                    source = n_scale_address + (j * c.scale_tiles + i) * SCALE_TILE_BYTES + lane * 16
                    to = n_scales + (i * c.n_operands * c.scale_row_tiles + j) * TILE_BLOCKS
                    tcgen05.copy_scales(to, tcgen05.scale_descriptor(source), c.cta_group)
        for step in range_constexpr(MMAS_PER_K_TILE):
            if step < num_mmas:
                place = step + before
                tile, scale_id = place // self.mmas_per_scale_tile, place % self.mmas_per_scale_tile * 2
                for j in range_constexpr(c.n_operands):
                    n_rows = at + (MMA_M + j * c.cta_mma_n) * K_TILE_BYTES
                    _, column = places[j]
                    tcgen05.multiply(
                        acc + j * c.mma_n if const_expr(j > 0) else acc,
                        tcgen05.operand_descriptor(at + step * (MMA_K // 2)),
                        tcgen05.operand_descriptor(n_rows + step * (MMA_K // 2)),
                        tcgen05.instruction_descriptor(MMA_M * c.cta_group, c.mma_n, c.fmt == MXFP4, scale_id),
                        scales + tile * TILE_BLOCKS,
                        n_scales + (tile * c.n_operands + j) * c.scale_row_tiles * TILE_BLOCKS + column,
                        adds if step == 0 else True,
                        c.fmt.block_size,
                        c.cta_group,
                    )


class ScaleTiles(NamedTuple):
    """The 128-row scale tiles of one operand that a stage needs.

    Attributes:
        scales: matrix of scale bytes.
        row_tile: index of the first row of tiles.
        exist: number of rows of tiles from ``row_tile`` to the end of the matrix.
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


class BlockScaledKernel(Tcgen05Kernel):
    """Base class of the block-scaled kernels. ``config`` is a ``BlockScaledConfig``."""

    def __init__(self, config: BlockScaledConfig):
        super().__init__(config)
        self.mma = BlockScaledMma(self.stage)

    # K tiles

    @cute.jit
    def _copy_scale_tiles(self, m_side: ScaleTiles, n_sides: tuple, first, size, base, barrier):
        """If a stage's scales are tiled, start their copies. In any case, tell the stage's full barrier how many bytes
        to expect.

        ``n_sides`` contains the ``ScaleTiles`` of each operand on the N side. If the scales are tiled, the method
        copies ``size`` bytes of each row of scale tiles, starting at tile ``first``, and the barrier expects the bytes
        of codes and scales. If the scales are linear, scale-loader warps write them, and the barrier expects only the
        bytes of the codes.
        """
        stage = self.stage
        if const_expr(stage.has_scale_loaders):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, stage.code_bytes)
        else:
            with cute.arch.elect_one():
                exist = n_sides[0].exist
                for tiles in (*n_sides[1:], m_side):
                    exist = exist + tiles.exist
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, stage.code_bytes + size * exist)
                at = base + stage.code_bytes
                for tiles, count in (*((one, stage.scale_row_tiles) for one in n_sides), (m_side, 1)):
                    self.mma.copy_scale_tiles(
                        tiles.scales, tiles.row_tile, count, tiles.exist, first, size, at, barrier, tiles.policy
                    )
                    at = at + stage.n_scale_bytes

    @cute.jit
    def _load_linear_scales_of_k_tile(
        self, turn, lane, m_side: tuple, n_sides: tuple, first, blocks, stage, parity, smem
    ) -> tuple:
        """Write a k tile's linear scales to its stage, in the 128x4 layout, if ``turn`` is 0. Otherwise skip the k
        tile.

        The scale-loader warps take turns, so that they load the scales of several k tiles at the same time.

        Returns:
            The turn, stage and parity for the next k tile.
        """
        if turn == 0:
            barriers = smem.pipeline.empty + stage, parity, smem.pipeline.full + stage
            self.mma.store_linear_scales(m_side, n_sides, first, blocks, lane, self._stage_at(stage, smem), *barriers)
        else:
            # Wait even if another warp writes this k tile: a warp that skipped a phase of the barrier could not tell
            # later phases apart by their parity.
            smem.pipeline.wait_empty(stage, parity)
        return (turn + SCALE_LOADER_WARPS - 1) % SCALE_LOADER_WARPS, *smem.pipeline.next(stage, parity)

    def _first_mma_state(self) -> MmaState:
        # The parity starts at 1, so that the first waits for empty scale buffers return immediately.
        return MmaState(Int32(0), Int32(0), Int32(0), Int32(1))

    def _multiply_k_tile(self, at: MmaState, tmem, acc, num_mmas, first_rows: tuple, adds, phase, smem) -> MmaState:
        """Wait for a k tile's operands and for an empty buffer for its scales, then issue the k tile's MMAs, in the MMA
        thread.

        A ``tcgen05.commit`` makes the stage and the buffer empty when the MMAs have ended. ``BlockScaledMma.multiply``
        describes the arguments ``acc`` to ``phase``.

        Returns:
            The ``MmaState`` for the next k tile.
        """
        c = self.config
        ptx.wait(smem.scales_empty + at.scale_stage, at.scale_parity)
        self._wait_full(at.stage, at.parity, smem)
        tcgen05.fence_after()
        scales = tmem + Uint32(c.acc_columns + at.scale_stage * self.stage.scale_columns)
        stage = Uint32(smem.stages.toint()) + Uint32(at.stage * self.stage.size_bytes)
        self.mma.multiply(acc, stage, scales, num_mmas, first_rows, adds, phase)
        tcgen05.commit(smem.pipeline.empty + at.stage, self.stage.cta_group, self.stage.cta_group == 2)
        tcgen05.commit(smem.scales_empty + at.scale_stage, self.stage.cta_group, False)
        return MmaState(
            *smem.pipeline.next(at.stage, at.parity), *next_stage(at.scale_stage, at.scale_parity, SCALE_STAGES)
        )


def copy_tile_row(scales: cute.Tensor, row_tile, first, size, to: cute.Pointer, barrier, policy) -> None:
    """Start the copy of ``size`` bytes of a row of scale tiles, starting at tile ``first``. One thread calls this
    function."""
    offset = (Int64(row_tile) * (scales.shape[1] // TILE_BLOCKS) + first) * SCALE_TILE_BYTES
    ptx.copy_bulk(to, scales.iterator + cute.assume(offset, divby=SCALE_TILE_BYTES), size, barrier, policy=policy)


def as_bytes(scales: cute.Tensor, layout: ScaleLayout) -> cute.Tensor:
    """Return scales, in a linear or tiled layout, as a matrix of bytes."""
    scales = scale_matrix(scales, layout)
    return cute.make_tensor(cute.recast_ptr(scales.iterator, dtype=Uint8), scales.layout)
