"""The device code; the package's docstring describes the roles and the data path."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.blackwell import tcgen05
from torch_cute_ops.kernels.common.blackwell.block_scaled_kernel import WARP, BlockScaledKernel, ScaleTiles, as_bytes
from torch_cute_ops.kernels.common.blackwell.block_scaled_mma import STEPS
from torch_cute_ops.kernels.common.blackwell.layouts import LINE, ROWS, STEP
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import load_terms
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, load_words, pack, store_words
from torch_cute_ops.kernels.common.core.pipeline import next_stage
from torch_cute_ops.kernels.common.experts.factors import biases_argument, factor_counts, factors_argument
from torch_cute_ops.kernels.common.fp4.decode import rows_of_bytes
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE, SCALE_TILE_BYTES
from torch_cute_ops.kernels.fp4_tcgen05_experts.config import ACCUMULATORS, GROUP, LOADED, WORD, Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

ADDERS = 256  # threads of a CTA that adds up totals


class Part(NamedTuple):
    """A CTA's part of the GEMM, and the operands.

    Attributes:
        m, n: sizes of the result.
        steps: MMAs of an expert. (As a constant, of which all chunks are whole, it made ptxas crash.)
        experts, words: experts, and words of bits of a part of them.
        token_tiles, tiles: tiles of tokens, and of the result.
        units: how many there are of all CTAs.
        first, pitch: the first of the CTA's units, and how far it is to the next.
        a_scale, b_scale: as bytes.
        alpha: factors (M, E).
        bias: biases (E, N), or ``None``.
        out: the result.
        touched: words of bits: which experts some token of a tile is routed to; ``None``: all are computed.
        totals: of all units; ``None``: they are the result.
    """

    m: Int32
    n: Int32
    steps: Int32
    experts: Int32
    words: Int32
    token_tiles: Int32
    tiles: Int32
    units: Int32
    first: Int32
    pitch: Int32
    a_scale: cute.Tensor
    b_scale: cute.Tensor
    alpha: cute.Tensor
    bias: cute.Tensor | None
    out: cute.Tensor
    touched: cute.Tensor | None
    totals: cute.Tensor | None


class Unit(NamedTuple):
    """A unit of work: a tile of tokens, a tile of the weight's rows, a part of the experts."""

    token_tile: Int32
    row_tile: Int32
    part: Int32


class FP4Tcgen05ExpertsKernel(BlockScaledKernel):
    """The kernels of one ``Config``."""

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
            ctas=ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, alpha, bias, out, workspace, ctas: Int32, stream):
        c = self.config
        m, n = out.shape
        experts = alpha.shape[1]
        token_tiles, row_tiles = cute.ceil_div(m, ROWS), cute.ceil_div(n, c.columns)
        units = token_tiles * row_tiles * c.parts
        words = cute.ceil_div(experts, c.parts * WORD)
        # As in ``Config.workspace_bytes``
        totals = touched = None
        if const_expr(c.shares_tiles):
            size = Int64(units) * cutlass.min(m, ROWS) * c.columns
            totals = cute.make_tensor(cute.recast_ptr(workspace.iterator, dtype=Float32), cute.make_layout((size,)))
        if const_expr(c.routed):
            bits = workspace.iterator
            if const_expr(c.shares_tiles):
                bits = bits + cute.assume(cute.size(totals) * 4, divby=16)
            touched = cute.make_tensor(
                cute.recast_ptr(bits, dtype=Uint32), cute.make_layout((token_tiles * c.parts * words,))
            )
        written, read = (out, workspace), (a, a_scale, b, b_scale, alpha, bias)
        ctas = cutlass.min(units, cutlass.max(ctas, Int32(1)))
        if const_expr(c.routed):
            # The launch of no CTAs fails, and ends the call.
            words_of_tile = ctas_unless_overlapping(words * c.parts, written, read)
            self.touch_kernel(alpha, touched, m).launch(
                grid=[words_of_tile, token_tiles, 1], block=[ROWS, 1, 1], stream=stream, use_pdl=c.pdl
            )
        else:
            ctas = ctas_unless_overlapping(ctas, written, read)
        b_rows, b_bytes = rows_of_bytes(b, b_scale)
        maps = (
            self.mma.map(self._by_expert(a, experts), ROWS),
            self.mma.map(self._by_expert(b_rows, experts), c.columns),
        )
        self.kernel(*maps, as_bytes(a_scale), b_bytes, alpha, bias, out, touched, totals).launch(
            grid=[ctas, 1, 1], block=[c.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=c.pdl
        )
        if const_expr(c.shares_tiles):
            self.add_kernel(out, totals).launch(
                grid=[cute.ceil_div(m * (n // GROUP), ADDERS), 1, 1],
                block=[ADDERS, 1, 1],
                stream=stream,
                use_pdl=c.pdl,
            )

    def _by_expert(self, codes: cute.Tensor, experts) -> cute.Tensor:
        """Codes of rows as (rows, bytes of an expert, experts)."""
        line = cute.assume(codes.shape[1] // experts, divby=STEP // 2)
        layout = cute.make_layout((codes.shape[0], line, experts), stride=(codes.stride[0], 1, line))
        return cute.make_tensor(codes.iterator, layout)

    # Experts

    @cute.kernel
    def touch_kernel(self, alpha, touched, m):
        """Set the bits of experts that some token of a tile is routed to. A CTA has a word of a tile: a lane an expert,
        a warp 32 tokens."""
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        word, token_tile, _ = cute.arch.block_idx()
        words_of_tile, _, _ = cute.arch.grid_dim()
        pdl_start(c.pdl)
        warps = ROWS // WARP
        found = cute.make_tensor(SmemAllocator().allocate_array(Uint32, warps), cute.make_layout(warps))
        # Words of a part are neighbours.
        words = words_of_tile // c.parts
        expert = (word % words * WORD + tid % WARP) * c.parts + word // words
        first = token_tile * ROWS + tid // WARP * WARP
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
            touched[token_tile * words_of_tile + word] = every

    def _factor_bits(self, token, expert, exists, alpha) -> Uint32:
        """The factor of a token for an expert, as bits; zero, unless it ``exists``."""
        offset = Int64(token) * alpha.stride[0] + Int64(expert) * alpha.stride[1]
        return ptx.load_if(alpha.iterator + offset, exists, 1)[0]

    # GEMM

    @cute.kernel
    def kernel(self, a_map, b_map, a_scale, b_scale, alpha, bias, out, touched, totals):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        m, n = out.shape
        experts = alpha.shape[1]
        token_tiles = cute.ceil_div(m, ROWS)
        tiles = token_tiles * cute.ceil_div(n, c.columns)
        part = Part(
            m=m,
            n=n,
            steps=a_map[1].shape[1] // (STEP // 2),
            experts=experts,
            words=cute.ceil_div(experts, c.parts * WORD),
            token_tiles=token_tiles,
            tiles=tiles,
            units=tiles * c.parts,
            first=cta,
            pitch=ctas,
            a_scale=a_scale,
            b_scale=b_scale,
            alpha=alpha,
            bias=bias,
            out=out,
            touched=touched,
            totals=totals,
        )
        _, columns = self._work(tid, (a_map, b_map), part)
        # All loads of tensor memory are done.
        self._meet()
        self._free(tid, columns)

    def _unit(self, number, part) -> Unit:
        """Tiles of tokens run side by side, and share the weight in L2. Parts come one after the other, so that a CTA
        has units of several, which are not all of those that many tokens are routed to."""
        tile = number % part.tiles
        return Unit(tile % part.token_tiles, tile // part.token_tiles, number // part.tiles)

    def _bits(self, unit: Unit, word, part) -> Uint32:
        """The experts of a unit that are computed, of those of a word: the lowest bit is the first."""
        if self.config.routed:
            return part.touched[(unit.token_tile * self.config.parts + unit.part) * part.words + word]
        count = (part.experts - unit.part + self.config.parts - 1) // self.config.parts - word * WORD
        return ptx.select(count >= WORD, Uint32(0xFFFFFFFF), (Uint32(1) << Uint32(count)) - 1)

    def _expert(self, bits, word, unit: Unit) -> Int32:
        """The first expert of ``bits``."""
        return (word * WORD + Int32(cute.arch.popc(~bits & (bits - 1)))) * self.config.parts + unit.part

    def _first_tile(self, expert, chunk):
        """The tile of scales that a chunk begins in."""
        return (expert * self.config.width + chunk * K_TILE) // self.stage.tile_elements

    # Copies

    @cute.jit
    def _copy(self, a_map, b_map, part, smem):
        """The copying warp: fill stages."""
        c = self.config
        tokens, rows = self.mma.boxes(a_map, ROWS), self.mma.boxes(b_map, c.columns)
        # With parity 1, a stage that was never used counts as free.
        stage, parity = Int32(0), Int32(1)
        number = part.first
        while number < part.units:
            unit = self._unit(number, part)
            for word in cutlass.range(part.words, unroll=1):
                bits = self._bits(unit, word, part)
                while bits != 0:
                    expert = self._expert(bits, word, unit)
                    for chunk in cutlass.range(c.chunks, unroll=1):
                        ptx.wait(smem.free + stage, parity)
                        base, barrier = self._stage_at(stage, smem), smem.full + stage
                        self._copy_scales_of(unit, expert, chunk, base, barrier, part)
                        place = unit.row_tile, chunk, expert
                        self.mma.copy_box(b_map, rows, c.columns, base + ROWS * LINE, place, barrier, ptx.EVICT_FIRST)
                        place = unit.token_tile, chunk, expert
                        self.mma.copy_box(a_map, tokens, ROWS, base, place, barrier, None)
                        stage, parity = next_stage(stage, parity, c.stages)
                    bits = bits & (bits - 1)
            number += part.pitch

    @cute.jit
    def _copy_scales_of(self, unit, expert, chunk, base, barrier, part):
        """Start the copies of a stage's scales, if they are in tiles."""
        c, stage = self.config, self.stage
        first = self._first_tile(expert, chunk)
        end = expert * c.width + cutlass.min(chunk * K_TILE + K_TILE, Int32(c.width))
        size = (cute.ceil_div(end, stage.tile_elements) - first) * SCALE_TILE_BYTES
        rows = ScaleTiles(part.b_scale, unit.row_tile * c.columns // ROWS, 1, ptx.EVICT_FIRST)
        tokens = ScaleTiles(part.a_scale, unit.token_tile, 1, None)
        self._copy_scales(tokens, rows, first, size, base, barrier)

    @cute.jit
    def _arrange(self, thread, part, smem):
        """An arranging warp: write linear scales to every fourth stage."""
        c = self.config
        turn, lane = thread // WARP, thread % WARP
        blocks = part.experts * (c.width // c.fmt.block_size)
        stage, parity = Int32(0), Int32(1)
        number = part.first
        while number < part.units:
            unit = self._unit(number, part)
            tokens = part.a_scale, unit.token_tile * ROWS + lane, part.m
            rows = part.b_scale, unit.row_tile * c.columns + lane, part.n
            for word in cutlass.range(part.words, unroll=1):
                bits = self._bits(unit, word, part)
                while bits != 0:
                    expert = self._expert(bits, word, unit)
                    for chunk in cutlass.range(c.chunks, unroll=1):
                        first = self._first_tile(expert, chunk) * (self.stage.tile_elements // c.fmt.block_size)
                        turn, stage, parity = self._arrange_chunk(
                            turn, lane, tokens, rows, first, blocks, stage, parity, smem
                        )
                    bits = bits & (bits - 1)
            number += part.pitch

    # MMAs

    @cute.jit
    def _multiply(self, columns, part, smem):
        """The multiplying thread: issue the MMAs of all experts."""
        c = self.config
        if const_expr(c.pdl and c.routed):
            cute.arch.griddepcontrol_wait()
        place = self._first_chunk()
        accumulator, free_parity = Int32(0), Int32(1)
        number = part.first
        while number < part.units:
            unit = self._unit(number, part)
            first_column = unit.row_tile * c.columns
            for word in cutlass.range(part.words, unroll=1):
                bits = self._bits(unit, word, part)
                while bits != 0:
                    phase = None
                    if const_expr(self.stage.spread):
                        # The width is an odd multiple of half a tile of scales.
                        phase = self._expert(bits, word, unit) % 2
                    ptx.wait(smem.sums_free + accumulator, free_parity)
                    total = columns + Uint32(accumulator * c.columns)
                    for chunk in cutlass.range(c.chunks, unroll=1):
                        steps = cutlass.min(part.steps - chunk * STEPS, Int32(STEPS))
                        place = self._multiply_chunk(place, columns, total, steps, first_column, chunk > 0, phase, smem)
                    tcgen05.commit(smem.sums_full + accumulator, 1, False)
                    accumulator, free_parity = next_stage(accumulator, free_parity, ACCUMULATORS)
                    bits = bits & (bits - 1)
            number += part.pitch

    # Results

    @cute.jit
    def _store(self, columns, tid, part, smem):
        """A storing warp: add up the sums of each unit's experts, and store the totals."""
        c = self.config
        totals = cute.make_rmem_tensor(cute.make_layout(c.columns), Float32)
        accumulator, parity = Int32(0), Int32(0)
        number = part.first
        while number < part.units:
            unit = self._unit(number, part)
            token = unit.token_tile * ROWS + tid
            totals.fill(0.0)
            for word in cutlass.range(part.words, unroll=1):
                bits = self._bits(unit, word, part)
                while bits != 0:
                    expert = self._expert(bits, word, unit)
                    factor = ptx.float_of(self._factor_bits(token, expert, token < part.m, part.alpha))
                    biases = None
                    if const_expr(c.bias_dtype is not None):
                        biases = self._load_bias(expert, unit, tid, part)
                    ptx.wait(smem.sums_full + accumulator, parity)
                    tcgen05.fence_after()
                    counts = factor_counts(factor)
                    if cute.arch.vote_ballot_sync(counts) != 0:
                        start = columns + Uint32(accumulator * c.columns) + Uint32(tid // WARP * WARP << 16)
                        if const_expr(c.bias_dtype is not None):
                            self._share_bias(biases, tid, smem)
                        for piece in range_constexpr(c.columns // LOADED):
                            sums = tcgen05.load(start + piece * LOADED, LOADED)
                            tcgen05.wait_for_loads()
                            if counts:
                                for j in range_constexpr(0, LOADED, 4):
                                    at = piece * LOADED + j
                                    own = [ptx.float_of(word) for word in sums[j : j + 4]]
                                    if const_expr(c.bias_dtype is not None):
                                        own = self._with_bias(own, at, tid, smem)
                                    for k in range_constexpr(4):
                                        totals[at + k] = ptx.fma_rn(factor, own[k], totals[at + k])
                    self._leave_columns(smem.sums_free + accumulator, tid)
                    accumulator, parity = next_stage(accumulator, parity, ACCUMULATORS)
                    bits = bits & (bits - 1)
            self._store_totals(totals, number, unit, tid, part)
            number += part.pitch

    def _load_bias(self, expert, unit, tid, part) -> list:
        """The bias of each ``WARP``-th column of a unit. It comes while the sums are computed."""
        column = unit.row_tile * self.config.columns + tid % WARP
        return [
            load_terms(part.bias, expert, column, i, 1, column + i < part.n)[0]
            for i in range(0, self.config.columns, WARP)
        ]

    def _share_bias(self, biases: list, tid, smem) -> None:
        """Give all lanes of the warp all columns' bias. They have read the last expert's."""
        for i, bias in enumerate(biases):
            at = self._bias_at(i * WARP + tid % WARP, tid, smem, 4)
            store_words([ptx.bits_of(bias)], cute.make_tensor(at, cute.make_layout(1)))
        cute.arch.sync_warp()

    def _with_bias(self, sums: list, column: int, tid, smem) -> list:
        """Four columns' sums with their bias."""
        words = load_words(cute.make_tensor(self._bias_at(column, tid, smem, 16), cute.make_layout(4)))
        return [ptx.add_rn(x, ptx.float_of(word)) for x, word in zip(sums, words, strict=True)]

    def _bias_at(self, column, tid, smem, align: int) -> cute.Pointer:
        """Where the warp's bias of a column is in shared memory."""
        after = (tid // WARP * self.config.columns + column) * 4
        start = smem.stages + (self.config.smem_bytes - self.config.bias_bytes)
        return cute.recast_ptr(start + cute.assume(after, divby=align), dtype=Uint32)

    @cute.jit
    def _store_totals(self, totals, number, unit, tid, part):
        """Store a token's totals of a unit: as the result, or for ``add_kernel``."""
        c = self.config
        token, row = unit.token_tile * ROWS + tid, unit.row_tile * c.columns
        for group in range_constexpr(c.columns // GROUP):
            exists = (token < part.m) & (row + group * GROUP < part.n)
            values = [totals[group * GROUP + i] for i in range(GROUP)]
            if const_expr(c.shares_tiles):
                at = self._total_at(part.totals, number, tid, group, part.m)
                words = pack(values, Float32)
            else:
                at = part.out.iterator + (Int64(token) * part.n + (row + group * GROUP))
                words = pack(values, self.out_dtype)
            for i in range_constexpr(0, len(words), 4):
                ptx.store_if(at + i * len(values) // len(words), words[i : i + 4], exists)

    def _total_at(self, totals, unit, row, group, m) -> cute.Pointer:
        """Where a unit's totals of a token's ``GROUP`` columns are. Those of neighbouring tokens are neighbours, so
        that the lanes of a warp store them together."""
        tokens = cutlass.min(m, Int32(ROWS))
        place = (Int64(unit) * (self.config.columns // GROUP) + group) * tokens + row
        return totals.iterator + cute.assume(place * GROUP, divby=GROUP)

    @cute.kernel
    def add_kernel(self, out, totals):
        """Add up the totals of all parts, in their order, and store the result. A thread has ``GROUP`` columns of a
        token."""
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        pdl_start(c.pdl)
        m, n = out.shape
        place = cta * ADDERS + tid
        token, column = place // (n // GROUP), place % (n // GROUP) * GROUP
        token_tiles = cute.ceil_div(m, ROWS)
        tile = column // c.columns * token_tiles + token // ROWS
        tiles = token_tiles * cute.ceil_div(n, c.columns)
        exists = token < m
        values = [Float32(0.0)] * GROUP
        for part in range_constexpr(c.parts):
            at = self._total_at(totals, part * tiles + tile, token % ROWS, column % c.columns // GROUP, m)
            words = [word for i in range(0, GROUP, 4) for word in ptx.load_if(at + i, exists, 4)]
            values = [ptx.add_rn(x, ptx.float_of(word)) for x, word in zip(values, words, strict=True)]
        words = pack(values, self.out_dtype)
        to = out.iterator + (Int64(token) * n + column)
        for i in range_constexpr(0, len(words), 4):
            ptx.store_if(to + i * GROUP // len(words), words[i : i + 4], exists)
