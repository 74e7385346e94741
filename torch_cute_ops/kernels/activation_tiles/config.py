"""How a kernel that arranges activations is built: no device code."""

from dataclasses import dataclass

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout

CHUNK = 256
"""Elements of k that are put in order together; products over experts may have half of it."""
TILE_TOKENS = 8
TILE_LINE = 128
"""Bytes of a token in a tile."""
TILE_BYTES = TILE_TOKENS * TILE_LINE
"""Of a tile of 8 tokens x 64 positions of 16 bits."""
THREADS = 128


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel.

    Attributes:
        dtype: of what is written: bfloat16 or float16; and of the activations, if they are not in FP4.
        fmt: format of the weights, and of activations in FP4.
        layout: scale layout of activations in FP4; ``None``: they are of 16 bits.
        by_warp: whether they are for products of warps, not of warpgroups.
        chunk: elements of k of a chunk.
        pdl: whether launches are programmatic dependent launches.
    """

    dtype: torch.dtype
    fmt: FP4Format
    layout: ScaleLayout | None
    by_warp: bool
    chunk: int
    pdl: bool

    @property
    def token_bytes(self) -> int:
        """Of a token's part of a chunk."""
        return self.chunk * self.dtype.itemsize
