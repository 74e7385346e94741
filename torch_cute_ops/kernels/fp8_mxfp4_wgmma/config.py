"""Configuration of the GEMM of FP8 activations and an MXFP4 weight by wgmma: no device code."""

from dataclasses import dataclass
from typing import ClassVar, Final

from torch_cute_ops.formats import MXFP4, FP4Format, ScaleLayout
from torch_cute_ops.kernels import fp8_wgmma
from torch_cute_ops.kernels.common.epilogue import Epilogue
from torch_cute_ops.kernels.common.expert_layout import ExpertLayout
from torch_cute_ops.kernels.common.fit import first_fit
from torch_cute_ops.kernels.common.fp8_arguments import Arguments
from torch_cute_ops.kernels.common.fp8_stages import BLOCK, GROUPS
from torch_cute_ops.kernels.common.warpgroup import GROUP_ROWS
from torch_cute_ops.runtime.arch import Arch

__all__ = ["Arguments", "Config", "plan"]

COLUMNS: Final = GROUPS * GROUP_ROWS
"""Rows of the weight of a tile."""
SPAN: Final = 2
"""K blocks of a stage: 128 bytes of codes of a row, which is what L2 reads at once."""
BLOCKS: Final = BLOCK // MXFP4.block_size
"""Blocks of a K block."""
TILES: Final = (*((tokens, splits) for tokens in (8, 16) for splits in (1, 2, 3, 4, 6)), (32, 1))
"""Rows of ``a`` of a tile, and CTAs that share its k. The sums of blocks leave registers for no more."""


@dataclass(frozen=True)
class Config(fp8_wgmma.Config):
    """Everything static about a kernel. N, K, R and the number of experts are not.

    Attributes:
        layout: scale layout of the weight. The others are those of ``fp8_wgmma``.
    """

    layout: ScaleLayout
    tiles: ClassVar[tuple] = tuple((tokens, COLUMNS, splits) for tokens, splits in TILES)
    fmt: ClassVar[FP4Format] = MXFP4
    span: ClassVar[int] = SPAN
    line: ClassVar[int] = SPAN * BLOCK // 2
    scales_ahead: ClassVar[int] = 1
    helpers: ClassVar[int] = SPAN
    teams: ClassVar[int] = 2

    @property
    def registers(self) -> tuple[int, int, int]:
        return 208, 56, 40

    @property
    def together(self) -> int:
        return SPAN

    @property
    def place_scales(self) -> int:
        """Those of the rows of ``a``; for each row of the weight a factor of each block, and a word that says by how
        much helpers round; and a word of flags, in a piece of 16 bytes."""
        return self.flags_at + 4

    @property
    def amounts_at(self) -> int:
        """Where the words for helpers begin."""
        return self.tokens + BLOCKS * self.columns

    @property
    def flags_at(self) -> int:
        """Where the word of flags is."""
        return self.amounts_at + self.columns

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if self.layout.tile_rows not in (0, 128):
            return f"a weight has no scales in the layout {self.layout.name}"
        return super().reason_unsupported(arch)


STAGES: Final = (8, 6, 4)
"""Multiples of the teams, so that a stage is the same team's in every round of the ring."""


def plan(
    *,
    layout: ScaleLayout,
    rows: ExpertLayout,
    epilogue: Epilogue,
    tokens: int,
    splits: int = 1,
    arch: Arch,
    pdl: bool,
    static_weight: bool = False,
) -> Config | None:
    """The configuration with the most stages that fit into an SM of ``arch``; ``None`` if it cannot run this."""
    ahead = static_weight and Config.reads_ahead(rows, tokens, pdl)
    sizes = tokens, COLUMNS, splits
    return first_fit((Config(rows, epilogue, *sizes, stages, pdl, ahead, layout) for stages in STAGES), arch)
