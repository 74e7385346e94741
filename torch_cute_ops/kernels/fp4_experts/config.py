"""How a kernel of products over experts is built: no device code."""

from dataclasses import dataclass
from typing import Final

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels import activation_tiles
from torch_cute_ops.kernels.activation_tiles import CHUNK
from torch_cute_ops.kernels.common.limits import reason_beyond
from torch_cute_ops.kernels.common.weight_chunks import WeightChunks
from torch_cute_ops.runtime.arch import Arch

ROWS: Final = 64
"""Rows of the weight that a CTA has."""
SLOTS: Final = 4
"""Units that a CTA works on at a time. Each has four warps, with 16 rows, and one that feeds them."""
WARPS: Final = SLOTS * 4
THREADS: Final = 32 * (WARPS + 4)
GROUPS: Final = (8, 16, 32)
"""Tokens of a unit."""
TILES: Final = (16, 32, 64, 128, 256)
"""Tokens of a tile: as many as there are, if they fit. A wider tile has fewer stages."""
MAX_EXPERTS: Final = 512
BARRIER_BYTES: Final = 512
LIST_BYTES: Final = 12 * (MAX_EXPERTS + 8)
"""Touched experts, where their units begin, and how many tokens each is for."""


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel. N, K, M and the number of experts are not.

    Attributes:
        dtype: of the activations as the products take them, and of the decoded weights: bfloat16, or float16 (NVFP4
            only).
        fmt, layout: format of the weights, and their scale layout.
        a_layout: scale layout of activations in FP4; ``None``: they are of 16 bits.
        out_dtype: of the result.
        group: tokens of a unit.
        tokens: of a tile.
        stages: chunks under way, of all slots.
        pdl: whether launches are programmatic dependent launches.
    """

    dtype: torch.dtype
    fmt: FP4Format
    layout: ScaleLayout
    a_layout: ScaleLayout | None
    out_dtype: torch.dtype
    group: int
    tokens: int
    stages: int
    pdl: bool

    @property
    def threads(self) -> int:
        """Threads of a CTA that multiplies."""
        return THREADS

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that multiplies, and of another."""
        return 88, 128

    @property
    def arranged(self) -> activation_tiles.Config:
        """How the activations are put in order."""
        return activation_tiles.Config(self.dtype, self.fmt, self.a_layout, True, self.pdl)

    @property
    def chunks(self) -> WeightChunks:
        """Chunks of the weight, one a stage."""
        return WeightChunks(self.fmt, self.layout, ROWS)

    @property
    def stage_bytes(self) -> int:
        """One chunk of everything, and of the unit's tokens which they are and their factors."""
        return self.chunks.size_bytes + self.group * (CHUNK * 2 + 8)

    @property
    def sum_bytes(self) -> int:
        """Sums of the tile."""
        return self.tokens * ROWS * 4

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA that multiplies."""
        return self.stages * self.stage_bytes + self.sum_bytes + LIST_BYTES + BARRIER_BYTES

    def workspace_bytes(self, m: int, experts: int) -> int:
        """Bytes for the lists: for each tile and expert how many tokens, which, and their factors."""
        return -(-m // self.tokens) * experts * (4 + 8 * self.tokens)

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if arch.name != "sm_90a":
            return f"is of sm_90a; this is {arch.name}"
        return reason_beyond(self.dtype, self.fmt, self.smem_bytes, arch)


def plan(
    *,
    dtype: torch.dtype,
    fmt: FP4Format,
    layout: ScaleLayout,
    a_layout: ScaleLayout | None,
    out_dtype: torch.dtype,
    group: int,
    tokens: int,
    arch: Arch,
    pdl: bool,
) -> Config | None:
    """The configuration with the most stages that ``arch`` has room for; ``None`` if it has none for two of a slot."""
    for stages in range(4 * SLOTS, SLOTS, -SLOTS):
        config = Config(dtype, fmt, layout, a_layout, out_dtype, group, tokens, stages, pdl)
        if config.reason_unsupported(arch) is None:
            return config
    return None
