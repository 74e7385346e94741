"""Configuration of a permuting kernel. No device code."""

from collections import namedtuple
from dataclasses import dataclass

import torch

from torch_cute_ops.formats.fp8 import FP8_BLOCK128
from torch_cute_ops.kernels.common.fp8.layouts import FP8_UNIT, SCALE_THREADS

FEW = 128
"""Largest number of tokens for which a single launch is faster."""
THREADS = 64
"""Number of threads of a CTA that quantises."""
COPY_THREADS = 128
"""Number of threads of a CTA that copies scales."""
SCALES_PER_THREAD = 16
"""Number of scales of a row that one thread copies."""


@dataclass(frozen=True)
class Config:
    """Static properties of the kernels.

    Attributes:
        dtype: dtype of the tokens: bfloat16, float16 or float32.
        width: elements of a token.
        topk: largest number of rows to which a token is copied.
        few: largest number of tokens for a single launch. With more tokens, the first launch stores scales once per
            token.
        pdl: True for programmatic dependent launches.
    """

    dtype: torch.dtype
    width: int
    topk: int
    few: int
    pdl: bool

    @property
    def threads_per_token(self) -> int:
        """Number of threads per token. A thread processes ``FP8_UNIT`` elements, or none in the missing half of a short
        block."""
        return self.scales * SCALE_THREADS

    @property
    def has_short_block(self) -> bool:
        """True if the last block of a token holds 64 elements instead of 128."""
        return self.threads_per_token * FP8_UNIT != self.width

    @property
    def scales(self) -> int:
        """Number of scales of a token."""
        return FP8_BLOCK128.scales_per_row(self.width)

    @property
    def scale_groups(self) -> int:
        """Number of groups of ``SCALES_PER_THREAD`` scales of a token."""
        return -(-self.scales // SCALES_PER_THREAD)

    def workspace_shape(self, tokens: int) -> tuple[int, int] | None:
        """Return the shape of the workspace for the tokens' scales, or None if the call needs none."""
        return (tokens, self.scales) if tokens > self.few else None


class Arguments(namedtuple("Arguments", "input y scale expanded_to_permuted permuted_to_expanded workspace")):
    """Run-time arguments, in order, for M tokens of W elements (``Config.width``), and R rows in the experts' order.

    Attributes:
        input: (M, W) of ``Config.dtype``; rows may be strided.
        y: (R, W) float8_e4m3fn, contiguous.
        scale: (R, ``Config.scales``) fp32, column-major without padding.
        expanded_to_permuted: (M, topk) int32, contiguous: row of each pair, negative for a pair without a row.
        permuted_to_expanded: (R,) int32: pair of each row, negative for padding.
        workspace: ``Config.workspace_shape(M)`` fp32, contiguous; if that is None, any fp32 matrix, unused.
    """


def plan(dtype: torch.dtype, width: int, topk: int, pdl: bool = True) -> Config:
    """Return the configuration for tokens of ``width`` elements with up to ``topk`` rows. The configuration fits every
    architecture."""
    return Config(dtype, width, topk, FEW, pdl)
