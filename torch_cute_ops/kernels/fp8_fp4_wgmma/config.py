"""Configuration of the GEMM of FP8 activations and an FP4 weight by wgmma: no device code."""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from torch_cute_ops.formats import FP4Format
from torch_cute_ops.kernels import fp8_wgmma
from torch_cute_ops.kernels.common.core.layouts import WGMMA_M
from torch_cute_ops.kernels.common.fp8.layouts import BLOCK, NARROW_SPLITS, SPLITS, Arguments
from torch_cute_ops.kernels.fp8_fp4_wgmma.weights_config import COLUMNS, UnitsConfig

__all__ = ["Arguments", "Config", "plan"]

PAIR: Final = 256
"""Rows of ``a`` of a tile of two CTAs, each of which decodes half of the weight for both."""
LEAST: Final = 32
"""Rows of ``a`` of the smallest tile: for fewer each format has a kernel of its own, which is faster."""
TILES: Final = (
    *((tokens, COLUMNS, splits) for tokens in (LEAST, WGMMA_M) for splits in SPLITS),
    # Under random routing most experts of a mean of 32 or 64 rows have no more than these.
    *((tokens, COLUMNS, 1) for tokens in (48, 80, 96, fp8_wgmma.MANY, PAIR)),
    # Two CTAs share k, each of which finishes the rows of one consumer warpgroup.
    *((fp8_wgmma.MANY, columns, 2) for columns in (WGMMA_M, COLUMNS)),
    *((tokens, WGMMA_M, splits) for tokens in (LEAST, 48, WGMMA_M, 80, 96) for splits in NARROW_SPLITS),
)
"""Rows of ``a`` and of the weight of a tile, and CTAs that share its k."""


@dataclass(frozen=True)
class Config(UnitsConfig):
    """Everything static about a kernel. N, K, R and the number of experts are not.

    Attributes:
        fmt: format of the weight. The others are those of ``fp8_wgmma`` and ``FP4WeightConfig``.
        row_ctas: CTAs of a cluster that share the decoded weight, each for ``tokens`` rows of ``a``.
    """

    tiles: ClassVar[tuple] = TILES
    fmt: FP4Format
    row_ctas: int = 1
    stage_counts: ClassVar = range(10, 1, -1)
    line: ClassVar[int] = BLOCK // 2

    @property
    def lanes_per_row(self) -> int:
        """Threads that decode a row of the weight in a K block: where two CTAs share the decoded weight, each has half
        of the rows, and a thread half of a row."""
        return self.row_ctas

    @property
    def teams(self) -> int:
        # As many as leave registers for the consumers' sums, in whole warpgroups
        if self.columns < COLUMNS:
            return 4
        return 3 if self.is_swapped else 2

    @property
    def helpers(self) -> int:
        return self.lanes_per_row * self.copied_columns // 32

    @property
    def registers(self) -> tuple[int, int, int]:
        # All but the consumers give some up: theirs are at most what the launch gives each thread.
        if not self.is_swapped:
            return 168, 56, 40
        return (144, 72, 40) if self.mma_columns > LEAST else (136, 80, 40)

    @property
    def together(self) -> int:
        # More sums would leave too few registers for the decoding warps.
        return 2 if self.mma_columns < WGMMA_M else 1

    @property
    def unrolls(self) -> bool:
        return False

    @property
    def scales_ahead(self) -> int:
        return 2 if self.mma_columns < WGMMA_M else 1

    @property
    def own_bytes(self) -> int:
        """The decoded weight."""
        return self.stages * self.columns * BLOCK


def plan(*, tokens: int, **given: Any) -> Config | None:
    """As ``fp8_wgmma.with_most_stages`` does, for one of ``TILES``."""
    row_ctas = 2 if tokens == PAIR else 1
    return fp8_wgmma.with_most_stages(Config, tokens=tokens // row_ctas, row_ctas=row_ctas, **given)
