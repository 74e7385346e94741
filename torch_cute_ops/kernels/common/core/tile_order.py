"""The order in which CTAs take the tiles of a GEMM.

Up to ``raster`` tiles of tokens, a strip, run side by side over all tiles of rows of the weight before the next strip,
so that CTAs that run at the same time share both operands in L2.
"""

import cutlass
from cutlass import Int32

from torch_cute_ops.kernels.common.core.layouts import RASTER_WIDTH


def tile_of(number, row_tiles, token_tiles, raster: int = RASTER_WIDTH) -> tuple:
    """Tile ``number`` of ``row_tiles`` by ``token_tiles``, in strips of ``raster`` of the latter: which of the rows of
    the weight, and which of tokens."""
    strip = number // (row_tiles * raster)
    width = cutlass.min(token_tiles - strip * raster, Int32(raster))
    place = number - strip * (row_tiles * raster)
    return place // width, strip * raster + place % width
