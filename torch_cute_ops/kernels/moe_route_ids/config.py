"""Configuration of the kernels that assign pairs to rows. No device code."""

from collections import namedtuple
from dataclasses import dataclass

from torch_cute_ops.kernels.common.experts.layouts import ExpertPlacement, PlacementConfig

BATCH = 512
"""Number of pairs that a CTA processes at a time, and largest number of pairs that a single CTA processes. With 1,024
experts, the bitmap of a batch takes 64 KB."""
SLOTS_PER_CTA = 512
"""Number of pairs per CTA, unless this would need more CTAs than the GPU has SMs. A smaller number would mean more
CTAs, and each CTA reads the counts of all CTAs."""


@dataclass(frozen=True)
class Config(PlacementConfig):
    """Static properties of the kernels that assign pairs to rows.

    Attributes:
        experts: number of experts.
        is_masked: True if all experts own the same number of rows, False if an expert's number of rows depends on its
            number of pairs.
        pdl: True to launch with programmatic dependent launch.
    """

    experts: int
    is_masked: bool
    pdl: bool

    @property
    def placement(self) -> ExpertPlacement:
        """Static properties of the assignment of pairs to rows. A slot is a single pair."""
        return ExpertPlacement(self.experts, 1, BATCH, BATCH, SLOTS_PER_CTA, self.is_masked)


class Arguments(
    namedtuple("Arguments", "ids expanded_to_permuted permuted_to_expanded offsets counts workspace row_multiple sms")
):
    """Run-time arguments, in order, for M tokens, E experts, and R rows in the experts' order. All tensors are
    contiguous.

    Attributes:
        ids: (M, topk) int32, experts of each token. A number that is not an expert's index stands for no expert.
        expanded_to_permuted: (M, topk) int32, written: row of each pair, -1 for a pair without an expert, or for a
            dropped pair.
        permuted_to_expanded, offsets, counts, row_multiple, sms: as in ``moe_route.Arguments``.
        workspace: (``Config.workspace_words(M * topk, R, sms)``,) int32. If this is 0 words, pass any int32 tensor: the
            kernels do not access it.
    """


def plan(experts: int, is_masked: bool, pdl: bool = True) -> Config:
    """Return the configuration for ``experts`` experts. Every architecture supports it."""
    return Config(experts, is_masked, pdl)
