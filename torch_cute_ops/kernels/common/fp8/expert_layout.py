"""Which rows of a buffer belong to which expert: no device code."""

from dataclasses import dataclass
from typing import Final

from torch_cute_ops.formats.experts import MAX_EXPERTS

TABLE_BYTES: Final = 3 * (MAX_EXPERTS + 4) * 4 + 128
"""Bytes of the table of experts in shared memory: for each its first row, its number of rows, and the tiles of the
experts before it; and a sum for each warp."""


@dataclass(frozen=True)
class ExpertLayout:
    """How rows belong to experts.

    Attributes:
        has_offsets: whether offsets are given. An expert's rows begin at its offset; they end where counts say, or
            without counts at the next offset.
        has_counts: whether counts are given. Without offsets each expert has an equal part of the buffer.

    With neither there is one expert with all rows.
    """

    has_offsets: bool = False
    has_counts: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether there is one expert, which has all rows."""
        return not (self.has_offsets or self.has_counts)

    @property
    def is_masked(self) -> bool:
        """Whether each expert has an equal part of the buffer, so that tensors have three dimensions."""
        return self.has_counts and not self.has_offsets

    @property
    def table_bytes(self) -> int:
        """Shared memory for the table of experts."""
        return 0 if self.is_plain else TABLE_BYTES
