"""Configuration of the kernel that rearranges activations. No device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Final

from torch_cute_ops.kernels.common.fp4.layouts import ActivationLayout

THREADS: Final = 128
"""Number of threads of a CTA."""


class Arguments(namedtuple("Arguments", "a scale tiles flags alpha factors")):
    """Run-time arguments, in order, for M tokens of K elements.

    Attributes:
        a: (M, K) bfloat16 or float16, or (M, K/2) uint8 FP4 codes.
        scale: block scales of FP4 codes: (M, K/B) if linear, the shape ``ScaleLayout.shape`` if tiled; e4m3, or uint8
            for ue8m0. None for 16-bit activations.
        tiles: uint8 output, the rearranged activations: ``Config.token_bytes`` bytes per k tile and token, with M
            rounded up to whole m tiles.
        flags: int32 flags of the GEMM's CTAs. The kernel sets them to 0.
        alpha: (M, experts) float32 factors, any strides, or None.
        factors: (tile_m, experts, m tiles) float32 output, a copy of ``alpha``, or None.
    """


@dataclass(frozen=True)
class Config(ActivationLayout):
    """Static parameters of the kernel that rearranges activations.

    Attributes:
        pdl: True to launch with programmatic dependent launch.
    """

    pdl: bool
