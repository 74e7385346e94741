"""The device code; the package's docstring tells the roles and the data path."""

from types import SimpleNamespace

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.kernels.common.cluster_sums import leave_sums, write_sums
from torch_cute_ops.kernels.common.convert import DSL_DTYPES, load_words, store_words
from torch_cute_ops.kernels.common.fp4_weights import (
    decode,
    pair_activations,
    rows_of_bytes,
    scale_argument,
    scale_factors,
    sum_scale,
)
from torch_cute_ops.kernels.fp4_mma.config import CHUNK, ROWS, THREADS, Config
from torch_cute_ops.runtime.argspec import Argument, Dim, TensorArg

LINE = 128  # bytes of codes of a row in a chunk
QUAD = 4  # lanes that share a row of an mma operand
TILE = 8  # rows of activations of one mma


class FP4MmaKernel:
    """The kernel of one ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]
        self.out_dtype = DSL_DTYPES[config.out_dtype]

    def arguments(self) -> tuple[Argument, ...]:
        m, n = Dim("m"), Dim("n", divisibility=8)
        k, half = Dim("k", divisibility=32), Dim("k_bytes", divisibility=16)
        return (
            TensorArg(self.dtype.__name__, (m, k), (k, 1), align=16),
            TensorArg("Uint8", (half, n), (1, half), align=16),
            scale_argument(self.config.fmt, Dim("scale_rows"), Dim("blocks")),
            TensorArg("Float32", (1,), (1,), align=4) if self.config.has_alpha else None,
            TensorArg(self.out_dtype.__name__, (m, n), (n, 1), align=16),
        )

    @cute.jit
    def __call__(self, a, b, scale, alpha, out, stream):
        c = self.config
        b, scale = rows_of_bytes(b, scale)
        # In one dimension, where a grid may have 2^31: the weight's tiles, for one tile of activations after another.
        tiles = cute.ceil_div(b.shape[0], ROWS) * cute.ceil_div(a.shape[0], c.tokens)
        self.kernel(a, b, scale, alpha, out).launch(
            grid=[tiles * c.splits, 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=c.ctas_per_sm,
            preferred_smem_carveout=100,
            cluster=[c.splits, 1, 1] if const_expr(c.splits > 1) else None,
            stream=stream,
            use_pdl=c.pdl,
        )

    @cute.kernel
    def kernel(self, a, b, scale, alpha, out):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        row_tiles = cute.ceil_div(b.shape[0], ROWS)
        tile = cta // c.splits
        lane = tid % 32
        chunks = cute.ceil_div(a.shape[1], CHUNK)
        rank = cta % c.splits
        first = rank * chunks // c.splits
        count = (rank + 1) * chunks // c.splits - first
        t = SimpleNamespace(
            tid=tid,
            row=tid // 32 * 16 + lane // QUAD,  # and the eighth row after it
            quad=lane % QUAD,
            token=lane // QUAD,
            first_row=tile % row_tiles * ROWS,
            first_token=tile // row_tiles * c.tokens,
            k=a.shape[1],
            n=b.shape[0],
            m=a.shape[0],
            blocks=a.shape[1] // c.fmt.block_size,
            a=a,
            b=b,
            scale=scale,
        )
        base = SmemAllocator().allocate(c.smem_bytes, 128)
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
        for i in range_constexpr(c.stages - 1):
            if i < count:
                self._load(first + i, i, base, t)
            cute.arch.cp_async_commit_group()
        sums = cute.make_rmem_tensor((c.tokens // TILE * 4,), Float32)
        sums.fill(0.0)
        cute.arch.cp_async_wait_group(c.stages - 2)
        if count > 0:
            self._pair(0, base, t)
        for i in range(count):
            # What this thread copied of the next chunk is there.
            cute.arch.cp_async_wait_group(c.stages - 3)
            if i + 1 < count:
                self._pair((i + 1) % c.stages, base, t)
            # This chunk is there for all, and all are done with the one before, whose place is filled next.
            cute.arch.sync_threads()
            ahead = i + c.stages - 1
            if ahead < count:
                self._load(first + ahead, ahead % c.stages, base, t)
            cute.arch.cp_async_commit_group()
            self._multiply(first + i, i % c.stages, sums, base, t)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        sum_tile = c.sum_tile
        leave_sums(sum_tile, sums, base, t.row, t.quad)
        if const_expr(c.splits > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        factor = Float32(1.0)
        if const_expr(c.has_alpha):
            factor = alpha[0]
        scale = (Float32(sum_scale(c.fmt)), factor)
        write_sums(sum_tile, c.splits, THREADS, scale, out, base, rank, tid, t.first_token, t.first_row)
        if const_expr(c.splits > 1):
            # No CTA may end while another still reads its sums.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    # Copies. A stage holds codes, scales, activations. Chunks of 16 bytes are swapped within a line, so that the lanes
    # that read at once meet all banks.

    def _codes_at(self, stage, base) -> cute.Pointer:
        return base + cute.assume(Int32(stage) * self.config.stage_bytes, divby=128)

    def _scales_at(self, stage, base) -> cute.Pointer:
        return self._codes_at(stage, base) + self.config.code_bytes

    def _tokens_at(self, stage, base) -> cute.Pointer:
        return self._scales_at(stage, base) + self.config.scale_bytes

    @cute.jit
    def _load(self, chunk, stage, base, t):
        """Start this thread's copies of a chunk."""
        c = self.config
        codes, scales, tokens = (at(stage, base) for at in (self._codes_at, self._scales_at, self._tokens_at))
        for i in range_constexpr(c.code_bytes // 16 // THREADS):
            piece = t.tid + i * THREADS
            row, column = piece // (LINE // 16), piece % (LINE // 16)
            begin = chunk * LINE + column * 16
            exists = (t.first_row + row < t.n) & (begin < t.k // 2)
            source = t.b.iterator + self._offset(t.first_row + row, t.k // 2, begin, exists, 16)
            ptx.copy_async_16(codes + self._code_place(row, column), source, exists)
        row_bytes = CHUNK * c.dtype.itemsize
        for i in range_constexpr(c.token_bytes // 16 // THREADS):
            piece = t.tid + i * THREADS
            row, column = piece // (row_bytes // 16), piece % (row_bytes // 16)
            begin = chunk * CHUNK + column * (16 // c.dtype.itemsize)
            exists = (t.first_token + row < t.m) & (begin < t.k)
            source = t.a.iterator + self._offset(t.first_token + row, t.k, begin, exists, 8)
            ptx.copy_async_16(tokens + self._token_place(row, column), source, exists)
        self._load_scales(chunk, scales, t)

    def _offset(self, row, pitch, column, exists, divby: int) -> Int64:
        """Elements from the start of a matrix, a multiple of ``divby``; 0 for what is beyond it."""
        offset = Int64(row) * pitch + column
        return cute.assume(ptx.select(exists, offset, Int64(0)), divby=divby)

    @cute.jit
    def _pair(self, stage, base, t):
        """Put the activations that this thread has copied into the order of the decoded codes, where they are."""
        c = self.config
        row_pieces = CHUNK * c.dtype.itemsize // 16
        for i in range_constexpr(c.token_bytes // 16 // THREADS):
            piece = t.tid + i * THREADS
            place = self._token_place(piece // row_pieces, piece % row_pieces)
            words = self._words(self._tokens_at(stage, base), place)
            at = cute.recast_ptr(self._tokens_at(stage, base) + cute.assume(place, divby=16), dtype=Uint32)
            store_words(pair_activations(words, self.dtype), cute.make_tensor(at, cute.make_layout(4)))

    @cute.jit
    def _load_scales(self, chunk, scales, t):
        c = self.config
        blocks = c.chunk_blocks
        if const_expr(c.layout.is_linear):
            # Rows of blocks bytes, 4 at a time, since no more is sure to be aligned.
            for i in range_constexpr(c.scale_bytes // 4 // THREADS):
                piece = t.tid + i * THREADS
                row, column = piece // (blocks // 4), piece % (blocks // 4)
                begin = chunk * blocks + column * 4
                exists = (t.first_row + row < t.n) & (begin < t.blocks)
                source = t.scale.iterator + self._offset(t.first_row + row, t.blocks, begin, exists, 4)
                ptx.copy_async_4(scales + (row * blocks + column * 4), source, exists)
        else:
            # Tiles of 128 rows and 4 blocks, 512 bytes, one after the other.
            for i in range_constexpr(c.scale_bytes // 16 // THREADS or 1):
                piece = t.tid + i * THREADS
                tiles = cute.ceil_div(t.blocks, 4)
                tile = chunk * (blocks // 4) + piece // 32
                exists = tile < tiles
                start = Int64(t.first_row // ROWS) * tiles + tile
                offset = cute.assume(ptx.select(exists, start * 512 + piece % 32 * 16, Int64(0)), divby=16)
                if piece < c.scale_bytes // 16:
                    ptx.copy_async_16(scales + piece * 16, t.scale.iterator + offset, exists)

    def _code_place(self, row, column) -> Int32:
        """Where the 16 bytes of codes ``column`` of a row lie: two rows that are read at once, apart."""
        return row * LINE + (column ^ (row % 2 * 4)) * 16

    def _token_place(self, row, column) -> Int32:
        """Where 16 bytes of a row of activations lie: what four lanes and two rows read at once, apart."""
        bytes_ = CHUNK * self.config.dtype.itemsize
        return row * bytes_ + (column ^ (column // 8 % 2) ^ (row % 2 * 2)) * 16

    # Products

    def _words(self, pointer: cute.Pointer, offset) -> list:
        """Four words."""
        at = cute.recast_ptr(pointer + cute.assume(offset, divby=16), dtype=Uint32)
        return load_words(cute.make_tensor(at, cute.make_layout(4)))

    @cute.jit
    def _multiply(self, chunk, stage, sums, base, t):
        """Add the products of a chunk to the sums."""
        c = self.config
        codes, scales, tokens = (at(stage, base) for at in (self._codes_at, self._scales_at, self._tokens_at))
        name = "bf16" if self.dtype is BFloat16 else "f16"
        for half in range_constexpr(2):
            rows = []
            for r in range_constexpr(2):
                row = t.row + 8 * r
                words = self._words(codes, self._code_place(row, half * 4 + t.quad))
                rows.append(decode(words, self._block_scales(scales, chunk, half, row, t), self.dtype, c.fmt))
            for tile in range_constexpr(c.tokens // TILE):
                for word in range_constexpr(4):
                    column = half * 16 + t.quad * 4 + word
                    pairs = self._words(tokens, self._token_place(tile * TILE + t.token, column))
                    for step in range_constexpr(2):
                        (low0, high0), (low1, high1) = rows[0][word][step], rows[1][word][step]
                        total = [sums[tile * 4 + i] for i in range(4)]
                        total = ptx.mma_16x8x16([low0, low1, high0, high1], pairs[2 * step : 2 * step + 2], total, name)
                        for i in range_constexpr(4):
                            sums[tile * 4 + i] = total[i]

    def _block_scales(self, scales, chunk, half: int, row, t) -> list:
        """The factors of the blocks that the lane's 32 elements in a half of a chunk make: two, or one of MXFP4."""
        c = self.config
        count = 32 // c.fmt.block_size
        block = half * (c.chunk_blocks // 2) + t.quad * count
        # In a stage the scales lie as those of a matrix of its size.
        place = c.layout.row_offset(row, c.chunk_blocks) + c.layout.block_offset(block)
        at = cute.assume(place, divby=count)
        dtype = Uint8 if count == 1 else Uint16
        bytes_ = Uint32(cute.make_tensor(cute.recast_ptr(scales + at, dtype=dtype), cute.make_layout(1))[0])
        # Beyond the last block the matrix of scales may hold anything, and 0 times NaN is not 0.
        bytes_ = ptx.select(chunk * c.chunk_blocks + block < t.blocks, bytes_, Uint32(0))
        return scale_factors(bytes_, self.dtype, c.fmt)
