"""Device code of the tcgen05 GEMM of 16-bit activations and an FP4 weight. The package's docstring describes the roles
and the data path."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.kernels.common.blackwell import tcgen05
from torch_cute_ops.kernels.common.blackwell.decoded import DecodedWeightKernel
from torch_cute_ops.kernels.common.blackwell.fp8_gemm import MMA_K_BYTES
from torch_cute_ops.kernels.common.blackwell.fp8_layouts import CODE_BYTES
from torch_cute_ops.kernels.common.blackwell.layouts import K_TILE_BYTES, MMA_M
from torch_cute_ops.kernels.common.blackwell.roles import MMA_WARP, WARP
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import Finish
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, load_words, pack, store_words
from torch_cute_ops.kernels.common.core.pipeline import next_stage
from torch_cute_ops.kernels.common.fp4.codes import acc_scale, decode_in_order, scale_argument, scale_factors
from torch_cute_ops.kernels.common.fp8.tiles import Tile
from torch_cute_ops.kernels.common.fp8.weights import FP4Weight, piece_at
from torch_cute_ops.kernels.fp4_weight_tcgen05.config import (
    K_TILE,
    LINES,
    SLOTS,
    STREAM_K,
    WEIGHT_COLUMNS,
    Arguments,
    Config,
)
from torch_cute_ops.kernels.fp4_weight_tcgen05.stream_k import COLUMNS, ROWS, Ranges, WorkTile, load_sums, slots_of
from torch_cute_ops.runtime.argspec import Dim, TensorArg

MMA_K = 16  # elements along K that an MMA multiplies
MMAS_PER_LINE = K_TILE_BYTES // MMA_K_BYTES
MMA_COLUMNS = MMA_K // 2  # columns of tensor memory that hold the weight of an MMA
PIECES = 4  # 16-byte pieces of codes of a weight row in a k tile
PIECE_COLUMNS = WEIGHT_COLUMNS // PIECES


class PlainFP4Weight(FP4Weight):
    """Weight source of a single FP4 weight, whose K may be any multiple of 32."""

    def arguments(self, n: Dim, k: Dim, blocks: Dim, experts: Dim | None) -> tuple[TensorArg, TensorArg]:
        half = Dim("k_bytes", divisibility=16)
        scales = Dim("b_blocks", divisibility=4 if self.scale_layout.is_linear else 1)
        b = TensorArg("Uint8", (half, n), (1, half), align=16)
        return b, scale_argument(self.fmt, self.scale_layout, n, scales, name="b_")


class FP4WeightTcgen05Kernel(DecodedWeightKernel):
    """GEMM kernel, compiled for a ``Config``."""

    k_tile_bytes = LINES * K_TILE_BYTES

    def __init__(self, config: Config):
        super().__init__(config, PlainFP4Weight(config.fmt, config.layout, True, MMA_M, CODE_BYTES))
        self.dtype = DSL_DTYPES[config.dtype]

    def arguments(self) -> Arguments:
        k = Dim("k", divisibility=32)
        a = TensorArg(self.dtype.__name__, (Dim("rows"), k), (k, 1), align=16)
        given = super().arguments()._replace(a=a, a_scale=None)
        workspace = TensorArg("Uint8", (Dim("workspace_bytes", bits=64),), (1,), align=16)
        return Arguments(*given, workspace=workspace if self.streams else None)

    @property
    def streams(self) -> bool:
        """True with stream-K."""
        return self.config.split_k == STREAM_K

    @cute.jit
    def __call__(
        self, a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, prefetch, max_ctas: Int32, workspace, stream
    ):
        given = Arguments(a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, prefetch, max_ctas, workspace)
        if const_expr(self.streams):
            self._launch_stream_k(given, stream)
        else:
            self._launch(given, self._ctas(given), None, stream)

    @cute.jit
    def _launch_stream_k(self, given: Arguments, stream):
        """Launch the GEMM, and then the kernel that adds up partial sums."""
        m, n = given.out.shape
        k_tiles = cute.ceil_div(given.a.shape[1], K_TILE)
        iterations = Ranges(cute.ceil_div(n, MMA_M), k_tiles, given.max_ctas).iterations
        # If ``a`` has no rows, launch no CTA. The launch without stream-K does the same.
        ctas = Int32(cutlass.min(iterations * cutlass.min(m, 1), Int64(given.max_ctas)))
        slots = slots_of(given.workspace, m, ctas)
        read = given[: Arguments._fields.index("out")]
        self._launch(given, ctas_unless_overlapping(ctas, (given.out, given.workspace), read), slots, stream)
        self.reduce_kernel(slots, (given.alpha, given.bias), given.out, k_tiles).launch(
            grid=[ctas, cute.ceil_div(m, ROWS), 1],
            block=[ROWS * WARP, 1, 1],
            stream=stream,
            use_pdl=self.config.pdl,
        )

    def _weight_at(self, tmem, stage) -> Uint32:
        """Return the first tensor-memory column of a stage's decoded weight."""
        return tmem + Uint32(self.config.acc_columns) + Uint32(stage * WEIGHT_COLUMNS)

    # Parts of tiles

    def _begin(self, tid, work, smem):
        """Return the work with its tiles. With stream-K, tile ``i`` is m tile ``i % m_tiles`` of n tile ``i //
        m_tiles``. The CTA multiplies k tiles from ``begin`` in its first n tile, and up to ``end`` in its last n
        tile."""
        if not self.streams:
            return super()._begin(tid, work, smem)
        cta, k_tiles, m_tiles = work.first, work.end, self._m_tiles(work)
        ranges = Ranges(cute.ceil_div(work.n, MMA_M), k_tiles, work.pitch)
        begin, end = ranges.begin(cta), ranges.begin(cta + 1)
        first, last = Int32(begin // k_tiles), Int32((end - 1) // k_tiles)
        return work._replace(
            begin=Int32(begin - Int64(first) * k_tiles),
            end=Int32(end - Int64(last) * k_tiles),
            first=first * m_tiles,
            pitch=Int32(1),
            num_tiles=(last + 1) * m_tiles,
        )

    def _m_tiles(self, work) -> Int32:
        """Return the number of m tiles."""
        return cute.ceil_div(work.m, self.config.tile_m)

    def _k_range(self, number, work) -> tuple:
        if not self.streams:
            return super()._k_range(number, work)
        m_tiles = self._m_tiles(work)
        begin = ptx.select(number < work.first + m_tiles, work.begin, Int32(0))
        return begin, ptx.select(number >= work.num_tiles - m_tiles, work.end, self._k_tiles(work))

    def _k_tiles(self, work) -> Int32:
        """Return the number of k tiles of an n tile."""
        return cute.ceil_div(work.num_mmas, LINES * MMAS_PER_LINE)

    def _find(self, number, lane, work, smem) -> Tile | WorkTile:
        if not self.streams:
            return super()._find(number, lane, work, smem)
        cta, _, _ = cute.arch.block_idx()
        m_tiles, (begin, end) = self._m_tiles(work), self._k_range(number, work)
        row, column = number % m_tiles * self.config.tile_m, number // m_tiles * MMA_M
        slot = SLOTS * cta + ptx.select(begin == 0, Int32(1), Int32(0))
        slot = ptx.select((begin == 0) & (end == self._k_tiles(work)), Int32(-1), slot)
        return WorkTile(expert=Int32(0), row=row, rows=work.m - row, column=column, slot=slot)

    # Copies

    def _copy_activations(self, of_tile, boxes, k_tile, base, copied) -> None:
        for line in range(LINES):
            place, to = (Int32(0), k_tile * LINES + line), base + line * self.stage.line_bytes
            self.copies.copy_box(of_tile, boxes, self.stage.mma_n, to, place, copied, None)

    # Decoders

    @cute.jit
    def _load_scales(self, decoder, work, smem):
        """Run a decoder warp. Each decoder group decodes the weight of every ``teams``-th k tile to the columns of the
        k tile's stage, and always uses the same ``stages / teams`` stages. The scales of a k tile are loaded before the
        group decodes its previous k tile.

        A warp can access only one quarter of the lanes of tensor memory. The index of the warp determines this quarter.
        """
        c = self.config
        team, lane = decoder // MMA_M, decoder % WARP
        row = (decoder // WARP + MMA_WARP + 1) % (MMA_M // WARP) * WARP + lane
        tmem = Uint32(cute.make_tensor(smem.tmem, cute.make_layout(1))[0]) + Uint32(row // WARP * WARP << 16)
        before = Int32(0)  # number of k tiles of this CTA's earlier tiles
        turn, parity = Int32(0), Int32(0)
        for number in range(work.first, work.num_tiles, work.pitch):
            tile = self._find(number, lane, work, smem)
            begin, end = self._k_range(number, work)
            start = begin + (team + c.teams - before % c.teams) % c.teams
            following = self._scales_of(cutlass.min(start, end - 1), row, tile, work)
            scales = cute.make_rmem_tensor((len(following),), Uint32)
            for i in range_constexpr(len(following)):
                scales[i] = following[i]
            for k_tile in cutlass.range(start, end, c.teams, unroll=1):
                words = [scales[i] for i in range(len(following))]
                ahead = self._scales_of(cutlass.min(k_tile + c.teams, end - 1), row, tile, work)
                stage = turn * c.teams + team
                ptx.wait(smem.copied + stage, parity)
                # The stage was empty before the copies, so its earlier MMAs have ended.
                tcgen05.fence_after()
                self._decode(words, self._stage_at(stage, smem), row, self._weight_at(tmem, stage))
                # When the stores have ended, the loads of codes have ended too, so that no proxy fence is needed before
                # the copies of the next codes.
                tcgen05.wait_for_stores()
                tcgen05.fence_before()
                cute.arch.sync_warp()
                # The commit of the MMAs does not order these loads of codes before the copies of the next codes, so
                # this warp arrives at ``empty`` too.
                smem.pipeline.arrive_empty(stage, Uint32(lane == 0))
                smem.pipeline.arrive_full(stage, Uint32(lane == 0))
                turn, parity = next_stage(turn, parity, c.stages // c.teams)
                for i in range_constexpr(len(ahead)):
                    scales[i] = ahead[i]
            before += end - begin
        if const_expr(c.split_k > 1):
            self._await_stage_writers()

    def _scales_of(self, k_tile, row, tile: Tile, work) -> list:
        """Load the scales of one k tile in weight row ``row`` of a tile. Each word of the result holds four scales.
        Scales of rows that do not exist are zero. Scales beyond K may be undefined, because no MMA reads their
        elements."""
        c, column = self.config, tile.column + row
        first, left = Int64(k_tile) * c.tile_scales, work.num_mmas * MMA_K // c.fmt.block_size - k_tile * c.tile_scales
        return self.weight.row_scales(work.b_scale, work.n, tile.expert, column, column < work.n, first, left)

    def _decode(self, words: list, base: cute.Pointer, row, to: Uint32) -> None:
        """Decode weight row ``row`` of the stage at ``base`` to tensor memory, starting at column ``to``."""
        c = self.config
        for piece in range(PIECES):
            # The swizzle permutes the 16-byte pieces of a 128-byte line by the index of the line. A line holds two
            # rows.
            at = self.stage.codes_offset + row * CODE_BYTES + (piece ^ row // 2 % 4) * 16
            codes = load_words(piece_at(base, at))
            if c.fmt == MXFP4:
                bytes_ = words[0] >> 8 * piece & Uint32(0xFF)
            else:
                bytes_ = words[piece // 2] >> 16 * (piece % 2) & Uint32(0xFFFF)
            factors = scale_factors(bytes_, self.dtype, c.fmt)
            decoded = decode_in_order(codes, factors, self.dtype, c.fmt)
            tcgen05.store(to + Uint32(piece * PIECE_COLUMNS), decoded)

    # MMAs

    @cute.jit
    def _multiply(self, tmem, acc, stage, num_mmas, adds, first_token, smem):
        """Issue the first ``num_mmas`` MMAs of a k tile. The number is even, because K is a multiple of 32."""
        c = self.config
        weight = self._weight_at(tmem, stage)
        at = Uint32(smem.stages.toint()) + Uint32(stage * self.stage.size_bytes)
        instruction = tcgen05.sixteen_bit_instruction_descriptor(MMA_M, c.tile_m, self.dtype is BFloat16)
        for pair in range_constexpr(LINES * MMAS_PER_LINE // 2):
            if 2 * pair < num_mmas:
                for step in (2 * pair, 2 * pair + 1):
                    line, place = step // MMAS_PER_LINE, step % MMAS_PER_LINE
                    b = tcgen05.operand_descriptor(at + (line * self.stage.line_bytes + place * MMA_K_BYTES))
                    a = weight + Uint32(step * MMA_COLUMNS)
                    tcgen05.multiply_16_bit(acc, a, b, instruction, adds if step == 0 else True)

    # Results

    def _finish(self, column, count: int, expert, work) -> Finish:
        return self._finisher(column, count, work.alpha, work.bias, work.n)

    def _finisher(self, column, count: int, alpha, bias, n) -> Finish:
        """Load alpha and bias of ``count`` columns, and return the function that applies the epilogue."""
        terms = self.epilogue.terms(alpha, bias, column, count, n)
        return self.epilogue.finisher(self.epilogue.factor(alpha), terms, acc_scale(self.config.fmt))

    def _stage_token_scales(self, tile: Tile, tid, work, smem) -> None:
        """Return at once, because the activations have no scales."""

    def _scaled(self, words: list, scales: None, first) -> list:
        return [ptx.float_of(word) for word in words]

    def _store(self, values: list, first, finish, tile, column, tid, work, smem):
        if self.streams:
            self._store_sums(values, first, finish, tile, column, tid, work, smem)
        else:
            super()._store(values, first, finish, tile, column, tid, work, smem)

    @cute.jit
    def _store_sums(self, values: list, first, finish, tile: WorkTile, column, tid, work, smem):
        """Store columns of the accumulator as results or, if the CTA multiplies only some k tiles, as partial sums."""
        if tile.slot < 0:
            DecodedWeightKernel._store(self, values, first, finish, tile, column, tid, work, smem)
        else:
            for i in range_constexpr(len(values)):
                if first + i < tile.rows:
                    work.workspace[tile.row + first + i, tid, tile.slot] = values[i]

    @cute.kernel
    def reduce_kernel(self, slots, terms, out, k_tiles: Int32):
        """Add up the partial sums of an n tile in the order of k, apply the epilogue and store the results.

        CTA i reduces the n tile in whose interior range i of the GEMM begins. If an earlier range begins inside the
        same n tile, or if range i begins at the start of an n tile, CTA i does nothing.
        """
        tid, _, _ = cute.arch.thread_idx()
        cta, group, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        m, n = out.shape
        ranges = Ranges(cute.ceil_div(n, MMA_M), k_tiles, ctas)
        begin = ranges.begin(cta)
        n_tile = Int32(begin // k_tiles)
        start = Int64(n_tile) * k_tiles
        is_first = (start < begin) & (ranges.begin(cta - 1) <= start)
        last = ranges.cta_of(start + k_tiles - 1)
        row, place = group * ROWS + tid // WARP, tid % WARP * COLUMNS
        column = n_tile * MMA_M + place
        # The GEMM waited for earlier kernels before it let this kernel start, so alpha and bias are complete.
        finish = self._finisher(column, COLUMNS, *terms, n)
        pdl_start(self.config.pdl)
        if is_first & (row < m) & (column < n):
            acc = cute.make_rmem_tensor((COLUMNS,), Float32)
            for i, value in enumerate(load_sums(slots, row, place, SLOTS * cta - 1)):
                acc[i] = value
            for other in cutlass.range(cta, last + 1, unroll=4):
                for i, value in enumerate(load_sums(slots, row, place, SLOTS * other)):
                    acc[i] = ptx.add_rn(acc[i], value)
            words = pack([finish(acc[i], i) for i in range(COLUMNS)], out.element_type)
            at = out.iterator + cute.assume(Int64(row) * n + column, divby=COLUMNS)
            store_words(words, cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(len(words))))
