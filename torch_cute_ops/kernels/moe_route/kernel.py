"""Device code of the kernels that choose experts and assign rows. The package's docstring describes roles and data
path."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES
from torch_cute_ops.kernels.common.experts.layouts import THREADS, WARP
from torch_cute_ops.kernels.common.experts.routing import ExpertChooser, ExpertPlacer, RowOutputs
from torch_cute_ops.kernels.moe_route.config import Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg


class MoeRouteKernel(ExpertPlacer):
    """Kernels that choose experts and assign rows, compiled for a ``Config``."""

    def __init__(self, config: Config):
        super().__init__(config.placement, config.pdl)
        self.config, self.chooser = config, ExpertChooser(config)

    def arguments(self) -> Arguments:
        c, tokens = self.config, Dim("tokens")
        row_stride, dtype = Dim("row_stride", bits=64), DSL_DTYPES[c.dtype].__name__
        weights, pairs = (TensorArg(name, (tokens, c.topk), (c.topk, 1), align=4) for name in ("Float32", "Int32"))
        return Arguments(
            logits=TensorArg(dtype, (tokens, c.experts), (row_stride, 1), c.dtype.itemsize),
            bias=TensorArg("Float32", (c.experts,), (1,), align=4) if c.has_bias else None,
            weights=weights,
            ids=pairs,
            scaling_factor=ScalarArg("Float32"),
            **self.order_arguments(pairs),
        )

    @cute.jit
    def __call__(
        self,
        logits,
        bias,
        weights,
        ids,
        expanded_to_permuted,
        permuted_to_expanded,
        offsets,
        counts,
        workspace,
        scaling_factor: Float32,
        row_multiple: Int32,
        sms: Int32,
        stream,
    ):
        inputs, rows = (logits, bias, weights, ids, scaling_factor), RowOutputs(permuted_to_expanded, offsets, counts)
        read, written = (logits, bias), (weights, ids, expanded_to_permuted, *rows)
        slots = logits.shape[0]
        self.launch(slots, inputs, expanded_to_permuted, rows, workspace, row_multiple, sms, written, read, stream)

    @cute.jit
    def take_batch(self, batch, inputs, thread, smem):
        """Choose the experts of a batch of tokens. One warp handles one token."""
        logits, bias, weights, ids, factor = inputs
        topk, chosen = self.config.topk, smem.chosen
        for token in range(batch + thread.warp, cutlass.min(batch + self.config.batch, thread.last), THREADS // WARP):
            expert, weight = self.chooser.choose(token, logits, bias, factor, thread.lane)
            if thread.lane < topk:
                ids[token, thread.lane] = expert
                weights[token, thread.lane] = weight
                chosen[(token - batch) * topk + thread.lane] = expert
                self.mark(expert, token - batch, smem)
        cute.arch.sync_threads()
        expert, rank = Int32(0), Int32(0)
        if self.has_pair(batch, thread):
            expert = chosen[thread.tid]
            rank = self.rank_of(expert, thread.tid // topk, smem)
        return expert, rank

    def expert_of(self, pair, inputs):
        return self.flat(inputs[3])[pair]
