"""The device code; the package's docstring tells the roles and the data path."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.kernels.common.convert import DSL_DTYPES, unpack
from torch_cute_ops.kernels.common.fp8 import divide_e4m3x4, dynamic_scale, scale_divisor
from torch_cute_ops.kernels.moe_permute.config import COPY_THREADS, SCALE_THREADS, THREADS, UNIT, Config
from torch_cute_ops.runtime.argspec import Argument, Dim, TensorArg

VECTOR = 16
"""Bytes of a load, and of a store."""
CHUNK = 16
"""Scales that a thread reads before it stores them."""


class MoePermuteKernel:
    """The kernels of one ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]

    def arguments(self) -> tuple[Argument, ...]:
        c = self.config
        tokens, rows = Dim("tokens"), Dim("rows")
        step = Dim("row_stride", divisibility=VECTOR // c.dtype.itemsize, bits=64)
        return (
            TensorArg(self.dtype.__name__, (tokens, c.width), (step, 1), align=VECTOR),
            TensorArg("Float8E4M3FN", (rows, c.width), (c.width, 1), align=VECTOR),
            TensorArg("Float32", (c.scales, rows), (rows, 1), align=4),
            TensorArg("Int32", (tokens, c.topk), (c.topk, 1), align=4),
            TensorArg("Int32", (rows,), (1,), align=4),
            TensorArg("Float32", (Dim("kept"), Dim("kept_scales")), (Dim("kept_pitch", bits=64), 1), align=VECTOR),
        )

    @cute.jit
    def __call__(self, x, y, scale, places, pairs, workspace, stream):
        c = self.config
        tokens = x.shape[0]
        if tokens <= c.few:
            self._quantize(x, y, scale, None, places, stream)
        else:
            kept = cute.make_tensor(workspace.iterator, cute.make_layout((tokens, c.scales), stride=(c.scales, 1)))
            self._quantize(x, y, None, kept, places, stream)
            self.copy_scales(kept, pairs, scale).launch(
                grid=[cute.ceil_div(pairs.shape[0], COPY_THREADS), 1, 1],
                block=[COPY_THREADS, 1, 1],
                min_blocks_per_mp=1,
                stream=stream,
                use_pdl=c.pdl,
            )

    @cute.jit
    def _quantize(self, x, y, scale, kept, places, stream):
        self.quantize(x, y, scale, kept, places).launch(
            grid=[Int32((Int64(x.shape[0]) * self.config.units + (THREADS - 1)) // THREADS), 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.config.pdl,
        )

    @cute.kernel
    def quantize(self, x, y, scale, kept, places):
        """Codes of all tokens, in each of their places; and their scales, there or in ``kept``."""
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        number = Uint32(cta) * THREADS + Uint32(tid)
        token, unit = Int32(number // c.units), Int32(number % c.units)
        exists = token < x.shape[0]
        first = cute.assume(unit * UNIT, divby=UNIT)
        start = x.iterator + cute.assume(Int64(token) * x.stride[0], divby=VECTOR // c.dtype.itemsize) + first
        words = []
        for i in range_constexpr(UNIT * c.dtype.itemsize // VECTOR):
            words += ptx.load_if(start, exists, VECTOR // 4, VECTOR * i)
        index = places.iterator + Int64(token) * c.topk
        rows = [self._row(index, j, exists) for j in range(c.topk)]
        values = unpack(words, self.dtype)
        amax = Float32(0.0)
        for value in values:
            amax = ptx.max_abs_nan(amax, value)
        amax = cute.arch.warp_reduction(amax, ptx.max_abs_nan, threads_in_group=SCALE_THREADS)
        own = dynamic_scale(amax)
        divisor = scale_divisor(own, None, is_dynamic=True)
        codes = [divide_e4m3x4(values[i : i + 4], divisor) for i in range(0, UNIT, 4)]
        for row in rows:
            to = y.iterator + cute.assume(Int64(row) * c.width + first, divby=UNIT)
            ptx.store_if(to, codes, row >= 0)
        block, member = unit // SCALE_THREADS, unit % SCALE_THREADS
        if const_expr(kept is None):
            # Threads that share a scale have some of the places each.
            for i in range_constexpr(0, c.topk, SCALE_THREADS):
                place = self._row(index, i + member, exists & (i + member < c.topk))
                if place >= 0:
                    scale[block, place] = own
        else:
            if exists & (member == 0):
                kept[token, block] = own

    def _row(self, index: cute.Pointer, j, exists) -> Int32:
        """A token's ``j``-th place, or -1."""
        return ptx.select(exists, Int32(ptx.load_if(index + j, exists, 1)[0]), Int32(-1))

    @cute.kernel
    def copy_scales(self, kept, pairs, scale):
        """Each row's scales, from those of its token."""
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        row = cta * COPY_THREADS + tid
        pair = Int32(-1)
        if row < pairs.shape[0]:
            pair = pairs[row]
        token = pair // c.topk
        if (pair >= 0) & (token < kept.shape[0]):
            # Words of a load.
            vector = 4 if c.scales % 4 == 0 else 1
            for first in range(0, c.scales, CHUNK):
                words = []
                for i in range_constexpr(0, CHUNK, vector):
                    at = kept.iterator + cute.assume(Int64(token) * c.scales + (first + i), divby=vector)
                    words += ptx.load_if(at, first + i < c.scales, vector)
                for i in range_constexpr(CHUNK):
                    if first + i < c.scales:
                        scale[first + i, row] = ptx.float_of(words[i])
