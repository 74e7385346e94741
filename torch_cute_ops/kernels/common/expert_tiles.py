"""Tiles of a product for each of many experts, and the order in which CTAs take them: on the device, from offsets and
counts.

A tile is ``tokens`` rows of one expert by ``columns`` rows of its weight. Tiles are numbered expert by expert, and CTAs
take every so manieth: experts without rows have no numbers. Within an expert, ``BAND`` tiles of rows run side by side
with all columns before the next ones, so that what runs at the same time shares rows and columns in L2.

A table in shared memory has what each expert begins with; a warp finds a number's expert in it by two votes.
"""

from types import SimpleNamespace
from typing import Final

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.kernels.common.expert_layout import ExpertLayout
from torch_cute_ops.kernels.common.expert_search import expert_by_votes
from torch_cute_ops.kernels.common.scan import WARP, running_sum_of_cta
from torch_cute_ops.runtime.argspec import Argument, Dim, TensorArg

BAND: Final = 8


class ExpertTiles:
    """Tiles of ``tokens`` rows and ``columns`` columns."""

    def __init__(self, rows: ExpertLayout, tokens: int, columns: int):
        self.rows, self.tokens, self.columns = rows, tokens, columns

    def arguments(self, out_dtype: str) -> tuple[Argument, ...]:
        """Of a kernel: ``a``, ``b``, their scales, offsets, counts and the result, as ``views`` takes them."""
        n, k, blocks = Dim("n", divisibility=8), Dim("k", divisibility=128), Dim("blocks")
        pitch, columns = Dim("a_scale_pitch", bits=64), Dim("b_scale_rows")
        experts, offsets = Dim("experts"), TensorArg("Int32", (Dim("offsets"),), (1,), align=4)
        fp8, fp32 = "Float8E4M3FN", "Float32"
        if self.rows.is_masked:
            rows, of_expert = Dim("rows"), Dim("rows_of_expert", bits=64, divisibility=16)
            a = TensorArg(fp8, (experts, rows, k), (of_expert, k, 1), align=16)
            a_scale = TensorArg(fp32, (blocks, experts, rows), (pitch, rows, 1), align=4)
            out = TensorArg(out_dtype, (experts, rows, n), (Dim("out_of_expert", bits=64, divisibility=8), n, 1), 16)
        else:
            rows = Dim("rows")
            a = TensorArg(fp8, (rows, k), (k, 1), align=16)
            a_scale = TensorArg(fp32, (blocks, rows), (pitch, 1), align=4)
            out = TensorArg(out_dtype, (rows, n), (n, 1), align=16)
        if self.rows.is_plain:
            b = TensorArg(fp8, (k, n), (1, k), align=16)
            b_scale = TensorArg(fp32, (columns, blocks), (blocks, 1), align=4)
        else:
            b = TensorArg(fp8, (experts, n, k), (Dim("b_of_expert", bits=64, divisibility=16), k, 1), align=16)
            of_expert = Dim("b_scale_of_expert", bits=64)
            b_scale = TensorArg(fp32, (experts, columns, blocks), (of_expert, blocks, 1), align=4)
        counts = TensorArg("Int32", (experts,), (1,), align=4)
        given = (offsets if self.rows.has_offsets else None, counts if self.rows.has_counts else None)
        return (a, b, a_scale, b_scale, *given, out)

    def views(self, a, b, a_scale, b_scale, out) -> SimpleNamespace:
        """The tensors of all experts together: ``a`` (R, K), ``b`` (N, K, E), ``a_scale`` (K/128, R), ``b_scale``
        (N/128, K/128, E), ``out`` (R, N); and sizes."""
        if self.rows.is_masked:
            space = a.shape[1]
            count = a.shape[0] * space
            k, n = a.shape[2], out.shape[2]
        else:
            space = count = a.shape[0]
            k, n = a.shape[1], out.shape[1]
        if self.rows.is_plain:
            experts = 1
            weight = (n, k, 1), (k, 1, 0)
            scale = (b_scale.shape[0], b_scale.shape[1], 1), (b_scale.stride[0], 1, 0)
        else:
            experts = b.shape[0]
            weight = (n, k, experts), (k, 1, b.stride[0])
            scale = (b_scale.shape[1], b_scale.shape[2], experts), (b_scale.stride[1], 1, b_scale.stride[0])
        return SimpleNamespace(
            a=cute.make_tensor(a.iterator, cute.make_layout((count, k), stride=(k, 1))),
            b=cute.make_tensor(b.iterator, cute.make_layout(weight[0], stride=weight[1])),
            a_scale=cute.make_tensor(
                a_scale.iterator, cute.make_layout((a_scale.shape[0], count), stride=(a_scale.stride[0], 1))
            ),
            b_scale=cute.make_tensor(b_scale.iterator, cute.make_layout(scale[0], stride=scale[1])),
            out=cute.make_tensor(out.iterator, cute.make_layout((count, n), stride=(n, 1))),
            space=space,
        )

    # In the kernel

    def _table(self, base: cute.Pointer) -> SimpleNamespace:
        at, size = cute.recast_ptr(base, dtype=Int32), MAX_EXPERTS + 4
        names = ("firsts", "begins", "counts")
        tensors = {name: cute.make_tensor(at + i * size, cute.make_layout(size)) for i, name in enumerate(names)}
        return SimpleNamespace(**tensors, totals=cute.make_tensor(at + 3 * size, cute.make_layout(WARP)))

    @cute.jit
    def prepare(self, offsets, counts, experts, space, base, tid, threads: int):
        """Write the table; all ``threads`` of the CTA come here, and have met at its end."""
        if const_expr(not self.rows.is_plain):
            table = self._table(base)
            each = -(-MAX_EXPERTS // threads)
            tiles = cute.make_rmem_tensor((each,), Int32)
            own = Int32(0)
            for i in range_constexpr(each):
                expert = tid * each + i
                begin, count = Int32(0), Int32(0)
                if expert < experts:
                    if const_expr(self.rows.has_offsets):
                        begin = offsets[expert]
                        count = counts[expert] if const_expr(self.rows.has_counts) else offsets[expert + 1] - begin
                        count = cutlass.min(count, space - begin)
                    else:
                        begin = expert * space
                        count = cutlass.min(counts[expert], space)
                count = cutlass.max(count, Int32(0))
                if expert < MAX_EXPERTS:
                    table.begins[expert] = begin
                    table.counts[expert] = count
                tiles[i] = cute.ceil_div(count, self.tokens)
                own += tiles[i]
            first = running_sum_of_cta(own, table.totals, tid, threads // WARP) - own
            for i in range_constexpr(each):
                if tid * each + i < MAX_EXPERTS:
                    table.firsts[tid * each + i] = first
                first = first + tiles[i]
            if tid == threads - 1:
                table.firsts[MAX_EXPERTS] = first
        cute.arch.sync_threads()

    def count(self, m, n, base):
        """How many tiles there are."""
        columns = cute.ceil_div(n, self.columns)
        if const_expr(self.rows.is_plain):
            return cute.ceil_div(m, self.tokens) * columns
        return self._table(base).firsts[MAX_EXPERTS] * columns

    @cute.jit
    def find(self, number, m, n, base, lane):
        """The ``number``-th tile: its expert, its first row, how many rows the expert has from there on, and its first
        column. All lanes of a warp come here together."""
        columns = cute.ceil_div(n, self.columns)
        expert, begin, count, first = Int32(0), Int32(0), m, Int32(0)
        if const_expr(not self.rows.is_plain):
            table = self._table(base)
            row_tile = number // columns
            # The last expert that begins with this tile of rows or before has it: those without rows come before it.
            expert = expert_by_votes(table.firsts, row_tile, lane)
            begin, count, first = table.begins[expert], table.counts[expert], table.firsts[expert]
        place = number - first * columns
        band = place // (columns * BAND)
        width = cutlass.min(cute.ceil_div(count, self.tokens) - band * BAND, Int32(BAND))
        place = place - band * (columns * BAND)
        skipped = (band * BAND + place % width) * self.tokens
        return expert, begin + skipped, count - skipped, place // width * self.columns


def element(tensor: cute.Tensor, row, column, divby: int = 1) -> cute.Pointer:
    """Where an element of a matrix with contiguous rows lies."""
    return tensor.iterator + cute.assume(Int64(row) * tensor.stride[0] + column, divby=divby)
