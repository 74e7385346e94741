"""How experts are chosen for a token (``expert_chooser``): no device code. How pairs of a token and an expert get rows
in the order of the experts (``expert_placer``): no device code. Sizes of the lists of tokens that are routed to experts
(``kernels.common.experts.lists``): no device code. Size of the lists of ``kernels.common.experts.units`` in shared
memory: no device code."""

import itertools
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from torch_cute_ops.formats.experts import MAX_EXPERTS

# expert choice
#
# How experts are chosen for a token (``expert_chooser``): no device code.

WARP = 32


@dataclass(frozen=True)
class ExpertChoice:
    """Everything static about the choice. A warp chooses for one token; each lane has some consecutive experts.

    Attributes:
        dtype: dtype of the logits: bfloat16, float16 or float32.
        experts, topk: number of experts, and of experts that a token gets.
        is_sigmoid: whether scores are sigmoids of the logits; otherwise their softmax.
        has_bias: whether a bias is added to the scores for the choice.
        num_groups, topk_groups: number of groups of experts, and of groups that a token's experts may be from.
        renormalize: whether a token's weights are normalised to sum to 1.
    """

    dtype: torch.dtype
    experts: int
    topk: int
    is_sigmoid: bool
    has_bias: bool
    num_groups: int
    topk_groups: int
    renormalize: bool

    @property
    def group_size(self) -> int:
        """Experts in a group."""
        return self.experts // self.num_groups

    @property
    def group_lanes(self) -> int:
        """Lanes of a warp that hold the experts of one group."""
        return WARP >> (self.num_groups - 1).bit_length()

    @property
    def lane_experts(self) -> int:
        """The most experts of a lane."""
        return -(-self.group_size // self.group_lanes)

    def with_relevant_groups(self) -> "ExpertChoice":
        """The same choice; with one group if a token may have experts of all, because then groups change nothing."""
        return self if self.topk_groups < self.num_groups else replace(self, num_groups=1, topk_groups=1)


# expert placement
#
# How pairs of a token and an expert get rows in the order of the experts (``expert_placer``): no device code.

THREADS = 1024
"""Threads of a CTA."""
SINGLE_CTA_ROWS = 8192
"""Rows up to which a single CTA writes all of them: 33,000 take it 5 µs longer, the time of a second launch (H200)."""
ROWS_PER_CTA = 8192
"""Rows for each CTA, as long as there are SMs."""


@dataclass(frozen=True)
class ExpertPlacement:
    """Everything static about the placement. A *slot* is a token whose pairs have different experts, or a single pair.

    Attributes:
        experts: number of experts.
        slot_pairs: pairs of a slot.
        batch: slots that a CTA processes at a time: whole words of bits, and at most as many pairs as threads.
        single_cta_slots: slots up to which a single CTA does everything; at most a chunk.
        slots_per_cta: slots for each CTA, as long as there are SMs.
        is_masked: whether all experts have the same number of rows, not as many as they need.
    """

    experts: int
    slot_pairs: int
    batch: int
    single_cta_slots: int
    slots_per_cta: int
    is_masked: bool

    @property
    def words(self) -> int:
        """Words that hold a chunk's bits of one expert."""
        return self.batch // 32

    @property
    def threads_per_expert(self) -> int:
        """Threads that add up the counts of an expert over the runs."""
        return min(16, THREADS >> (self.experts - 1).bit_length())

    @property
    def smem_offsets(self) -> "SmemOffsets":
        """How the shared memory of a CTA is divided, in words."""
        experts = self.experts
        sizes = (
            self.words * experts,
            self.batch * self.slot_pairs,
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
        if slots <= self.single_cta_slots and rows <= SINGLE_CTA_ROWS:
            return 0
        return max(1, min(sms, max(-(-slots // self.slots_per_cta), -(-rows // ROWS_PER_CTA)))) * self.experts


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
        partial_sums: partial sums of each expert's counts: over the runs before, and over all runs.
        warps: one word for each warp, for the running sum.
        end: total size.
    """

    bits: int
    chosen: int
    before: int
    begins: int
    sizes: int
    partial_sums: int
    warps: int
    end: int


# token list layout
#
# Sizes of the lists of tokens that are routed to experts (``kernels.common.experts.lists``): no device code.

PAIR_BYTES: Final = 8
"""Two words about a token of a list."""


@dataclass(frozen=True)
class TokenListLayout:
    """Lists of a tile's tokens, one for each expert.

    Attributes:
        token_block: tokens of a tile.
        tile_m: tokens of a unit of work; a list has room for whole units.
        k_tiles: chunks of k of a token, if its activations are in the list; else 0.
        token_bytes: bytes of a token in a chunk of rearranged activations.
    """

    token_block: int
    tile_m: int
    k_tiles: int
    token_bytes: int

    @property
    def threads(self) -> int:
        """Threads of a CTA that lists tokens: one for each token."""
        return -(-max(self.capacity, 128) // 32) * 32

    @property
    def capacity(self) -> int:
        """Tokens that a list has room for, in whole units."""
        return -(-self.token_block // self.tile_m) * self.tile_m

    @property
    def size_bytes(self) -> int:
        """A list: the rearranged activations of its tokens, their pairs, and their number."""
        return self.capacity * (self.k_tiles * self.token_bytes + PAIR_BYTES) + 4


# unit lists
#
# Size of the lists of ``kernels.common.experts.units`` in shared memory: no device code.

MAX_SCANNED_TOKENS: Final = 32
"""Most tokens of a tile for which every CTA scans the factors itself, and so starts to copy weights before the lists of
tokens are there. That is safe: the kernel that lists them lets this one start only when it has waited for all kernels
before it."""
M_TILE_LIST_BYTES: Final = 12 * (MAX_EXPERTS + 8)
