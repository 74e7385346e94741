"""Device code of the FP4 tcgen05 GEMM over experts with a gate. The package's docstring describes the roles and
the data path."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
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
from torch_cute_ops.kernels.common.core.epilogue import factor_counts, factors_argument, load_terms
from torch_cute_ops.kernels.common.core.launch import ctas_if_adjacent, ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, pack
from torch_cute_ops.kernels.common.experts.gated import GatedEpilogueOps, Outputs
from torch_cute_ops.kernels.common.fp4.codes import scale_argument, scale_matrix
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE, SCALE_TILE_BYTES
from torch_cute_ops.kernels.fp4_tcgen05_gated_experts.config import BLOCK_M_TILES, TOKEN_BLOCK, Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

WORDS = MAX_EXPERTS // WARP  # largest number of words that hold one bit per expert
TERMS_PER_LOAD = 4


class Work(NamedTuple):
    """Work of a CTA, and the tensors of the call.

    Attributes:
        m, width: number of tokens, and number of columns of one expert.
        experts, n_tiles: number of experts, and number of n tiles of one expert.
        k_tiles, num_mmas, k_blocks: numbers of k tiles, of MMAs and of blocks that cover a row.
        num_token_blocks: number of token blocks.
        first, pitch: index of the CTA's first work tile, and distance to its next work tile.
        a_scale, b_scale: block scales as matrices of bytes. The rows of all experts are one matrix.
        counts, touched: number of touched m tiles of each token block, and lists of touched m tiles. An entry of a list
            is the index of the expert times ``BLOCK_M_TILES``, plus the index of the m tile in the token block.
        routing: (M, E) factors.
        outputs: tensors of the epilogue.
    """

    m: Int32
    width: Int32
    experts: Int32
    n_tiles: Int32
    k_tiles: Int32
    num_mmas: Int32
    k_blocks: Int32
    num_token_blocks: Int32
    first: Int32
    pitch: Int32
    a_scale: cute.Tensor
    b_scale: cute.Tensor
    counts: cute.Tensor
    touched: cute.Tensor
    routing: cute.Tensor
    outputs: Outputs


class WorkTile(NamedTuple):
    """Unit of scheduling: an m tile, an expert, and an n tile."""

    m_tile: Int32
    expert: Int32
    n_tile: Int32


class FP4Tcgen05GatedExpertsKernel(BlockScaledKernel):
    """Kernels for one ``Config``. The kernels list touched m tiles, multiply, and apply the gate."""

    def __init__(self, config: Config):
        super().__init__(config)
        # The MMAs apply the block scales, so accumulators need no factor.
        self.epilogue = GatedEpilogueOps(config.epilogue, acc_scale=1.0, has_e2m1_cvt=True)

    def arguments(self) -> Arguments:
        c = self.config
        m, experts, rows = Dim("m"), Dim("experts"), Dim("rows", divisibility=max(MMA_M, c.tile_n))
        half, blocks = Dim("k_bytes", divisibility=MMA_K // 2), Dim("blocks", divisibility=TILE_BLOCKS)
        b_scale = scale_argument(c.fmt, c.layout, rows, blocks, name="b_")
        if c.layout.is_linear:
            strides = Dim("b_scale_stride", TILE_BLOCKS, bits=64), blocks, 1
            b_scale = TensorArg(b_scale.dtype, (experts, rows, blocks), strides, align=16)
        return Arguments(
            a=TensorArg("Uint8", (m, half), (half, 1), align=16),
            a_scale=scale_argument(c.fmt, c.layout, m, blocks, name="a_"),
            b=TensorArg("Uint8", (experts, half, rows), (Dim("b_stride", 16, bits=64), 1, half), align=16),
            b_scale=b_scale,
            routing=factors_argument(m),
            workspace=TensorArg("Uint8", (Dim("workspace_bytes", bits=64),), (1,), align=16),
            num_ctas=ScalarArg("Int32"),
            **self.epilogue.arguments(m, experts, rows),
        )

    @cute.jit
    def __call__(
        self,
        a,
        a_scale,
        b,
        b_scale,
        routing,
        alpha,
        bias,
        global_scale,
        row_scale,
        swiglu_alpha,
        swiglu_beta,
        swiglu_limit,
        y,
        scale,
        workspace,
        num_ctas: Int32,
        stream,
    ):
        c = self.config
        m, experts = routing.shape
        num_token_blocks = cute.ceil_div(m, TOKEN_BLOCK)
        # ``Config.workspace_bytes`` computes the size of this layout.
        words = cute.recast_ptr(workspace.iterator, dtype=Int32)
        counts = cute.make_tensor(words, cute.make_layout((num_token_blocks,)))
        most = experts * BLOCK_M_TILES
        lists = cute.make_layout((num_token_blocks, most), stride=(most, 1))
        touched = cute.make_tensor(words + num_token_blocks, lists)
        gate = (swiglu_alpha, swiglu_beta, swiglu_limit) if const_expr(c.epilogue.has_gate_parameters) else None
        terms = alpha, bias, global_scale, row_scale
        outputs = Outputs(*terms, y, scale_matrix(scale, c.epilogue.out_layout), gate)
        # If tensors overlap, the number of CTAs is 0, and this launch fails. The call then raises before it launches
        # the GEMM.
        read = a, a_scale, b, b_scale, routing, *terms
        listing_ctas = ctas_unless_overlapping(num_token_blocks, (y, scale, workspace), read)
        if const_expr(c.layout.is_linear):
            listing_ctas = ctas_if_adjacent(listing_ctas, b_scale)
        self.list_kernel(routing, counts, touched, outputs).launch(
            grid=[listing_ctas, 1, 1], block=[c.list_threads, 1, 1], stream=stream, use_pdl=c.pdl
        )
        rows = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[2, 1, 0]))
        maps = self.mma.map(a, MMA_M), self.mma.map(rows, c.out_columns)
        scales = as_bytes(a_scale, c.layout), self._expert_scales(b_scale)
        self.kernel(*maps, *scales, routing, counts, touched, outputs).launch(
            grid=[cutlass.max(num_ctas, Int32(1)), 1, 1],
            block=[c.threads, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=c.pdl,
        )

    def _expert_scales(self, b_scale: cute.Tensor) -> cute.Tensor:
        """Return the scales of all experts as one matrix of bytes."""
        if self.config.layout.is_linear:
            experts, rows, blocks = b_scale.shape
            layout = cute.make_layout((experts * rows, blocks), stride=(blocks, 1))
            b_scale = cute.make_tensor(b_scale.iterator, layout)
        return as_bytes(b_scale, self.config.layout)

    # Lists

    @cute.kernel
    def list_kernel(self, routing, counts, touched, outputs):
        """List the touched m tiles of one token block, expert by expert, and zero the padding of the result's
        scales."""
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        token_block, _, _ = cute.arch.block_idx()
        num_token_blocks, _, _ = cute.arch.grid_dim()
        smem = SmemAllocator()
        found = smem.allocate_array(Uint32, BLOCK_M_TILES * WORDS)
        bits = smem.allocate_array(Uint32, BLOCK_M_TILES * WORDS)
        totals = smem.allocate_array(Int32, WORDS)
        pdl_start(c.pdl)
        m, experts = routing.shape
        if const_expr(self.epilogue.is_fp4 and not c.epilogue.out_layout.is_linear):
            thread, threads = token_block * c.list_threads + tid, num_token_blocks * c.list_threads
            self.epilogue.clear_padding(outputs, m, thread, threads)
        warp, lane = tid // WARP, tid % WARP
        # A word holds one bit for each of 32 experts. Each warp searches the experts of one word, in every
        # ``slices``-th token. If ``words`` does not divide the number of warps, the votes of the last warps are 0.
        words = cute.ceil_div(experts, WARP)
        slices = WORDS // words
        expert = warp % words * WARP + lane
        for i in range_constexpr(BLOCK_M_TILES):
            begin = token_block * TOKEN_BLOCK + i * MMA_M
            end = cutlass.min(begin + MMA_M, m)
            is_touched = Boolean(False)
            for token in cutlass.range(begin + warp // words, end, slices, unroll=16):
                is_touched |= factor_counts(self._factor(token, expert, expert < experts, routing))
            ballot = cute.arch.vote_ballot_sync(is_touched & (warp < slices * words))
            if lane == 0:
                found[i * WORDS + warp] = Uint32(ballot)
        cute.arch.sync_threads()
        # A thread combines what the warps have found for one word of one m tile.
        if tid < BLOCK_M_TILES * WORDS:
            every = Uint32(0)
            if lane < words:
                for i in cutlass.range(slices, unroll=1):
                    every |= found[warp * WORDS + i * words + lane]
            bits[tid] = every
        cute.arch.sync_threads()
        if tid < WORDS:
            total = Int32(0)
            for i in range_constexpr(BLOCK_M_TILES):
                total += Int32(cute.arch.popc(bits[i * WORDS + tid]))
            totals[tid] = total
        cute.arch.sync_threads()
        # A thread appends the touched m tiles of its expert, after the m tiles of all lower experts.
        if tid < experts:
            place = Int32(0)
            for word in cutlass.range(warp, unroll=1):
                place += totals[word]
            lower = (Uint32(1) << Uint32(lane)) - 1
            for i in range_constexpr(BLOCK_M_TILES):
                place += Int32(cute.arch.popc(bits[i * WORDS + warp] & lower))
            for i in range_constexpr(BLOCK_M_TILES):
                if (bits[i * WORDS + warp] >> Uint32(lane) & 1) != Uint32(0):
                    touched[token_block, place] = tid * BLOCK_M_TILES + i
                    place += 1
            if tid == experts - 1:
                counts[token_block] = place

    def _factor(self, token, expert, exists, routing):
        """Return the factor of a token for an expert, or zero if not ``exists``."""
        offset = Int64(token) * routing.stride[0] + Int64(expert) * routing.stride[1]
        return ptx.float_of(ptx.load_if(routing.iterator + offset, exists, 1)[0])

    # GEMM

    @cute.kernel
    def kernel(self, a_map, b_map, a_scale, b_scale, routing, counts, touched, outputs):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        m, half = a_map[1].shape
        width = b_map[1].shape[0] // 2
        work = Work(
            m=m,
            width=width,
            experts=routing.shape[1],
            n_tiles=width // c.out_columns,
            k_tiles=cute.ceil_div(half, K_TILE_BYTES),
            num_mmas=half // (MMA_K // 2),
            k_blocks=half * 2 // c.fmt.block_size,
            num_token_blocks=counts.shape[0],
            first=cta,
            pitch=num_ctas,
            a_scale=a_scale,
            b_scale=b_scale,
            counts=counts,
            touched=touched,
            routing=routing,
            outputs=outputs,
        )
        _, tmem = self._run_roles(tid, (a_map, b_map), work)
        # Wait until all loads from tensor memory have ended.
        self._sync()
        self._free_tmem(tid, tmem)

    # Work tiles. Each role walks through the token blocks: ``token_block`` is the token block of the current work tile,
    # ``begin`` the index of the token block's first work tile, and ``end`` the index after its last work tile. After
    # the last work tile, ``token_block`` is the number of token blocks.

    def _tiles_of(self, token_block, work) -> Int32:
        """Return the number of work tiles of a token block, or 0 if the token block does not exist."""
        count = ptx.load_if(work.counts.iterator + token_block, token_block < work.num_token_blocks, 1)[0]
        return Int32(count) * work.n_tiles

    def _first_token_block(self, number, work) -> tuple:
        """Return (``token_block``, ``begin``, ``end``) for work tile ``number``, the first of this CTA."""
        return self._advance(number, Int32(0), Int32(0), self._tiles_of(Int32(0), work), work)

    @cute.jit
    def _advance(self, number, token_block, begin, end, work) -> tuple:
        """Return (``token_block``, ``begin``, ``end``) for work tile ``number``, given the values for an earlier work
        tile."""
        while (token_block < work.num_token_blocks) & (number >= end):
            token_block += 1
            begin = end
            end = begin + self._tiles_of(token_block, work)
        return token_block, begin, end

    def _work_tile(self, number, token_block, begin, work) -> WorkTile:
        index = number - begin
        entry = Int32(work.touched[token_block, index // work.n_tiles])
        m_tile = token_block * BLOCK_M_TILES + entry % BLOCK_M_TILES
        return WorkTile(m_tile, entry // BLOCK_M_TILES, index % work.n_tiles)

    def _first_rows(self, tile: WorkTile, work) -> tuple:
        """Return the first row of gate and the first row of up of an n tile, among the rows of its expert."""
        row = tile.n_tile * self.config.out_columns
        return row, work.width + row

    # Copies

    @cute.jit
    def _produce(self, a_map, b_map, work, smem):
        """Run the producer warp, which fills the stages."""
        c = self.config
        a_boxes, b_boxes = self.mma.boxes(a_map, MMA_M), self.mma.boxes(b_map, c.out_columns)
        # The parity starts at 1, so that the first waits for empty stages return immediately.
        stage, parity = Int32(0), Int32(1)
        number = work.first
        token_block, begin, end = self._first_token_block(number, work)
        while token_block < work.num_token_blocks:
            tile = self._work_tile(number, token_block, begin, work)
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                smem.pipeline.wait_empty(stage, parity)
                base, barrier = self._stage_at(stage, smem), smem.pipeline.full + stage
                self._copy_scales_of(tile, k_tile, base, barrier, work)
                to = base + MMA_M * K_TILE_BYTES
                for row in self._first_rows(tile, work):
                    place = row // c.out_columns, k_tile, tile.expert
                    self.mma.copy_box(b_map, b_boxes, c.out_columns, to, place, barrier, None)
                    to = to + c.out_columns * K_TILE_BYTES
                self.mma.copy_box(a_map, a_boxes, MMA_M, base, (tile.m_tile, k_tile), barrier, None)
                stage, parity = smem.pipeline.next(stage, parity)
            number += work.pitch
            token_block, begin, end = self._advance(number, token_block, begin, end, work)

    @cute.jit
    def _copy_scales_of(self, tile, k_tile, base, barrier, work):
        """If the scales are tiled, start the copies of a stage's scales. In any case, make the stage's full barrier
        expect the bytes of all copies to the stage."""
        stage = self.stage
        first = k_tile * stage.scale_tiles
        size = cutlass.min(work.b_scale.shape[1] // TILE_BLOCKS - first, Int32(stage.scale_tiles)) * SCALE_TILE_BYTES
        # An expert has a multiple of 128 rows, so its scale tiles contain no rows of another expert.
        row_tiles = tile.expert * (work.width * 2 // MMA_M)
        n_sides = tuple(
            ScaleTiles(work.b_scale, row_tiles + row // MMA_M, 1, None) for row in self._first_rows(tile, work)
        )
        self._copy_scale_tiles(ScaleTiles(work.a_scale, tile.m_tile, 1, None), n_sides, first, size, base, barrier)

    @cute.jit
    def _load_scales(self, thread, work, smem):
        """Run a scale-loader warp, which writes linear scales to every fourth stage in the 128x4 layout."""
        turn, lane = thread // WARP, thread % WARP
        stage, parity = Int32(0), Int32(1)
        number = work.first
        token_block, begin, end = self._first_token_block(number, work)
        while token_block < work.num_token_blocks:
            tile = self._work_tile(number, token_block, begin, work)
            a_rows = work.a_scale, tile.m_tile * MMA_M + lane, work.m
            above = tile.expert * work.width * 2 + lane
            n_sides = tuple(
                (work.b_scale, above + row, work.experts * work.width * 2) for row in self._first_rows(tile, work)
            )
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                first = k_tile * (K_TILE // self.config.fmt.block_size)
                turn, stage, parity = self._load_linear_scales_of_k_tile(
                    turn, lane, a_rows, n_sides, first, work.k_blocks, stage, parity, smem
                )
            number += work.pitch
            token_block, begin, end = self._advance(number, token_block, begin, end, work)

    # MMAs

    @cute.jit
    def _issue_mmas(self, tmem, work, smem):
        """Issue the MMAs of all work tiles, in the MMA thread."""
        c = self.config
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
        place = self._first_mma_state()
        accumulator, empty_parity = Int32(0), Int32(1)
        number = work.first
        token_block, begin, end = self._first_token_block(number, work)
        while token_block < work.num_token_blocks:
            rows = self._first_rows(self._work_tile(number, token_block, begin, work), work)
            smem.acc_pipeline.wait_empty(accumulator, empty_parity)
            acc = tmem + Uint32(accumulator * c.tile_n)
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                num_mmas = cutlass.min(work.num_mmas - k_tile * MMAS_PER_K_TILE, Int32(MMAS_PER_K_TILE))
                place = self._multiply_k_tile(place, tmem, acc, num_mmas, rows, k_tile > 0, None, smem)
            tcgen05.commit(smem.acc_pipeline.full + accumulator, 1, False)
            accumulator, empty_parity = smem.acc_pipeline.next(accumulator, empty_parity)
            number += work.pitch
            token_block, begin, end = self._advance(number, token_block, begin, end, work)

    # Results

    @cute.jit
    def _run_epilogue(self, tmem, tid, work, smem):
        """Run an epilogue warp: apply the gate to the accumulators of all work tiles, and store the results."""
        c, outputs = self.config, work.outputs
        size = c.epilogue.block
        accumulator, parity = Int32(0), Int32(0)
        number = work.first
        token_block, begin, end = self._first_token_block(number, work)
        while token_block < work.num_token_blocks:
            tile = self._work_tile(number, token_block, begin, work)
            token, expert = tile.m_tile * MMA_M + tid, tile.expert
            is_routed = factor_counts(self._factor(token, expert, token < work.m, work.routing))
            alpha = self.epilogue.load_alpha(expert, is_routed, outputs)
            global_scale = self.epilogue.load_global_scale(expert, is_routed, outputs)
            row_scale = None
            if const_expr(c.epilogue.has_row_scale):
                row_scale = ptx.float_of(ptx.load_if(outputs.row_scale.iterator + token, is_routed, 1)[0])
            smem.acc_pipeline.wait_full(accumulator, parity)
            tcgen05.fence_after()
            if cute.arch.vote_ballot_sync(is_routed) != 0:
                start = tmem + Uint32(accumulator * c.tile_n) + Uint32(tid // WARP * WARP << 16)
                column = tile.n_tile * c.out_columns
                for first in cutlass.range(0, c.out_columns, size, unroll=1):
                    at = start + Uint32(first)
                    gate, up = tcgen05.load(at, size), tcgen05.load(at + c.out_columns, size)
                    tcgen05.wait_for_loads()
                    if is_routed:
                        place = column + first
                        accs = [[ptx.float_of(word) for word in words] for words in (gate, up)]
                        values = self._gated(accs, alpha, expert, place, row_scale, work)
                        self._store(values, token, expert * work.width + place, global_scale, outputs)
                    # The next load needs all lanes of the warp together.
                    cute.arch.sync_warp()
            self._signal_acc_loaded(smem.acc_pipeline.empty + accumulator, tid)
            accumulator, parity = smem.acc_pipeline.next(accumulator, parity)
            number += work.pitch
            token_block, begin, end = self._advance(number, token_block, begin, end, work)

    def _gated(self, accs: list, alpha, expert, column, row_scale, work) -> list:
        """Return the results of neighbouring columns. ``column`` is the first column, counted within the expert."""
        values = []
        for i in range(0, len(accs[0]), TERMS_PER_LOAD):
            biases = None
            if self.config.epilogue.bias_dtype is not None:
                biases = [
                    load_terms(work.outputs.bias, expert, column + half * work.width, i, TERMS_PER_LOAD, True)
                    for half in range(2)
                ]
            for j in range(TERMS_PER_LOAD):
                bias = None if biases is None else [of_half[j] for of_half in biases]
                gate, up = (of_half[i + j] for of_half in accs)
                values.append(self.epilogue.gated(gate, up, alpha, bias, work.outputs, row_scale))
        return values

    def _store(self, values: list, token, column, global_scale, outputs) -> None:
        """Store a block of a token's results. ``column`` is its first column, counted over all experts."""
        if self.epilogue.is_fp4:
            self.epilogue.store_codes(values, token, column, global_scale, outputs)
        else:
            words = pack(values, DSL_DTYPES[self.config.epilogue.out])
            self.epilogue.store(words, token, column, outputs.y)
