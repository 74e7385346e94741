"""Configuration of a permuting kernel: no device code."""

from collections import namedtuple
from dataclasses import dataclass

import torch

from torch_cute_ops.formats.fp8 import FP8_BLOCK128
from torch_cute_ops.kernels.common.fp8.layouts import FP8_UNIT, SCALE_THREADS

FEW = 128
"""Tokens up to which a single launch is faster."""
THREADS = 64
"""Threads of a CTA that quantises."""
COPY_THREADS = 128
"""Threads of a CTA that copies scales."""
SCALES_PER_THREAD = 16
"""Scales of a row that one thread copies."""


@dataclass(frozen=True)
class Config:
    """Everything static about the kernels.

    Attributes:
        dtype: dtype of the tokens: bfloat16, float16 or float32.
        width: elements of a token.
        topk: the most rows that a token is copied to.
        few: tokens up to which one kernel does it all; with more, scales are stored once for each token first.
        pdl: whether launches are programmatic dependent launches.
    """

    dtype: torch.dtype
    width: int
    topk: int
    few: int
    pdl: bool

    @property
    def threads_per_token(self) -> int:
        """Threads of a token; each has ``FP8_UNIT`` elements, except for those of a short block's missing half."""
        return self.scales * SCALE_THREADS

    @property
    def has_short_block(self) -> bool:
        """Whether the last block of a token has 64 elements instead of 128."""
        return self.threads_per_token * FP8_UNIT != self.width

    @property
    def scales(self) -> int:
        """Scales of a token."""
        return FP8_BLOCK128.scales_per_row(self.width)

    @property
    def scale_groups(self) -> int:
        """Chunks of a token's scales."""
        return -(-self.scales // SCALES_PER_THREAD)

    def workspace_shape(self, tokens: int) -> tuple[int, int] | None:
        """Shape of the workspace for the tokens' scales, if a call needs it."""
        return (tokens, self.scales) if tokens > self.few else None


class Arguments(namedtuple("Arguments", "input y scale expanded_to_permuted permuted_to_expanded workspace")):
    """The run-time arguments, in order; M tokens of W elements (``Config.width``), R rows in the experts' order.

    Attributes:
        input: (M, W) of ``Config.dtype``; rows may be strided.
        y: (R, W) float8_e4m3fn, contiguous.
        scale: (``Config.scales``, R) fp32, contiguous.
        expanded_to_permuted: (M, topk) int32, contiguous: the row of each pair, negative for one that has none.
        permuted_to_expanded: (R,) int32: the pair of each row, negative for padding.
        workspace: ``Config.workspace_shape(M)`` fp32, contiguous; where that is ``None``, any fp32 matrix, unused.
    """


def plan(dtype: torch.dtype, width: int, topk: int, pdl: bool = True) -> Config:
    """The configuration for tokens of ``width`` elements with up to ``topk`` rows each; every architecture has one."""
    return Config(dtype, width, topk, FEW, pdl)
