"""The device code; the package's docstring tells the roles and the data path."""

from functools import reduce

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from torch_cute_ops.kernels.common import pdl, ptx
from torch_cute_ops.kernels.common.convert import DSL_DTYPES, unpack
from torch_cute_ops.kernels.common.fp8 import divide_e4m3, dynamic_scale, scale_divisor
from torch_cute_ops.kernels.common.fp8_units import FP8_UNIT, SCALE_THREADS
from torch_cute_ops.kernels.common.token_words import alignment, words_of_token
from torch_cute_ops.kernels.moe_permute.config import CHUNK, COPY_THREADS, THREADS, Config
from torch_cute_ops.runtime.argspec import Argument, Dim, TensorArg

VECTOR = 16
"""Bytes of a load, and of a store."""


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
            TensorArg("Int32", (tokens, c.topk), (c.topk, 1), align=alignment(c.topk)),
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
                grid=[cute.ceil_div(pairs.shape[0], COPY_THREADS), c.chunks, 1],
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
        pdl.start(c.pdl)
        # Units of a large input exceed 32 bits.
        before = Int64(cta) * THREADS
        number = Int32(before % c.units) + tid
        token, unit = Int32(before // c.units) + number // c.units, number % c.units
        exists = token < x.shape[0]
        first = cute.assume(unit * FP8_UNIT, divby=FP8_UNIT)
        start = x.iterator + cute.assume(Int64(token) * x.stride[0], divby=VECTOR // c.dtype.itemsize) + first
        words = []
        for i in range_constexpr(FP8_UNIT * c.dtype.itemsize // VECTOR):
            words += ptx.load_if(start, exists, VECTOR // 4, VECTOR * i)
        rows = [ptx.select(exists, Int32(word), Int32(-1)) for word in words_of_token(places, token, c.topk, exists)]
        values = unpack(words, self.dtype)
        amax = reduce(ptx.max_abs_nan, values, Float32(0.0))
        amax = cute.arch.warp_reduction(amax, ptx.max_abs_nan, threads_in_group=SCALE_THREADS)
        own = dynamic_scale(amax)
        divisor = scale_divisor(own, None, is_dynamic=True)
        codes = divide_e4m3(values, divisor)
        for row in rows:
            to = y.iterator + cute.assume(Int64(row) * c.width + first, divby=FP8_UNIT)
            ptx.store_if(to, codes, row >= 0)
        block, member = unit // SCALE_THREADS, unit % SCALE_THREADS
        if const_expr(kept is None):
            # Threads that share a scale have some of the places each.
            for i in range_constexpr(0, c.topk, SCALE_THREADS):
                if exists & (i + member < c.topk):
                    place = places[token, i + member]
                    if place >= 0:
                        scale[block, place] = own
        else:
            if exists & (member == 0):
                kept[token, block] = own

    @cute.kernel
    def copy_scales(self, kept, pairs, scale):
        """A chunk of each row's scales, from those of its token."""
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, chunk, _ = cute.arch.block_idx()
        pdl.start(c.pdl)
        row = cta * COPY_THREADS + tid
        pair = Int32(-1)
        if row < pairs.shape[0]:
            pair = pairs[row]
        token, first = pair // c.topk, chunk * CHUNK
        if (pair >= 0) & (token < kept.shape[0]):
            # Words of a load.
            vector = 4 if c.scales % 4 == 0 else 1
            words = []
            for i in range_constexpr(0, CHUNK, vector):
                at = kept.iterator + cute.assume(Int64(token) * c.scales + (first + i), divby=vector)
                words += ptx.load_if(at, first + i < c.scales, vector)
            for i in range_constexpr(CHUNK):
                if first + i < c.scales:
                    scale[first + i, row] = ptx.float_of(words[i])
