"""Assign each (token, expert) pair to a row in the experts' buffer. The caller has chosen the experts.

Roles and data path. One thread handles one pair, and a CTA assigns 512 pairs at a time to rows. The assignment takes
one launch, or two launches if there are many pairs (see ``common.experts.routing.ExpertPlacer``). Each slot of
``ExpertPlacer`` is a single pair instead of a token, so that a token may name the same expert more than once. A pair
whose id names no expert gets no row and is not counted.

Bytes moved: 4 bytes per pair are read; 4 bytes per pair and 4 bytes per row are written. With two launches, each pair's
id is read twice. In addition, one word per pair, and one word per CTA and expert, are written and read again.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.moe_route_ids.config import Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.moe_route_ids.kernel import MoeRouteIdsKernel

__all__ = ["KERNEL", "Arguments", "Config", "MoeRouteIdsKernel", "plan"]

KERNEL = f"{__name__}.kernel.MoeRouteIdsKernel"
__getattr__ = on_demand(__name__, "MoeRouteIdsKernel")
