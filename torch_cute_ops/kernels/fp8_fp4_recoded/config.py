"""Configuration of the GEMM by a recoded weight: no device code."""

import functools
from dataclasses import dataclass
from typing import Final

from torch_cute_ops.kernels import fp8_wgmma
from torch_cute_ops.kernels.common.fp8.layouts import Arguments
from torch_cute_ops.kernels.fp4_to_fp8.config import COLUMNS
from torch_cute_ops.kernels.fp8_fp4_wgmma.weights_config import unit_words

__all__ = ["Arguments", "Config", "plan"]

RASTER: Final = 16
"""Tiles of rows of activations that run side by side: more than elsewhere, so that rows of the weight that are recoded
beside the GEMM are needed later. As many tiles share as much in L2."""


@dataclass(frozen=True)
class Config(fp8_wgmma.Config):
    """Everything static about a kernel, as of ``fp8_wgmma``. Of the ``Arguments``, ``b`` is what ``fp4_to_fp8`` has
    written, and ``b_scale`` its notes.

    Attributes:
        beside: whether ``fp4_to_fp8`` runs beside this kernel.
    """

    beside: bool

    @property
    def waits_last(self) -> bool:
        return self.pdl and self.beside

    @property
    def units_at(self) -> int:
        """Where what changes units begins among the scales of a stage."""
        return self.tokens

    @property
    def tells_expert(self) -> bool:
        """Whether consumers need the expert of a tile: for its rows' units."""
        return not self.rows.is_plain

    @property
    def place_scales(self) -> int:
        """Those of the rows of ``a``; and what changes units."""
        return self.units_at + unit_words(self.columns)


plan = functools.partial(fp8_wgmma.with_most_stages, Config, tokens=fp8_wgmma.MANY, columns=COLUMNS)
