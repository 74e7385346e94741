"""Host side of the experts' kernels: choice of experts, rows of pairs, and lists of routed tokens. No device code."""

import itertools
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from torch_cute_ops.formats.experts import MAX_EXPERTS, USUAL_EXPERTS


def table_experts(experts: int) -> int:
    """Return the number of experts for which a kernel's tables have room, if it is planned for ``experts``."""
    return USUAL_EXPERTS if experts <= USUAL_EXPERTS else MAX_EXPERTS


# Choice of experts (``routing.ExpertChooser``)

WARP = 32
MAX_UNROLLED_KEYS = 16
"""Largest number of keys of a lane for which the choice is unrolled. CTAs of 1,024 threads leave 64 registers to each
thread."""


@dataclass(frozen=True)
class ExpertChoice:
    """Static properties of the choice of experts. A warp chooses for one token; each lane holds consecutive experts.

    Attributes:
        dtype: dtype of the logits: bfloat16, float16 or float32.
        experts, topk: number of experts, and number of experts that a token gets.
        is_sigmoid: True if scores are sigmoids of the logits, False if they are their softmax.
        has_bias: True if a bias is added to the scores for the choice.
        num_groups, topk_groups: number of groups of experts, and number of groups that a token may use.
        renormalize: True if a token's weights are normalised to sum to 1.
        is_finite: True if logits that are not finite are replaced by finite numbers.
    """

    dtype: torch.dtype
    experts: int
    topk: int
    is_sigmoid: bool
    has_bias: bool
    num_groups: int
    topk_groups: int
    renormalize: bool
    is_finite: bool

    @property
    def group_size(self) -> int:
        """Number of experts in a group."""
        return self.experts // self.num_groups

    @property
    def group_lanes(self) -> int:
        """Number of lanes of a warp that score one group."""
        return WARP >> (self.num_groups - 1).bit_length()

    @property
    def lane_group_experts(self) -> int:
        """Largest number of experts of a group that one lane scores."""
        return -(-self.group_size // self.group_lanes)

    @property
    def scores_groups_first(self) -> bool:
        """True if a separate pass scores the groups, because lanes that hold whole groups would hold too many keys.

        If the number of groups is not a power of two, up to half of the lanes belong to no group.
        """
        return self.lane_group_experts > max(MAX_UNROLLED_KEYS, -(-self.experts // WARP))

    @property
    def lane_keys(self) -> int:
        """Largest number of experts whose keys a lane holds."""
        return -(-self.experts // WARP) if self.scores_groups_first else self.lane_group_experts

    @property
    def is_choice_looped(self) -> bool:
        """True if the loop that chooses one expert per iteration is not unrolled, to save registers."""
        return self.lane_keys > MAX_UNROLLED_KEYS or self.scores_groups_first

    @property
    def is_short_of_registers(self) -> bool:
        """True if values that depend only on the lane are computed again for each token. In registers across all
        tokens, they would make other values spill."""
        is_scored_twice = self.scores_groups_first and self.computes_softmax_first and self.has_bias
        return is_scored_twice and self.lane_keys > MAX_UNROLLED_KEYS

    @property
    def are_keys_interleaved(self) -> bool:
        """True if lane i holds the keys of experts i, i + 32, i + 64 and so on, False if the keys of consecutive
        experts."""
        return self.is_choice_looped and (self.num_groups == 1 or self.scores_groups_first)

    @property
    def adds_two_best(self) -> bool:
        """True if the score of a group is the sum of its two best experts' scores, False if it is the best score."""
        return self.group_size > 1 and (self.is_sigmoid or self.has_bias)

    @property
    def computes_softmax_first(self) -> bool:
        """True if the softmax must be computed before experts are chosen, for the choice or for the sum over all
        experts."""
        sums_all = not self.renormalize and (self.num_groups > 1 or self.is_choice_looped)
        return not self.is_sigmoid and (self.has_bias or sums_all)

    def with_relevant_groups(self) -> "ExpertChoice":
        """Return the choice, with one group if a token may use all groups: groups then change nothing."""
        return self if self.topk_groups < self.num_groups else replace(self, num_groups=1, topk_groups=1)


# Rows of pairs (``routing.ExpertPlacer``)

THREADS = 1024
"""Number of threads of a CTA."""
SINGLE_CTA_ROWS = 8192
"""Largest number of rows that a single CTA writes. On an H200, a single CTA takes 5 µs longer for 33,000 rows, as long
as a second launch takes."""
ROWS_PER_CTA = 8192
"""Number of rows for each CTA, as long as SMs are idle."""


@dataclass(frozen=True)
class ExpertPlacement:
    """Static properties of the assignment of pairs (a token and one of its experts) to rows. A *slot* is a token whose
    pairs name different experts, or a single pair.

    Attributes:
        experts: number of experts.
        slot_pairs: number of pairs of a slot.
        batch: number of slots that a CTA processes at a time, a multiple of 32; a thread handles at most one pair.
        single_cta_slots: largest number of slots for a single CTA, at most ``batch``.
        slots_per_cta: number of slots per CTA, as long as this gives no more CTAs than SMs.
        is_masked: True if all experts get the same number of rows, False if an expert gets as many rows as it needs.
    """

    experts: int
    slot_pairs: int
    batch: int
    single_cta_slots: int
    slots_per_cta: int
    is_masked: bool

    @property
    def words(self) -> int:
        """Number of words that hold the bits of one expert for a batch."""
        return self.batch // 32

    @property
    def threads_per_expert(self) -> int:
        """Number of threads that add up the counts of an expert over the CTAs."""
        return min(16, THREADS >> (self.experts - 1).bit_length())

    @property
    def smem_offsets(self) -> "SmemOffsets":
        """Offsets in the shared memory of a CTA, in words."""
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
        """Bytes of shared memory of a CTA."""
        return 4 * self.smem_offsets.end

    def workspace_words(self, slots: int, rows: int, sms: int) -> int:
        """Return the size of a call's workspace in 32-bit words; 0 for a single CTA."""
        if slots <= self.single_cta_slots and rows <= SINGLE_CTA_ROWS:
            return 0
        return max(1, min(sms, max(-(-slots // self.slots_per_cta), -(-rows // ROWS_PER_CTA)))) * self.experts


class PlacementConfig:
    """Base of the configurations of kernels that give pairs their rows."""

    @property
    def placement(self) -> ExpertPlacement:
        """Placement of pairs in rows."""
        raise NotImplementedError

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.placement.smem_bytes

    def workspace_words(self, slots: int, rows: int, sms: int) -> int:
        """Return the size of a call's workspace in 32-bit words; 0 for a single CTA."""
        return self.placement.workspace_words(slots, rows, sms)


class SmemOffsets(NamedTuple):
    """Offsets in shared memory, in words.

    Attributes:
        bits: bitmap, a bit per expert and slot of the batch.
        chosen: expert of each pair of the batch.
        before: number of pairs of each expert before the batch.
        begins: first row of each expert, then the end of the last expert's rows.
        sizes: number of rows of each expert.
        partial_sums: partial sums of each expert's counts, over the CTAs before this CTA and over all CTAs.
        warps: one word per warp, for the running sum.
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


# Lists of routed tokens (``work_tiles.TokenLister``)

PAIR_BYTES: Final = 8
"""Bytes of a token's entry in a list: its number and its factor."""


@dataclass(frozen=True)
class TokenListLayout:
    """Sizes of the lists of a token block's routed tokens, one list per expert.

    Attributes:
        token_block: number of tokens of a token block.
        tile_m: number of tokens of an m tile; a list holds whole m tiles.
        k_tiles: number of k tiles of a token if the list also holds the activations, otherwise 0.
        token_bytes: bytes of a token in a k tile of rearranged activations.
    """

    token_block: int
    tile_m: int
    k_tiles: int
    token_bytes: int

    @property
    def threads(self) -> int:
        """Number of threads of a CTA that lists tokens: one per token."""
        return -(-max(self.capacity, 128) // 32) * 32

    @property
    def capacity(self) -> int:
        """Number of tokens that a list can hold: whole m tiles."""
        return -(-self.token_block // self.tile_m) * self.tile_m

    @property
    def size_bytes(self) -> int:
        """Bytes of a list: rearranged activations of its tokens, their pairs, and their number."""
        return self.capacity * (self.k_tiles * self.token_bytes + PAIR_BYTES) + 4


# Lists of m tiles in shared memory (``work_tiles.ExpertMTiles``)

MAX_SCANNED_TOKENS: Final = 32
"""Largest token block for which each CTA scans the factors itself. The CTA then copies weights before the lists of
tokens exist. This is safe: the kernel that lists tokens releases its dependents only after its own wait for all earlier
kernels."""


def m_tile_list_bytes(max_experts: int) -> int:
    """Return the bytes of shared memory of the lists of m tiles of up to ``max_experts`` experts."""
    return 12 * (max_experts + 8)
