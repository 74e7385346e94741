"""Device code of the kernel that adds up each token's rows.

The package's docstring describes the roles of the warps and the data path.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import pack, store_words, unpack
from torch_cute_ops.kernels.common.experts.routing import TokenKernel, alignment, row_below, words_of_token
from torch_cute_ops.kernels.moe_finalize.config import CTAS_PER_SM, VECTOR, Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

WORDS = VECTOR // 4
ROWS_AT_ONCE = 16
"""Largest number of rows whose loads a thread issues at once. More would not fit into registers."""


class MoeFinalizeKernel(TokenKernel):
    """Kernel that adds up each token's rows, compiled for a ``Config``."""

    config: Config

    def arguments(self) -> Arguments:
        c = self.config
        tokens = Dim("tokens")
        align = alignment(c.topk)

        def rows(count: Dim, stride: str) -> TensorArg:
            step = Dim(stride, divisibility=c.vector, bits=64)
            return TensorArg(self.dtype.__name__, (count, c.width), (step, 1), align=VECTOR)

        return Arguments(
            input=rows(Dim("rows"), "row_stride"),
            expanded_to_permuted=TensorArg("Int32", (tokens, c.topk), (c.topk, 1), align=align),
            weights=TensorArg("Float32", (tokens, c.topk), (c.topk, 1), align=align),
            residual=rows(tokens, "residual_stride") if c.has_residual else None,
            out=TensorArg(self.dtype.__name__, (tokens, c.width), (c.width, 1), align=VECTOR),
            sms=ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(self, input, expanded_to_permuted, weights, residual, out, sms: Int32, stream):
        c = self.config
        index = expanded_to_permuted
        tokens, threads = out.shape[0], Int32(c.threads)
        slices = cutlass.min(cute.ceil_div(sms * CTAS_PER_SM, tokens), c.rounds(c.threads))
        ctas = ctas_unless_overlapping(
            tokens,
            written=(out,),
            read=(input, index, weights, residual),
            may_alias=() if residual is None else ((out, residual),),
        )
        if tokens <= c.few:
            # Launch larger CTAs only if each CTA runs a single round (see the package docstring) and larger CTAs reduce
            # the work of the busiest SM.
            is_less = self._busiest_sm_work(tokens, sms, c.more_threads) < self._busiest_sm_work(tokens, sms, c.threads)
            if is_less & (slices == c.rounds(c.threads)):
                threads, slices = Int32(c.more_threads), Int32(c.rounds(c.more_threads))
            self._launch(True, ctas, slices, threads, input, index, weights, residual, out, stream)
        else:
            self._launch(False, ctas, slices, threads, input, index, weights, residual, out, stream)

    def _busiest_sm_work(self, tokens, sms, threads: int):
        """Return the number of vectors that the busiest SM processes if each CTA of ``threads`` threads runs a single
        round."""
        return (tokens * self.config.rounds(threads) + sms - 1) // sms * threads

    @cute.jit
    def _launch(self, are_few: Constexpr, ctas, slices, threads, input, index, weights, residual, out, stream):
        c = self.config
        self.kernel(are_few, input, index, weights, residual, out).launch(
            grid=[ctas, slices, 1],
            block=[threads, 1, 1],
            max_number_threads=[max(c.threads, c.more_threads), 1, 1],
            # Without this limit, ptxas allots 32 registers, too few for the loads of all rows at once.
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=c.pdl,
        )

    @cute.kernel
    def kernel(self, are_few: Constexpr, input, index, weights, residual, out):
        """Add up the rows of one token, for one slice of columns. If ``are_few``, loads of rows bypass L1."""
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        token, slice_, _ = cute.arch.block_idx()
        _, slices, _ = cute.arch.grid_dim()
        threads, _, _ = cute.arch.block_dim()
        pdl_start(c.pdl)
        rows = [row_below(word, input.shape[0]) for word in words_of_token(index, token, c.topk)]
        factors = [ptx.float_of(word) for word in words_of_token(weights, token, c.topk)]
        for vector in range(slice_ * threads + tid, c.vectors, slices * threads):
            total = [Float32(0.0)] * c.vector
            if const_expr(c.has_residual):
                # Load the residual first, because its address, unlike the addresses of the rows, needs no index.
                total = unpack(ptx.load_if(self._at(residual, token, vector), True, WORDS, past_l1=are_few), self.dtype)
            for first in range_constexpr(0, c.topk, ROWS_AT_ONCE):
                some, count = rows[first : first + ROWS_AT_ONCE], min(c.topk - first, ROWS_AT_ONCE)
                words = [ptx.load_if(self._at(input, row, vector), row >= 0, WORDS, past_l1=are_few) for row in some]
                for j in range_constexpr(count):
                    for i, value in enumerate(unpack(words[j], self.dtype)):
                        # A pair without a row adds nothing, even if its weight is NaN.
                        term = ptx.mul_rn(value, factors[first + j])
                        total[i] = ptx.select(some[j] >= 0, total[i] + term, total[i])
            store_words(pack(total, self.dtype), self._words_of(out, token, vector))

    def _at(self, tensor: cute.Tensor, row, vector) -> cute.Pointer:
        """Return the address of 16-byte vector ``vector`` of a row."""
        c = self.config
        start = tensor.iterator + cute.assume(Int64(row) * tensor.stride[0], divby=c.vector)
        return start + cute.assume(vector * c.vector, divby=c.vector)

    def _words_of(self, tensor: cute.Tensor, row, vector) -> cute.Tensor:
        """Return 16-byte vector ``vector`` of a row as a tensor of words."""
        return cute.make_tensor(cute.recast_ptr(self._at(tensor, row, vector), dtype=Uint32), cute.make_layout(WORDS))
