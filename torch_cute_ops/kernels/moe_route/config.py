"""Configuration of the kernels that choose experts and assign rows. No device code."""

from collections import namedtuple
from dataclasses import dataclass

from torch_cute_ops.kernels.common.experts.layouts import THREADS, ExpertChoice, ExpertPlacement, PlacementConfig

BATCH, MANY_BATCH = 64, 32
"""Number of tokens that a CTA processes at a time, with up to 16 experts per token, and with more than 16. A thread
handles at most one (token, expert) pair."""
SINGLE_CTA_TOKENS = 32
"""Largest number of tokens that a single CTA processes: one token per warp."""
SLOTS_PER_CTA = 8
"""Number of tokens per CTA, unless this would need more CTAs than the GPU has SMs."""


@dataclass(frozen=True)
class Config(ExpertChoice, PlacementConfig):
    """Static properties of the kernels that choose experts and assign rows.

    Attributes:
        dtype, experts, topk, is_sigmoid, has_bias, num_groups, topk_groups, renormalize, is_finite: fields of
            ``ExpertChoice``.
        is_masked: True if all experts own the same number of rows, False if an expert's number of rows depends on its
            number of pairs.
        pdl: True to launch with programmatic dependent launch.
    """

    is_masked: bool
    pdl: bool

    @property
    def batch(self) -> int:
        """Number of tokens that a CTA processes at a time."""
        return BATCH if self.topk * BATCH <= THREADS else MANY_BATCH

    @property
    def placement(self) -> ExpertPlacement:
        """Static properties of the assignment of pairs to rows. A slot is a token."""
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
        logits: (M, E) of ``Config.dtype``. Rows may be strided.
        bias: (E,) fp32, or None without ``Config.has_bias``.
        weights: (M, topk) fp32, written: weights of each token's experts.
        ids: (M, topk) int32, written: experts of each token, best first.
        expanded_to_permuted: (M, topk) int32, written: row of each pair, -1 for a dropped pair.
        permuted_to_expanded: (R,) int32, written: pair of each row, -1 for padding.
        offsets: (E + 1,) int32, written: first row of each expert, then the end of the last expert's padding.
        counts: (E,) int32, written: number of rows of each expert.
        workspace: (``Config.workspace_words(M, R, sms)``,) int32. If this is 0 words, pass any int32 tensor: the
            kernels do not access it.
        scaling_factor: fp32 factor that multiplies all weights.
        row_multiple: int32. With ``Config.is_masked``, the number of rows of each expert. Otherwise, the alignment of
            each expert's first row.
        sms: int32, number of SMs of the device.
    """


def plan(choice: ExpertChoice, is_masked: bool, pdl: bool = True) -> Config:
    """Return the configuration for this choice of experts. Every architecture supports it."""
    return Config(**vars(choice.with_relevant_groups()), is_masked=is_masked, pdl=pdl)
