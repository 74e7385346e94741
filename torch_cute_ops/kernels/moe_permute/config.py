"""Configuration of the kernels that quantise tokens and store them in experts' rows. No device code."""

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
    """Static properties of the kernels that quantise tokens and store them in experts' rows.

    Attributes:
        dtype: dtype of the tokens: bfloat16, float16 or float32.
        width: number of elements of a token.
        topk: largest number of rows in which a token is stored.
        few: largest number of tokens for which one launch does all the work. With more tokens, a first launch stores
            scales once per token, and a second launch copies them to the rows.
        pdl: True to launch with programmatic dependent launch.
        scale_format: ``"ue8m0"`` if scales are powers of two, or None.
    """

    dtype: torch.dtype
    width: int
    topk: int
    few: int
    pdl: bool
    scale_format: str | None = None

    @property
    def threads_per_token(self) -> int:
        """Number of threads per token. Each thread processes ``FP8_UNIT`` elements. If the last block is short, the
        threads of its missing half process no elements."""
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
        """Number of groups of ``SCALES_PER_THREAD`` scales into which a token's scales are divided."""
        return -(-self.scales // SCALES_PER_THREAD)

    def workspace_shape(self, tokens: int) -> tuple[int, int] | None:
        """Return the shape of the workspace for the tokens' scales, or None if the call needs none."""
        return (tokens, self.scales) if tokens > self.few else None


class Arguments(namedtuple("Arguments", "input y scale expanded_to_permuted permuted_to_expanded workspace")):
    """Run-time arguments, in order, for M tokens of W elements (``Config.width``), and R rows in the experts' order.

    Attributes:
        input: (M, W) of ``Config.dtype``. Rows may be strided.
        y: (R, W) float8_e4m3fn, contiguous.
        scale: (R, ``Config.scales``) fp32, column-major without padding.
        expanded_to_permuted: (M, topk) int32, contiguous: row of each (token, expert) pair, negative for a pair without
            a row.
        permuted_to_expanded: (R,) int32: pair of each row, negative for padding.
        workspace: ``Config.workspace_shape(M)`` fp32, contiguous. If the shape is None, pass any fp32 matrix: the
            kernels do not access it.
    """


def plan(dtype: torch.dtype, width: int, topk: int, scale_format: str | None = None, pdl: bool = True) -> Config:
    """Return the configuration for tokens of ``width`` elements with up to ``topk`` rows each. Every architecture
    supports it."""
    return Config(dtype, width, topk, FEW, pdl, scale_format)
