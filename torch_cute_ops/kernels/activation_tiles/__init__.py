"""Rearrange activations in global memory, so that the CTAs of the GEMM ``kernels.fp4_wgmma`` can copy them in bulk.

``kernels.common.fp4.activations`` describes the layout. The number of tokens is rounded up to whole m tiles; the kernel
does not write the places of tokens that do not exist. The kernel also clears the flags that the GEMM's CTAs set after
they store their partial sums. Each thread writes 64 bytes.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.activation_tiles.config import Config

if TYPE_CHECKING:
    from torch_cute_ops.kernels.activation_tiles.kernel import ActivationTilesKernel

__all__ = ["ActivationTilesKernel", "Config"]

__getattr__ = on_demand(__name__, "ActivationTilesKernel")
