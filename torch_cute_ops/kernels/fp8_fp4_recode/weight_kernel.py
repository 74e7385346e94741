"""Device code of the kernel that recodes an FP4 weight to FP8. The package's docstring describes its data path."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.pipeline import fence_async_global
from torch_cute_ops.kernels.common.fp8.fp4_tables import (
    look_up,
    own_exponent,
    power_of_two,
    shared_exponent,
    table_of_own_unit,
    tables_over_shared_unit,
)
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE
from torch_cute_ops.kernels.common.fp8.weights import FP4Weight
from torch_cute_ops.kernels.fp8_fp4_recode.config import (
    NOTE_ROWS,
    RANGE,
    RANGE_WORK,
    ROW_THREADS,
    TEAM,
    TEAM_ROWS,
    WARP_ROWS,
    Notes,
    WeightArguments,
    WeightConfig,
)
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

PART = K_TILE // ROW_THREADS
"""Number of elements of a k tile that a thread recodes."""
ALL_LANES = 0xFFFFFFFF
ROW_LANES = (1 << ROW_THREADS) - 1
"""Bit mask of the lanes that share a warp's first row."""


class RecodeWeightKernel:
    """Kernel that recodes the weight, compiled for a ``WeightConfig``."""

    def __init__(self, config: WeightConfig):
        self.config = config
        self.weight = FP4Weight(config.fmt, config.layout, config.is_plain)

    def arguments(self) -> WeightArguments:
        n, k = Dim("n", divisibility=8), Dim("k", divisibility=64)
        experts = Dim("experts")
        of_row, of_expert = Dim("weight_row", bits=64, divisibility=64), Dim("weight_expert", bits=64, divisibility=64)
        b, b_scale = self.weight.arguments(n, k, Dim("blocks"), None if self.config.is_plain else experts)
        return WeightArguments(
            b=b,
            b_scale=b_scale,
            weight=TensorArg(
                "Float8E4M3FN", (1 if self.config.is_plain else experts, n, k), (of_expert, of_row, 1), align=16
            ),
            notes=TensorArg("Int32", (Dim("note_words", bits=64),), (1,), align=16),
            first=ScalarArg("Int32"),
            max_ctas=ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(self, b, b_scale, weight, notes, first: Int32, max_ctas: Int32, stream):
        c = self.config
        codes, scale = self.weight.views(b, b_scale)
        n, half, experts = codes.shape
        ranges = Notes.ranges(cute.ceil_div(2 * half, K_TILE))
        if const_expr(c.overlaps_gemm):
            left = experts * cute.ceil_div(n, NOTE_ROWS) - first
            # Launch at least one CTA even if nothing is left to recode, because the GEMM's launch depends on this
            # launch.
            ctas = cutlass.max(cutlass.min(max_ctas, cute.ceil_div(left * ranges * RANGE_WORK, c.teams)), Int32(1))
            along_k = 1
        else:
            ctas, along_k = first * RANGE_WORK, ranges
        ctas = ctas_unless_overlapping(ctas, written=(weight, notes), read=(b, b_scale))
        self.kernel(codes, scale, weight, notes, first).launch(
            grid=[ctas, along_k, 1],
            block=[c.threads, 1, 1],
            stream=stream,
            use_pdl=c.pdl,
        )

    @cute.kernel
    def kernel(self, codes, scale, weight, notes, first):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, range_, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        n, half, experts = codes.shape
        k_tiles = cute.ceil_div(2 * half, K_TILE)
        ranges, tiles = Notes.ranges(k_tiles), experts * cute.ceil_div(n, NOTE_ROWS)
        pdl_start(c.pdl)
        if const_expr(c.overlaps_gemm):
            team = cute.arch.make_warp_uniform(tid // TEAM)
            of_tile = ranges * RANGE_WORK
            begin, end = first * of_tile, tiles * of_tile
            for number in cutlass.range(begin + cta * c.teams + team, end, ctas * c.teams, unroll=1):
                tile, work_tile = number // of_tile, number % of_tile
                of_range = work_tile % RANGE_WORK, work_tile // RANGE_WORK
                self._recode(codes, scale, weight, notes, tile, *of_range, tid % TEAM)
                self._tell_done(notes, tile, k_tiles, team, tid % TEAM)
        else:
            # The other launch, which overlaps the GEMM, recodes weight tile ``first`` and all later weight tiles. Set
            # the counts of these weight tiles to zero, and the counts of earlier weight tiles to complete.
            for tile in cutlass.range((range_ * ctas + cta) * TEAM + tid, tiles, ctas * ranges * TEAM, unroll=1):
                done = ptx.select(tile < first, Int32(Notes.work_tiles(k_tiles)), Int32(0))
                notes[Int64(tile) * Notes.words(k_tiles) + Notes.done(k_tiles)] = done
            self._recode(codes, scale, weight, notes, cta // RANGE_WORK, cta % RANGE_WORK, range_, tid)

    def _tell_done(self, notes, tile, k_tiles, team, tid) -> None:
        """Increment the count of recoded work tiles, for which the GEMM waits. First execute a fence, because the GEMM
        copies the work tile through the async proxy."""
        fence_async_global()
        cute.arch.barrier(barrier_id=1 + team, number_of_threads=TEAM)
        at = notes.iterator + (Int64(tile) * Notes.words(k_tiles) + Notes.done(k_tiles))
        ptx.add_release_if(at, Int32(1), tid == 0)

    @cute.jit
    def _recode(self, codes, scale, weight, notes, tile, index, range_, tid):
        """Recode work tile ``index`` of a range of a weight tile. ``tid`` is the thread's index in its thread group."""
        c = self.config
        n, half, _ = codes.shape
        part = tid % ROW_THREADS
        of_expert = cute.ceil_div(n, NOTE_ROWS)
        expert, row = tile // of_expert, tile % of_expert * NOTE_ROWS + index * TEAM_ROWS + tid // ROW_THREADS
        exists = row < n
        begin = range_ * RANGE
        # The addresses of a thread's codes, numbers and scales advance by a constant from one k tile to the next.
        codes_at = Int64(expert) * codes.stride[2] + Int64(row) * codes.stride[0]
        codes_at = codes.iterator + (codes_at + begin * (K_TILE // 2) + part * (PART // 2))
        weight_at = Int64(expert) * weight.stride[0] + Int64(row) * weight.stride[1]
        weight_at = weight.iterator + (weight_at + begin * K_TILE + part * PART)
        place = Int64(begin * c.tile_scales + part * c.tile_scales // ROW_THREADS)
        scale_at = scale.iterator + self.weight.scale_offset(scale, n, expert, row, place)
        pitch = c.layout.block_offset(c.tile_scales)
        count = half - begin * (K_TILE // 2) - part * (PART // 2)  # bytes of codes up to the end of the row
        count = ptx.select(exists, count, Int32(0))
        loaded = self._load_some(codes_at, scale_at, pitch, count, 0)
        k_tiles = cute.ceil_div(2 * half, K_TILE)
        notes_at = notes.iterator + Int64(tile) * Notes.words(k_tiles)
        unit = shared_exponent(self._row_scales(scale, n, half, expert, row, exists, Int32(0)), c.fmt)
        leads = exists & (part == 0)
        if leads & (range_ == 0):
            of_row = cute.recast_ptr(notes_at, dtype=Float32) + row % NOTE_ROWS
            cute.make_tensor(of_row, cute.make_layout(1))[0] = power_of_two(unit)
            self._note(notes_at, k_tiles, Int32(0), row, unit)
        owns = Uint32(0)
        for first in range_constexpr(0, RANGE, c.at_once):
            loaded += self._load_some(codes_at, scale_at, pitch, count, first + c.at_once)
            if begin + first < k_tiles:
                some = loaded[first : first + c.at_once]
                tables, fitting = tables_over_shared_unit([byte for _, _, byte in some], unit, c.fmt)
                fits = Boolean(True)
                for i in range_constexpr(len(fitting)):
                    # Of two k tiles, test only the first: if it does not exist, neither does the second.
                    fits &= fitting[i] | (some[i * (c.at_once // len(fitting))][0] == Boolean(False))
                if cute.arch.vote_all_sync(fits) == Boolean(False):
                    of_row = scale, n, half, expert, row, notes_at
                    for i in range_constexpr(c.at_once):
                        low, high, own = self._own_table(some[i], tables[i], unit, begin, first + i, part, *of_row)
                        tables[i], owns = [low, high], owns | own
                for i in range_constexpr(c.at_once):
                    there, words, _ = some[i]
                    numbers = [number for word in words for number in look_up(tables[i], word)]
                    ptx.store_if(weight_at, numbers, there, (first + i) * K_TILE)
        if leads & (row % WARP_ROWS == 0):
            of_group = cute.recast_ptr(notes_at + Notes.owns(range_), dtype=Uint32) + row % NOTE_ROWS // WARP_ROWS
            cute.make_tensor(of_group, cute.make_layout(1))[0] = owns

    @cute.jit
    def _own_table(
        self, loaded: tuple, table: list, unit, begin, i: int, part, scale, n, half, expert, row, notes_at
    ) -> tuple:
        """Return the decoding table of a thread's block in k tile ``i`` of a range, and the k tile's bit.

        The table is two words. The bit is set if some row of the warp uses the k tile's own exponent. In this case,
        also store the exponent that the thread's row uses.
        """
        fmt, k_tile = self.config.fmt, begin + i
        there, _, byte = loaded
        low, high, owns = *table, Uint32(0)
        _, (fits, *_) = tables_over_shared_unit([byte, byte], unit, fmt)
        votes = Uint32(cute.arch.vote_ballot_sync(fits | (there == Boolean(False))))
        if votes != Uint32(ALL_LANES):
            owns = Uint32(1 << i)
            of_row = votes >> Uint32(cute.arch.lane_idx() // ROW_THREADS * ROW_THREADS) & Uint32(ROW_LANES)
            row_fits = of_row == Uint32(ROW_LANES)
            own = own_exponent(self._row_scales(scale, n, half, expert, row, there, k_tile), fmt)
            own_low, own_high = table_of_own_unit(byte, own, fmt)
            low, high = ptx.select(row_fits, low, own_low), ptx.select(row_fits, high, own_high)
            if (row < n) & (part == 0):
                k_tiles = cute.ceil_div(2 * half, K_TILE)
                self._note(notes_at, k_tiles, k_tile + 1, row, ptx.select(row_fits, unit, own))
        return low, high, owns

    def _load_some(self, codes_at, scale_at, pitch: int, count, first: int) -> list:
        """Load this thread's codes and scales of ``at_once`` k tiles, starting with k tile ``first``.

        Return a tuple per k tile: True if the codes exist, the codes, and the byte of the scale.
        """
        c, loaded = self.config, []
        for i in range(first, min(first + c.at_once, RANGE)):
            there = count > i * (K_TILE // 2)
            words = ptx.load_if(codes_at, there, 2, i * (K_TILE // 2), past_l1=True)
            loaded.append((there, words, ptx.load_narrow_if(scale_at, there, 1, i * pitch)))
        return loaded

    def _note(self, notes_at: cute.Pointer, k_tiles, place, row, exponent) -> None:
        """Write the exponent that a row uses to the notes."""
        at = cute.recast_ptr(notes_at + Notes.exponents(k_tiles, place), dtype=Int16) + row % NOTE_ROWS
        cute.make_tensor(at, cute.make_layout(1))[0] = Int16(exponent)

    def _row_scales(self, scale, n, half, expert, row, exists, k_tile) -> list:
        """Load a row's scales in a k tile. Return words of four scales."""
        c = self.config
        left = half * 2 // c.fmt.block_size - k_tile * c.tile_scales
        words = self.weight.row_scales(scale, n, expert, row, exists, Int64(k_tile) * c.tile_scales, left)
        return self.weight.without_padding(words, left)
