"""The device code; the package's docstring tells the roles and the data path."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.kernels.moe_permute.config import THREADS, Config
from torch_cute_ops.kernels.row_quant.kernel import RowQuantKernel
from torch_cute_ops.runtime.argspec import Argument, Dim, TensorArg

CHUNK = 16
"""Scales that a thread reads before it stores them."""


class MoePermuteKernel:
    """The kernels of one ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.quantize = RowQuantKernel(config.quantize)
        self.quantize_tokens = RowQuantKernel(config.quantize_tokens)
        self.quantize_slices = RowQuantKernel(config.slices)

    def arguments(self) -> tuple[Argument, ...]:
        x, _, _, _, y, scale, _, _, places, _, _, max_ctas = self.quantize.arguments()
        assert isinstance(y, TensorArg)
        pairs = TensorArg("Int32", (y.shape[0],), (1,), align=4)
        workspace = TensorArg("Float32", (Dim("kept"), Dim("kept_scales")), (Dim("kept_pitch", bits=64), 1), align=16)
        return x, y, scale, places, pairs, workspace, max_ctas

    @cute.jit
    def __call__(self, x, y, scale, places, pairs, workspace, max_ctas: Int32, stream):
        c = self.config
        nothing = (None, None, None)
        index = (None, None, places, None, Float32(0.0))
        if x.shape[0] <= c.few:
            self.quantize(x, *nothing, y, scale, *index, max_ctas, stream)
        else:
            layout = cute.make_layout((x.shape[0], c.scales), stride=(c.scales, 1))
            kept = cute.make_tensor(workspace.iterator, layout)
            if x.shape[0] < c.many:
                self.quantize_tokens(x, *nothing, y, kept, *index, max_ctas, stream)
            else:
                # One CTA for each slice.
                self.quantize_slices(x, *nothing, y, kept, *index, x.shape[0] * c.slices.splits, stream)
            self.kernel(kept, pairs, scale).launch(
                grid=[cute.ceil_div(pairs.shape[0], THREADS), 1, 1],
                block=[THREADS, 1, 1],
                min_blocks_per_mp=1,
                stream=stream,
                use_pdl=c.quantize.pdl,
            )

    @cute.kernel
    def kernel(self, kept, pairs, scale):
        """Each row's scales, from those of its token."""
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        if const_expr(c.quantize.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        row = cta * THREADS + tid
        pair = Int32(-1)
        if row < pairs.shape[0]:
            pair = pairs[row]
        token = pair // c.quantize.problem.copies
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
