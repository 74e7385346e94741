"""What a warpgroup is (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"): no device code."""

from typing import Final

WARPGROUP: Final = 128
"""Threads."""
GROUP_ROWS: Final = 64
"""Rows of an operand that it multiplies at once."""
