"""Device code of the kernel that writes the matrix of experts' weights. The package's docstring describes roles and
data path."""

import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES
from torch_cute_ops.kernels.common.experts.layouts import WARP
from torch_cute_ops.kernels.common.experts.routing import ExpertChooser
from torch_cute_ops.kernels.moe_route_dense.config import WARPS, Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg


class MoeRouteDenseKernel:
    """Kernel that writes the matrix of experts' weights, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config, self.chooser = config, ExpertChooser(config)

    def arguments(self) -> Arguments:
        c = self.config
        tokens, row_stride = Dim("tokens"), Dim("row_stride", bits=64)
        each = TensorArg("Float32", (c.experts,), (1,), align=4)
        dtype = DSL_DTYPES[c.dtype].__name__
        return Arguments(
            logits=TensorArg(dtype, (tokens, c.experts), (row_stride, 1), align=c.dtype.itemsize),
            bias=each if c.has_bias else None,
            expert_factor=each if c.has_expert_factor else None,
            out=TensorArg("Float32", (tokens, c.experts), (c.experts, 1), align=4),
            scaling_factor=ScalarArg("Float32"),
        )

    @cute.jit
    def __call__(self, logits, bias, expert_factor, out, scaling_factor: Float32, stream):
        ctas = ctas_unless_overlapping(cute.ceil_div(logits.shape[0], WARPS), (out,), (logits, bias, expert_factor))
        self.kernel(logits, bias, expert_factor, out, scaling_factor).launch(
            grid=[ctas, 1, 1],
            block=[self.config.threads, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.config.pdl,
        )

    @cute.kernel
    def kernel(self, logits, bias, expert_factor, out, scaling_factor: Float32):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = tid % WARP
        token = cta * WARPS + cute.arch.make_warp_uniform(tid // WARP)
        pdl_start(c.pdl)
        if token < logits.shape[0]:
            expert, weight = self.chooser.choose(token, logits, bias, scaling_factor, lane)
            row = cute.make_tensor(out.iterator + Int64(token) * c.experts, cute.make_layout(c.experts))
            for other in range(lane, c.experts, WARP):
                row[other] = Float32(0.0)
            if const_expr(c.has_expert_factor):
                weight = ptx.mul_rn(weight, expert_factor[expert])
            # Write the zeros before the weights: other lanes write the weights to the same elements.
            cute.arch.sync_warp()
            if lane < c.topk:
                row[expert] = weight
