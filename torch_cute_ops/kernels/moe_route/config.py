"""Configuration of a routing kernel: no device code."""

from collections import namedtuple
from dataclasses import dataclass

from torch_cute_ops.kernels.common.experts.layouts import ExpertChoice, ExpertPlacement, PlacementConfig

BATCH = 64
"""Tokens that a CTA processes at a time: with the most experts that a token can have, a pair for each thread."""
SINGLE_CTA_TOKENS = 32
"""Tokens up to which a single CTA does everything: one for each warp."""
SLOTS_PER_CTA = 8
"""Tokens for each CTA, as long as there are SMs."""


@dataclass(frozen=True)
class Config(ExpertChoice, PlacementConfig):
    """Everything static about the kernels.

    Attributes:
        dtype, experts, topk, is_sigmoid, has_bias, num_groups, topk_groups, renormalize: as for ``ExpertChoice``.
        is_masked: whether all experts have the same number of rows, not as many as they need.
        pdl: whether launches are programmatic dependent launches.
    """

    is_masked: bool
    pdl: bool

    @property
    def placement(self) -> ExpertPlacement:
        """How pairs get their rows, a slot being a token."""
        return ExpertPlacement(self.experts, self.topk, BATCH, SINGLE_CTA_TOKENS, SLOTS_PER_CTA, self.is_masked)


class Arguments(
    namedtuple(
        "Arguments",
        "logits bias weights ids expanded_to_permuted permuted_to_expanded "
        "offsets counts workspace scaling_factor unit sms",
    )
):
    """The run-time arguments, in order; M tokens, E experts, R rows in the experts' order; contiguous but for logits.

    Attributes:
        logits: (M, E) of ``Config.dtype``; rows may be strided.
        bias: (E,) fp32; ``None`` without ``Config.has_bias``.
        weights: (M, topk) fp32.
        ids: (M, topk) int32, the experts of each token, the best first.
        expanded_to_permuted: (M, topk) int32, the row of each pair, -1 for one that was dropped.
        permuted_to_expanded: (R,) int32, the pair of each row, -1 for padding.
        offsets: (E + 1,) int32, where each expert's rows begin, and where the last one's padding ends.
        counts: (E,) int32, rows of each expert.
        workspace: (``Config.workspace_words(M, R, sms)``,) int32; where that is 0, any, unused.
        scaling_factor: fp32, multiplies the weights.
        row_multiple: int32, the rows of each expert where ``Config.is_masked``; else what its first row is a multiple
            of.
        sms: int32, multiprocessors of the device.
    """


def plan(choice: ExpertChoice, is_masked: bool, pdl: bool = True) -> Config:
    """The configuration for this choice; every architecture has one."""
    return Config(**vars(choice.with_relevant_groups()), is_masked=is_masked, pdl=pdl)
