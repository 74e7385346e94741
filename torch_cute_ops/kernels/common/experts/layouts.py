"""Host side of kernels for experts: static properties and memory layouts for choosing experts, for assigning (token,
expert) pairs to rows, and for lists of routed tokens. No device code."""

import itertools
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from torch_cute_ops.formats.experts import MAX_EXPERTS, USUAL_EXPERTS


def table_experts(experts: int) -> int:
    """Return the capacity, in experts, of the tables of a kernel that is planned for ``experts`` experts."""
    return USUAL_EXPERTS if experts <= USUAL_EXPERTS else MAX_EXPERTS


# Choice of experts (``routing.ExpertChooser``)

WARP = 32
MAX_UNROLLED_KEYS = 16
"""Largest number of keys per lane for which the loop of the choice is unrolled. With more keys, the loop would spill: a
CTA of 1,024 threads gets only 64 registers per thread."""


@dataclass(frozen=True)
class ExpertChoice:
    """Static properties of the choice of experts. Each warp chooses the experts of one token. Each lane holds
    consecutive experts.

    Attributes:
        dtype: dtype of the logits: bfloat16, float16 or float32.
        experts, topk: number of experts, and number of experts to choose per token.
        is_sigmoid: True if an expert's score is the sigmoid of its logit, False if scores are the softmax of the
            logits.
        has_bias: True if the choice adds a bias to the scores.
        num_groups, topk_groups: number of groups of experts, and number of groups from which a token's experts are
            chosen.
        renormalize: True if a token's weights are normalised to sum to 1.
        is_finite: True if infinite and NaN logits are replaced by finite numbers.
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
        """Number of experts of a group."""
        return self.experts // self.num_groups

    @property
    def group_lanes(self) -> int:
        """Number of lanes that score one group together."""
        return WARP >> (self.num_groups - 1).bit_length()

    @property
    def lane_group_experts(self) -> int:
        """Largest number of experts that a lane scores when the lanes of a group score the group's experts together."""
        return -(-self.group_size // self.group_lanes)

    @property
    def scores_groups_first(self) -> bool:
        """True if a separate pass scores the groups before the experts are chosen.

        If False, each group occupies whole lanes. With a number of groups that is not a power of two, up to half of the
        lanes would then belong to no group, and the other lanes could hold too many keys.
        """
        return self.lane_group_experts > max(MAX_UNROLLED_KEYS, -(-self.experts // WARP))

    @property
    def lane_keys(self) -> int:
        """Largest number of keys that a lane holds. Each key belongs to one expert."""
        return -(-self.experts // WARP) if self.scores_groups_first else self.lane_group_experts

    @property
    def is_choice_looped(self) -> bool:
        """True if the loop that chooses one expert per iteration is not unrolled, to save registers."""
        return self.lane_keys > MAX_UNROLLED_KEYS or self.scores_groups_first

    @property
    def is_short_of_registers(self) -> bool:
        """True if values that depend only on the lane are computed again for each token. If they stayed in registers,
        other values would spill."""
        is_scored_twice = self.scores_groups_first and self.computes_softmax_first and self.has_bias
        return is_scored_twice and self.lane_keys > MAX_UNROLLED_KEYS

    @property
    def are_keys_interleaved(self) -> bool:
        """True if lane i holds the keys of experts i, i + 32, i + 64 and so on, False if it holds the keys of
        consecutive experts."""
        return self.is_choice_looped and (self.num_groups == 1 or self.scores_groups_first)

    @property
    def adds_two_best(self) -> bool:
        """True if a group's score is the sum of its two best experts' scores, False if it is its best expert's
        score."""
        return self.group_size > 1 and (self.is_sigmoid or self.has_bias)

    @property
    def computes_softmax_first(self) -> bool:
        """True if the softmax must be computed before experts are chosen: if the choice depends on the softmax (with a
        bias), or if the weights are divided by the sum over all experts."""
        sums_all = not self.renormalize and (self.num_groups > 1 or self.is_choice_looped)
        return not self.is_sigmoid and (self.has_bias or sums_all)

    def with_relevant_groups(self) -> "ExpertChoice":
        """Return this choice unchanged. If a token may use all groups, groups have no effect: return the choice with a
        single group."""
        return self if self.topk_groups < self.num_groups else replace(self, num_groups=1, topk_groups=1)


# Rows of pairs (``routing.ExpertPlacer``)

THREADS = 1024
"""Number of threads of a CTA."""
SINGLE_CTA_ROWS = 8192
"""Largest number of rows for which a single CTA writes all rows. On an H200 with 33,000 rows, a single CTA takes 5 µs
longer than several CTAs, which is the time that a second launch would take."""
ROWS_PER_CTA = 8192
"""Number of rows that a CTA writes as long as the GPU has idle SMs. If no SM is idle, each CTA writes more rows."""


@dataclass(frozen=True)
class ExpertPlacement:
    """Static properties of the kernels that assign (token, expert) pairs to rows. A *slot* is a token whose pairs name
    different experts, or a single pair.

    Attributes:
        experts: number of experts.
        slot_pairs: number of pairs of a slot.
        batch: number of slots that a CTA processes at a time, a multiple of 32. A thread handles at most one pair.
        single_cta_slots: largest number of slots that a single CTA processes, at most ``batch``.
        slots_per_cta: number of slots per CTA, unless this would need more CTAs than the GPU has SMs.
        is_masked: True if all experts own the same number of rows, False if an expert's number of rows depends on its
            number of pairs.
    """

    experts: int
    slot_pairs: int
    batch: int
    single_cta_slots: int
    slots_per_cta: int
    is_masked: bool

    @property
    def words(self) -> int:
        """Number of 32-bit words that hold one bit per slot of a batch."""
        return self.batch // 32

    @property
    def threads_per_expert(self) -> int:
        """Number of threads that add up one expert's counts of pairs over the CTAs."""
        return min(16, THREADS >> (self.experts - 1).bit_length())

    @property
    def smem_offsets(self) -> "SmemOffsets":
        """Offsets of the tables in the shared memory of a CTA, in words."""
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
        """Bytes of shared memory that a CTA takes."""
        return 4 * self.smem_offsets.end

    def workspace_words(self, slots: int, rows: int, sms: int) -> int:
        """Return the size of a call's workspace in 32-bit words, or 0 if a single CTA does all the work."""
        if slots <= self.single_cta_slots and rows <= SINGLE_CTA_ROWS:
            return 0
        return max(1, min(sms, max(-(-slots // self.slots_per_cta), -(-rows // ROWS_PER_CTA)))) * self.experts


class PlacementConfig:
    """Base class of the configurations of kernels that assign pairs to rows."""

    @property
    def placement(self) -> ExpertPlacement:
        """Static properties of the assignment of pairs to rows."""
        raise NotImplementedError

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory that a CTA takes."""
        return self.placement.smem_bytes

    def workspace_words(self, slots: int, rows: int, sms: int) -> int:
        """Return the size of a call's workspace in 32-bit words, or 0 if a single CTA does all the work."""
        return self.placement.workspace_words(slots, rows, sms)


class SmemOffsets(NamedTuple):
    """Offsets of the tables in a CTA's shared memory, in words.

    Attributes:
        bits: bitmap with one bit per expert and slot of the batch.
        chosen: index of the expert of each pair of the batch.
        before: number of pairs of each expert that precede the batch.
        begins: first row of each expert, followed by the end of the last expert's rows.
        sizes: number of rows of each expert.
        partial_sums: partial sums of each expert's counts: over the CTAs before this CTA, and over all CTAs.
        warps: one word per warp, for the running sum over the CTA's threads.
        end: total size of the tables.
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
"""Bytes of an entry in a list of tokens: the token's number and its factor, one word each."""


@dataclass(frozen=True)
class TokenListLayout:
    """Sizes of the lists of routed tokens. Each token block gets one list per expert.

    Attributes:
        token_block: number of tokens of a token block.
        tile_m: number of tokens of an m tile. The capacity of a list is a whole number of m tiles.
        k_tiles: number of k tiles of a token's activations if the list also holds activations, otherwise 0.
        token_bytes: bytes of rearranged activations per token and k tile.
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
        """Number of tokens that a list can hold, a multiple of ``tile_m``."""
        return -(-self.token_block // self.tile_m) * self.tile_m

    @property
    def size_bytes(self) -> int:
        """Number of bytes of a list. A list holds rearranged activations and an entry for each token, and the number of
        tokens."""
        return self.capacity * (self.k_tiles * self.token_bytes + PAIR_BYTES) + 4


# Lists of m tiles in shared memory (``work_tiles.ExpertMTiles``)

MAX_SCANNED_TOKENS: Final = 32
"""Largest token block for which each CTA of the GEMM scans the factors itself, instead of reading the lists' counts.
The CTA may then copy weights before the lists exist. This early copy is safe: the kernel that lists tokens has waited
for all earlier kernels before the GEMM starts."""


def m_tile_list_bytes(max_experts: int) -> int:
    """Return the bytes of shared memory that lists of m tiles take, for up to ``max_experts`` experts."""
    return 12 * (max_experts + 8)
