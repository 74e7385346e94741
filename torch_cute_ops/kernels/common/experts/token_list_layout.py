"""Sizes of the lists of tokens that are routed to experts (``kernels.common.experts.token_lists``): no device code."""

from dataclasses import dataclass
from typing import Final

PAIR_BYTES: Final = 8
"""Two words about a token of a list."""


@dataclass(frozen=True)
class TokenListLayout:
    """Lists of a tile's tokens, one for each expert.

    Attributes:
        tokens: tokens of a tile.
        group: tokens of a unit of work; a list has room for whole units.
        chunks: chunks of k of a token, if its activations are in the list; else 0.
        token_bytes: bytes of a token in a chunk of rearranged activations.
    """

    tokens: int
    group: int
    chunks: int
    token_bytes: int

    @property
    def threads(self) -> int:
        """Threads of a CTA that lists tokens: one for each token."""
        return -(-max(self.capacity, 128) // 32) * 32

    @property
    def capacity(self) -> int:
        """Tokens that a list has room for, in whole units."""
        return -(-self.tokens // self.group) * self.group

    @property
    def size_bytes(self) -> int:
        """A list: the rearranged activations of its tokens, their pairs, and their number."""
        return self.capacity * (self.chunks * self.token_bytes + PAIR_BYTES) + 4
