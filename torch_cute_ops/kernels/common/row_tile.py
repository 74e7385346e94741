"""Where a warp puts lines of a result together in shared memory: no device code."""

from typing import Final

ROWS: Final = 16
LINE: Final = 128
"""Bytes of a row."""
PITCH: Final = LINE + 16
"""Bytes between rows: those that lanes write at once meet all banks."""
SIZE_BYTES: Final = ROWS * PITCH
