"""Configuration of the kernel that places pairs: no device code."""

from collections import namedtuple
from dataclasses import dataclass

from torch_cute_ops.kernels.common.experts.layouts import ExpertPlacement, PlacementConfig

BATCH = 512
"""Pairs that a CTA processes at a time, and up to which a single CTA does everything; 32 KB of bits for 512 experts."""
SLOTS_PER_CTA = 512
"""Pairs for each CTA, as long as there are SMs: with fewer, each CTA would have more counts of others to read."""


@dataclass(frozen=True)
class Config(PlacementConfig):
    """Everything static about the kernels.

    Attributes:
        experts: number of experts.
        is_masked: whether all experts have the same number of rows, not as many as they need.
        pdl: whether launches are programmatic dependent launches.
    """

    experts: int
    is_masked: bool
    pdl: bool

    @property
    def placement(self) -> ExpertPlacement:
        """How pairs get their rows, a slot being a pair."""
        return ExpertPlacement(self.experts, 1, BATCH, BATCH, SLOTS_PER_CTA, self.is_masked)


class Arguments(
    namedtuple("Arguments", "ids expanded_to_permuted permuted_to_expanded offsets counts workspace unit sms")
):
    """The run-time arguments, in order, all contiguous; M tokens, E experts, R rows in the experts' order.

    Attributes:
        ids: (M, topk) int32, the experts of each token; any other number means no expert.
        expanded_to_permuted: (M, topk) int32, the row of each pair, -1 for one without an expert, or that was dropped.
        permuted_to_expanded, offsets, counts, workspace, row_multiple, sms: as for ``moe_route``; but the workspace has
            ``Config.workspace_words(M * topk, R, sms)`` words.
    """


def plan(experts: int, is_masked: bool, pdl: bool = True) -> Config:
    """The configuration for so many experts; every architecture has one."""
    return Config(experts, is_masked, pdl)
