"""Configuration of the GEMM of few rows of FP8 activations and an NVFP4 weight by wgmma: no device code."""

import functools
from dataclasses import dataclass
from typing import ClassVar, Final

from torch_cute_ops.formats import NVFP4, FP4Format
from torch_cute_ops.kernels import fp8_wgmma
from torch_cute_ops.kernels.common.fp8.layouts import SPLITS, Arguments
from torch_cute_ops.kernels.fp8_fp4_wgmma.lines_config import SPAN, LinesConfig
from torch_cute_ops.kernels.fp8_fp4_wgmma.weights_config import COLUMNS, UnitsConfig

__all__ = ["Arguments", "Config", "plan"]

TILES: Final = (*((tokens, COLUMNS, splits) for tokens in (8, 16) for splits in SPLITS), (24, COLUMNS, 1))
"""Rows of ``a`` and of the weight of a tile, and CTAs that share its k. With 24 rows consumers that share it would
spill."""


@dataclass(frozen=True)
class Config(LinesConfig, UnitsConfig):
    """Everything static about a kernel. N, K, R and the number of experts are not."""

    tiles: ClassVar[tuple] = TILES
    fmt: ClassVar[FP4Format] = NVFP4
    k_groups: ClassVar[int] = SPAN

    @property
    def registers(self) -> tuple[int, int, int]:
        # A launch gives each of the 768 threads 80. What the others give up goes to the consumers. Helpers with 24 rows
        # would spill 8 bytes of 40 registers.
        return (88, 72, 56) if self.tokens == 24 else (88, 80, 40)

    @property
    def own_bytes(self) -> int:
        """The sums of the second pair of consumers."""
        return self.columns * self.tokens * 4


plan = functools.partial(fp8_wgmma.with_most_stages, Config)
