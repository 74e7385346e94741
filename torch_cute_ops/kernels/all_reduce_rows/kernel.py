"""Device code of the kernel that sums rows of several GPUs.

The package's docstring describes the roles of the warps and the data path.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_cute_ops.kernels.all_reduce_rows.config import CONTROL_WORDS, MAX_RANKS, Arguments, Config
from torch_cute_ops.kernels.all_reduce_rows.exchange import Exchange
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping
from torch_cute_ops.kernels.common.fp4.codes import scale_matrix
from torch_cute_ops.kernels.row_quant.kernel import RowQuantKernel
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg


class AllReduceRowsKernel:
    """Kernel that sums rows of several GPUs and processes the sums as ``row_quant`` does, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.row_quant = RowQuantKernel(config.rows)
        self.row_quant.exchange = Exchange(config, self.row_quant.rows)

    def arguments(self) -> Arguments:
        peers = self.config.ranks - 1
        rows = self.row_quant.arguments()
        words = Dim("slot_words", divisibility=4)
        slots = [TensorArg("Int32", (2, words), (Dim("half_words", divisibility=4), 1), align=16)] * peers
        slots += [None] * (MAX_RANKS - 1 - peers)
        shared = ("input", "residual", "weight", "factor", "y", "scale", "norm", "eps", "max_ctas")
        return Arguments(
            *(getattr(rows, name) for name in shared),
            ScalarArg("Int32"),
            TensorArg("Int32", (2, peers, words), (Dim("half_words", divisibility=4), words, 1), align=16),
            *slots,
            control=TensorArg("Int32", (CONTROL_WORDS,), (1,), align=16),
            report=TensorArg("Int32", (peers,), (1,), align=4),
            timeout_ms=ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(
        self,
        input,
        residual,
        weight,
        factor,
        y,
        scale,
        norm,
        eps: Float32,
        max_ctas: Int32,
        rank: Int32,
        staging,
        peer0,
        peer1,
        peer2,
        peer3,
        peer4,
        peer5,
        peer6,
        control,
        report,
        timeout_ms: Int32,
        stream,
    ):
        layout = self.config.rows.spec.layout
        allowed = ctas_unless_overlapping(
            Int32(1),
            written=(y, scale, norm, residual),
            read=(input, weight, factor),
            may_alias=((residual, input),),
        )
        # Refuse to launch if the rows do not fit into a slot of the staging.
        fits = Int64(input.shape[0]) * self.config.row_bytes <= Int64(staging.shape[2]) * 4
        allowed = ptx.select(fits, allowed, Int32(0))
        if const_expr(not layout.is_linear):
            tile = layout.tile_rows
            allowed = ptx.select(scale.shape[0] == cute.ceil_div(input.shape[0], tile), allowed, Int32(0))
        scale = scale_matrix(scale, layout)
        slots = [peer0, peer1, peer2, peer3, peer4, peer5, peer6][: self.config.ranks - 1]
        peers = rank, staging, tuple(slots), control, report, timeout_ms
        given = input, residual, weight, None, factor, y, scale, None, norm, None, None, None, eps, None, peers
        self.row_quant.launch(allowed, given, max_ctas, stream)
