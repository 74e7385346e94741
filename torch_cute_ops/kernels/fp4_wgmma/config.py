"""How a warpgroup kernel of FP4 products is built: no device code."""

from dataclasses import dataclass
from typing import Final

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels import activation_tiles
from torch_cute_ops.kernels.activation_tiles import CHUNK, TILE_LINE
from torch_cute_ops.kernels.common.limits import reason_beyond
from torch_cute_ops.kernels.common.sum_tile import SumTile
from torch_cute_ops.kernels.common.warpgroup import BY_WARP, GROUP_ROWS, WARPGROUP
from torch_cute_ops.kernels.common.weight_chunks import WeightChunks
from torch_cute_ops.runtime.arch import Arch

QUARTERS: Final = 4
"""Of a chunk; 64 elements of k, 128 bytes of activations a token."""
TILES: Final = {8: 4, 16: 4, 32: 4, 64: 4, 128: 2, 256: 2}
"""Tokens of a tile, and the warpgroups that multiply: as many as leave registers for the sums."""
BARRIER_BYTES: Final = 512
ARRANGED_TOKENS: Final = 32
"""Tokens of a tile, at most, that a CTA can put in order itself."""
CLUSTER_TOKENS: Final = 128
"""Tokens of a tile, at most, whose sums a cluster can share: they take the place of the codes."""
SPLITS: Final = (1, 2, 3, 4, 8)
"""CTAs of a cluster."""
EXPERT_TILES: Final = (16, 32, 64, 128)
"""Tokens of a tile where there are experts: there are two sums each."""


def rows_of(tokens: int) -> int:
    """Rows of the weight of a tile with so many tokens."""
    return TILES[tokens] * GROUP_ROWS


def arranges(tokens: int, splits: int) -> bool:
    """Whether the CTAs of a cluster put the activations in order themselves."""
    return splits > 0 and tokens <= ARRANGED_TOKENS


def span_of(tokens: int, width: int | None) -> int:
    """Quarters of a chunk in a stage of activations."""
    if tokens <= 32:
        return QUARTERS
    # Two save 1.5 % (measured on an H200). With experts there are registers for one.
    return 2 if tokens == 64 and width is None else 1


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel. N, K, M and the number of workers are not.

    Attributes:
        dtype: of the activations as the products take them, and of the decoded weights: bfloat16, or float16 (NVFP4
            only).
        fmt, layout: format of the weights, and their scale layout.
        a_layout: scale layout of activations in FP4; ``None``: they are of 16 bits.
        out_dtype: of the result.
        has_alpha: whether there is a factor.
        width: elements of k of an expert; each token has a factor for each. ``None``: there are no experts.
        tokens: rows of activations of a tile.
        splits: CTAs of a cluster, which share the sums of a tile; 0: any number of CTAs shares all sums.
        stages: chunks of codes under way.
        token_stages: stages of activations under way.
        pdl: whether launches are programmatic dependent launches.
    """

    dtype: torch.dtype
    fmt: FP4Format
    layout: ScaleLayout
    a_layout: ScaleLayout | None
    out_dtype: torch.dtype
    has_alpha: bool
    width: int | None
    tokens: int
    splits: int
    stages: int
    token_stages: int
    pdl: bool

    @property
    def groups(self) -> int:
        """Warpgroups that multiply."""
        return TILES[self.tokens]

    @property
    def rows(self) -> int:
        """Rows of the weight of a tile."""
        return rows_of(self.tokens)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return (self.groups + 1) * WARPGROUP

    @property
    def arranges(self) -> bool:
        """Whether CTAs put the activations in order themselves, not a kernel before this one."""
        return arranges(self.tokens, self.splits)

    @property
    def by_warp(self) -> bool:
        """Whether warps multiply each by itself, not warpgroups."""
        return self.tokens <= BY_WARP

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that multiplies, and of another: together no more than all have at the launch."""
        if self.arranges:
            return 88, 128
        return {2: (232, 40) if self.width is not None else (240, 24), 4: (112, 32)}[self.groups]

    @property
    def sum_tile(self) -> SumTile:
        """Where a cluster's sums lie, in place of the codes."""
        return SumTile(self.tokens, self.rows)

    @property
    def arranged(self) -> activation_tiles.Config:
        """How the activations are put in order."""
        return activation_tiles.Config(self.dtype, self.fmt, self.a_layout, self.by_warp, CHUNK, self.pdl)

    def workspace_bytes(self, k: int, workers: int, *, shares: bool) -> int:
        """Bytes for each tile of activations: for these in order; with experts for their factors; and, if sums are
        shared, for those that ``workers`` leave for others, and the flags of these. All tiles of the first come first,
        then all of the next."""
        activations = self.tokens * -(-k // CHUNK) * CHUNK * self.dtype.itemsize
        factors = 0 if self.width is None else self.tokens * (k // self.width) * 4
        return activations + factors + (workers * (self.rows * self.tokens * 4 + self.groups * 4) if shares else 0)

    @property
    def chunks(self) -> WeightChunks:
        """Chunks of the weight, one a stage."""
        return WeightChunks(self.fmt, self.layout, self.rows)

    @property
    def span(self) -> int:
        """Quarters of a chunk in a stage of activations."""
        return span_of(self.tokens, self.width)

    @property
    def quarter_bytes(self) -> int:
        """Activations of a quarter."""
        return self.tokens * TILE_LINE

    @property
    def token_bytes(self) -> int:
        """Activations of a stage."""
        return self.span * self.quarter_bytes

    @property
    def factor_bytes(self) -> int:
        """Factors of an expert, beside a stage of activations."""
        return 0 if self.width is None else self.tokens * 4

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        stages = self.stages * self.chunks.size_bytes + self.token_stages * (self.token_bytes + self.factor_bytes)
        return stages + BARRIER_BYTES

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if arch.name != "sm_90a":
            return f"wgmma is of sm_90a; this is {arch.name}"
        if self.splits and self.tokens > CLUSTER_TOKENS:
            return f"clusters have tiles of at most {CLUSTER_TOKENS} tokens"
        if self.splits > 1 and self.sum_tile.size_bytes > self.stages * self.chunks.code_bytes:
            return f"{self.sum_tile.size_bytes} bytes of sums do not fit in place of {self.stages} stages of codes"
        if self.width is not None and (self.width % CHUNK or self.tokens not in EXPERT_TILES or self.splits):
            return f"experts have whole chunks of {CHUNK}, tiles of {EXPERT_TILES} tokens, and no clusters"
        return self.chunks.reason_not_copied or reason_beyond(self.dtype, self.fmt, self.smem_bytes, arch)


def plan(
    *,
    dtype: torch.dtype,
    fmt: FP4Format,
    layout: ScaleLayout,
    a_layout: ScaleLayout | None,
    out_dtype: torch.dtype,
    has_alpha: bool,
    width: int | None = None,
    tokens: int,
    splits: int = 0,
    arch: Arch,
    pdl: bool,
) -> Config | None:
    """The configuration with the most stages that ``arch`` has room for; ``None`` if it has room for none."""
    for stages in range(6, 2, -1):
        # A stage of codes lasts a chunk, whatever one of activations lasts.
        wanted = stages if tokens <= 32 else {64: 8, 128: 7, 256: 5}[tokens] // span_of(tokens, width)
        config = Config(dtype, fmt, layout, a_layout, out_dtype, has_alpha, width, tokens, splits, stages, wanted, pdl)
        if config.reason_unsupported(arch) is None:
            return config
    return None
