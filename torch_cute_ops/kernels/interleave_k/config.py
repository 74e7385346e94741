"""Configuration of the kernel that interleaves k. No device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Final

from torch_cute_ops.runtime.arch import Arch

THREADS: Final = 128
"""Number of threads of a CTA."""


class Arguments(namedtuple("Arguments", "a out")):
    """Run-time arguments, in order.

    Attributes:
        a: (rows, K) e4m3, contiguous. K is a multiple of 64.
        out: (rows, K rounded up to a multiple of 256) e4m3, contiguous.
    """


@dataclass(frozen=True)
class Config:
    """Static properties of the kernel that interleaves k.

    Attributes:
        pdl: True to launch with programmatic dependent launch.
    """

    pdl: bool

    def reason_unsupported(self, arch: Arch) -> None:
        """Return None: all architectures support the kernel."""
