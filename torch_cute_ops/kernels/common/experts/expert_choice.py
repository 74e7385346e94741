"""How experts are chosen for a token (``expert_chooser``): no device code."""

from dataclasses import dataclass, replace

import torch

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
