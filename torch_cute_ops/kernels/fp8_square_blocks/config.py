"""Configuration of the kernel that quantises blocks of 128 × 128 elements to FP8. No device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Final

import torch

from torch_cute_ops.runtime.arch import Arch

THREADS: Final = 256
"""Number of threads of a CTA."""


class Arguments(namedtuple("Arguments", "input y scale")):
    """Run-time arguments, in order, for E matrices of N rows and K columns. K is a multiple of 64.

    Attributes:
        input: (E, N, K) of ``Config.dtype``. Rows and matrices may be strided.
        y: (E · N, K) float8_e4m3fn, contiguous.
        scale: (E · ⌈N/128⌉, ⌈K/128⌉) fp32, contiguous.
    """


@dataclass(frozen=True)
class Config:
    """Static properties of the kernel.

    Attributes:
        dtype: dtype of the matrices: bfloat16, float16 or float32.
        scale_format: ``"ue8m0"`` if scales are powers of two, or None.
        pdl: True to launch with programmatic dependent launch.
    """

    dtype: torch.dtype
    scale_format: str | None
    pdl: bool

    def reason_unsupported(self, arch: Arch) -> None:
        """Return None: all architectures support the kernel."""


def plan(dtype: torch.dtype, scale_format: str | None, pdl: bool = True) -> Config:
    """Return the configuration for matrices of any size. Every architecture supports it."""
    return Config(dtype, scale_format, pdl)
