"""Layout of a tile's sums in shared memory: no device code."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SumTile:
    """fp32 sums of ``tokens`` rows of activations with ``rows`` rows of the weight, those of a token contiguous.

    Of the last ``shared`` rows there are ``turns`` partial sums, one behind the other.
    """

    tokens: int
    rows: int
    shared: int = 0
    turns: int = 1

    @property
    def pitch(self) -> int:
        """Elements from a token to the next: those of all rows, and four to avoid bank conflicts."""
        return self.rows + (self.turns - 1) * self.shared + 4

    @property
    def size_bytes(self) -> int:
        return self.tokens * self.pitch * 4

    def received_bytes(self, splits: int) -> int:
        """What the CTAs of a cluster send to one that adds up its tokens: every ``splits``-th."""
        return -(-self.tokens // splits) * splits * self.rows * 4
