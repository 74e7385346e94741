"""The device code; the package's docstring tells the roles and the data path."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common import ptx, row_tile
from torch_cute_ops.kernels.common.convert import DSL_DTYPES, load_words
from torch_cute_ops.kernels.common.expert_tiles import ExpertTiles
from torch_cute_ops.kernels.common.row_stores import store_rows
from torch_cute_ops.kernels.fp8_mma.config import BLOCK, COLUMNS, TILES, Config
from torch_cute_ops.runtime.argspec import Argument, ScalarArg

PIECE = 16  # bytes that a lane copies, or reads, at once
PIECES = BLOCK // PIECE


class FP8MmaKernel:
    """The kernel of one ``Config``.

    Methods pass on what a thread knows: ``t``, the tensors and this CTA's part; ``p``, the present tile; ``s``, where
    things lie in shared memory.
    """

    def __init__(self, config: Config):
        self.config = config
        self.out_dtype = DSL_DTYPES[config.out_dtype]
        self.tiles = ExpertTiles(config.rows, config.tokens, COLUMNS)

    def arguments(self) -> tuple[Argument, ...]:
        return (*self.tiles.arguments(self.out_dtype.__name__), ScalarArg("Int32"))

    @cute.jit
    def __call__(self, a, b, a_scale, b_scale, offsets, counts, out, workers: Int32, stream):
        view = self.tiles.views(a, b, a_scale, b_scale, out)
        operands = view.a, view.b, view.a_scale, view.b_scale
        self.kernel(operands, (offsets, counts), view.out, view.space).launch(
            grid=[workers, 1, 1],
            block=[self.config.threads, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=self.config.pdl,
        )

    @cute.kernel
    def kernel(self, operands, given, out, space):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        workers, _, _ = cute.arch.grid_dim()
        a, b, a_scale, b_scale = operands
        base = SmemAllocator().allocate(c.smem_bytes, 128)
        stores = base + c.stages * c.stage_bytes
        table = stores + c.warps * row_tile.SIZE_BYTES
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
        m, n = out.shape
        self.tiles.prepare(*given, b.shape[2], space, table, tid, c.threads)
        lane, warp = tid % 32, tid // 32
        across = TILES[c.tokens][1]
        t = SimpleNamespace(
            tid=tid,
            lane=lane,
            row=warp // across * c.warp_rows,  # of the warp, in a tile
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
            expert, row, rows, column = self.tiles.find(number, m, n, table, lane)
            p = SimpleNamespace(expert=expert, row=row, rows=rows, column=column)
            for i in range_constexpr(c.stages - 1):
                if i < t.blocks:
                    self._load(i, i, base, p, t)
                cute.arch.cp_async_commit_group()
            sums.fill(0.0)
            for block in cutlass.range(t.blocks, unroll=1):
                factors = self._factors(block, p, t)
                cute.arch.cp_async_wait_group(c.stages - 2)
                # This block is there for all, and all are done with the one before, whose place is filled next.
                cute.arch.sync_threads()
                ahead = block + c.stages - 1
                if ahead < t.blocks:
                    self._load(ahead, ahead % c.stages, base, p, t)
                cute.arch.cp_async_commit_group()
                self._multiply(block % c.stages, factors, sums, base, t)
            # All are done with the last block, whose place the next tile may take.
            cute.arch.sync_threads()
            for i in range_constexpr(c.warp_rows // 16):
                store_rows(
                    cute.make_tensor(sums.iterator + i * size, cute.make_layout(size)),
                    out,
                    stores + cute.assume(warp * row_tile.SIZE_BYTES, divby=PIECE),
                    row + t.row + 16 * i,
                    rows - t.row - 16 * i,
                    column + t.column,
                    lane,
                )
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()

    # Copies. A stage holds rows of a, then rows of b. Halves of every second row are swapped, so that the lanes that
    # read at once meet all banks.

    def _place(self, row, piece):
        """Where 16 bytes of a row lie in a stage."""
        return row * BLOCK + (piece ^ (row % 2 * (PIECES // 2))) * PIECE

    @cute.jit
    def _load(self, block, stage, base, p, t):
        """Start this thread's copies of a block of k: of rows that exist, and zeros for others."""
        c = self.config
        at = base + cute.assume(Int32(stage) * c.stage_bytes, divby=BLOCK)
        piece = t.tid % PIECES
        begin = block * BLOCK + piece * PIECE
        for i in range_constexpr((c.tokens + COLUMNS) * PIECES // c.threads):
            row = t.tid // PIECES + i * (c.threads // PIECES)
            if const_expr(i * (c.threads // PIECES) < c.tokens):
                exists = row < p.rows
                offset = ptx.select(exists, Int64(p.row + row) * t.k + begin, Int64(0))
                source = t.a.iterator + cute.assume(offset, divby=PIECE)
            else:
                column = p.column + row - c.tokens
                exists = column < t.n
                offset = Int64(p.expert) * t.b.stride[2] + Int64(column) * t.k + begin
                source = t.b.iterator + cute.assume(ptx.select(exists, offset, Int64(0)), divby=PIECE)
            ptx.copy_async_16(at + cute.assume(self._place(row, piece), divby=PIECE), source, exists)

    @cute.jit
    def _factors(self, block, p, t) -> list:
        """The factors of a lane's rows: two of each 16."""
        scale = t.b_scale[p.column // BLOCK, block, p.expert]
        factors = []
        for i in range_constexpr(self.config.warp_rows // 8):
            # Of rows that the expert does not have, its last row's: nothing of it is stored.
            row = cutlass.min(t.row + i * 8 + t.lane // 4, p.rows - 1)
            factors.append(ptx.mul_rn(t.a_scale[block, Int64(p.row) + row], scale))
        return factors

    # Products

    def _words(self, at: cute.Pointer, row, lane) -> list:
        """A lane's words of a row: two pieces of four."""
        words = []
        for piece in (lane % 4, lane % 4 + PIECES // 2):
            place = at + cute.assume(self._place(row, piece), divby=PIECE)
            words += load_words(cute.make_tensor(cute.recast_ptr(place, dtype=Uint32), cute.make_layout(4)))
        return words

    @cute.jit
    def _multiply(self, stage, factors, sums, base, t):
        """Add the products of a block of k to the sums."""
        c = self.config
        at = base + cute.assume(Int32(stage) * c.stage_bytes, divby=BLOCK)
        row = t.row + t.lane // 4
        rows = [self._words(at, row + 8 * i, t.lane) for i in range(c.warp_rows // 8)]
        for group in range_constexpr(c.warp_columns // 8):
            columns = self._words(at, c.tokens + t.column + group * 8 + t.lane // 4, t.lane)
            for i in range_constexpr(c.warp_rows // 16):
                total = [Float32(0.0)] * 4
                for step in range_constexpr(4):
                    a = [rows[2 * i + r][half + step] for half in (0, 4) for r in (0, 1)]
                    total = ptx.mma_16x8x32(a, [columns[step], columns[4 + step]], total)
                first = (i * (c.warp_columns // 8) + group) * 4
                for j in range_constexpr(4):
                    sums[first + j] = ptx.fma_rn(factors[2 * i + j // 2], total[j], sums[first + j])
