"""How a kernel of FP4 products is built: no device code."""

from dataclasses import dataclass

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.limits import reason_beyond
from torch_cute_ops.kernels.common.sum_tile import SumTile
from torch_cute_ops.runtime.arch import Arch

ROWS = 128
"""Rows of the weight that a CTA has."""
CHUNK = 256
"""Elements of k that are copied at once: 128 bytes of codes a row, a whole cache line."""
TOKEN_TILES = (8, 16, 32, 64)
"""Rows of activations that a CTA can have."""
RESERVED = 1024
"""Shared memory that the system takes of each CTA, bytes (CUDA C++ Programming Guide, "Compute Capabilities")."""
WARPS = 8
THREADS = 32 * WARPS
STAGES = range(6, 2, -1)


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel. N, K and M are not.

    Attributes:
        dtype: of the activations, and of the decoded weights: bfloat16, or float16 (NVFP4 only).
        fmt, layout: format of the weights, and their scale layout.
        out_dtype: of the result.
        has_alpha: whether there is a factor.
        tokens: rows of activations of a CTA.
        splits: CTAs that share a sum.
        stages: chunks under way.
        ctas_per_sm: CTAs that an SM shall hold.
        pdl: whether launches are programmatic dependent launches.
    """

    dtype: torch.dtype
    fmt: FP4Format
    layout: ScaleLayout
    out_dtype: torch.dtype
    has_alpha: bool
    tokens: int
    splits: int
    stages: int
    ctas_per_sm: int
    pdl: bool

    @property
    def chunk_blocks(self) -> int:
        """Blocks of a row in a chunk."""
        return CHUNK // self.fmt.block_size

    @property
    def code_bytes(self) -> int:
        """Codes of a stage."""
        return ROWS * CHUNK // 2

    @property
    def scale_bytes(self) -> int:
        """Scales of a stage."""
        return ROWS * self.chunk_blocks

    @property
    def token_bytes(self) -> int:
        """Activations of a stage."""
        return self.tokens * CHUNK * self.dtype.itemsize

    @property
    def stage_bytes(self) -> int:
        """One chunk of everything."""
        return self.code_bytes + self.scale_bytes + self.token_bytes

    @property
    def sum_tile(self) -> SumTile:
        """Where the sums lie."""
        return SumTile(self.tokens, ROWS)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA; the sums take the place of the stages."""
        return max(self.stages * self.stage_bytes, self.sum_tile.size_bytes)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return THREADS

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if self.layout.tile_rows not in (0, ROWS):
            return f"weights have no scales in the layout {self.layout.name}"
        reason = reason_beyond(self.dtype, self.fmt, self.smem_bytes, arch)
        if reason is not None:
            return reason
        if (self.smem_bytes + RESERVED) * self.ctas_per_sm > arch.smem_per_sm:
            return f"{self.ctas_per_sm} CTAs need more shared memory than the {arch.smem_per_sm} bytes of an SM"
        return None


def plan(
    *,
    dtype: torch.dtype,
    fmt: FP4Format,
    layout: ScaleLayout,
    out_dtype: torch.dtype,
    has_alpha: bool,
    tokens: int,
    splits: int,
    ctas_per_sm: int,
    arch: Arch,
    pdl: bool,
) -> Config | None:
    """The configuration with the most stages that ``arch`` has room for; ``None`` if it has room for none."""
    for stages in STAGES:
        config = Config(dtype, fmt, layout, out_dtype, has_alpha, tokens, splits, stages, ctas_per_sm, pdl)
        if config.reason_unsupported(arch) is None:
            return config
    return None
