"""Configuration of the kernel that dequantises FP4 blocks. No device code."""

from collections import namedtuple
from dataclasses import dataclass

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout

CTAS_PER_SM = 6
THREADS = 256


@dataclass(frozen=True)
class Config:
    """Static properties of the kernel that dequantises FP4 blocks.

    Attributes:
        out_dtype: dtype of the output: bfloat16, float16 or float32.
        width: number of elements of a row.
        fmt, layout: FP4 format and scale layout.
        global_scale: True if the tensor has a global scale.
    """

    out_dtype: torch.dtype
    width: int
    fmt: FP4Format
    layout: ScaleLayout
    global_scale: bool

    @property
    def blocks(self) -> int:
        """Number of blocks of a row."""
        return self.width // self.fmt.block_size

    @property
    def threads_per_row(self) -> int:
        """Number of threads that share a row. The number is a power of two, so that a CTA processes whole rows."""
        return min(THREADS, 1 << (self.blocks - 1).bit_length())

    @property
    def rows_per_cta(self) -> int:
        return THREADS // self.threads_per_row


class Arguments(namedtuple("Arguments", "y scale global_scale out max_ctas")):
    """Run-time arguments, in order, for R rows of W elements (``Config.width``). All tensors are contiguous.

    Attributes:
        y: (R, W/2) uint8, packed e2m1 codes.
        scale: uint8, bytes of the block scales, in the shape of ``Config.layout``.
        global_scale: (1,) fp32, or None without ``Config.global_scale``.
        out: (R, W) of ``Config.out_dtype``.
        max_ctas: int32, largest number of CTAs to launch: enough to fill the GPU.
    """


def plan(out_dtype: torch.dtype, width: int, fmt: FP4Format, layout: ScaleLayout, global_scale: bool) -> Config:
    """Return the configuration with these properties. Every architecture supports it."""
    return Config(out_dtype, width, fmt, layout, global_scale)
