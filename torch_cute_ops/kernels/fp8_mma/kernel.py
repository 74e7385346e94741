"""Device code of the FP8 GEMM by mma.sync.

The package's docstring describes the roles of the warps and the data path.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import EpilogueOps
from torch_cute_ops.kernels.common.core.memory import load_words
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE, STORE_TILE_BYTES, Arguments
from torch_cute_ops.kernels.common.fp8.row_stores import store_rows
from torch_cute_ops.kernels.common.fp8.tiles import ExpertTiles, Tile
from torch_cute_ops.kernels.common.fp8.weights import FP8Weight
from torch_cute_ops.kernels.fp8_mma.config import TILE_N, TILES, Config

PIECE = 16  # number of bytes that a lane copies or reads at once
PIECES = K_TILE // PIECE


class Work(NamedTuple):
    """Work of a thread, and the tensors of the call.

    Attributes:
        tid, lane: index of the thread in its CTA, and index in its warp.
        row, column: first row and column of the warp in its tile.
        n, k: sizes of the GEMM.
        k_tiles: number of k tiles. The last k tile may have 64 elements.
        a, b, a_scale, b_scale: operands and their scales, for all experts.
    """

    tid: Int32
    lane: Int32
    row: Int32
    column: Int32
    n: Int32
    k: Int32
    k_tiles: Int32
    a: cute.Tensor
    b: cute.Tensor
    a_scale: cute.Tensor
    b_scale: cute.Tensor


class FP8MmaKernel:
    """GEMM kernel by mma.sync, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.epilogue = EpilogueOps(config.epilogue)
        self.tiles = ExpertTiles(config.rows, config.tile_m, TILE_N, FP8Weight(TILE_N, config.rows.is_plain))

    def arguments(self) -> Arguments:
        return self.tiles.arguments(self.epilogue)

    @cute.jit
    def __call__(self, a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, prefetch, max_ctas: Int32, stream):
        given = Arguments(a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, prefetch, max_ctas)
        view = self.tiles.views(given)
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
    def kernel(self, operands, rows, terms, out, space):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        a, b, a_scale, b_scale = operands
        base = SmemAllocator().allocate(c.smem_bytes, 128)
        stores = base + c.stages * c.stage_bytes
        table = stores + c.warps * STORE_TILE_BYTES
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
        m, n = out.shape
        self.tiles.prepare(*rows, b.shape[2], space, table, tid, c.threads)
        lane, warp = tid % 32, tid // 32
        across = TILES[c.tile_m][1]
        work = Work(
            tid=tid,
            lane=lane,
            row=warp // across * c.warp_m,
            column=warp % across * c.warp_n,
            n=n,
            k=a.shape[1],
            k_tiles=a_scale.shape[0],
            a=a,
            b=b,
            a_scale=a_scale,
            b_scale=b_scale,
        )
        size = c.warp_n // 2
        acc = cute.make_rmem_tensor((c.warp_m // 16 * size,), Float32)
        for number in range(cta, self.tiles.count(m, n, table), ctas):
            tile = Tile(*self.tiles.find(number, m, n, table, lane))
            for i in range_constexpr(c.stages - 1):
                if i < work.k_tiles:
                    self._load(i, i, base, tile, work)
                cute.arch.cp_async_commit_group()
            acc.fill(0.0)
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                factors = self._factors(k_tile, tile, work)
                cute.arch.cp_async_wait_group(c.stages - 2)
                # After this barrier, all threads' copies of this k tile have arrived, and all warps have read the
                # previous k tile. So the copies below may overwrite the previous k tile's stage.
                cute.arch.sync_threads()
                ahead = k_tile + c.stages - 1
                if ahead < work.k_tiles:
                    self._load(ahead, ahead % c.stages, base, tile, work)
                cute.arch.cp_async_commit_group()
                self._multiply(k_tile % c.stages, factors, acc, base, work)
            # Wait until all warps have read the last k tile, because the next tile's copies overwrite its stage.
            cute.arch.sync_threads()
            epilogue = self.epilogue.of_tile(*terms, n, None if const_expr(c.rows.is_plain) else tile.expert)
            for i in range_constexpr(c.warp_m // 16):
                store_rows(
                    cute.make_tensor(acc.iterator + i * size, cute.make_layout(size)),
                    out,
                    stores + cute.assume(warp * STORE_TILE_BYTES, divby=PIECE),
                    tile.row + work.row + 16 * i,
                    tile.rows - work.row - 16 * i,
                    tile.column + work.column,
                    lane,
                    epilogue,
                )
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()

    # Copies. A stage holds rows of a, then rows of b. The halves of every second row are swapped, so that lanes that
    # read at the same time avoid bank conflicts.

    def _place(self, row, piece):
        """Return the offset, in a stage, of the ``piece``-th 16-byte piece of a row."""
        return row * K_TILE + (piece ^ (row % 2 * (PIECES // 2))) * PIECE

    @cute.jit
    def _load(self, k_tile, stage, base, tile, work):
        """Start this thread's part of the copies of a k tile. Elements that do not exist become zeros."""
        c = self.config
        at = base + cute.assume(Int32(stage) * c.stage_bytes, divby=K_TILE)
        piece = work.tid % PIECES
        begin = k_tile * K_TILE + piece * PIECE
        for i in range_constexpr((c.tile_m + TILE_N) * PIECES // c.threads):
            row = work.tid // PIECES + i * (c.threads // PIECES)
            if const_expr(i * (c.threads // PIECES) < c.tile_m):
                exists = (row < tile.rows) & (begin < work.k)
                offset = ptx.select(exists, Int64(tile.row + row) * work.k + begin, Int64(0))
                source = work.a.iterator + cute.assume(offset, divby=PIECE)
            else:
                column = tile.column + row - c.tile_m
                exists = (column < work.n) & (begin < work.k)
                offset = Int64(tile.expert) * work.b.stride[2] + Int64(column) * work.k + begin
                source = work.b.iterator + cute.assume(ptx.select(exists, offset, Int64(0)), divby=PIECE)
            ptx.copy_async_16(at + cute.assume(self._place(row, piece), divby=PIECE), source, exists)

    @cute.jit
    def _factors(self, k_tile, tile, work) -> list:
        """Return the products of both operands' scales for the lane's rows, which are two of every 16 rows."""
        scale = work.b_scale[tile.column // K_TILE, k_tile, tile.expert]
        factors = []
        for i in range_constexpr(self.config.warp_m // 8):
            # For a row that does not exist, load the factor of the expert's last row. Its results are not stored.
            row = cutlass.min(work.row + i * 8 + work.lane // 4, tile.rows - 1)
            factors.append(ptx.mul_rn(work.a_scale[k_tile, Int64(tile.row) + row], scale))
        return factors

    # MMAs

    def _words(self, at: cute.Pointer, row, lane) -> list:
        """Load this lane's words of a row, as two vectors of four words."""
        words = []
        for piece in (lane % 4, lane % 4 + PIECES // 2):
            place = at + cute.assume(self._place(row, piece), divby=PIECE)
            words += load_words(cute.make_tensor(cute.recast_ptr(place, dtype=Uint32), cute.make_layout(4)))
        return words

    @cute.jit
    def _multiply(self, stage, factors, acc, base, work):
        """Multiply a k tile, multiply the results by ``factors``, and add them to the accumulators."""
        c = self.config
        at = base + cute.assume(Int32(stage) * c.stage_bytes, divby=K_TILE)
        row = work.row + work.lane // 4
        rows = [self._words(at, row + 8 * i, work.lane) for i in range(c.warp_m // 8)]
        for group in range_constexpr(c.warp_n // 8):
            columns = self._words(at, c.tile_m + work.column + group * 8 + work.lane // 4, work.lane)
            for i in range_constexpr(c.warp_m // 16):
                total = [Float32(0.0)] * 4
                for step in range_constexpr(4):
                    a = [rows[2 * i + r][half + step] for half in (0, 4) for r in (0, 1)]
                    total = ptx.mma_16x8x32(a, [columns[step], columns[4 + step]], total)
                first = (i * (c.warp_n // 8) + group) * 4
                for j in range_constexpr(4):
                    acc[first + j] = ptx.fma_rn(factors[2 * i + j // 2], total[j], acc[first + j])
