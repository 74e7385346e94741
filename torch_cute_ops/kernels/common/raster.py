"""How wide the raster is in which CTAs take the tiles of a GEMM (``kernels.common.tile_order``): no device code."""

from typing import Final

RASTER_WIDTH: Final = 8
"""Tiles of rows of activations that run side by side, and share the weight in L2."""
