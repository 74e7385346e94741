"""Layout of a tile's sums in shared memory: no device code."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SumTile:
    """fp32 sums of ``tokens`` rows of activations with ``rows`` rows of the weight, those of a token contiguous."""

    tokens: int
    rows: int

    @property
    def pitch(self) -> int:
        """Elements from a token to the next: the rows, and four to avoid bank conflicts."""
        return self.rows + 4

    @property
    def size_bytes(self) -> int:
        return self.tokens * self.pitch * 4
