"""Configuration of the GEMM of FP8 activations and an FP4 weight by wgmma: no device code."""

from dataclasses import dataclass
from typing import ClassVar, Final

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.epilogue import Epilogue
from torch_cute_ops.kernels.common.expert_layout import ExpertLayout
from torch_cute_ops.kernels.common.fp8_arguments import Arguments
from torch_cute_ops.kernels.common.fp8_stages import BLOCK, GROUPS, SCALE_WARPS, FP8TilesConfig
from torch_cute_ops.kernels.common.warpgroup import GROUP_ROWS
from torch_cute_ops.runtime.arch import Arch

__all__ = ["Arguments", "Config", "plan"]

COLUMNS: Final = GROUPS * GROUP_ROWS
"""Rows of the weight of a tile."""
TILES: Final = (
    *((tokens, splits) for tokens in (16, 32, 64) for splits in (1, 2, 4)),
    (128, 1),
    (256, 1),
)
"""Rows of ``a`` of a tile, and CTAs that share it."""
import os
X=int(os.environ.get("X","128"))
MMA_TOKENS: Final = 128
"""Most rows of ``a`` of an MMA: with 256, sums and totals would take all registers."""
TABLE_BYTES: Final = 8
"""The numbers that the eight magnitudes of a code stand for in a block, in e4m3."""
WARP_ROWS: Final = 16


@dataclass(frozen=True)
class Config(FP8TilesConfig):
    """Everything static about a kernel. N, K, R and the number of experts are not.

    Attributes:
        fmt, layout: format and scale layout of the weight.
        rows: how rows of ``a`` belong to experts.
        epilogue: what is done to the sums.
        tokens, splits: one of ``TILES``: rows of ``a`` of a tile, and CTAs of a cluster, which share the k of a tile.
        stages: stages of the ring.
        pdl: whether launches are programmatic dependent launches.
    """

    fmt: FP4Format
    layout: ScaleLayout
    rows: ExpertLayout
    epilogue: Epilogue
    tokens: int
    splits: int
    stages: int
    pdl: bool
    columns: ClassVar[int] = COLUMNS
    stage_blocks: ClassVar[int] = 2

    @property
    def scales_ahead(self) -> int:
        """K blocks whose scales a warp loads together: as many as there are registers for."""
        return 1 if self.tokens >= MMA_TOKENS else 2

    @property
    def line(self) -> int:
        """Bytes of a row of the weight in a stage: a whole cache line."""
        return self.stage_blocks * BLOCK // 2

    @property
    def mma_tokens(self) -> int:
        """N of an MMA."""
        return min(self.tokens, MMA_TOKENS if self.tokens < 128 else X)

    @property
    def passes(self) -> int:
        """MMAs of a warpgroup for a k32 step."""
        return self.tokens // self.mma_tokens

    @property
    def has_units(self) -> bool:
        """Whether totals are in units of powers of two, so that a K block's sums need no factor of the weight. It
        takes instructions for each K block, and saves one for each sum of it."""
        return self.tokens >= 128 and not os.environ.get("NOUNITS")

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of consumers, and of other warps."""
        return (232, 40) if self.tokens >= MMA_TOKENS else (216, 72)

    @property
    def block_scales(self) -> int:
        """Scales of a row of the weight in a K block, a byte each."""
        return BLOCK // self.fmt.block_size

    @property
    def place_scales(self) -> int:
        """Those of the rows of ``a``, then the bytes of the rows of the weight."""
        return self.tokens + self.columns * self.block_scales // 4

    @property
    def table_line(self) -> int:
        """Bytes of the tables of a row of the weight."""
        return self.block_scales * TABLE_BYTES

    @property
    def own_bytes(self) -> int:
        """The tables of a K block."""
        return self.columns * self.table_line

    @property
    def store_bytes(self) -> int:
        """Shared memory in which CTAs exchange partial sums."""
        return self.sum_tile.size_bytes if self.splits > 1 else 0

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if not arch.has_wgmma:
            return f"{arch.name} has no wgmma instructions"
        if (self.tokens, self.splits) not in TILES:
            return f"no tile has {self.tokens} rows of a, shared by {self.splits} CTAs"
        if self.layout.tile_rows not in (0, 128):
            return f"a weight has no scales in the layout {self.layout.name}"
        if self.stages * self.stage_blocks < SCALE_WARPS:
            return f"{SCALE_WARPS} warps load the scales of a K block each; {self.stages} stages have fewer"
        if self.smem_bytes > arch.smem_per_cta:
            return f"needs {self.smem_bytes} bytes of shared memory; {arch.name} has {arch.smem_per_cta}"
        return self.epilogue.reason_unsupported(is_grouped=not self.rows.is_plain)


MOST_STAGES: Final = 6


def plan(
    *,
    fmt: FP4Format,
    layout: ScaleLayout,
    rows: ExpertLayout,
    epilogue: Epilogue,
    tokens: int,
    splits: int = 1,
    arch: Arch,
    pdl: bool,
) -> Config | None:
    """The configuration with the most stages that fit into an SM of ``arch``; ``None`` if it cannot run this."""
    for stages in range(MOST_STAGES, 1, -1):
        config = Config(fmt, layout, rows, epilogue, tokens, splits, stages, pdl)
        if config.reason_unsupported(arch) is None:
            return config
    return None
