"""Device code of the FP8 x FP4 GEMM with per-token scales. The package's docstring describes roles, data path and
pipelines."""

from typing import Final, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.layouts import WARPGROUP
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.fp8.consumers import (
    K_STEP,
    Consumer,
    RegisterMma,
    Results,
    UnitEpilogue,
    load_token_scales,
    pair,
)
from torch_cute_ops.kernels.common.fp8.fp4_tables import look_up, table_of_index
from torch_cute_ops.kernels.common.fp8.gemm import FP8Gemm, Smem, Stages, WorkSchedule, arrive, wait_if
from torch_cute_ops.kernels.common.fp8.k_groups import K_GROUP_THREADS, KGroupSums
from torch_cute_ops.kernels.common.fp8.kernel import FP8Kernel
from torch_cute_ops.kernels.common.fp8.layouts import GROUPS, K_TILE, LINE_SPAN
from torch_cute_ops.kernels.common.fp8.row_stores import store_column_pairs
from torch_cute_ops.kernels.common.fp8.tiles import Tile
from torch_cute_ops.kernels.common.fp8.weights import PreparedWeight, piece_at
from torch_cute_ops.kernels.fp8_fp4_token_wgmma.config import TABLE_BYTES, TABLES, Config

ROWS: Final = 2
"""Number of weight rows of a lane."""
STEPS: Final = K_TILE // K_STEP
TABLES_READY: Final = 2
TOKEN_SCALES: Final = 3
"""Ids of named barriers: one barrier for all consumers, and the first of two barriers for one warpgroup each."""


class FP8FP4TokenWgmmaKernel(FP8Kernel):
    """GEMM kernel for per-token scales and an FP4 weight, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        stages = Stages(config)
        weight = _weight(config)
        schedule = WorkSchedule(config, weight)
        results = Results(config, stages, schedule, UnitEpilogue(config, weight))
        loop = DecodingLoop(config, stages, weight)
        consumers = DecodingConsumers(config, RegisterMma(config), loop, results)
        self.gemm = FP8Gemm(config, schedule, IndexLoader(config, stages), consumers)


def _weight(config: Config) -> PreparedWeight:
    """Return the weight source of a configuration."""
    return PreparedWeight(config.fmt, config.rows.is_plain, config.copied_n, config.line)


class IndexLoader:
    """Scale source that copies a stage's indices of decoding tables to shared memory. A lane copies every 32nd row."""

    def __init__(self, config: Config, stages: Stages):
        self.config, self.stages, self.weight = config, stages, _weight(config)
        self.row_words = config.scale_bytes // 4

    def begin(self, tile: Tile, lane, work) -> None:
        return None

    def load(self, k_stage, tile: Tile, lane, work) -> list:
        first = tile.column + lane
        at = self.weight.row_of_slab(work.b_scale, tile.expert, k_stage + 1, first)
        loaded = []
        for i in range(self.config.tile_n // 32):
            loaded.append(ptx.load_if(at, first + 32 * i < work.n, self.row_words, 32 * i * self.config.scale_bytes))
        return loaded

    def store(self, loaded, begun, is_last, stage, lane, work, smem) -> None:
        for i, words in enumerate(loaded):
            at = (lane + 32 * i) * self.row_words
            store_words(words, self.stages.words(stage * LINE_SPAN, at, self.row_words, smem))


class Loaded(NamedTuple):
    """Codes and tables from which a lane decodes its quarter of a k tile, for both of its weight rows.

    Attributes:
        codes: four words of codes per row.
        tables: decoding table of each block, two words per table.
    """

    codes: cute.Tensor
    tables: cute.Tensor


class DecodingLoop:
    """Mainloop of a consumer. While the MMAs of a k tile run, the consumer decodes the next k tile."""

    def __init__(self, config: Config, stages: Stages, weight: PreparedWeight):
        self.config, self.stages, self.weight = config, stages, weight
        self.blocks = K_TILE // 4 // config.fmt.block_size
        self.k_tiles = LINE_SPAN // config.k_groups

    @cute.jit
    def compute_tables(self, tid, smem):
        """Compute the decoding tables, with all consumer threads."""
        threads = self.config.consumer_warps * 32
        for index in range(tid, TABLES, threads):
            store_words(table_of_index(index, self.config.fmt), self._table(index, smem))
        cute.arch.barrier(barrier_id=TABLES_READY, number_of_threads=threads)

    def _code_piece(self, stage, row, quad, k_tile, smem: Smem) -> cute.Tensor:
        """Return the codes of a lane's quarter of a row's k tile, as four words in shared memory. Quarter ``quad`` of k
        tile ``k_tile`` is the 16-byte piece ``2 * quad + k_tile`` of the row's line, so that the lanes of two
        neighbouring rows access different banks."""
        index = quad * LINE_SPAN + k_tile
        return piece_at(smem.b, self.weight.line_offset(stage * LINE_SPAN, row, index, LINE_SPAN))

    @cute.jit
    def run(self, multiply, acc, k_group, stage, parity, slot, slot_parity, consumer, work, smem):
        """Multiply the k tiles of an output tile that belong to K group ``k_group``. The caller has waited for the
        first stage. Return the next stage, the next slot of ``a``, and their parities."""
        c = self.config
        acc.fill(0.0)
        partial = cute.make_rmem_tensor((c.mma_n // 2,), Float32) if const_expr(c.promotes) else acc
        words = [cute.make_rmem_tensor((4 * STEPS,), Uint32) for _ in range(2)]
        loaded = Loaded(
            cute.make_rmem_tensor((ROWS * STEPS,), Uint32), cute.make_rmem_tensor((ROWS * self.blocks * 2,), Uint32)
        )
        count = work.end - work.begin
        if count > 0:
            self._load(loaded, stage, k_group, consumer, smem)
        self._decode(words[0], loaded)
        args = multiply, acc, partial, words, loaded, k_group
        for rest in cutlass.range(count - c.pass_stages, -1, -c.pass_stages, unroll=1):
            stage, parity, slot, slot_parity = self._multiply_stages(
                *args, c.pass_stages, rest, stage, parity, slot, slot_parity, consumer, smem
            )
        for rest in cutlass.range(count % c.pass_stages - 1, -1, -1, unroll=1):
            stage, parity, slot, slot_parity = self._multiply_stages(
                *args, 1, rest, stage, parity, slot, slot_parity, consumer, smem
            )
        return stage, parity, slot, slot_parity

    def _multiply_stages(
        self,
        multiply,
        acc,
        partial,
        words,
        loaded,
        k_group,
        count: int,
        follow,
        stage,
        parity,
        slot,
        slot_parity,
        consumer,
        smem,
    ) -> tuple:
        """Multiply ``count`` stages of a tile, after which ``follow`` stages of the tile remain. Before the call, the
        caller waits for the first stage, and decodes its first k tile to ``words[0]``. Return the next stage and its
        parity."""
        done, last = None, count * self.k_tiles - 1
        for i in range(last + 1):
            within, used = i % self.k_tiles, slot
            if self.config.a_slots:
                smem.slots.wait_full(slot, slot_parity)
                slot, slot_parity = smem.slots.next(slot, slot_parity)
            else:
                used = stage * LINE_SPAN + k_group + within
                if i > 0:  # with slots, the wait for a slot ends straight code
                    ptx.end_straight_code(follow < 0)
            multiply(used, words[i % 2], partial, adds=i > 0 or not self.config.promotes)
            # Load the next k tile, and wait for the previous k tile's MMAs, while this k tile's MMAs run.
            read = None
            if within == self.k_tiles - 1:
                read = stage
                stage, parity = smem.stages.next(stage, parity)
                if i < last:
                    smem.stages.wait_full(stage, parity)
            if i < last:
                self._load(loaded, stage, k_group + (i + 1) % self.k_tiles, consumer, smem)
            else:
                self._load_if(follow > 0, loaded, stage, parity, k_group, consumer, smem)
            warpgroup.wait_group(1)
            if done is not None:
                self._release(done, consumer, smem)
            self._decode(words[(i + 1) % 2], loaded)
            if self.config.a_slots:
                read = used
                if within == self.k_tiles - 2:  # all codes of the stage have been decoded
                    self.stages.release(stage, consumer.lane, smem)
            done = read
        warpgroup.wait_group(0)
        self._release(done, consumer, smem)
        if self.config.promotes:
            for i in range(self.config.mma_n // 2):
                acc[i] = ptx.add_rn(acc[i], partial[i])
        return stage, parity, slot, slot_parity

    def _release(self, done, consumer: Consumer, smem) -> None:
        """Release a k tile of ``a``, or the stage that holds it."""
        if self.config.a_slots:
            arrive(smem.slots.empty + done, consumer.lane)
        else:
            self.stages.release(done, consumer.lane, smem)

    @cute.jit
    def _load_if(self, condition, loaded: Loaded, stage, parity, k_group, consumer, smem):
        """If ``condition``, wait for a stage, and load its first k tile."""
        wait_if(condition, smem.stages.full + stage, parity)
        if condition:
            self._load(loaded, stage, k_group, consumer, smem)

    def _load(self, loaded: Loaded, stage, k_tile, consumer: Consumer, smem) -> None:
        """Load a lane's codes and decoding tables of a k tile of a stage."""
        width = self.config.scale_bytes // LINE_SPAN // 4  # bytes of indices of a quarter
        dtype = Uint8 if width == 1 else Uint16
        base = cute.recast_ptr(self.stages.scales(stage * LINE_SPAN, smem).iterator, dtype=Uint8)
        for r in range(ROWS):
            row = consumer.row ^ r
            codes = load_words(self._code_piece(stage, row, consumer.quad, k_tile, smem))
            for i in range(STEPS):
                loaded.codes[r * STEPS + i] = codes[i]
            at = row * self.config.scale_bytes + (consumer.quad * LINE_SPAN + k_tile) * width
            at = cute.recast_ptr(base + cute.assume(at, divby=width), dtype=dtype)
            indices = Uint32(cute.make_tensor(at, cute.make_layout(1))[0])
            for block in range(self.blocks):
                table = load_words(self._table((indices >> 8 * block) & Uint32(0xFF), smem))
                for i in range(2):
                    loaded.tables[(r * self.blocks + block) * 2 + i] = table[i]

    def _decode(self, words, loaded: Loaded) -> None:
        """Decode a lane's quarter of a k tile, for both weight rows, into ``words``: the A operands of the MMAs."""
        for r in range(ROWS):
            for step in range(STEPS):
                at = (r * self.blocks + step * self.blocks // STEPS) * 2
                numbers = look_up([loaded.tables[at], loaded.tables[at + 1]], loaded.codes[r * STEPS + step])
                for half in range(2):
                    words[4 * step + 2 * half + r] = numbers[half]

    def _table(self, index, smem) -> cute.Tensor:
        """View a decoding table as two words."""
        at = smem.workspace + cute.assume(self.config.tables_at + index * TABLE_BYTES, divby=TABLE_BYTES)
        return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(2))


class DecodingConsumers:
    """Consumer warpgroups: two, or four in two K groups. Each group multiplies 128 weight rows."""

    def __init__(self, config: Config, mma: RegisterMma, loop: DecodingLoop, results: Results):
        self.config, self.mma, self.loop, self.results = config, mma, loop, results
        self.weight = loop.weight
        self.sums = KGroupSums(config)

    @cute.jit
    def run(self, tid, work, smem):
        c = self.config
        group, lane = cute.arch.make_warp_uniform(tid // WARPGROUP), tid % 32
        k_group = group // GROUPS if const_expr(c.k_groups > 1) else Int32(0)
        in_group = tid % K_GROUP_THREADS
        first, pair = in_group // 32 * 16, lane // 4
        # Of two lanes whose loads are served together, one begins with an even row and the other with an odd row, so
        # that the two lanes access different banks.
        row = first + 2 * pair + pair % 2
        consumer = Consumer(in_group, lane, lane % 4, first, row, Int32(0), smem.stores)
        self.loop.compute_tables(tid, smem)
        multiply = self.mma.begin(smem)
        acc = cute.make_rmem_tensor((c.mma_n // 2,), Float32)
        stage, parity, turn = Int32(0), Int32(0), Int32(0)
        slot, slot_parity = Int32(0), Int32(0)
        self.results.meet_cluster()
        for number in range(work.first, work.num_tiles, work.num_clusters):
            row, rows, column, expert = self.results.await_tile(number, stage, parity, lane, work, smem)
            # Load alpha, bias, units and scales before the MMAs, so that the MMAs hide the latency of the loads. With
            # split-K, load only the scales here, and the other operands after the MMAs: the exchange of partial sums
            # hides these loads, and during the MMAs the loaded values would take many registers.
            finish = self._of_rows(column, expert, consumer, work) if const_expr(c.split_k == 1) else None
            scales = self._token_scales(row, rows, tid, work)
            stage, parity, slot, slot_parity = self.loop.run(
                multiply, acc, k_group, stage, parity, slot, slot_parity, consumer, work, smem
            )
            tile = row, rows, column, expert, number + work.num_clusters >= work.num_tiles
            if const_expr(c.k_groups == 1):
                self._finish(acc, scales, finish, tile, turn, group, consumer, work, smem)
            elif k_group > 0:
                self.sums.leave(acc, turn, consumer, smem)
            else:
                self.sums.join(acc, turn, consumer, smem)
                self._finish(acc, scales, finish, tile, turn, group, consumer, work, smem)
            turn = turn ^ 1
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()

    def _finish(self, acc, scales, finish, tile, turn, group, consumer, work, smem) -> None:
        """Multiply the accumulators of a tile by the scales of ``a``, apply the epilogue, and store the results. Under
        split-K, first add up the partial sums of the cluster's CTAs.

        Args:
            scales: result of ``_token_scales``.
            finish: functions that apply the epilogue, or None with split-K.
            tile: (first row, number of rows, first column, expert, True if it is the CTA's last tile).
        """
        row, rows, column, expert, is_last = tile
        if self.config.exchanges:
            self._exchange(acc, scales, row, rows, column, expert, turn, is_last, group, consumer, work, smem)
            return
        self._scale(acc, scales, turn * GROUPS + group, group, consumer, smem)
        if self.config.split_k > 1:
            finish = self.results.finish(column, expert, consumer, work)
            self.results.add_up(acc, finish, row, rows, column, turn, is_last, consumer, work, smem)
        else:
            store_column_pairs(acc, work.out, row, rows, column + consumer.first, consumer.lane, finish)

    @cute.jit
    def _exchange(self, acc, scales: list, row, rows, column, expert, turn, is_last, group, consumer, work, smem):
        """Add up the accumulators of one consumer warpgroup over two CTAs, and store the results of this warpgroup."""
        exists = rows > 0
        self.results.exchange(acc, exists, group, turn, is_last, consumer, work, smem)
        if group == work.rank:
            self._scale(acc, scales, turn * GROUPS + group, group, consumer, smem)
            finish = self._of_rows(column, expert, consumer, work)
            store_column_pairs(acc, work.out, row, rows, column + consumer.first, consumer.lane, finish)

    def _of_rows(self, column, expert, consumer, work) -> tuple:
        """Return the functions that apply the epilogue to the accumulators of the thread's two weight rows."""
        epilogue = self.results.epilogue.of_tile(expert, column, work)
        return tuple(epilogue(column + (consumer.row ^ r), 1) for r in range(2))

    def _token_scales(self, row, rows, tid, work) -> list:
        """Load this thread's scales of the tile's rows of ``a``: every 128th row."""
        tid = tid % WARPGROUP
        return load_token_scales(row, rows, [tid + i for i in range(0, self.config.tile_m, WARPGROUP)], work)

    @cute.jit
    def _scale(self, acc, of_tokens: list, buffer, group, consumer, smem):
        """Multiply the accumulators by the scales of their rows of ``a``, which the threads of a warpgroup exchange.
        Successive tiles use different buffers, because other threads may still load the previous tile's scales."""
        c, tid = self.config, consumer.tid % WARPGROUP
        at = smem.workspace + cute.assume(c.token_scales_at + buffer * (c.tile_m * 4), divby=16)
        scales = cute.make_tensor(cute.recast_ptr(at, dtype=Float32), cute.make_layout(c.tile_m))
        for i in range_constexpr(len(of_tokens)):
            if tid + i * WARPGROUP < c.tile_m:
                scales[tid + i * WARPGROUP] = of_tokens[i]
        cute.arch.barrier(barrier_id=TOKEN_SCALES + group, number_of_threads=WARPGROUP)
        for eight in range_constexpr(c.mma_n // 8):
            of_columns = pair(scales, eight, consumer)
            for i in range_constexpr(4):
                at = 4 * eight + i
                acc[at] = ptx.mul_rn(acc[at], of_columns[i % 2])
