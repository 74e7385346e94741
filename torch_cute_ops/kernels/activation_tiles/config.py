"""Configuration of the kernel that rearranges activations: no device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Final

from torch_cute_ops.kernels.common.fp4.layouts import ActivationLayout

THREADS: Final = 128
"""Threads of a CTA."""


class Arguments(namedtuple("Arguments", "a scale tiles flags alpha factors")):
    """The run-time arguments, in order, for M tokens of K elements.

    Attributes:
        a: (M, K) bfloat16 or float16, or (M, K/2) uint8, codes.
        scale: scales of codes, (M, K/B) or tiles (``ScaleLayout.shape``); e4m3, or uint8 for ue8m0. None for 16-bit
            activations.
        tiles: uint8, written: ``Config.token_bytes`` bytes per k tile and token, with M rounded up to whole m tiles.
        flags: int32, set to 0.
        alpha: (M, experts) float32, any strides, or None.
        factors: (tile_m, experts, m tiles) float32, to which ``alpha`` is copied, or None.
    """


@dataclass(frozen=True)
class Config(ActivationLayout):
    """Static parameters of a kernel.

    Attributes:
        pdl: True for programmatic dependent launches.
    """

    pdl: bool
