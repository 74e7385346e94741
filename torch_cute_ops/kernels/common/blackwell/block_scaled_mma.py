"""Copies and MMAs of a stage of two FP4 operands for block-scaled ``tcgen05.mma``.

The operand on the M side maps to the lanes of tensor memory, the operand on the N side to its columns.
``BlockScaledStage`` defines the layout of a stage.
"""

import cutlass.cute as cute
from cutlass import Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.blackwell import tcgen05
from torch_cute_ops.kernels.common.blackwell.layouts import K_TILE_BYTES, MMA_K, MMA_M, BlockScaledStage
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import store_words
from torch_cute_ops.kernels.common.core.pipeline import fence_async
from torch_cute_ops.kernels.common.fp4.codes import scale_argument
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE, SCALE_TILE_BYTES
from torch_cute_ops.runtime.argspec import Dim, TensorArg

MMAS_PER_K_TILE = K_TILE // MMA_K


class BlockScaledMma:
    """Copies and MMAs of one ``BlockScaledStage``."""

    def __init__(self, stage: BlockScaledStage):
        self.stage = stage
        self.mmas_per_scale_tile = stage.scale_tile_k // MMA_K

    def arguments(self, m: Dim, n: Dim) -> tuple[TensorArg, ...]:
        """Return ``a``, ``a_scale``, ``b`` and ``b_scale`` for M rows of activations and N rows of a weight."""
        half = Dim("k_bytes", divisibility=MMA_K // 2)
        blocks = Dim("blocks", divisibility=TILE_BLOCKS)
        linear = self.stage.has_scale_loaders
        a_rows, b_rows = (m, n) if linear else (Dim(name, divisibility=MMA_M) for name in ("a_rows", "b_rows"))
        return (
            TensorArg("Uint8", (m, half), (half, 1), align=16),
            scale_argument(self.stage.fmt, a_rows, blocks),
            TensorArg("Uint8", (half, n), (1, half), align=16),
            scale_argument(self.stage.fmt, b_rows, blocks),
        )

    # Codes, by tensor maps

    def map(self, codes: cute.Tensor, rows: int) -> tuple:
        """Return a tensor map with boxes of ``rows`` rows of a k tile.

        ``codes`` is (rows, bytes), or (rows, bytes, experts), whose k tiles end with their expert.
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
        """Return the matrix divided into boxes: (tiles of rows, k tiles), and experts."""
        rank = len(map[1].shape)
        return cute.local_tile(map[1], (rows, K_TILE_BYTES, 1)[:rank], (None,) * rank)

    def copy_box(self, map: tuple, boxes, rows: int, to: cute.Pointer, place: tuple, barrier, policy) -> None:
        """Start the copy of the box at ``place`` in ``boxes``."""
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
        """Start the copies of up to ``count`` rows of scale tiles, in one thread. ``exist`` rows exist.

        ``row_tile`` is the first tile along the rows. Of each row of tiles, ``size`` bytes are copied, from tile
        ``first`` on.
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
        """Write a k tile's linear scales to an ``empty`` stage, in tile order, with one warp.

        A lane has every 32nd row of each 128 rows; the words of these rows are neighbours in a tile.

        Args:
            m_side, n_side: scales of each operand, first row of the lane, and number of existing rows.
            first: first block of the k tile.
            blocks: number of blocks of a whole row.
        """
        stage = self.stage
        # Load the scales while the stage is still in use.
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
        """Return a k tile's scales of every 32nd of 128 rows, each as a list of words.

        Scales outside of the matrix, and of rows from ``used`` on, are zero.
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
        """Copy a k tile's scales to tensor memory, and issue its first ``num_mmas`` MMAs.

        Args:
            acc: tensor-memory columns of the accumulator.
            at: address of the stage in shared memory.
            scales: tensor-memory columns for the scales of the k tile.
            num_mmas: number of MMAs of the k tile.
            first_n: first row of the operand on the N side.
            adds: True if the first MMA adds to the accumulator.
            phase: number of MMAs of the first scale tile that belong to the previous expert, or None if always 0.
        """
        c = self.stage
        # With fewer rows than a scale tile has, the first row's position in the tile is a lane and a column.
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
