"""Device code of the tcgen05 GEMM of 16-bit activations and an FP4 weight. The package's docstring describes the roles
and the data path."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.kernels.common.blackwell import tcgen05
from torch_cute_ops.kernels.common.blackwell.fp8_gemm import MMA_K_BYTES, FP8GemmKernel
from torch_cute_ops.kernels.common.blackwell.fp8_layouts import CODE_BYTES
from torch_cute_ops.kernels.common.blackwell.layouts import K_TILE_BYTES, MMA_M
from torch_cute_ops.kernels.common.blackwell.roles import MMA_WARP, WARP, OperandCopies
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import Finish
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, load_words
from torch_cute_ops.kernels.common.core.pipeline import next_stage
from torch_cute_ops.kernels.common.fp4.codes import acc_scale, decode_in_order, scale_argument, scale_factors
from torch_cute_ops.kernels.common.fp8.tiles import Tile
from torch_cute_ops.kernels.common.fp8.weights import FP4Weight, piece_at
from torch_cute_ops.kernels.fp4_weight_tcgen05.config import LINES, WEIGHT_COLUMNS, Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, TensorArg

MMA_K = 16  # elements along K that an MMA multiplies
MMAS_PER_LINE = K_TILE_BYTES // MMA_K_BYTES
MMA_COLUMNS = MMA_K // 2  # columns of tensor memory that hold the weight of an MMA
PIECES = 4  # 16-byte pieces of codes of a weight row in a k tile
PIECE_COLUMNS = WEIGHT_COLUMNS // PIECES


class CodeCopies(OperandCopies):
    """Device code that copies FP4 codes to stages by TMA."""

    line = CODE_BYTES


class PlainFP4Weight(FP4Weight):
    """Weight source of a single FP4 weight, whose K may be any multiple of 32."""

    def arguments(self, n: Dim, k: Dim, blocks: Dim, experts: Dim | None) -> tuple[TensorArg, TensorArg]:
        half = Dim("k_bytes", divisibility=16)
        scales = Dim("b_blocks", divisibility=4 if self.scale_layout.is_linear else 1)
        b = TensorArg("Uint8", (half, n), (1, half), align=16)
        return b, scale_argument(self.fmt, self.scale_layout, n, scales, name="b_")


class FP4WeightTcgen05Kernel(FP8GemmKernel):
    """GEMM kernel, compiled for a ``Config``."""

    k_tile_bytes = LINES * K_TILE_BYTES

    def __init__(self, config: Config):
        super().__init__(config, PlainFP4Weight(config.fmt, config.layout, True, MMA_M, CODE_BYTES))
        self.code_copies = CodeCopies()
        self.dtype = DSL_DTYPES[config.dtype]

    def arguments(self) -> Arguments:
        k = Dim("k", divisibility=32)
        a = TensorArg(self.dtype.__name__, (Dim("rows"), k), (k, 1), align=16)
        return super().arguments()._replace(a=a, a_scale=None)

    def _weight_map(self, b: cute.Tensor) -> tuple:
        return self.code_copies.map(b, MMA_M)

    def _init_barriers(self, smem) -> None:
        super()._init_barriers(smem)
        for i in range(self.config.stages):
            cute.arch.mbarrier_init(smem.copied + i, 1)

    def _weight_at(self, tmem, stage) -> Uint32:
        """Return the first tensor-memory column of a stage's decoded weight."""
        return tmem + Uint32(self.config.acc_columns) + Uint32(stage * WEIGHT_COLUMNS)

    # Copies

    @cute.jit
    def _produce(self, a_map, b_map, work, smem):
        """Run the producer warp, which copies activations and FP4 codes to the stages."""
        tid, _, _ = cute.arch.thread_idx()
        c, rows = self.stage, self.stage.mma_n
        b_boxes = self.code_copies.boxes(b_map, MMA_M)
        b_policy = ptx.EVICT_FIRST if const_expr(self.config.streams_weight) else None
        # The parity starts at 1, so that the first waits for empty stages return immediately.
        stage, parity = Int32(0), Int32(1)
        for number in range(work.first, work.num_tiles, work.pitch):
            tile = self._find(number, tid % WARP, work, smem)
            of_tile = a_map[0], cute.domain_offset((tile.row, 0), a_map[1])
            a_boxes = self.copies.boxes(of_tile, rows)
            for k_tile in cutlass.range(work.begin, work.end, unroll=1):
                smem.pipeline.wait_empty(stage, parity)
                base, copied = self._stage_at(stage, smem), smem.copied + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(copied, c.code_bytes)
                place = tile.column // MMA_M, k_tile, tile.expert
                self.code_copies.copy_box(b_map, b_boxes, MMA_M, base + c.codes_offset, place, copied, b_policy)
                for line in range_constexpr(LINES):
                    place = Int32(0), k_tile * LINES + line
                    self.copies.copy_box(of_tile, a_boxes, rows, base + line * c.line_bytes, place, copied, None)
                stage, parity = smem.pipeline.next(stage, parity)

    # Decoders

    @cute.jit
    def _load_scales(self, decoder, work, smem):
        """Run a decoder warp. Each decoder group decodes the weight of every ``teams``-th k tile to the columns of the
        k tile's stage, and always uses the same ``stages / teams`` stages. The scales of a k tile are loaded before the
        group decodes its previous k tile.

        A warp can access only one quarter of the lanes of tensor memory, which its index determines.
        """
        c = self.config
        team, lane = decoder // MMA_M, decoder % WARP
        row = (decoder // WARP + MMA_WARP + 1) % (MMA_M // WARP) * WARP + lane
        tmem = Uint32(cute.make_tensor(smem.tmem, cute.make_layout(1))[0]) + Uint32(row // WARP * WARP << 16)
        before = Int32(0)  # number of k tiles of this CTA's earlier tiles
        turn, parity = Int32(0), Int32(0)
        for number in range(work.first, work.num_tiles, work.pitch):
            tile = self._find(number, lane, work, smem)
            start = work.begin + (team + c.teams - before % c.teams) % c.teams
            following = self._scales_of(cutlass.min(start, work.end - 1), row, tile, work)
            scales = cute.make_rmem_tensor((len(following),), Uint32)
            for i in range_constexpr(len(following)):
                scales[i] = following[i]
            for k_tile in cutlass.range(start, work.end, c.teams, unroll=1):
                words = [scales[i] for i in range(len(following))]
                ahead = self._scales_of(cutlass.min(k_tile + c.teams, work.end - 1), row, tile, work)
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
            before += work.end - work.begin
        if const_expr(c.split_k > 1):
            self._await_stage_writers()

    def _scales_of(self, k_tile, row, tile: Tile, work) -> list:
        """Load the scales of weight row ``row`` of a tile in a k tile, as words of four. Scales of rows that do not
        exist are zero. Scales beyond K may be undefined, because no MMA reads their elements."""
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
        terms = self.epilogue.terms(work.alpha, work.bias, column, count, work.n, expert)
        return self.epilogue.finisher(self.epilogue.factor(work.alpha, expert), terms, acc_scale(self.config.fmt))

    def _stage_token_scales(self, tile: Tile, tid, work, smem) -> None:
        """Return at once, because the activations have no scales."""

    def _scaled(self, words: list, scales: None, first) -> list:
        return [ptx.float_of(word) for word in words]
