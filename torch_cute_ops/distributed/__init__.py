"""Models on several GPUs, on ``torch.distributed``: sharding rules for DTensor, tensor and expert parallelism.

Importing this registers the rules of every op with DTensor.
"""

# torch imports this one late, by a dispatch mode say. Defaults of its functions then hold the default group for ever,
# and a thread of gloo's that outlives the interpreter aborts the process. Imported first, they hold none.
import torch.distributed.nn.functional  # noqa: F401

from torch_cute_ops.distributed.collectives import Sent, all_gather, count_traffic, gather_rows, reduce_scatter
from torch_cute_ops.distributed.experts import ExpertParallel, ExpertWeights
from torch_cute_ops.distributed.loading import load_
from torch_cute_ops.distributed.norm import normed_rows
from torch_cute_ops.distributed.parallel import ColumnParallel, RowParallel, decoder_plan
from torch_cute_ops.distributed.sharding import full_tensor, reason_unsharded, redistribute, register
from torch_cute_ops.distributed.start import check_ranks, watched_ranks

__all__ = [
    "ColumnParallel",
    "ExpertParallel",
    "ExpertWeights",
    "RowParallel",
    "Sent",
    "all_gather",
    "check_ranks",
    "count_traffic",
    "decoder_plan",
    "full_tensor",
    "gather_rows",
    "load_",
    "normed_rows",
    "reason_unsharded",
    "redistribute",
    "reduce_scatter",
    "watched_ranks",
]

register()
