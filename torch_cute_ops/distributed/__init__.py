"""Run models on several GPUs with ``torch.distributed``: sharding rules for DTensor, tensor and expert parallelism.

Importing this package registers a DTensor sharding strategy for every op.
"""

# Import this module before torch does so lazily, for example inside a dispatch mode. If it is imported late, default
# arguments of its functions keep the default process group alive, and a surviving gloo thread aborts the process at
# exit.
import torch.distributed.nn.functional  # noqa: F401

from torch_cute_ops.distributed.collectives import Sent, all_gather, count_traffic, gather_rows, reduce_scatter
from torch_cute_ops.distributed.divided_experts import DividedExperts
from torch_cute_ops.distributed.experts import ExpertParallel, ExpertWeights
from torch_cute_ops.distributed.loading import load_
from torch_cute_ops.distributed.norm import normed_rows
from torch_cute_ops.distributed.parallel import ColumnParallel, RowParallel
from torch_cute_ops.distributed.plans import decoder_plan
from torch_cute_ops.distributed.sharding import full_tensor, reason_unsharded, redistribute, register
from torch_cute_ops.distributed.start import check_ranks, watched_ranks
from torch_cute_ops.runtime.groups import reset_all_reduce

__all__ = [
    "ColumnParallel",
    "DividedExperts",
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
    "reset_all_reduce",
    "watched_ranks",
]

register()
