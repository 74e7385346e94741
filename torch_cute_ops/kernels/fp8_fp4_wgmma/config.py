"""Configuration of the GEMM of FP8 activations and an FP4 weight by wgmma: no device code."""

from dataclasses import dataclass
from typing import ClassVar, Final

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels import fp8_wgmma
from torch_cute_ops.kernels.common.epilogue import Epilogue
from torch_cute_ops.kernels.common.expert_layout import ExpertLayout
from torch_cute_ops.kernels.common.fp8_arguments import Arguments
from torch_cute_ops.kernels.common.fp8_stages import BLOCK, GROUPS, THREADS
from torch_cute_ops.kernels.common.warpgroup import GROUP_ROWS, WARPGROUP
from torch_cute_ops.runtime.arch import Arch

__all__ = ["Arguments", "Config", "plan"]

COLUMNS: Final = GROUPS * GROUP_ROWS
"""Rows of the weight of a tile."""
TILES: Final = tuple((tokens, splits) for tokens, columns, splits in fp8_wgmma.TILES if columns == COLUMNS)
"""Rows of ``a`` of a tile, and CTAs that share it."""
PAIRED_TOKENS: Final = 16
"""Most rows of ``a`` of a tile of which two CTAs share an SM: one waits while the other decodes."""
CTA_BYTES: Final = 1024
"""Shared memory that a CTA takes besides."""
DECODERS: Final = WARPGROUP // 32
"""Warps that decode the weight; each thread has a row."""


@dataclass(frozen=True)
class Config(fp8_wgmma.Config):
    """Everything static about a kernel. N, K, R and the number of experts are not.

    Attributes:
        fmt, layout: format and scale layout of the weight. The others are those of ``fp8_wgmma``.
    """

    fmt: FP4Format
    layout: ScaleLayout
    line: ClassVar[int] = BLOCK // 2
    scales_ahead: ClassVar[int] = 2
    helpers: ClassVar[int] = DECODERS

    @property
    def threads(self) -> int:
        return THREADS + WARPGROUP

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that share an SM."""
        return 2 if self.tokens <= PAIRED_TOKENS else 1

    @property
    def registers(self) -> tuple[int, int]:
        if self.ctas_per_sm == 2:
            return 80, 48
        return (216, 40) if self.has_units else (168, 88)

    @property
    def block_scales(self) -> int:
        """Scales of a row of the weight in a K block, a byte each."""
        return BLOCK // self.fmt.block_size

    @property
    def has_units(self) -> bool:
        """Whether totals are in units of powers of two, so that a K block's sums need no factor of the weight. With the
        weight on the M side the factors are few."""
        return not self.is_swapped

    @property
    def place_scales(self) -> int:
        """Those of the rows of ``a``, the bytes of the rows of the weight, and ``2^t`` of these; or, with units, two
        powers that change them and for each decoding warp whether any does."""
        powers = 2 * self.columns + DECODERS if self.has_units else self.columns
        return self.tokens + self.columns * self.block_scales // 4 + powers

    @property
    def own_bytes(self) -> int:
        """The decoded weight."""
        return self.stages * self.columns * BLOCK

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if (self.tokens, self.splits) not in TILES or self.columns != COLUMNS:
            return f"no tile has {self.tokens} rows of a and {self.columns} of b, shared by {self.splits} CTAs"
        if self.layout.tile_rows not in (0, 128):
            return f"a weight has no scales in the layout {self.layout.name}"
        if (self.smem_bytes + CTA_BYTES) * self.ctas_per_sm > arch.smem_per_cta + CTA_BYTES:
            return f"needs {self.smem_bytes} bytes of shared memory in each of {self.ctas_per_sm} CTAs of an SM"
        return super().reason_unsupported(arch)


MOST_STAGES: Final = 10


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
        config = Config(rows, epilogue, tokens, COLUMNS, splits, stages, pdl, fmt, layout)
        if config.reason_unsupported(arch) is None:
            return config
    return None
