"""Device code of the kernels that quantise tokens.

The package's docstring describes the roles of the warps and the data path.
"""

from functools import reduce

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import unpack
from torch_cute_ops.kernels.common.core.ue8m0 import float_of_ue8m0, is_live, ue8m0_scale
from torch_cute_ops.kernels.common.experts.routing import TokenKernel, alignment, row_below, words_of_token
from torch_cute_ops.kernels.common.fp8.encode import (
    E4M3_MAX,
    divide_e4m3,
    dynamic_scale,
    multiply_e4m3,
    scale_divisor,
)
from torch_cute_ops.kernels.common.fp8.layouts import FP8_UNIT, SCALE_THREADS
from torch_cute_ops.kernels.moe_permute.config import COPY_THREADS, SCALES_PER_THREAD, THREADS, Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, TensorArg

VECTOR = 16
"""Number of bytes of a load or a store."""


class MoePermuteKernel(TokenKernel):
    """Kernels that quantise tokens and copy scales, compiled for a ``Config``."""

    config: Config

    def arguments(self) -> Arguments:
        c = self.config
        tokens, rows = Dim("tokens"), Dim("rows")
        step = Dim("row_stride", divisibility=VECTOR // c.dtype.itemsize, bits=64)
        token_scales = (Dim("kept"), Dim("kept_scales"))
        return Arguments(
            input=TensorArg(self.dtype.__name__, (tokens, c.width), (step, 1), align=VECTOR),
            y=TensorArg("Float8E4M3FN", (rows, c.width), (c.width, 1), align=VECTOR),
            scale=TensorArg("Float32", (rows, c.scales), (1, rows), align=4),
            expanded_to_permuted=TensorArg("Int32", (tokens, c.topk), (c.topk, 1), align=alignment(c.topk)),
            permuted_to_expanded=TensorArg("Int32", (rows,), (1,), align=4),
            workspace=TensorArg("Float32", token_scales, (Dim("kept_pitch", bits=64), 1), align=VECTOR),
        )

    @cute.jit
    def __call__(self, input, y, scale, expanded_to_permuted, permuted_to_expanded, workspace, stream):
        c = self.config
        tokens = input.shape[0]
        ctas = Int32((Int64(tokens) * c.threads_per_token + (THREADS - 1)) // THREADS)
        read = (input, expanded_to_permuted, permuted_to_expanded)
        if tokens <= c.few:
            ctas = ctas_unless_overlapping(ctas, (y, scale), read)
            self._quantize(ctas, input, y, scale, None, expanded_to_permuted, stream)
        else:
            token_scales = cute.make_tensor(
                workspace.iterator, cute.make_layout((tokens, c.scales), stride=(c.scales, 1))
            )
            ctas = ctas_unless_overlapping(ctas, (y, scale, token_scales), read)
            self._quantize(ctas, input, y, None, token_scales, expanded_to_permuted, stream)
            # If tensors overlap, the launch above fails and raises, so this launch does not happen.
            self.copy_scales(token_scales, permuted_to_expanded, scale).launch(
                grid=[cute.ceil_div(permuted_to_expanded.shape[0], COPY_THREADS), c.scale_groups, 1],
                block=[COPY_THREADS, 1, 1],
                min_blocks_per_mp=1,
                stream=stream,
                use_pdl=c.pdl,
            )

    @cute.jit
    def _quantize(self, ctas, input, y, scale, token_scales, places, stream):
        self.quantize(input, y, scale, token_scales, places).launch(
            grid=[ctas, 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.config.pdl,
        )

    @cute.kernel
    def quantize(self, input, y, scale, token_scales, places):
        """Store the codes of each token in all its rows. Store the scales in the same rows, or once per token in
        ``token_scales``."""
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        pdl_start(c.pdl)
        # With a large input, the index of a thread may exceed 32 bits.
        before = Int64(cta) * THREADS
        number = Int32(before % c.threads_per_token) + tid
        token, thread_in_token = (
            Int32(before // c.threads_per_token) + number // c.threads_per_token,
            number % c.threads_per_token,
        )
        is_token = token < input.shape[0]
        # The threads of a short block's missing half hold no elements, but help to store the block's scale.
        exists = is_token & (thread_in_token * FP8_UNIT < c.width) if c.has_short_block else is_token
        first = cute.assume(thread_in_token * FP8_UNIT, divby=FP8_UNIT)
        start = input.iterator + cute.assume(Int64(token) * input.stride[0], divby=VECTOR // c.dtype.itemsize) + first
        words = []
        for i in range_constexpr(FP8_UNIT * c.dtype.itemsize // VECTOR):
            words += ptx.load_if(start, exists, VECTOR // 4, VECTOR * i)
        rows = [
            ptx.select(exists, row_below(word, y.shape[0]), Int32(-1))
            for word in words_of_token(places, token, c.topk, exists)
        ]
        values = unpack(words, self.dtype)
        amax = reduce(ptx.max_abs_nan, values, Float32(0.0))
        amax = cute.arch.warp_reduction(amax, ptx.max_abs_nan, threads_in_group=SCALE_THREADS)
        if const_expr(c.scale_format == "ue8m0"):
            byte, inverse = ue8m0_scale(amax, E4M3_MAX)
            own, codes = float_of_ue8m0(byte), multiply_e4m3(values, inverse, is_live(amax))
        else:
            own = dynamic_scale(amax)
            codes = divide_e4m3(values, scale_divisor(own, None, is_dynamic=True))
        for row in rows:
            to = y.iterator + cute.assume(Int64(row) * c.width + first, divby=FP8_UNIT)
            ptx.store_if(to, codes, row >= 0)
        block, thread_in_block = thread_in_token // SCALE_THREADS, thread_in_token % SCALE_THREADS
        if const_expr(token_scales is None):
            # The threads of a block divide the token's rows. Each thread stores the block's scale in some of these
            # rows.
            for i in range_constexpr(0, c.topk, SCALE_THREADS):
                if is_token & (i + thread_in_block < c.topk):
                    place = places[token, i + thread_in_block]
                    if (place >= 0) & (place < y.shape[0]):
                        scale[place, block] = own
        else:
            if exists & (thread_in_block == 0):
                token_scales[token, block] = own

    @cute.kernel
    def copy_scales(self, token_scales, pairs, scale):
        """Copy one group of scales to each row of the buffer, from the scales of the row's token."""
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, scale_group, _ = cute.arch.block_idx()
        pdl_start(c.pdl)
        row = cta * COPY_THREADS + tid
        pair = Int32(-1)
        if row < pairs.shape[0]:
            pair = pairs[row]
        token, first = pair // c.topk, scale_group * SCALES_PER_THREAD
        if (pair >= 0) & (token < token_scales.shape[0]):
            # Number of words that one load reads. A load of four words must be aligned.
            vector = 4 if c.scales % 4 == 0 else 1
            words = []
            for i in range_constexpr(0, SCALES_PER_THREAD, vector):
                at = token_scales.iterator + cute.assume(Int64(token) * c.scales + (first + i), divby=vector)
                words += ptx.load_if(at, first + i < c.scales, vector)
            for i in range_constexpr(SCALES_PER_THREAD):
                if first + i < c.scales:
                    scale[row, first + i] = ptx.float_of(words[i])
