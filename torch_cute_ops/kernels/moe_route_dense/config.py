"""Configuration of the kernel that writes a matrix of weights: no device code."""

from collections import namedtuple
from dataclasses import dataclass

from torch_cute_ops.kernels.common.experts.layouts import ExpertChoice

WARPS = 4
"""Warps of a CTA, one for each token."""


@dataclass(frozen=True)
class Config(ExpertChoice):
    """Everything static about the kernel.

    Attributes:
        dtype, experts, topk, is_sigmoid, has_bias, num_groups, topk_groups, renormalize: as for ``ExpertChoice``.
        has_expert_factor: whether weights are multiplied by factors of their experts.
        pdl: whether launches are programmatic dependent launches.
    """

    has_expert_factor: bool
    pdl: bool

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * WARPS


class Arguments(namedtuple("Arguments", "logits bias expert_factor out scaling_factor")):
    """The run-time arguments, in order; M tokens, E experts; contiguous but for logits.

    Attributes:
        logits: (M, E) of ``Config.dtype``; rows may be strided.
        bias: (E,) fp32; ``None`` without ``Config.has_bias``.
        expert_factor: (E,) fp32; ``None`` without ``Config.has_expert_factor``.
        out: (M, E) fp32.
        scaling_factor: fp32, multiplies the weights.
    """


def plan(choice: ExpertChoice, has_expert_factor: bool, pdl: bool = True) -> Config:
    """The configuration for this choice; every architecture has one."""
    return Config(**vars(choice.with_relevant_groups()), has_expert_factor=has_expert_factor, pdl=pdl)
