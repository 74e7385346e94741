"""The device code; the package's docstring describes the roles and the data path."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import EpilogueOps
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, load_words, store_words
from torch_cute_ops.kernels.common.core.partial_sums import reduce_partial_sums, store_partial_sums, thread_columns
from torch_cute_ops.kernels.common.fp4.codes import (
    acc_scale,
    decode,
    pair_activations,
    rows_of_bytes,
    scale_argument,
    scale_factors,
)
from torch_cute_ops.kernels.fp4_mma.config import CHUNK, ROWS, THREADS, Arguments, Config
from torch_cute_ops.kernels.fp4_mma.native import code_place, load_activations, multiply_codes
from torch_cute_ops.runtime.argspec import Dim, TensorArg

LINE = 128  # bytes of codes of a row in a chunk
QUAD = 4  # lanes that share a row of an mma operand
TILE = 8  # rows of activations of one mma


class Part(NamedTuple):
    """A thread's part of its CTA's tile, and the operands.

    Attributes:
        tid: index of the thread in its CTA.
        row: the first of the thread's two rows of the weight in the tile; the other is ``row + 8``.
        quad: of the lane, among the four that share these rows.
        token: of the lane, among the eight of an MMA.
        first_row, first_token: of the tile.
        k, n, m: sizes of the GEMM.
        blocks: of a row of the weight.
        a, b, scale: the activations, and the weight by rows with its scales as bytes.
        a_scale: the scales of activations that are codes, as bytes.
    """

    tid: Int32
    row: Int32
    quad: Int32
    token: Int32
    first_row: Int32
    first_token: Int32
    k: Int32
    n: Int32
    m: Int32
    blocks: Int32
    a: cute.Tensor
    b: cute.Tensor
    scale: cute.Tensor
    a_scale: cute.Tensor | None


class FP4MmaKernel:
    """The kernel of one ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.native = config.a_layout is not None
        self.dtype = DSL_DTYPES[config.dtype]
        self.epilogue = EpilogueOps(config.epilogue)

    def arguments(self) -> Arguments:
        m, n = Dim("m"), Dim("n", divisibility=8)
        k, half = Dim("k", divisibility=32), Dim("k_bytes", divisibility=16)
        alpha, bias = self.epilogue.arguments(n)
        columns = half if self.native else k
        a_scales = scale_argument(self.config.fmt, Dim("a_scale_rows"), Dim("a_blocks")) if self.native else None
        return Arguments(
            a=TensorArg(self.dtype.__name__, (m, columns), (columns, 1), align=16),
            a_scale=a_scales,
            b=TensorArg("Uint8", (half, n), (1, half), align=16),
            b_scale=scale_argument(self.config.fmt, Dim("scale_rows"), Dim("blocks")),
            alpha=alpha,
            bias=bias,
            out=TensorArg(self.epilogue.out_dtype.__name__, (m, n), (n, 1), align=16),
        )

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, alpha, bias, out, stream):
        c = self.config
        b, scale = rows_of_bytes(b, b_scale)
        if const_expr(self.native):
            a_scale = cute.make_tensor(cute.recast_ptr(a_scale.iterator, dtype=Uint8), a_scale.layout)
        # In one dimension, where a grid may have 2^31 CTAs: all tiles of the weight for a tile of activations, then for
        # the next.
        tiles = cute.ceil_div(b.shape[0], ROWS) * cute.ceil_div(a.shape[0], c.tokens)
        ctas = ctas_unless_overlapping(tiles * c.splits, (out,), (a, a_scale, b, scale, alpha, bias))
        self.kernel(a, a_scale, b, scale, alpha, bias, out).launch(
            grid=[ctas, 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=c.ctas_per_sm,
            preferred_smem_carveout=100,
            cluster=[c.splits, 1, 1] if const_expr(c.splits > 1) else None,
            stream=stream,
            use_pdl=c.pdl,
        )

    @cute.kernel
    def kernel(self, a, a_scale, b, scale, alpha, bias, out):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        row_tiles = cute.ceil_div(b.shape[0], ROWS)
        tile = cta // c.splits
        lane = tid % 32
        k = a.shape[1] * 2 if const_expr(self.native) else a.shape[1]
        chunks = cute.ceil_div(k, CHUNK)
        rank = cta % c.splits
        first = rank * chunks // c.splits
        count = (rank + 1) * chunks // c.splits - first
        part = Part(
            tid=tid,
            row=tid // 32 * 16 + lane // QUAD,
            quad=lane % QUAD,
            token=lane // QUAD,
            first_row=tile % row_tiles * ROWS,
            first_token=tile // row_tiles * c.tokens,
            k=k,
            n=b.shape[0],
            m=a.shape[0],
            blocks=k // c.fmt.block_size,
            a=a,
            b=b,
            scale=scale,
            a_scale=a_scale,
        )
        base = SmemAllocator().allocate(c.smem_bytes, 128)
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
        for i in range_constexpr(c.stages - 1):
            if i < count:
                self._load(first + i, i, base, part)
            cute.arch.cp_async_commit_group()
        sums = cute.make_rmem_tensor((c.tokens // TILE * 4,), Float32)
        sums.fill(0.0)
        if const_expr(not self.native):
            cute.arch.cp_async_wait_group(c.stages - 2)
            if count > 0:
                self._rearrange(0, base, part)
        for i in range(count):
            # This thread's copies have arrived: of this chunk, and of the next one, which it rearranges.
            cute.arch.cp_async_wait_group(c.stages - (2 if const_expr(self.native) else 3))
            if const_expr(not self.native):
                if i + 1 < count:
                    self._rearrange((i + 1) % c.stages, base, part)
            # All copies of this chunk have arrived, and all warps are done with the one before, whose stage is next.
            cute.arch.sync_threads()
            ahead = i + c.stages - 1
            if ahead < count:
                self._load(first + ahead, ahead % c.stages, base, part)
            cute.arch.cp_async_commit_group()
            if const_expr(self.native):
                stage = i % c.stages
                operands = [at(stage, base) for at in (self._codes_at, self._scales_at, self._tokens_at)]
                multiply_codes(c, first + i, operands, sums, part)
            else:
                self._multiply(first + i, i % c.stages, sums, base, part)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        sum_tile = c.sum_tile
        terms = self.epilogue.terms(alpha, bias, *thread_columns(sum_tile, THREADS, tid, part.first_row), part.n)
        store_partial_sums(sum_tile, sums, base, part.row, part.quad)
        if const_expr(c.splits > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        finish = self.epilogue.finisher(
            self.epilogue.factor(alpha), terms, 1.0 if const_expr(self.native) else acc_scale(c.fmt)
        )
        reduce_partial_sums(sum_tile, c.splits, THREADS, finish, out, base, rank, tid, part.first_token, part.first_row)
        if const_expr(c.splits > 1):
            # No CTA may end while another still reads its sums.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    # Copies. A stage holds codes, scales, activations. Pieces of 16 bytes are permuted within a row, so that lanes that
    # read at once have no bank conflicts.

    def _codes_at(self, stage, base) -> cute.Pointer:
        return base + cute.assume(Int32(stage) * self.config.stage_bytes, divby=128)

    def _scales_at(self, stage, base) -> cute.Pointer:
        return self._codes_at(stage, base) + self.config.code_bytes

    def _tokens_at(self, stage, base) -> cute.Pointer:
        return self._scales_at(stage, base) + self.config.scale_bytes

    @cute.jit
    def _load(self, chunk, stage, base, part):
        """Start this thread's copies of a chunk."""
        c = self.config
        codes, scales, tokens = (at(stage, base) for at in (self._codes_at, self._scales_at, self._tokens_at))
        for i in range_constexpr(c.code_bytes // 16 // THREADS):
            piece = part.tid + i * THREADS
            row, column = piece // (LINE // 16), piece % (LINE // 16)
            begin = chunk * LINE + column * 16
            exists = (part.first_row + row < part.n) & (begin < part.k // 2)
            source = part.b.iterator + self._offset(part.first_row + row, part.k // 2, begin, exists, 16)
            ptx.copy_async_16(codes + self._code_place(row, column), source, exists)
        self._load_scales(chunk, scales, part)
        if const_expr(self.native):
            load_activations(c, chunk, tokens, part)
        else:
            self._load_activations(chunk, tokens, part)

    @cute.jit
    def _load_activations(self, chunk, tokens, part):
        c = self.config
        row_bytes = CHUNK * c.dtype.itemsize
        for i in range_constexpr(c.token_bytes // 16 // THREADS):
            piece = part.tid + i * THREADS
            row, column = piece // (row_bytes // 16), piece % (row_bytes // 16)
            begin = chunk * CHUNK + column * (16 // c.dtype.itemsize)
            exists = (part.first_token + row < part.m) & (begin < part.k)
            source = part.a.iterator + self._offset(part.first_token + row, part.k, begin, exists, 8)
            ptx.copy_async_16(tokens + self._token_place(row, column), source, exists)

    def _offset(self, row, pitch, column, exists, divby: int) -> Int64:
        """Elements from the start of a matrix, a multiple of ``divby``; 0 for what does not exist."""
        offset = Int64(row) * pitch + column
        return cute.assume(ptx.select(exists, offset, Int64(0)), divby=divby)

    @cute.jit
    def _rearrange(self, stage, base, part):
        """Rearrange the activations that this thread has copied, in place, into the order of the decoded codes."""
        c = self.config
        row_pieces = CHUNK * c.dtype.itemsize // 16
        for i in range_constexpr(c.token_bytes // 16 // THREADS):
            piece = part.tid + i * THREADS
            place = self._token_place(piece // row_pieces, piece % row_pieces)
            words = self._words(self._tokens_at(stage, base), place)
            at = cute.recast_ptr(self._tokens_at(stage, base) + cute.assume(place, divby=16), dtype=Uint32)
            store_words(pair_activations(words, self.dtype), cute.make_tensor(at, cute.make_layout(4)))

    @cute.jit
    def _load_scales(self, chunk, scales, part):
        c = self.config
        blocks = c.chunk_blocks
        if const_expr(c.layout.is_linear):
            # Rows are multiples of 4 bytes, and no more alignment is known.
            for i in range_constexpr(c.scale_bytes // 4 // THREADS):
                piece = part.tid + i * THREADS
                row, column = piece // (blocks // 4), piece % (blocks // 4)
                begin = chunk * blocks + column * 4
                exists = (part.first_row + row < part.n) & (begin < part.blocks)
                source = part.scale.iterator + self._offset(part.first_row + row, part.blocks, begin, exists, 4)
                ptx.copy_async_4(scales + (row * blocks + column * 4), source, exists)
        else:
            # Tiles of 128 rows x 4 blocks, 512 bytes, one after the other.
            for i in range_constexpr(c.scale_bytes // 16 // THREADS or 1):
                piece = part.tid + i * THREADS
                tiles = cute.ceil_div(part.blocks, 4)
                tile = chunk * (blocks // 4) + piece // 32
                exists = tile < tiles
                start = Int64(part.first_row // ROWS) * tiles + tile
                offset = cute.assume(ptx.select(exists, start * 512 + piece % 32 * 16, Int64(0)), divby=16)
                if piece < c.scale_bytes // 16:
                    ptx.copy_async_16(scales + piece * 16, part.scale.iterator + offset, exists)

    def _code_place(self, row, column) -> Int32:
        """Offset of the 16 bytes ``column`` of a row of codes; rows that are read at once are in different banks."""
        if const_expr(self.native):
            return code_place(row, column)
        return row * LINE + (column ^ (row % 2 * 4)) * 16

    def _token_place(self, row, column) -> Int32:
        """Offset of the 16 bytes ``column`` of a row of activations; what four lanes read at once of two rows is in
        different banks."""
        bytes_ = CHUNK * self.config.dtype.itemsize
        return row * bytes_ + (column ^ (column // 8 % 2) ^ (row % 2 * 2)) * 16

    # MMAs

    def _words(self, pointer: cute.Pointer, offset) -> list:
        """Four words."""
        at = cute.recast_ptr(pointer + cute.assume(offset, divby=16), dtype=Uint32)
        return load_words(cute.make_tensor(at, cute.make_layout(4)))

    @cute.jit
    def _multiply(self, chunk, stage, sums, base, part):
        """Add a chunk to the sums."""
        c = self.config
        codes, scales, tokens = (at(stage, base) for at in (self._codes_at, self._scales_at, self._tokens_at))
        name = "bf16" if self.dtype is BFloat16 else "f16"
        for half in range_constexpr(2):
            rows = []
            for r in range_constexpr(2):
                row = part.row + 8 * r
                words = self._words(codes, self._code_place(row, half * 4 + part.quad))
                rows.append(decode(words, self._block_scales(scales, chunk, half, row, part), self.dtype, c.fmt))
            for tile in range_constexpr(c.tokens // TILE):
                for word in range_constexpr(4):
                    column = half * 16 + part.quad * 4 + word
                    pairs = self._words(tokens, self._token_place(tile * TILE + part.token, column))
                    for step in range_constexpr(2):
                        (low0, high0), (low1, high1) = rows[0][word][step], rows[1][word][step]
                        total = [sums[tile * 4 + i] for i in range(4)]
                        total = ptx.mma_16x8x16([low0, low1, high0, high1], pairs[2 * step : 2 * step + 2], total, name)
                        for i in range_constexpr(4):
                            sums[tile * 4 + i] = total[i]

    def _block_scales(self, scales, chunk, half: int, row, part) -> list:
        """The factors of the lane's 32 elements in a half of a chunk: two blocks of NVFP4, or one of MXFP4."""
        c = self.config
        count = 32 // c.fmt.block_size
        block = half * (c.chunk_blocks // 2) + part.quad * count
        # The scales of a stage are laid out like those of a matrix of its size.
        place = c.layout.row_offset(row, c.chunk_blocks) + c.layout.block_offset(block)
        at = cute.assume(place, divby=count)
        dtype = Uint8 if count == 1 else Uint16
        bytes_ = Uint32(cute.make_tensor(cute.recast_ptr(scales + at, dtype=dtype), cute.make_layout(1))[0])
        # Scales of blocks that do not exist may be anything, and 0 times NaN is not 0.
        bytes_ = ptx.select(chunk * c.chunk_blocks + block < part.blocks, bytes_, Uint32(0))
        return scale_factors(bytes_, self.dtype, c.fmt)
