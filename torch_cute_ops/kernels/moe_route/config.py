"""Configuration of a routing kernel. No device code."""

from collections import namedtuple
from dataclasses import dataclass

from torch_cute_ops.kernels.common.experts.layouts import THREADS, ExpertChoice, ExpertPlacement, PlacementConfig

BATCH, MANY_BATCH = 64, 32
"""Numbers of tokens that a CTA processes at a time: with up to 16 experts per token, and with more than 16. Each thread
takes at most one pair."""
SINGLE_CTA_TOKENS = 32
"""Largest number of tokens for a single CTA: one for each warp."""
SLOTS_PER_CTA = 8
"""Number of tokens for each CTA, as long as SMs are idle."""


@dataclass(frozen=True)
class Config(ExpertChoice, PlacementConfig):
    """Static properties of the kernels.

    Attributes:
        dtype, experts, topk, is_sigmoid, has_bias, num_groups, topk_groups, renormalize, is_finite: fields of
            ``ExpertChoice``.
        is_masked: True if all experts get the same number of rows, False if an expert gets as many rows as it needs.
        pdl: True for programmatic dependent launches.
    """

    is_masked: bool
    pdl: bool

    @property
    def batch(self) -> int:
        """Number of tokens that a CTA processes at a time."""
        return BATCH if self.topk * BATCH <= THREADS else MANY_BATCH

    @property
    def placement(self) -> ExpertPlacement:
        """Assignment of pairs to rows, in which a slot is a token."""
        return ExpertPlacement(self.experts, self.topk, self.batch, SINGLE_CTA_TOKENS, SLOTS_PER_CTA, self.is_masked)


class Arguments(
    namedtuple(
        "Arguments",
        "logits bias weights ids expanded_to_permuted permuted_to_expanded "
        "offsets counts workspace scaling_factor row_multiple sms",
    )
):
    """Run-time arguments, in order, for M tokens, E experts, and R rows in the experts' order. All tensors except
    ``logits`` are contiguous.

    Attributes:
        logits: (M, E) of ``Config.dtype``; rows may be strided.
        bias: (E,) fp32; None without ``Config.has_bias``.
        weights: (M, topk) fp32, factors of each token's experts.
        ids: (M, topk) int32, experts of each token, best first.
        expanded_to_permuted: (M, topk) int32, row of each pair, -1 for a dropped pair.
        permuted_to_expanded: (R,) int32, pair of each row, -1 for padding.
        offsets: (E + 1,) int32, first row of each expert, then the end of the last expert's padding.
        counts: (E,) int32, number of rows of each expert.
        workspace: (``Config.workspace_words(M, R, sms)``,) int32. For 0 words, any int32 tensor, which is not used.
        scaling_factor: fp32, factor of the weights.
        row_multiple: int32, number of rows of each expert with ``Config.is_masked``; otherwise the multiple at which
            each expert's rows begin.
        sms: int32, number of SMs of the device.
    """


def plan(choice: ExpertChoice, is_masked: bool, pdl: bool = True) -> Config:
    """Return the configuration for this choice. The configuration fits every architecture."""
    return Config(**vars(choice.with_relevant_groups()), is_masked=is_masked, pdl=pdl)
