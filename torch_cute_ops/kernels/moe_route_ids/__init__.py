"""Give each pair of a token and an expert a row in the experts' buffer, for experts that were chosen elsewhere.

Roles and data path. A thread has one pair, and a CTA processes 512 pairs at a time and gives them rows, in one launch
or two (``common.expert_placer``). A slot is a single pair, not a token, so a token may have an expert more than once. A
pair whose id is not that of an expert gets no row and counts nowhere.

Bytes moved: 4 bytes read and 4 written for each pair, 4 written for each row. With two launches, each pair's id is read
twice and a word for it written and read again, as is a word for each CTA and expert.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.moe_route_ids.config import Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.moe_route_ids.kernel import MoeRouteIdsKernel

__all__ = ["KERNEL", "Arguments", "Config", "MoeRouteIdsKernel", "plan"]

KERNEL = f"{__name__}.kernel.MoeRouteIdsKernel"
__getattr__ = on_demand(__name__, "MoeRouteIdsKernel")
