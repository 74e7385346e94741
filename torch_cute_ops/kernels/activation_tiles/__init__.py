"""Activations in the order of ``kernels.fp4_wgmma``, for all of its CTAs: as ``kernels.common.activations`` tells.
Tokens beyond m are not written.

Besides, it clears the flags by which CTAs of the product tell each other of their sums. One thread writes 64 bytes.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.activation_tiles.config import CHUNK, TILE_BYTES, TILE_LINE, TILE_TOKENS, Config

if TYPE_CHECKING:
    from torch_cute_ops.kernels.activation_tiles.kernel import ActivationTilesKernel

__all__ = ["CHUNK", "TILE_BYTES", "TILE_LINE", "TILE_TOKENS", "ActivationTilesKernel", "Config"]

__getattr__ = on_demand(__name__, "ActivationTilesKernel")
