"""Choose the experts of each token, and assign each (token, expert) pair to a row in the experts' buffer.

Roles and data path. A warp chooses the experts of a token (``common.experts.routing.ExpertChooser``). A CTA processes
64 or 32 tokens at a time and assigns their pairs to rows, in one launch or two (``ExpertPlacer``).

Bytes moved: the logits are read; 12 bytes per pair (weight, expert and row) and 4 bytes per row are written. With two
launches, one word per pair, and one word per CTA and expert, are also written and read again.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.moe_route.config import Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.moe_route.kernel import MoeRouteKernel

__all__ = ["KERNEL", "Arguments", "Config", "MoeRouteKernel", "plan"]

KERNEL = f"{__name__}.kernel.MoeRouteKernel"
__getattr__ = on_demand(__name__, "MoeRouteKernel")
