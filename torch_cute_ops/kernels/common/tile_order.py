"""The order in which CTAs take the tiles of a GEMM.

Up to ``RASTER_WIDTH`` tiles of tokens, a strip, run side by side over all tiles of rows of the weight before the next
strip, so that CTAs that run at the same time share both operands in L2.
"""

import cutlass
from cutlass import Int32

from torch_cute_ops.kernels.common.raster import RASTER_WIDTH


def tile_of(number, row_tiles, token_tiles) -> tuple:
    """Tile ``number`` of ``row_tiles`` by ``token_tiles``: which of the rows of the weight, and which of tokens."""
    strip = number // (row_tiles * RASTER_WIDTH)
    width = cutlass.min(token_tiles - strip * RASTER_WIDTH, Int32(RASTER_WIDTH))
    place = number - strip * (row_tiles * RASTER_WIDTH)
    return place // width, strip * RASTER_WIDTH + place % width
