"""Configuration of the kernel that recodes an FP4 weight with prepared scales. No device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Final

from torch_cute_ops.formats import FP4Format
from torch_cute_ops.runtime.arch import Arch

THREADS: Final = 128
"""Number of threads of a CTA."""
ROWS: Final = 4
"""Number of weight rows that a thread recodes. N is a multiple of this number."""


class Arguments(namedtuple("Arguments", "b b_scale weight units")):
    """Run-time arguments, in order.

    Sizes: E experts; N rows of an expert's weight, a multiple of 8; K elements of a row, a multiple of 64; B elements
    of a block.

    Attributes:
        b: (K / 2, N) uint8 FP4 codes, the transposed view of a row-major (N, K / 2) weight; with experts (E, K / 2, N).
        b_scale: prepared scales (``torch_cute_ops.prepare_scales``): (1 + ⌈K / 256⌉, N, 256 / B) uint8, with experts
            (E, 1 + ⌈K / 256⌉, N, 256 / B).
        weight: (E, N, K rounded up to a multiple of 256) e4m3, contiguous, written. E is 1 without experts.
        units: (E, N) float32, contiguous, written.
    """


@dataclass(frozen=True)
class Config:
    """Static properties of the kernel.

    Attributes:
        fmt: format of the weight.
        is_plain: True for a single weight matrix, False for one matrix per expert.
        pdl: True to launch with programmatic dependent launch.
    """

    fmt: FP4Format
    is_plain: bool
    pdl: bool

    def reason_unsupported(self, arch: Arch) -> None:
        """Return None: all architectures support the kernel."""
