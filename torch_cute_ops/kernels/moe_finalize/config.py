"""Configuration of a finalising kernel: no device code."""

from collections import namedtuple
from dataclasses import dataclass

import torch

VECTOR = 16
"""Bytes of a row that a thread processes at once."""
FEW = 512
"""Tokens up to which loads that bypass L1 are faster."""
THREADS, MORE_THREADS = 128, 256
"""The most threads of a CTA; and of one that is larger because, with few tokens, that balances the SMs."""
CTAS_PER_SM = 5
"""Resident CTAs of an SM, from which the number of slices is computed."""
WARP = 32


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel.

    Attributes:
        dtype: dtype of the rows: bfloat16, float16 or float32.
        width: elements of a row.
        topk: rows of a token.
        has_residual: whether there is a residual.
        few: tokens up to which loads of rows bypass L1.
        threads: threads of a CTA.
        more_threads: threads of a CTA where, with few tokens, more of them balance the SMs.
        pdl: whether launches are programmatic dependent launches.
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
        """Elements that a thread processes at once."""
        return VECTOR // self.dtype.itemsize

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return self.width // self.vector

    def rounds(self, threads: int) -> int:
        """Portions of a row: rounds in which this many threads process it, a vector each."""
        return -(-self.vectors // threads)


class Arguments(namedtuple("Arguments", "input expanded_to_permuted weights residual out sms")):
    """The run-time arguments, in order; M tokens of W elements (``Config.width``), of R rows in the experts' order.

    Attributes:
        input: (R, W) of ``Config.dtype``; rows may be strided.
        expanded_to_permuted: (M, topk) int32, contiguous: the row of each pair, negative for one that has none.
        weights: (M, topk) fp32, contiguous.
        residual: (M, W) like the input, rows may be strided; ``None`` without ``Config.has_residual``.
        out: (M, W) like the input, contiguous; it may be the residual itself.
        sms: int32, multiprocessors of the device.
    """


def plan(dtype: torch.dtype, width: int, topk: int, has_residual: bool, pdl: bool = True) -> Config:
    """The configuration for these properties; every architecture has one."""
    vectors = width * dtype.itemsize // VECTOR
    threads, more_threads = (_even_threads(vectors, max_threads) for max_threads in (THREADS, MORE_THREADS))
    return Config(dtype, width, topk, has_residual, FEW, threads, more_threads, pdl)


def _even_threads(vectors: int, max_threads: int) -> int:
    """Return the number of threads, at most ``max_threads``, that divides a row into rounds equal to within a warp."""
    rounds = -(-vectors // max_threads)
    return -(-vectors // (rounds * WARP)) * WARP
