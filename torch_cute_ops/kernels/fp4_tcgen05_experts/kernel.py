"""Device code of the FP4 tcgen05 GEMM over experts. The package's docstring describes the roles and the data
path."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.blackwell import tcgen05
from torch_cute_ops.kernels.common.blackwell.block_scaled import (
    MMAS_PER_K_TILE,
    BlockScaledKernel,
    ScaleTiles,
    as_bytes,
)
from torch_cute_ops.kernels.common.blackwell.layouts import K_TILE_BYTES, MMA_K, MMA_M
from torch_cute_ops.kernels.common.blackwell.roles import WARP
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import biases_argument, factor_counts, factors_argument, load_terms
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, load_words, pack, store_words
from torch_cute_ops.kernels.common.fp4.codes import rows_of_bytes, scale_matrix
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE, SCALE_TILE_BYTES
from torch_cute_ops.kernels.fp4_tcgen05_experts.config import (
    COLUMNS_PER_LOAD,
    EXPERTS_PER_WORD,
    STORE_COLUMNS,
    Arguments,
    Config,
)
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

REDUCE_THREADS = 256  # number of threads of a CTA that adds up partial sums


class Work(NamedTuple):
    """Work of a CTA, and the tensors of the call.

    Attributes:
        m, n: numbers of rows and columns of the result.
        num_mmas: number of MMAs that cover one expert's k. The number is a run-time value, because ptxas crashes if it
            is a constant.
        experts, words: number of experts, and number of words that hold the bits of one class's experts.
        m_tiles, tiles: number of m tiles, and number of tiles of the result.
        num_work_tiles: number of work tiles of all CTAs.
        first, pitch: index of the CTA's first work tile, and distance to its next work tile.
        a_scale, b_scale: block scales as bytes.
        alpha: (M, E) factors of the pairs of tokens and experts.
        bias: biases (E, N), or None.
        out: result.
        touched: words of bits, one bit per m tile and expert, set if a token of the m tile is routed to the expert.
            None if all experts are computed.
        partial_sums: partial sums of all work tiles, or None if a work tile's sums are the result.
    """

    m: Int32
    n: Int32
    num_mmas: Int32
    experts: Int32
    words: Int32
    m_tiles: Int32
    tiles: Int32
    num_work_tiles: Int32
    first: Int32
    pitch: Int32
    a_scale: cute.Tensor
    b_scale: cute.Tensor
    alpha: cute.Tensor
    bias: cute.Tensor | None
    out: cute.Tensor
    touched: cute.Tensor | None
    partial_sums: cute.Tensor | None


class WorkTile(NamedTuple):
    """Unit of scheduling: an m tile, an n tile, and a class of experts."""

    m_tile: Int32
    n_tile: Int32
    class_: Int32


class FP4Tcgen05ExpertsKernel(BlockScaledKernel):
    """Kernels for one ``Config``. The kernels find the experts to compute, multiply, and add up partial sums."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.out_dtype = DSL_DTYPES[config.out_dtype]

    def arguments(self) -> Arguments:
        m, n = Dim("m"), Dim("n", divisibility=8)
        workspace = TensorArg("Uint8", (Dim("workspace_bytes", bits=64),), (1,), align=16)
        return Arguments(
            *self.mma.arguments(m, n),
            factors_argument(m),
            biases_argument(self.config.bias_dtype, n),
            out=TensorArg(self.out_dtype.__name__, (m, n), (n, 1), align=16),
            workspace=workspace if self.config.has_workspace else None,
            num_ctas=ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, alpha, bias, out, workspace, num_ctas: Int32, stream):
        c = self.config
        m, n = out.shape
        experts = alpha.shape[1]
        m_tiles, n_tiles = cute.ceil_div(m, MMA_M), cute.ceil_div(n, c.tile_n)
        num_work_tiles = m_tiles * n_tiles * c.classes
        words = cute.ceil_div(experts, c.classes * EXPERTS_PER_WORD)
        # ``Config.workspace_bytes`` computes the size of this layout.
        partial_sums = touched = None
        if const_expr(c.has_partial_sums):
            size = Int64(num_work_tiles) * cutlass.min(m, MMA_M) * c.tile_n
            partial_sums = cute.make_tensor(
                cute.recast_ptr(workspace.iterator, dtype=Float32), cute.make_layout((size,))
            )
        if const_expr(c.routed):
            bits = workspace.iterator
            if const_expr(c.has_partial_sums):
                bits = bits + cute.assume(cute.size(partial_sums) * 4, divby=16)
            touched = cute.make_tensor(
                cute.recast_ptr(bits, dtype=Uint32), cute.make_layout((m_tiles * c.classes * words,))
            )
        written, read = (out, workspace), (a, a_scale, b, b_scale, alpha, bias)
        num_ctas = cutlass.min(num_work_tiles, cutlass.max(num_ctas, Int32(1)))
        if const_expr(c.routed):
            # If tensors overlap, the number of CTAs is 0, and this launch fails. The call then raises before it
            # launches the GEMM.
            words_of_tile = ctas_unless_overlapping(words * c.classes, written, read)
            self.touch_kernel(alpha, touched, m).launch(
                grid=[words_of_tile, m_tiles, 1], block=[MMA_M, 1, 1], stream=stream, use_pdl=c.pdl
            )
        else:
            num_ctas = ctas_unless_overlapping(num_ctas, written, read)
        b_rows, b_bytes = rows_of_bytes(b, scale_matrix(b_scale, self.stage.layout))
        maps = (
            self.mma.map(self._by_expert(a, experts), MMA_M),
            self.mma.map(self._by_expert(b_rows, experts), c.tile_n),
        )
        self.kernel(
            *maps, as_bytes(a_scale, self.stage.layout), b_bytes, alpha, bias, out, touched, partial_sums
        ).launch(grid=[num_ctas, 1, 1], block=[c.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=c.pdl)
        if const_expr(c.has_partial_sums):
            self.reduce_kernel(out, partial_sums).launch(
                grid=[cute.ceil_div(m * (n // STORE_COLUMNS), REDUCE_THREADS), 1, 1],
                block=[REDUCE_THREADS, 1, 1],
                stream=stream,
                use_pdl=c.pdl,
            )

    def _by_expert(self, codes: cute.Tensor, experts) -> cute.Tensor:
        """Return FP4 codes (rows, bytes) viewed as (rows, bytes of an expert, experts)."""
        line = cute.assume(codes.shape[1] // experts, divby=MMA_K // 2)
        layout = cute.make_layout((codes.shape[0], line, experts), stride=(codes.stride[0], 1, line))
        return cute.make_tensor(codes.iterator, layout)

    # Experts

    @cute.kernel
    def touch_kernel(self, alpha, touched, m):
        """Set the bit of each expert to which a token of an m tile is routed.

        A CTA writes one word of bits for one m tile. A lane handles one expert, and a warp handles 32 tokens.
        """
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        word, m_tile, _ = cute.arch.block_idx()
        words_of_tile, _, _ = cute.arch.grid_dim()
        pdl_start(c.pdl)
        warps = MMA_M // WARP
        found = cute.make_tensor(SmemAllocator().allocate_array(Uint32, warps), cute.make_layout(warps))
        # In memory, all words of a class are contiguous. Bit b of word w belongs to the class's expert number 32 w + b.
        words = words_of_tile // c.classes
        expert = (word % words * EXPERTS_PER_WORD + tid % WARP) * c.classes + word // words
        first = m_tile * MMA_M + tid // WARP * WARP
        factors = Uint32(0)
        for i in range_constexpr(WARP):
            exists = (expert < alpha.shape[1]) & (first + i < m)
            factors = factors | self._factor_bits(first + i, expert, exists, alpha)
        ballot = cute.arch.vote_ballot_sync(factor_counts(ptx.float_of(factors)))
        if tid % WARP == 0:
            found[tid // WARP] = Uint32(ballot)
        cute.arch.sync_threads()
        if tid == 0:
            every = found[0]
            for i in range_constexpr(1, warps):
                every = every | found[i]
            touched[m_tile * words_of_tile + word] = every

    def _factor_bits(self, token, expert, exists, alpha) -> Uint32:
        """Return the bits of a token's factor for an expert, or zero if not ``exists``."""
        offset = Int64(token) * alpha.stride[0] + Int64(expert) * alpha.stride[1]
        return ptx.load_if(alpha.iterator + offset, exists, 1)[0]

    # GEMM

    @cute.kernel
    def kernel(self, a_map, b_map, a_scale, b_scale, alpha, bias, out, touched, partial_sums):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        m, n = out.shape
        experts = alpha.shape[1]
        m_tiles = cute.ceil_div(m, MMA_M)
        tiles = m_tiles * cute.ceil_div(n, c.tile_n)
        work = Work(
            m=m,
            n=n,
            num_mmas=a_map[1].shape[1] // (MMA_K // 2),
            experts=experts,
            words=cute.ceil_div(experts, c.classes * EXPERTS_PER_WORD),
            m_tiles=m_tiles,
            tiles=tiles,
            num_work_tiles=tiles * c.classes,
            first=cta,
            pitch=num_ctas,
            a_scale=a_scale,
            b_scale=b_scale,
            alpha=alpha,
            bias=bias,
            out=out,
            touched=touched,
            partial_sums=partial_sums,
        )
        _, tmem = self._run_roles(tid, (a_map, b_map), work)
        # Wait until all loads from tensor memory have ended.
        self._sync()
        self._free_tmem(tid, tmem)

    def _work_tile(self, number, work) -> WorkTile:
        """Return the work tile with index ``number``. The m tiles of an n tile run at the same time and share the
        weight in L2.

        The class is the slowest index, so that a CTA computes work tiles of several classes. This balances the work,
        because the number of routed tokens differs between classes.
        """
        tile = number % work.tiles
        return WorkTile(tile % work.m_tiles, tile // work.m_tiles, number // work.tiles)

    def _bits(self, work_tile: WorkTile, word, work) -> Uint32:
        """Return a word of bits, the lowest expert in the lowest bit. A bit is set if the expert must be computed."""
        if self.config.routed:
            return work.touched[(work_tile.m_tile * self.config.classes + work_tile.class_) * work.words + word]
        count = (
            work.experts - work_tile.class_ + self.config.classes - 1
        ) // self.config.classes - word * EXPERTS_PER_WORD
        return ptx.select(count >= EXPERTS_PER_WORD, Uint32(0xFFFFFFFF), (Uint32(1) << Uint32(count)) - 1)

    def _expert(self, bits, word, work_tile: WorkTile) -> Int32:
        """Return the index of the expert that belongs to the lowest set bit of ``bits``."""
        return (
            word * EXPERTS_PER_WORD + Int32(cute.arch.popc(~bits & (bits - 1)))
        ) * self.config.classes + work_tile.class_

    def _first_scale_tile(self, expert, k_tile):
        """Return the index along K of the scale tile in which a k tile begins."""
        return (expert * self.config.expert_k + k_tile * K_TILE) // self.stage.scale_tile_k

    # Copies

    @cute.jit
    def _produce(self, a_map, b_map, work, smem):
        """Run the producer warp, which fills the stages."""
        c = self.config
        a_boxes, b_boxes = self.mma.boxes(a_map, MMA_M), self.mma.boxes(b_map, c.tile_n)
        # The parity starts at 1, so that the first waits for empty stages return immediately.
        stage, parity = Int32(0), Int32(1)
        number = work.first
        while number < work.num_work_tiles:
            work_tile = self._work_tile(number, work)
            for word in cutlass.range(work.words, unroll=1):
                bits = self._bits(work_tile, word, work)
                while bits != 0:
                    expert = self._expert(bits, word, work_tile)
                    for k_tile in cutlass.range(c.k_tiles, unroll=1):
                        smem.pipeline.wait_empty(stage, parity)
                        base, barrier = self._stage_at(stage, smem), smem.pipeline.full + stage
                        self._copy_scales_of(work_tile, expert, k_tile, base, barrier, work)
                        place = work_tile.n_tile, k_tile, expert
                        self.mma.copy_box(
                            b_map, b_boxes, c.tile_n, base + MMA_M * K_TILE_BYTES, place, barrier, ptx.EVICT_FIRST
                        )
                        place = work_tile.m_tile, k_tile, expert
                        self.mma.copy_box(a_map, a_boxes, MMA_M, base, place, barrier, None)
                        stage, parity = smem.pipeline.next(stage, parity)
                    bits = bits & (bits - 1)
            number += work.pitch

    @cute.jit
    def _copy_scales_of(self, work_tile, expert, k_tile, base, barrier, work):
        """If the scales are tiled, start the copies of a stage's scales. In any case, make the stage's full barrier
        expect the bytes of all copies to the stage."""
        c, stage = self.config, self.stage
        first = self._first_scale_tile(expert, k_tile)
        end = expert * c.expert_k + cutlass.min(k_tile * K_TILE + K_TILE, Int32(c.expert_k))
        size = (cute.ceil_div(end, stage.scale_tile_k) - first) * SCALE_TILE_BYTES
        b_tiles = ScaleTiles(work.b_scale, work_tile.n_tile * c.tile_n // MMA_M, 1, ptx.EVICT_FIRST)
        a_tiles = ScaleTiles(work.a_scale, work_tile.m_tile, 1, None)
        self._copy_scale_tiles(a_tiles, (b_tiles,), first, size, base, barrier)

    @cute.jit
    def _load_scales(self, thread, work, smem):
        """Run a scale-loader warp, which writes linear scales to every fourth stage in the 128x4 layout."""
        c = self.config
        turn, lane = thread // WARP, thread % WARP
        blocks = work.experts * (c.expert_k // c.fmt.block_size)
        stage, parity = Int32(0), Int32(1)
        number = work.first
        while number < work.num_work_tiles:
            work_tile = self._work_tile(number, work)
            a_rows = work.a_scale, work_tile.m_tile * MMA_M + lane, work.m
            b_rows = work.b_scale, work_tile.n_tile * c.tile_n + lane, work.n
            for word in cutlass.range(work.words, unroll=1):
                bits = self._bits(work_tile, word, work)
                while bits != 0:
                    expert = self._expert(bits, word, work_tile)
                    for k_tile in cutlass.range(c.k_tiles, unroll=1):
                        first = self._first_scale_tile(expert, k_tile) * (self.stage.scale_tile_k // c.fmt.block_size)
                        turn, stage, parity = self._load_linear_scales_of_k_tile(
                            turn, lane, a_rows, (b_rows,), first, blocks, stage, parity, smem
                        )
                    bits = bits & (bits - 1)
            number += work.pitch

    # MMAs

    @cute.jit
    def _issue_mmas(self, tmem, work, smem):
        """Issue the MMAs of all experts, in the MMA thread."""
        c = self.config
        if const_expr(c.pdl and c.routed):
            cute.arch.griddepcontrol_wait()
        place = self._first_mma_state()
        accumulator, empty_parity = Int32(0), Int32(1)
        number = work.first
        while number < work.num_work_tiles:
            work_tile = self._work_tile(number, work)
            first_n = work_tile.n_tile * c.tile_n
            for word in cutlass.range(work.words, unroll=1):
                bits = self._bits(work_tile, word, work)
                while bits != 0:
                    phase = None
                    if const_expr(self.stage.spread):
                        # ``expert_k`` is an odd multiple of half a scale tile, so odd experts begin with the second
                        # half of a scale tile.
                        phase = self._expert(bits, word, work_tile) % 2
                    smem.acc_pipeline.wait_empty(accumulator, empty_parity)
                    acc = tmem + Uint32(accumulator * c.tile_n)
                    for k_tile in cutlass.range(c.k_tiles, unroll=1):
                        num_mmas = cutlass.min(work.num_mmas - k_tile * MMAS_PER_K_TILE, Int32(MMAS_PER_K_TILE))
                        place = self._multiply_k_tile(place, tmem, acc, num_mmas, (first_n,), k_tile > 0, phase, smem)
                    tcgen05.commit(smem.acc_pipeline.full + accumulator, 1, False)
                    accumulator, empty_parity = smem.acc_pipeline.next(accumulator, empty_parity)
                    bits = bits & (bits - 1)
            number += work.pitch

    # Results

    @cute.jit
    def _run_epilogue(self, tmem, tid, work, smem):
        """Run an epilogue warp: for each work tile, add up the products of all its experts, and store the sums."""
        c = self.config
        acc = cute.make_rmem_tensor(cute.make_layout(c.tile_n), Float32)
        accumulator, parity = Int32(0), Int32(0)
        number = work.first
        while number < work.num_work_tiles:
            work_tile = self._work_tile(number, work)
            token = work_tile.m_tile * MMA_M + tid
            acc.fill(0.0)
            for word in cutlass.range(work.words, unroll=1):
                bits = self._bits(work_tile, word, work)
                while bits != 0:
                    expert = self._expert(bits, word, work_tile)
                    factor = ptx.float_of(self._factor_bits(token, expert, token < work.m, work.alpha))
                    biases = None
                    if const_expr(c.bias_dtype is not None):
                        biases = self._load_bias(expert, work_tile, tid, work)
                    smem.acc_pipeline.wait_full(accumulator, parity)
                    tcgen05.fence_after()
                    counts = factor_counts(factor)
                    if cute.arch.vote_ballot_sync(counts) != 0:
                        start = tmem + Uint32(accumulator * c.tile_n) + Uint32(tid // WARP * WARP << 16)
                        if const_expr(c.bias_dtype is not None):
                            self._broadcast_bias(biases, tid, smem)
                        for piece in range_constexpr(c.tile_n // COLUMNS_PER_LOAD):
                            words = tcgen05.load(start + piece * COLUMNS_PER_LOAD, COLUMNS_PER_LOAD)
                            tcgen05.wait_for_loads()
                            if counts:
                                for j in range_constexpr(0, COLUMNS_PER_LOAD, 4):
                                    at = piece * COLUMNS_PER_LOAD + j
                                    own = [ptx.float_of(word) for word in words[j : j + 4]]
                                    if const_expr(c.bias_dtype is not None):
                                        own = self._add_bias(own, at, tid, smem)
                                    for k in range_constexpr(4):
                                        acc[at + k] = ptx.fma_rn(factor, own[k], acc[at + k])
                            # The next load needs all lanes of the warp together.
                            cute.arch.sync_warp()
                    self._signal_acc_loaded(smem.acc_pipeline.empty + accumulator, tid)
                    accumulator, parity = smem.acc_pipeline.next(accumulator, parity)
                    bits = bits & (bits - 1)
            self._store_result(acc, number, work_tile, tid, work)
            number += work.pitch

    def _load_bias(self, expert, work_tile, tid, work) -> list:
        """Load an expert's bias for this lane's columns of a work tile (every 32nd column) while the MMAs compute the
        accumulator."""
        column = work_tile.n_tile * self.config.tile_n + tid % WARP
        return [
            load_terms(work.bias, expert, column, i, 1, column + i < work.n)[0]
            for i in range(0, self.config.tile_n, WARP)
        ]

    def _broadcast_bias(self, biases: list, tid, smem) -> None:
        """Store an expert's bias in shared memory for all lanes of the warp. All lanes must have read the previous
        expert's bias."""
        for i, bias in enumerate(biases):
            at = self._bias_at(i * WARP + tid % WARP, tid, smem, 4)
            store_words([ptx.bits_of(bias)], cute.make_tensor(at, cute.make_layout(1)))
        cute.arch.sync_warp()

    def _add_bias(self, sums: list, column: int, tid, smem) -> list:
        """Return four neighbouring elements of ``sums`` plus the bias of their columns."""
        words = load_words(cute.make_tensor(self._bias_at(column, tid, smem, 16), cute.make_layout(4)))
        return [ptx.add_rn(x, ptx.float_of(word)) for x, word in zip(sums, words, strict=True)]

    def _bias_at(self, column, tid, smem, align: int) -> cute.Pointer:
        """Return the address of a column's bias in this warp's shared memory."""
        after = (tid // WARP * self.config.tile_n + column) * 4
        start = smem.stages + (self.config.smem_bytes - self.config.bias_bytes)
        return cute.recast_ptr(start + cute.assume(after, divby=align), dtype=Uint32)

    @cute.jit
    def _store_result(self, acc, number, work_tile, tid, work):
        """Store a token's sums of a work tile, either as the result or as partial sums that ``reduce_kernel`` adds
        up."""
        c = self.config
        token, row = work_tile.m_tile * MMA_M + tid, work_tile.n_tile * c.tile_n
        for column_group in range_constexpr(c.tile_n // STORE_COLUMNS):
            exists = (token < work.m) & (row + column_group * STORE_COLUMNS < work.n)
            values = [acc[column_group * STORE_COLUMNS + i] for i in range(STORE_COLUMNS)]
            if const_expr(c.has_partial_sums):
                at = self._partial_sum_at(work.partial_sums, number, tid, column_group, work.m)
                words = pack(values, Float32)
            else:
                at = work.out.iterator + (Int64(token) * work.n + (row + column_group * STORE_COLUMNS))
                words = pack(values, self.out_dtype)
            for i in range_constexpr(0, len(words), 4):
                ptx.store_if(at + i * len(values) // len(words), words[i : i + 4], exists)

    def _partial_sum_at(self, partial_sums, number, row, column_group, m) -> cute.Pointer:
        """Return the address of ``STORE_COLUMNS`` neighbouring partial sums of a token in a work tile.

        Adjacent tokens are adjacent in memory, so that the stores of a warp coalesce.
        """
        tokens = cutlass.min(m, Int32(MMA_M))
        place = (Int64(number) * (self.config.tile_n // STORE_COLUMNS) + column_group) * tokens + row
        return partial_sums.iterator + cute.assume(place * STORE_COLUMNS, divby=STORE_COLUMNS)

    @cute.kernel
    def reduce_kernel(self, out, partial_sums):
        """Add up the partial sums of all classes, in the order of the classes, and store the result. A thread adds up
        ``STORE_COLUMNS`` columns."""
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        pdl_start(c.pdl)
        m, n = out.shape
        place = cta * REDUCE_THREADS + tid
        token, column = place // (n // STORE_COLUMNS), place % (n // STORE_COLUMNS) * STORE_COLUMNS
        m_tiles = cute.ceil_div(m, MMA_M)
        tile = column // c.tile_n * m_tiles + token // MMA_M
        tiles = m_tiles * cute.ceil_div(n, c.tile_n)
        exists = token < m
        values = [Float32(0.0)] * STORE_COLUMNS
        for class_ in range_constexpr(c.classes):
            at = self._partial_sum_at(
                partial_sums, class_ * tiles + tile, token % MMA_M, column % c.tile_n // STORE_COLUMNS, m
            )
            words = [word for i in range(0, STORE_COLUMNS, 4) for word in ptx.load_if(at + i, exists, 4)]
            values = [ptx.add_rn(x, ptx.float_of(word)) for x, word in zip(values, words, strict=True)]
        words = pack(values, self.out_dtype)
        to = out.iterator + (Int64(token) * n + column)
        for i in range_constexpr(0, len(words), 4):
            ptx.store_if(to + i * STORE_COLUMNS // len(words), words[i : i + 4], exists)
