"""What configurations with an FP4 weight have in common: no device code."""

from dataclasses import dataclass
from typing import ClassVar, Final

from torch_cute_ops.formats import ScaleLayout
from torch_cute_ops.kernels import fp8_wgmma
from torch_cute_ops.kernels.common.core.layouts import WGMMA_M
from torch_cute_ops.kernels.common.fp8.layouts import GROUPS
from torch_cute_ops.runtime.arch import Arch

COLUMNS: Final = GROUPS * WGMMA_M
"""Rows of the weight of a tile, where each consumer warpgroup has its own."""
FLAG_WORDS: Final = 4
"""Words for the flags of a K block: one, in a piece of 16 bytes."""


def unit_words(columns: int) -> int:
    """Words from ``units_at`` on, among the scales of a K block: for each row of the weight two powers that change
    units; and the flags."""
    return 2 * columns + FLAG_WORDS


@dataclass(frozen=True)
class FP4WeightConfig(fp8_wgmma.Config):
    """Everything static about a kernel with an FP4 weight.

    Attributes:
        layout: scale layout of the weight. The others are those of ``fp8_wgmma``.
    """

    prefetching_tokens: ClassVar[int] = 16
    """With 1 and 16 rows as fast as without it, in such a layer of MXFP4 weights, and with 64 3.2 µs slower."""

    layout: ScaleLayout

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if self.layout.tile_rows not in (0, 128):
            return f"a weight has no scales in the layout {self.layout.name}"
        return super().reason_unsupported(arch)


class UnitsConfig(FP4WeightConfig):
    """The same where rows of the weight have units of their own (``UnitsKernel``)."""

    @property
    def place_scales(self) -> int:
        """Those of the rows of ``a``; for each row of the weight that the CTA decodes four words that its tables follow
        from; and what changes units."""
        return self.units_at + unit_words(self.columns)

    @property
    def units_at(self) -> int:
        """Where what changes units begins among the scales of a K block."""
        return self.tokens + 4 * self.copied_columns
