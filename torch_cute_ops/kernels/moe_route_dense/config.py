"""Configuration of the kernel that writes the matrix of experts' weights. No device code."""

from collections import namedtuple
from dataclasses import dataclass

from torch_cute_ops.kernels.common.experts.layouts import ExpertChoice

WARPS = 4
"""Number of warps of a CTA. Each handles one token."""


@dataclass(frozen=True)
class Config(ExpertChoice):
    """Static properties of the kernel that writes the matrix of experts' weights.

    Attributes:
        dtype, experts, topk, is_sigmoid, has_bias, num_groups, topk_groups, renormalize, is_finite: fields of
            ``ExpertChoice``.
        has_expert_factor: True if each weight is multiplied by a factor of its expert.
        pdl: True to launch with programmatic dependent launch.
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
        logits: (M, E) of ``Config.dtype``. Rows may be strided.
        bias: (E,) fp32, or None without ``Config.has_bias``.
        expert_factor: (E,) fp32, or None without ``Config.has_expert_factor``.
        out: (M, E) fp32, written.
        scaling_factor: fp32 factor that multiplies all weights.
    """


def plan(choice: ExpertChoice, has_expert_factor: bool, pdl: bool = True) -> Config:
    """Return the configuration for this choice of experts. Every architecture supports it."""
    return Config(**vars(choice.with_relevant_groups()), has_expert_factor=has_expert_factor, pdl=pdl)
