"""Configuration of the kernel that places pairs. No device code."""

from collections import namedtuple
from dataclasses import dataclass

from torch_cute_ops.kernels.common.experts.layouts import ExpertPlacement, PlacementConfig

BATCH = 512
"""Number of pairs that a CTA processes at a time, and largest number of pairs for a single CTA. For 1,024 experts, the
bitmap takes 64 KB."""
SLOTS_PER_CTA = 512
"""Number of pairs for each CTA, as long as SMs are idle. With fewer, each CTA would read the counts of more CTAs."""


@dataclass(frozen=True)
class Config(PlacementConfig):
    """Static properties of the kernels.

    Attributes:
        experts: number of experts.
        is_masked: True if all experts get the same number of rows, False if an expert gets as many rows as it needs.
        pdl: True for programmatic dependent launches.
    """

    experts: int
    is_masked: bool
    pdl: bool

    @property
    def placement(self) -> ExpertPlacement:
        """Assignment of pairs to rows, in which a slot is a single pair."""
        return ExpertPlacement(self.experts, 1, BATCH, BATCH, SLOTS_PER_CTA, self.is_masked)


class Arguments(
    namedtuple("Arguments", "ids expanded_to_permuted permuted_to_expanded offsets counts workspace row_multiple sms")
):
    """Run-time arguments, in order, all contiguous, for M tokens, E experts, and R rows in the experts' order.

    Attributes:
        ids: (M, topk) int32, experts of each token; any other number means no expert.
        expanded_to_permuted: (M, topk) int32, row of each pair, -1 for a pair without an expert, or for a dropped pair.
        permuted_to_expanded, offsets, counts, row_multiple, sms: arguments as for ``moe_route``.
        workspace: (``Config.workspace_words(M * topk, R, sms)``,) int32; for 0 words, any tensor, unused.
    """


def plan(experts: int, is_masked: bool, pdl: bool = True) -> Config:
    """Return the configuration for ``experts`` experts. The configuration fits every architecture."""
    return Config(experts, is_masked, pdl)
