"""Rearrange activations in memory for the CTAs of ``kernels.fp4_wgmma``.

``kernels.common.fp4.activations`` describes the layout. Places of tokens that do not exist, from M on, are not written.
The kernel also clears the flags with which CTAs of the GEMM announce their partial sums. A thread writes 64 bytes.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.activation_tiles.config import Config

if TYPE_CHECKING:
    from torch_cute_ops.kernels.activation_tiles.kernel import ActivationTilesKernel

__all__ = ["ActivationTilesKernel", "Config"]

__getattr__ = on_demand(__name__, "ActivationTilesKernel")
