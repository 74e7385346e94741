"""Device code of the FP4 GEMM with mma.sync. The package's docstring describes the roles and the data path."""

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
    scale_matrix,
)
from torch_cute_ops.kernels.fp4_mma.config import K_TILE, THREADS, TILE_N, Arguments, Config
from torch_cute_ops.kernels.fp4_mma.native import code_place, load_activations, multiply_codes
from torch_cute_ops.runtime.argspec import Dim, TensorArg

LINE = 128  # bytes of codes of a row in a k tile
QUAD = 4  # number of lanes that share a row of an MMA's operand
TILE = 8  # number of rows of activations per MMA


class Work(NamedTuple):
    """Work of a thread in its CTA's tile, and the tensors of the call.

    Attributes:
        tid: index of the thread in its CTA.
        row: first of the thread's two weight rows in the tile. The second is ``row + 8``.
        quad: index of the lane among the four lanes that share these rows.
        token: index of the lane's row of activations among the eight rows of an MMA.
        first_column, first_row: first column and row of the tile in the result.
        k, n, m: sizes of the GEMM.
        blocks: number of blocks of a row of the weight.
        a, b, scale: activations as (M, K) 16-bit values or as codes, codes of the weight (N, K/2), and the weight's
            scales as bytes.
        a_scale: scales of activations in FP4, as bytes, or None.
    """

    tid: Int32
    row: Int32
    quad: Int32
    token: Int32
    first_column: Int32
    first_row: Int32
    k: Int32
    n: Int32
    m: Int32
    blocks: Int32
    a: cute.Tensor
    b: cute.Tensor
    scale: cute.Tensor
    a_scale: cute.Tensor | None


class FP4MmaKernel:
    """GEMM kernel, compiled for a ``Config``."""

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
        c = self.config
        a_scales = None
        if self.native:
            a_scales = scale_argument(c.fmt, c.a_layout, Dim("a_scale_rows"), Dim("a_blocks"), name="a_")
        return Arguments(
            a=TensorArg(self.dtype.__name__, (m, columns), (columns, 1), align=16),
            a_scale=a_scales,
            b=TensorArg("Uint8", (half, n), (1, half), align=16),
            b_scale=scale_argument(c.fmt, c.layout, Dim("scale_rows"), Dim("blocks")),
            alpha=alpha,
            bias=bias,
            row_scale=self.epilogue.row_scale_argument(m),
            out=TensorArg(self.epilogue.out_dtype.__name__, (m, n), (n, 1), align=16),
        )

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, alpha, bias, row_scale, out, stream):
        c = self.config
        # The grid has one dimension, because this dimension may have 2^31 CTAs. It lists all n tiles of the first m
        # tile, then all n tiles of the second m tile, and so on.
        tiles = cute.ceil_div(b.shape[1], TILE_N) * cute.ceil_div(a.shape[0], c.tile_m)
        ctas = ctas_unless_overlapping(tiles * c.split_k, (out,), (a, a_scale, b, b_scale, alpha, bias, row_scale))
        b, scale = rows_of_bytes(b, scale_matrix(b_scale, c.layout))
        if const_expr(self.native):
            a_scale = scale_matrix(a_scale, c.a_layout)
            a_scale = cute.make_tensor(cute.recast_ptr(a_scale.iterator, dtype=Uint8), a_scale.layout)
        self.kernel(a, a_scale, b, scale, alpha, bias, row_scale, out).launch(
            grid=[ctas, 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=c.ctas_per_sm,
            preferred_smem_carveout=100,
            cluster=[c.split_k, 1, 1] if const_expr(c.split_k > 1) else None,
            stream=stream,
            use_pdl=c.pdl,
        )

    @cute.kernel
    def kernel(self, a, a_scale, b, scale, alpha, bias, row_scale, out):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        n_tiles = cute.ceil_div(b.shape[0], TILE_N)
        tile = cta // c.split_k
        lane = tid % 32
        k = a.shape[1] * 2 if const_expr(self.native) else a.shape[1]
        k_tiles = cute.ceil_div(k, K_TILE)
        rank = cta % c.split_k
        first = rank * k_tiles // c.split_k
        count = (rank + 1) * k_tiles // c.split_k - first
        work = Work(
            tid=tid,
            row=tid // 32 * 16 + lane // QUAD,
            quad=lane % QUAD,
            token=lane // QUAD,
            first_column=tile % n_tiles * TILE_N,
            first_row=tile // n_tiles * c.tile_m,
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
                self._load(first + i, i, base, work)
            cute.arch.cp_async_commit_group()
        acc = cute.make_rmem_tensor((c.tile_m // TILE * 4,), Float32)
        acc.fill(0.0)
        if const_expr(not self.native):
            cute.arch.cp_async_wait_group(c.stages - 2)
            if count > 0:
                self._rearrange(0, base, work)
        for i in range(count):
            # Wait for this thread's copies of this k tile. If activations are rearranged, also wait for the copies of
            # the next k tile, which this thread rearranges now.
            cute.arch.cp_async_wait_group(c.stages - (2 if const_expr(self.native) else 3))
            if const_expr(not self.native):
                if i + 1 < count:
                    self._rearrange((i + 1) % c.stages, base, work)
            # After this barrier, all threads' copies of this k tile have arrived, and no warp reads the previous k tile
            # any more. So the copies below may overwrite the previous k tile's stage.
            cute.arch.sync_threads()
            ahead = i + c.stages - 1
            if ahead < count:
                self._load(first + ahead, ahead % c.stages, base, work)
            cute.arch.cp_async_commit_group()
            if const_expr(self.native):
                stage = i % c.stages
                operands = [at(stage, base) for at in (self._codes_at, self._scales_at, self._activations_at)]
                multiply_codes(c, first + i, operands, acc, work)
            else:
                self._multiply(first + i, i % c.stages, acc, base, work)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        partial_sums = c.partial_sums
        terms = self.epilogue.terms(alpha, bias, *thread_columns(partial_sums, THREADS, tid, work.first_column), work.n)
        store_partial_sums(partial_sums, acc, base, work.row, work.quad)
        if const_expr(c.split_k > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        finish = self.epilogue.finisher(
            self.epilogue.factor(alpha), terms, 1.0 if const_expr(self.native) else acc_scale(c.fmt)
        )
        reduce_partial_sums(
            partial_sums, c.split_k, THREADS, finish, out, base, rank, tid, work.first_row, work.first_column, row_scale
        )
        if const_expr(c.split_k > 1):
            # Wait, because other CTAs may still read this CTA's partial sums.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    # Copies. A stage holds codes, scales and activations. 16-byte vectors are permuted within a row, so that lanes that
    # read at the same time avoid bank conflicts.

    def _codes_at(self, stage, base) -> cute.Pointer:
        return base + cute.assume(Int32(stage) * self.config.stage_bytes, divby=128)

    def _scales_at(self, stage, base) -> cute.Pointer:
        return self._codes_at(stage, base) + self.config.code_bytes

    def _activations_at(self, stage, base) -> cute.Pointer:
        return self._scales_at(stage, base) + self.config.scale_bytes

    @cute.jit
    def _load(self, k_tile, stage, base, work):
        """Start the copies that this thread makes of a k tile."""
        c = self.config
        codes, scales, activations = (at(stage, base) for at in (self._codes_at, self._scales_at, self._activations_at))
        for i in range_constexpr(c.code_bytes // 16 // THREADS):
            vector = work.tid + i * THREADS
            row, column = vector // (LINE // 16), vector % (LINE // 16)
            begin = k_tile * LINE + column * 16
            exists = (work.first_column + row < work.n) & (begin < work.k // 2)
            source = work.b.iterator + self._offset(work.first_column + row, work.k // 2, begin, exists, 16)
            ptx.copy_async_16(codes + self._code_place(row, column), source, exists)
        self._load_scales(k_tile, scales, work)
        if const_expr(self.native):
            load_activations(c, k_tile, activations, work)
        else:
            self._load_activations(k_tile, activations, work)

    @cute.jit
    def _load_activations(self, k_tile, activations, work):
        c = self.config
        row_bytes = K_TILE * c.dtype.itemsize
        for i in range_constexpr(c.activation_bytes // 16 // THREADS):
            vector = work.tid + i * THREADS
            row, column = vector // (row_bytes // 16), vector % (row_bytes // 16)
            begin = k_tile * K_TILE + column * (16 // c.dtype.itemsize)
            exists = (work.first_row + row < work.m) & (begin < work.k)
            source = work.a.iterator + self._offset(work.first_row + row, work.k, begin, exists, 8)
            ptx.copy_async_16(activations + self._activation_place(row, column), source, exists)

    def _offset(self, row, pitch, column, exists, divby: int) -> Int64:
        """Return the offset of an element in a matrix, or 0 if the element does not exist. The offset is a multiple of
        ``divby``."""
        offset = Int64(row) * pitch + column
        return cute.assume(ptx.select(exists, offset, Int64(0)), divby=divby)

    @cute.jit
    def _rearrange(self, stage, base, work):
        """Reorder, in place, the activations that this thread copied. The new order is the order of the decoded
        codes."""
        c = self.config
        row_vectors = K_TILE * c.dtype.itemsize // 16
        for i in range_constexpr(c.activation_bytes // 16 // THREADS):
            vector = work.tid + i * THREADS
            place = self._activation_place(vector // row_vectors, vector % row_vectors)
            words = self._words(self._activations_at(stage, base), place)
            at = cute.recast_ptr(self._activations_at(stage, base) + cute.assume(place, divby=16), dtype=Uint32)
            store_words(pair_activations(words, self.dtype), cute.make_tensor(at, cute.make_layout(4)))

    @cute.jit
    def _load_scales(self, k_tile, scales, work):
        c = self.config
        blocks = c.k_tile_blocks
        if const_expr(c.layout.is_linear):
            # Copy 4 bytes at a time, because the length of a row of scales is only known to be a multiple of 4 bytes.
            for i in range_constexpr(c.scale_bytes // 4 // THREADS):
                vector = work.tid + i * THREADS
                row, column = vector // (blocks // 4), vector % (blocks // 4)
                begin = k_tile * blocks + column * 4
                exists = (work.first_column + row < work.n) & (begin < work.blocks)
                source = work.scale.iterator + self._offset(work.first_column + row, work.blocks, begin, exists, 4)
                ptx.copy_async_4(scales + (row * blocks + column * 4), source, exists)
        else:
            # Tiled scales are contiguous tiles of 128 rows x 4 blocks, 512 bytes each.
            for i in range_constexpr(c.scale_bytes // 16 // THREADS or 1):
                vector = work.tid + i * THREADS
                tiles = cute.ceil_div(work.blocks, 4)
                tile = k_tile * (blocks // 4) + vector // 32
                exists = tile < tiles
                start = Int64(work.first_column // TILE_N) * tiles + tile
                offset = cute.assume(ptx.select(exists, start * 512 + vector % 32 * 16, Int64(0)), divby=16)
                if vector < c.scale_bytes // 16:
                    ptx.copy_async_16(scales + vector * 16, work.scale.iterator + offset, exists)

    def _code_place(self, row, column) -> Int32:
        """Return the offset of 16-byte vector ``column`` of a row of codes. Rows that a warp reads at the same time are
        in different banks."""
        if const_expr(self.native):
            return code_place(row, column)
        return row * LINE + (column ^ (row % 2 * 4)) * 16

    def _activation_place(self, row, column) -> Int32:
        """Return the offset of 16-byte vector ``column`` of a row of activations.

        Four lanes read vectors of two rows at the same time. These vectors are in different banks.
        """
        bytes_ = K_TILE * self.config.dtype.itemsize
        return row * bytes_ + (column ^ (column // 8 % 2) ^ (row % 2 * 2)) * 16

    # MMAs

    def _words(self, pointer: cute.Pointer, offset) -> list:
        """Load four words from shared memory, ``offset`` bytes after ``pointer``."""
        at = cute.recast_ptr(pointer + cute.assume(offset, divby=16), dtype=Uint32)
        return load_words(cute.make_tensor(at, cute.make_layout(4)))

    @cute.jit
    def _multiply(self, k_tile, stage, acc, base, work):
        """Multiply a k tile, and add the products to ``acc``."""
        c = self.config
        codes, scales, activations = (at(stage, base) for at in (self._codes_at, self._scales_at, self._activations_at))
        name = "bf16" if self.dtype is BFloat16 else "f16"
        for half in range_constexpr(2):
            rows = []
            for r in range_constexpr(2):
                row = work.row + 8 * r
                words = self._words(codes, self._code_place(row, half * 4 + work.quad))
                rows.append(decode(words, self._block_scales(scales, k_tile, half, row, work), self.dtype, c.fmt))
            for tile in range_constexpr(c.tile_m // TILE):
                for word in range_constexpr(4):
                    column = half * 16 + work.quad * 4 + word
                    pairs = self._words(activations, self._activation_place(tile * TILE + work.token, column))
                    for step in range_constexpr(2):
                        (low0, high0), (low1, high1) = rows[0][word][step], rows[1][word][step]
                        total = [acc[tile * 4 + i] for i in range(4)]
                        total = ptx.mma_16x8x16([low0, low1, high0, high1], pairs[2 * step : 2 * step + 2], total, name)
                        for i in range_constexpr(4):
                            acc[tile * 4 + i] = total[i]

    def _block_scales(self, scales, k_tile, half: int, row, work) -> list:
        """Return the scale factors of the lane's 32 elements in half a k tile: for two NVFP4 blocks or one MXFP4
        block."""
        c = self.config
        count = 32 // c.fmt.block_size
        block = half * (c.k_tile_blocks // 2) + work.quad * count
        # In a stage, scales are laid out like a whole scale matrix with the stage's rows and columns, so the same
        # formula gives their offsets.
        place = c.layout.row_offset(row, c.k_tile_blocks) + c.layout.block_offset(block)
        at = cute.assume(place, divby=count)
        dtype = Uint8 if count == 1 else Uint16
        bytes_ = Uint32(cute.make_tensor(cute.recast_ptr(scales + at, dtype=dtype), cute.make_layout(1))[0])
        # Scales of missing blocks may have any value. Replace these scales by zero, because a NaN times a code of 0
        # would not be 0.
        bytes_ = ptx.select(k_tile * c.k_tile_blocks + block < work.blocks, bytes_, Uint32(0))
        return scale_factors(bytes_, self.dtype, c.fmt)
