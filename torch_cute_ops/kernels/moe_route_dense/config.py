"""Configuration of the kernel that writes a matrix of weights. No device code."""

from collections import namedtuple
from dataclasses import dataclass

from torch_cute_ops.kernels.common.experts.layouts import ExpertChoice

WARPS = 4
"""Number of warps of a CTA, one for each token."""


@dataclass(frozen=True)
class Config(ExpertChoice):
    """Static properties of the kernel.

    Attributes:
        dtype, experts, topk, is_sigmoid, has_bias, num_groups, topk_groups, renormalize, is_finite: fields of
            ``ExpertChoice``.
        has_expert_factor: True if weights are multiplied by factors of their experts.
        pdl: True for programmatic dependent launches.
    """

    has_expert_factor: bool
    pdl: bool

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return 32 * WARPS


class Arguments(namedtuple("Arguments", "logits bias expert_factor out scaling_factor")):
    """Run-time arguments, in order, for M tokens and E experts. All tensors except ``logits`` are contiguous.

    Attributes:
        logits: (M, E) of ``Config.dtype``; rows may be strided.
        bias: (E,) fp32; None without ``Config.has_bias``.
        expert_factor: (E,) fp32; None without ``Config.has_expert_factor``.
        out: (M, E) fp32.
        scaling_factor: fp32, factor of the weights.
    """


def plan(choice: ExpertChoice, has_expert_factor: bool, pdl: bool = True) -> Config:
    """Return the configuration for this choice. The configuration fits every architecture."""
    return Config(**vars(choice.with_relevant_groups()), has_expert_factor=has_expert_factor, pdl=pdl)
