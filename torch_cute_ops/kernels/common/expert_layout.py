"""Which rows of a buffer belong to which expert: no device code."""

from dataclasses import dataclass
from typing import Final

from torch_cute_ops.formats.experts import MAX_EXPERTS

TABLE_BYTES: Final = 3 * (MAX_EXPERTS + 4) * 4 + 128
"""Of the table of experts in shared memory: for each where its rows begin, how many they are, and how many tiles come
before; and the sums of warps."""


@dataclass(frozen=True)
class ExpertLayout:
    """How rows belong to experts.

    Attributes:
        has_offsets: whether there are offsets: an expert's rows begin at its own, and end at the next, or where counts
            say.
        has_counts: whether there are counts. Without offsets each expert has an equal part of the buffer.

    With neither, all rows belong to the one expert that there is.
    """

    has_offsets: bool = False
    has_counts: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether there is one expert, and all rows are its own."""
        return not (self.has_offsets or self.has_counts)

    @property
    def is_masked(self) -> bool:
        """Whether each expert has an equal part of the buffer: tensors of three dimensions."""
        return self.has_counts and not self.has_offsets

    @property
    def table_bytes(self) -> int:
        """Shared memory for the table of experts."""
        return 0 if self.is_plain else TABLE_BYTES
