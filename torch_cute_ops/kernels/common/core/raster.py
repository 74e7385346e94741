"""Width of the raster in which CTAs take tiles of a GEMM (``kernels.common.core.tile_order``). No device code."""

from typing import Final

RASTER_WIDTH: Final = 8
"""Tiles of rows of activations that run side by side, and share the weight in L2."""
