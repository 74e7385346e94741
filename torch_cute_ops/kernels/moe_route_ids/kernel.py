"""Device code of the kernels that assign pairs to rows.

The package's docstring describes the roles of the warps and the data path.
"""

import cutlass.cute as cute
from cutlass import Int32

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.experts.routing import ExpertPlacer, RowOutputs
from torch_cute_ops.kernels.moe_route_ids.config import Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, TensorArg


class MoeRouteIdsKernel(ExpertPlacer):
    """Kernels that assign pairs to rows, compiled for a ``Config``."""

    may_lack_experts = True

    def __init__(self, config: Config):
        super().__init__(config.placement, config.pdl)
        self.config = config

    def arguments(self) -> Arguments:
        tokens, topk = Dim("tokens"), Dim("topk")
        pairs = TensorArg("Int32", (tokens, topk), (topk, 1), align=4)
        return Arguments(ids=pairs, **self.order_arguments(pairs))

    @cute.jit
    def __call__(
        self,
        ids,
        expanded_to_permuted,
        permuted_to_expanded,
        offsets,
        counts,
        workspace,
        row_multiple: Int32,
        sms: Int32,
        stream,
    ):
        slots, rows = ids.shape[0] * ids.shape[1], RowOutputs(permuted_to_expanded, offsets, counts)
        written = (expanded_to_permuted, *rows)
        self.launch(slots, (ids,), expanded_to_permuted, rows, workspace, row_multiple, sms, written, (ids,), stream)

    @cute.jit
    def take_batch(self, batch, inputs, thread, smem):
        """Read the expert of each thread's pair, and compute the pair's rank among all pairs with the same expert."""
        expert, rank = Int32(-1), Int32(0)
        if self.has_pair(batch, thread):
            expert = self.expert_of(batch + thread.tid, inputs)
            if expert >= 0:
                self.mark(expert, thread.tid, smem)
        cute.arch.sync_threads()
        if expert >= 0:
            rank = self.rank_of(expert, thread.tid, smem)
        return expert, rank

    def expert_of(self, pair, inputs):
        expert = self.flat(inputs[0])[pair]
        return ptx.select((expert >= 0) & (expert < self.config.experts), expert, Int32(-1))
