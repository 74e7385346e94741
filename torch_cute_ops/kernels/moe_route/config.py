"""How a routing kernel is built: no device code."""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torch_cute_ops.formats.experts import MAX_TOPK

WARP = 32
CHUNK = 64
"""Tokens that a CTA takes at a time."""
ALONE = 32
"""Tokens up to which one CTA does it all: one for each warp."""
ALONE_ROWS = 8192
"""Rows up to which it writes them all: 33,000 take it 5 µs more, as long as another launch does (H200)."""
RUN = 8
"""Tokens of a CTA, while there are CTAs enough."""
ROWS = 8192
"""Rows that a CTA fills, while there are CTAs enough."""
THREADS = CHUNK * MAX_TOPK
"""One for each pair of a chunk."""
BITS = CHUNK // 32
"""Words of a chunk's bits for one expert."""


@dataclass(frozen=True)
class Config:
    """Everything static about the kernels.

    Attributes:
        dtype: of the logits: bfloat16, float16 or float32.
        experts, topk: how many there are, and how many of them a token has.
        is_sigmoid: whether scores are sigmoids of the logits, not their softmax.
        has_bias: whether a bias is added to scores for the choice.
        num_groups, topk_groups: groups of experts, and how many of them a token may have experts of.
        renormalize: whether a token's weights are made to sum to 1.
        is_masked: whether each expert has equally many rows, not as many as it needs.
        pdl: whether launches are programmatic dependent launches.
    """

    dtype: torch.dtype
    experts: int
    topk: int
    is_sigmoid: bool
    has_bias: bool
    num_groups: int
    topk_groups: int
    renormalize: bool
    is_masked: bool
    pdl: bool

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return THREADS

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.experts // self.num_groups

    @property
    def group_lanes(self) -> int:
        """Lanes of a warp that have the experts of one group."""
        return WARP >> (self.num_groups - 1).bit_length()

    @property
    def lane_experts(self) -> int:
        """Experts of a lane at most."""
        return -(-self.group_size // self.group_lanes)

    @property
    def parts(self) -> int:
        """Threads that add up the counts of one expert."""
        return min(16, THREADS >> (self.experts - 1).bit_length())

    @property
    def smem_offsets(self) -> "SmemOffsets":
        """How the shared memory of a CTA is divided, in words."""
        sizes = (BITS * self.experts, THREADS, self.experts, self.experts + 1, self.experts, 2 * THREADS, WARP)
        return SmemOffsets(*itertools.accumulate((-(-size // 4) * 4 for size in sizes), initial=0))

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return 4 * self.smem_offsets.end

    def workspace_words(self, tokens: int, rows: int, sms: int) -> int:
        """32-bit words that a call needs beside its outputs; 0, if one CTA does it all."""
        if tokens <= ALONE and rows <= ALONE_ROWS:
            return 0
        return max(1, min(sms, max(-(-tokens // RUN), -(-rows // ROWS)))) * self.experts


class SmemOffsets(NamedTuple):
    """Where in shared memory something begins, words.

    Attributes:
        bits: of each expert, which tokens of the chunk chose it.
        chosen: the expert of each pair of the chunk.
        before: of each expert, the tokens before the chunk that chose it.
        begins: where each expert's rows begin, and the last one's end.
        sizes: of each expert, its rows.
        sums: parts of the counts of each expert: of the runs before, and of all.
        warps: sums of the warps.
        end: of all.
    """

    bits: int
    chosen: int
    before: int
    begins: int
    sizes: int
    sums: int
    warps: int
    end: int


def plan(
    dtype: torch.dtype,
    experts: int,
    topk: int,
    is_sigmoid: bool,
    has_bias: bool,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    is_masked: bool,
    pdl: bool = True,
) -> Config:
    """The configuration for these facts; every architecture has one."""
    # Where all groups may be chosen, they make no difference.
    groups = (num_groups, topk_groups) if topk_groups < num_groups else (1, 1)
    return Config(dtype, experts, topk, is_sigmoid, has_bias, *groups, renormalize, is_masked, pdl)
