"""Configuration of the kernel that adds up each token's rows. No device code."""

from collections import namedtuple
from dataclasses import dataclass

import torch

VECTOR = 16
"""Number of bytes of a row that a thread processes at once."""
FEW = 512
"""Largest number of tokens for which loads that bypass L1 are faster."""
THREADS, MORE_THREADS = 128, 256
"""Largest numbers of threads of a CTA: usually 128, and 256 if there are few tokens and larger CTAs balance the SMs."""
CTAS_PER_SM = 5
"""Target number of CTAs per SM, from which the number of slices is computed."""
WARP = 32


@dataclass(frozen=True)
class Config:
    """Static properties of the kernel that adds up each token's rows.

    Attributes:
        dtype: dtype of the rows: bfloat16, float16 or float32.
        width: number of elements of a row.
        topk: number of rows of a token.
        has_residual: True if a residual is added.
        few: largest number of tokens for which loads of rows bypass L1.
        threads: number of threads of a CTA.
        more_threads: number of threads of a CTA for few tokens, if larger CTAs balance the work of the SMs.
        pdl: True to launch with programmatic dependent launch.
    """

    dtype: torch.dtype
    width: int
    topk: int
    has_residual: bool
    few: int
    threads: int
    more_threads: int
    pdl: bool

    @property
    def vector(self) -> int:
        """Number of elements that a thread processes at once."""
        return VECTOR // self.dtype.itemsize

    @property
    def vectors(self) -> int:
        """Number of 16-byte vectors of a row."""
        return self.width // self.vector

    def rounds(self, threads: int) -> int:
        """Return the number of rounds in which ``threads`` threads process a row. In a round, a thread processes one
        vector."""
        return -(-self.vectors // threads)


class Arguments(namedtuple("Arguments", "input expanded_to_permuted weights residual out sms")):
    """Run-time arguments, in order, for M tokens of W elements (``Config.width``), and R rows in the experts' order.

    Attributes:
        input: (R, W) of ``Config.dtype``. Rows may be strided.
        expanded_to_permuted: (M, topk) int32, contiguous: row of each (token, expert) pair, negative for a pair without
            a row.
        weights: (M, topk) fp32, contiguous.
        residual: (M, W) of ``Config.dtype``, or None without ``Config.has_residual``. Rows may be strided.
        out: (M, W) of ``Config.dtype``, contiguous. ``out`` may be the residual itself.
        sms: int32, number of SMs of the device.
    """


def plan(dtype: torch.dtype, width: int, topk: int, has_residual: bool, pdl: bool = True) -> Config:
    """Return the configuration with these properties. Every architecture supports it."""
    vectors = width * dtype.itemsize // VECTOR
    threads, more_threads = (_even_threads(vectors, max_threads) for max_threads in (THREADS, MORE_THREADS))
    return Config(dtype, width, topk, has_residual, FEW, threads, more_threads, pdl)


def _even_threads(vectors: int, max_threads: int) -> int:
    """Return a number of threads, at most ``max_threads``, that divides a row evenly: the row's rounds differ by at
    most one warp."""
    rounds = -(-vectors // max_threads)
    return -(-vectors // (rounds * WARP)) * WARP
