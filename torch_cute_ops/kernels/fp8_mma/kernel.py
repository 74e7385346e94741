"""The device code; the package's docstring describes the roles and the data path."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import load_words
from torch_cute_ops.kernels.common.experts.tiles import ExpertTilesKernel
from torch_cute_ops.kernels.common.fp8.layouts import STORE_TILE_BYTES
from torch_cute_ops.kernels.common.fp8.row_stores import store_rows
from torch_cute_ops.kernels.fp8_mma.config import BLOCK, COLUMNS, TILES, Arguments, Config

PIECE = 16  # bytes that a lane copies, or reads, at once
PIECES = BLOCK // PIECE


class Share(NamedTuple):
    """A thread's share of its CTA's tiles, and the operands.

    Attributes:
        tid, lane: index of the thread in its CTA and in its warp.
        row, column: the first of its warp, in a tile.
        n, k: sizes of the GEMM.
        blocks: K blocks; the last may be half of one.
        a, b, a_scale, b_scale: the operands and their scales, of all experts.
    """

    tid: Int32
    lane: Int32
    row: Int32
    column: Int32
    n: Int32
    k: Int32
    blocks: Int32
    a: cute.Tensor
    b: cute.Tensor
    a_scale: cute.Tensor
    b_scale: cute.Tensor


class Tile(NamedTuple):
    """A tile: its expert, its first row, the rows that the expert has from there on, and its first column."""

    expert: Int32
    row: Int32
    rows: Int32
    column: Int32


class FP8MmaKernel(ExpertTilesKernel):
    """The kernel of one ``Config``."""

    def __init__(self, config: Config):
        super().__init__(config, config.tokens, COLUMNS)

    @cute.jit
    def __call__(self, a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, prefetch, max_ctas: Int32, stream):
        given = Arguments(a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, prefetch, max_ctas)
        view = self.tiles.views(a, b, a_scale, b_scale, out)
        operands = view.a, view.b, view.a_scale, view.b_scale
        self.kernel(operands, (offsets, counts), (alpha, bias), view.out, view.space).launch(
            grid=[self.tiles.ctas(given), 1, 1],
            block=[self.config.threads, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=self.config.pdl,
        )

    @cute.kernel
    def kernel(self, operands, given, alpha_and_bias, out, space):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        workers, _, _ = cute.arch.grid_dim()
        a, b, a_scale, b_scale = operands
        base = SmemAllocator().allocate(c.smem_bytes, 128)
        stores = base + c.stages * c.stage_bytes
        table = stores + c.warps * STORE_TILE_BYTES
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
        m, n = out.shape
        self.tiles.prepare(*given, b.shape[2], space, table, tid, c.threads)
        lane, warp = tid % 32, tid // 32
        across = TILES[c.tokens][1]
        share = Share(
            tid=tid,
            lane=lane,
            row=warp // across * c.warp_rows,
            column=warp % across * c.warp_columns,
            n=n,
            k=a.shape[1],
            blocks=a_scale.shape[0],
            a=a,
            b=b,
            a_scale=a_scale,
            b_scale=b_scale,
        )
        size = c.warp_columns // 2
        sums = cute.make_rmem_tensor((c.warp_rows // 16 * size,), Float32)
        for number in range(cta, self.tiles.count(m, n, table), workers):
            tile = Tile(*self.tiles.find(number, m, n, table, lane))
            for i in range_constexpr(c.stages - 1):
                if i < share.blocks:
                    self._load(i, i, base, tile, share)
                cute.arch.cp_async_commit_group()
            sums.fill(0.0)
            for block in cutlass.range(share.blocks, unroll=1):
                factors = self._factors(block, tile, share)
                cute.arch.cp_async_wait_group(c.stages - 2)
                # All copies of this block have arrived, and all warps are done with the one before, whose stage is
                # next.
                cute.arch.sync_threads()
                ahead = block + c.stages - 1
                if ahead < share.blocks:
                    self._load(ahead, ahead % c.stages, base, tile, share)
                cute.arch.cp_async_commit_group()
                self._multiply(block % c.stages, factors, sums, base, share)
            # All warps are done with the last block, whose stage the next tile may use.
            cute.arch.sync_threads()
            epilogue = self.epilogue.of_tile(*alpha_and_bias, n, None if const_expr(c.rows.is_plain) else tile.expert)
            for i in range_constexpr(c.warp_rows // 16):
                store_rows(
                    cute.make_tensor(sums.iterator + i * size, cute.make_layout(size)),
                    out,
                    stores + cute.assume(warp * STORE_TILE_BYTES, divby=PIECE),
                    tile.row + share.row + 16 * i,
                    tile.rows - share.row - 16 * i,
                    tile.column + share.column,
                    lane,
                    epilogue,
                )
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()

    # Copies. A stage holds rows of a, then rows of b. The halves of every second row are swapped, so that lanes that
    # read at once have no bank conflicts.

    def _place(self, row, piece):
        """Offset of 16 bytes of a row in a stage."""
        return row * BLOCK + (piece ^ (row % 2 * (PIECES // 2))) * PIECE

    @cute.jit
    def _load(self, block, stage, base, tile, share):
        """Start this thread's copies of a block of k; what does not exist becomes zeros."""
        c = self.config
        at = base + cute.assume(Int32(stage) * c.stage_bytes, divby=BLOCK)
        piece = share.tid % PIECES
        begin = block * BLOCK + piece * PIECE
        for i in range_constexpr((c.tokens + COLUMNS) * PIECES // c.threads):
            row = share.tid // PIECES + i * (c.threads // PIECES)
            if const_expr(i * (c.threads // PIECES) < c.tokens):
                exists = (row < tile.rows) & (begin < share.k)
                offset = ptx.select(exists, Int64(tile.row + row) * share.k + begin, Int64(0))
                source = share.a.iterator + cute.assume(offset, divby=PIECE)
            else:
                column = tile.column + row - c.tokens
                exists = (column < share.n) & (begin < share.k)
                offset = Int64(tile.expert) * share.b.stride[2] + Int64(column) * share.k + begin
                source = share.b.iterator + cute.assume(ptx.select(exists, offset, Int64(0)), divby=PIECE)
            ptx.copy_async_16(at + cute.assume(self._place(row, piece), divby=PIECE), source, exists)

    @cute.jit
    def _factors(self, block, tile, share) -> list:
        """The products of both scales for a lane's rows, two of each 16."""
        scale = share.b_scale[tile.column // BLOCK, block, tile.expert]
        factors = []
        for i in range_constexpr(self.config.warp_rows // 8):
            # For rows that the expert does not have its last one again, since their results are not stored
            row = cutlass.min(share.row + i * 8 + share.lane // 4, tile.rows - 1)
            factors.append(ptx.mul_rn(share.a_scale[block, Int64(tile.row) + row], scale))
        return factors

    # MMAs

    def _words(self, at: cute.Pointer, row, lane) -> list:
        """A lane's words of a row: two pieces of four."""
        words = []
        for piece in (lane % 4, lane % 4 + PIECES // 2):
            place = at + cute.assume(self._place(row, piece), divby=PIECE)
            words += load_words(cute.make_tensor(cute.recast_ptr(place, dtype=Uint32), cute.make_layout(4)))
        return words

    @cute.jit
    def _multiply(self, stage, factors, sums, base, share):
        """Add a block of k to the sums."""
        c = self.config
        at = base + cute.assume(Int32(stage) * c.stage_bytes, divby=BLOCK)
        row = share.row + share.lane // 4
        rows = [self._words(at, row + 8 * i, share.lane) for i in range(c.warp_rows // 8)]
        for group in range_constexpr(c.warp_columns // 8):
            columns = self._words(at, c.tokens + share.column + group * 8 + share.lane // 4, share.lane)
            for i in range_constexpr(c.warp_rows // 16):
                total = [Float32(0.0)] * 4
                for step in range_constexpr(4):
                    a = [rows[2 * i + r][half + step] for half in (0, 4) for r in (0, 1)]
                    total = ptx.mma_16x8x32(a, [columns[step], columns[4 + step]], total)
                first = (i * (c.warp_columns // 8) + group) * 4
                for j in range_constexpr(4):
                    sums[first + j] = ptx.fma_rn(factors[2 * i + j // 2], total[j], sums[first + j])
