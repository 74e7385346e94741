"""Choose the experts of each token, and write a matrix (tokens, experts) of their weights, with zeros everywhere else.

Roles and data path. A warp chooses the experts of a token (``common.experts.routing.ExpertChooser``), and writes zeros
for all experts. After a warp barrier, the warp writes the weights of the chosen experts. No shared memory is used. CTAs
are not persistent.

Bytes moved: the logits are read, and 4 bytes per token and expert are written.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.moe_route_dense.config import Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.moe_route_dense.kernel import MoeRouteDenseKernel

__all__ = ["KERNEL", "Arguments", "Config", "MoeRouteDenseKernel", "plan"]

KERNEL = f"{__name__}.kernel.MoeRouteDenseKernel"
__getattr__ = on_demand(__name__, "MoeRouteDenseKernel")
