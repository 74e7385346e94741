"""Configuration of the GEMM of FP8 activations and an MXFP4 weight by wgmma: no device code."""

import functools
from dataclasses import dataclass
from typing import ClassVar, Final

from torch_cute_ops.formats import MXFP4, FP4Format
from torch_cute_ops.kernels import fp8_wgmma
from torch_cute_ops.kernels.common.fp8.layouts import BLOCK, SPLITS, Arguments
from torch_cute_ops.kernels.fp8_fp4_wgmma.lines_config import SPAN, LinesConfig
from torch_cute_ops.kernels.fp8_fp4_wgmma.weights_config import COLUMNS, FLAG_WORDS

__all__ = ["Arguments", "Config", "plan"]

BLOCKS: Final = BLOCK // MXFP4.block_size
"""Blocks of a K block."""
TILES: Final = (*((tokens, COLUMNS, splits) for tokens in (8, 16, 24) for splits in SPLITS), (32, COLUMNS, 1))
"""Rows of ``a`` and of the weight of a tile, and CTAs that share its k. The sums of blocks leave registers for no more
rows of ``a``."""


@dataclass(frozen=True)
class Config(LinesConfig):
    """Everything static about a kernel. N, K, R and the number of experts are not."""

    tiles: ClassVar[tuple] = TILES
    fmt: ClassVar[FP4Format] = MXFP4

    @property
    def registers(self) -> tuple[int, int, int]:
        # Helpers with 24 rows would spill 8 bytes of 40 registers, where CTAs share a tile.
        return (200, 56, 56) if self.tokens == 24 else (208, 56, 40)

    @property
    def together(self) -> int:
        return SPAN

    @property
    def place_scales(self) -> int:
        """Those of the rows of ``a``; for each row of the weight a factor of each block, and a word that says by how
        much helpers round; and the flags."""
        return self.flags_at + FLAG_WORDS

    @property
    def amounts_at(self) -> int:
        """Where the words for helpers begin."""
        return self.tokens + BLOCKS * self.columns

    @property
    def flags_at(self) -> int:
        """Where the word of flags is."""
        return self.amounts_at + self.columns


plan = functools.partial(fp8_wgmma.with_most_stages, Config)
