"""How a permuting kernel is built: no device code."""

from dataclasses import dataclass

import torch

from torch_cute_ops.formats.fp8 import FP8_BLOCK128
from torch_cute_ops.kernels.common.fp8_units import FP8_UNIT

FEW = 128
"""Tokens up to which one launch is faster."""
THREADS = 64
"""Of a CTA that quantises."""
COPY_THREADS = 128
"""Of a CTA that copies scales."""
CHUNK = 16
"""Scales of a row that a thread copies."""


@dataclass(frozen=True)
class Config:
    """Everything static about the kernels.

    Attributes:
        dtype: of the tokens: bfloat16, float16 or float32.
        width: elements of a token.
        topk: the most places of a token.
        few: tokens up to which scales are stored in each place at once; of more, once for each token first.
        pdl: whether launches are programmatic dependent launches.
    """

    dtype: torch.dtype
    width: int
    topk: int
    few: int
    pdl: bool

    @property
    def units(self) -> int:
        """Units of a token."""
        return self.width // FP8_UNIT

    @property
    def scales(self) -> int:
        """Scales of a token."""
        return self.width // FP8_BLOCK128.block_size

    @property
    def chunks(self) -> int:
        """Chunks of a token's scales."""
        return -(-self.scales // CHUNK)

    def workspace_shape(self, tokens: int) -> tuple[int, int] | None:
        """Of the tokens' scales, if a call needs them."""
        return (tokens, self.scales) if tokens > self.few else None


def plan(dtype: torch.dtype, width: int, topk: int, pdl: bool = True) -> Config:
    """The configuration for tokens of ``width`` elements, each in ``topk`` places at most; any architecture has one."""
    return Config(dtype, width, topk, FEW, pdl)
