"""What a warpgroup is (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"), and what is left to warps: no
device code."""

from typing import Final

WARPGROUP: Final = 128
"""Threads."""
GROUP_ROWS: Final = 64
"""Rows of an operand that it multiplies at once."""
BY_WARP: Final = 8
"""Tokens of a tile or a unit, at most, that warps multiply each by itself, by mma.sync, beside FP4 weights: 7 % faster
than warpgroups for 8 tokens, no faster for 16, since every warp reads all activations (measured on an H200)."""
