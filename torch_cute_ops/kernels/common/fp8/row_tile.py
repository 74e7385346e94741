"""Layout of the lines of a result that a warp assembles in shared memory: no device code."""

from typing import Final

ROWS: Final = 16
LINE: Final = 128
"""Bytes of a row."""
PITCH: Final = LINE + 16
"""Bytes from a row to the next; what lanes write at once is then in different banks."""
SIZE_BYTES: Final = ROWS * PITCH
