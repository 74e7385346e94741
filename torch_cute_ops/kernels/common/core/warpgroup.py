"""Warpgroups (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"), and which tiles are left to single warps:
no device code."""

from typing import Final

WARPGROUP: Final = 128
"""Threads."""
SCHEDULERS: Final = 4
"""Warp schedulers of an SM: warp w belongs to scheduler w % 4."""
GROUP_ROWS: Final = 64
"""Rows of the M side of a wgmma."""
BY_WARP: Final = 8
"""Most tokens of a tile, or of a unit of work, that warps multiply with FP4 weights each by itself, by mma.sync: 7 %
faster than wgmma for 8 tokens, no faster for 16, since every warp reads all activations (measured on an H200).
One row of codes is an exception (``kernels.fp4_wgmma.codes``)."""
