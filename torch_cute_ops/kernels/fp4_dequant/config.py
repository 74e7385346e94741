"""How a dequantising kernel is built: no device code."""

from dataclasses import dataclass

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout

CTAS_PER_SM = 6
THREADS = 256


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel.

    Attributes:
        out_dtype: bfloat16, float16 or float32.
        width: elements of a row.
        fmt, layout: FP4 format and scale layout.
        global_scale: whether a global scale is passed.
    """

    out_dtype: torch.dtype
    width: int
    fmt: FP4Format
    layout: ScaleLayout
    global_scale: bool

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.width // self.fmt.block_size

    @property
    def threads_per_row(self) -> int:
        """Threads on a row: a power of two, so that rows share a CTA evenly."""
        return min(THREADS, 1 << (self.blocks - 1).bit_length())

    @property
    def rows_per_cta(self) -> int:
        return THREADS // self.threads_per_row


def plan(out_dtype: torch.dtype, width: int, fmt: FP4Format, layout: ScaleLayout, global_scale: bool) -> Config:
    """The configuration for these facts; every architecture has one."""
    return Config(out_dtype, width, fmt, layout, global_scale)
