"""How pairs of a token and an expert get rows in the order of the experts (``expert_placer``): no device code."""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

WARP = 32
THREADS = 1024
"""Threads of a CTA."""
ALONE_ROWS = 8192
"""Rows up to which a single CTA writes all of them: 33,000 take it 5 µs longer, the time of a second launch (H200)."""
ROWS = 8192
"""Rows for each CTA, as long as there are SMs."""


@dataclass(frozen=True)
class ExpertPlacement:
    """Everything static about the placement. A *slot* is a token whose pairs have different experts, or a single pair.

    Attributes:
        experts: number of experts.
        slot_pairs: pairs of a slot.
        chunk: slots that a CTA processes at a time: whole words of bits, and at most as many pairs as threads.
        alone: slots up to which a single CTA does everything; at most a chunk.
        run: slots for each CTA, as long as there are SMs.
        is_masked: whether all experts have the same number of rows, not as many as they need.
    """

    experts: int
    slot_pairs: int
    chunk: int
    alone: int
    run: int
    is_masked: bool

    @property
    def words(self) -> int:
        """Words that hold a chunk's bits of one expert."""
        return self.chunk // 32

    @property
    def parts(self) -> int:
        """Threads that add up the counts of an expert over the runs."""
        return min(16, THREADS >> (self.experts - 1).bit_length())

    @property
    def smem_offsets(self) -> "SmemOffsets":
        """How the shared memory of a CTA is divided, in words."""
        experts = self.experts
        sizes = (
            self.words * experts,
            self.chunk * self.slot_pairs,
            experts,
            experts + 1,
            experts,
            2 * THREADS,
            WARP,
        )
        return SmemOffsets(*itertools.accumulate((-(-size // 4) * 4 for size in sizes), initial=0))

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return 4 * self.smem_offsets.end

    def workspace_words(self, slots: int, rows: int, sms: int) -> int:
        """Size of the workspace of a call in 32-bit words; 0 if a single CTA does everything."""
        if slots <= self.alone and rows <= ALONE_ROWS:
            return 0
        return max(1, min(sms, max(-(-slots // self.run), -(-rows // ROWS)))) * self.experts


class PlacementConfig:
    """What configurations of kernels that give pairs their rows have in common."""

    @property
    def placement(self) -> ExpertPlacement:
        """How pairs get their rows."""
        raise NotImplementedError

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.placement.smem_bytes

    def workspace_words(self, slots: int, rows: int, sms: int) -> int:
        """Size of the workspace of a call in 32-bit words; 0 if a single CTA does everything."""
        return self.placement.workspace_words(slots, rows, sms)


class SmemOffsets(NamedTuple):
    """Offsets in shared memory, in words.

    Attributes:
        bits: for each expert, a bit for each slot of the chunk that has it.
        chosen: the expert of each pair of the chunk.
        before: for each expert, its pairs before the chunk.
        begins: first row of each expert, and the end of the last one's rows.
        sizes: number of rows of each expert.
        sums: partial sums of each expert's counts: over the runs before, and over all runs.
        warps: one word for each warp, for the running sum.
        end: total size.
    """

    bits: int
    chosen: int
    before: int
    begins: int
    sizes: int
    sums: int
    warps: int
    end: int
