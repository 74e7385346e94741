"""How a kernel of products over experts is built: no device code."""

from dataclasses import dataclass
from typing import Final

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.kernels import activation_tiles
from torch_cute_ops.kernels.activation_tiles import CHUNK
from torch_cute_ops.kernels.common.limits import reason_beyond
from torch_cute_ops.kernels.common.warpgroup import BY_WARP, GROUP_ROWS
from torch_cute_ops.kernels.common.weight_chunks import WeightChunks
from torch_cute_ops.runtime.arch import Arch

ROWS: Final = GROUP_ROWS
"""Rows of the weight that a CTA has: those of a warpgroup."""
BANDS: Final = ROWS // 16
"""Rows of a warp, so many times."""
FEEDERS: Final = 4
"""Warps that feed slots: one for each."""
GROUPS: Final = (8, 16, 24, 32)
"""Tokens of a unit."""
TILES: Final = (16, 32, 64, 128, 256, 512)
"""Tokens of a tile: as many as there are, if they fit. A wider tile has fewer stages."""
WAYS: Final = ((CHUNK, 4, 1), (CHUNK // 2, 4, 1), (CHUNK, 2, 2))
"""Elements of k of a chunk, units that a CTA works on at a time, warps that share the k of 16 rows. The first for which
there is room is taken."""
CLASSES: Final = 8
"""Of experts, those of one number modulo this: what work is shared out by."""
SCANNED: Final = 32
"""Tokens of a tile, at most, whose factors every CTA looks through itself."""
BARRIER_BYTES: Final = 512
LIST_BYTES: Final = 12 * (MAX_EXPERTS + 8)
"""Touched experts, where their units begin, how many tokens each is for, and how many units there are."""
PAIR_BYTES: Final = 8
"""A token that an expert is for, and its factor."""


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel. N, M and the number of experts are not.

    Attributes:
        dtype: of the activations as the products take them, and of the decoded weights: bfloat16, or float16 (NVFP4
            only).
        fmt, layout: format of the weights, and their scale layout.
        a_layout: scale layout of activations in FP4; ``None``: they are of 16 bits.
        out_dtype: of the result.
        width: elements of k of an expert.
        chunk: elements of k of a stage.
        group: tokens of a unit.
        tokens: of a tile.
        slots: units that a CTA works on at a time.
        parts: warps that share the k of 16 rows of a unit.
        stages: chunks under way, of all slots.
        classes: of experts: a CTA has the products of a slice of rows with some of the classes, or of two slices. 1:
            each CTA has a slice.
        pdl: whether launches are programmatic dependent launches.
    """

    dtype: torch.dtype
    fmt: FP4Format
    layout: ScaleLayout
    a_layout: ScaleLayout | None
    out_dtype: torch.dtype
    width: int
    chunk: int
    group: int
    tokens: int
    slots: int
    parts: int
    stages: int
    classes: int
    pdl: bool

    @property
    def threads(self) -> int:
        """Threads of a CTA that multiplies."""
        return 32 * (self.warps + FEEDERS)

    @property
    def places(self) -> int:
        """Warps that have the same rows."""
        return self.slots * self.parts

    @property
    def warps(self) -> int:
        """Warps that multiply."""
        return BANDS * self.places

    @property
    def by_warp(self) -> bool:
        """Whether warps multiply each by itself, not warpgroups."""
        return self.group <= BY_WARP

    @property
    def expert_chunks(self) -> int:
        """Chunks of an expert."""
        return -(-self.width // self.chunk)

    @property
    def list_threads(self) -> int:
        """Threads of a CTA that lists tokens: one for each."""
        return -(-max(self.capacity, 128) // 32) * 32

    @property
    def capacity(self) -> int:
        """Tokens that a list has room for: whole units."""
        return -(-self.tokens // self.group) * self.group

    @property
    def scans(self) -> bool:
        """Whether a CTA that multiplies looks through the factors itself, and so need not wait for the lists before it
        reads weights."""
        return self.tokens <= SCANNED

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that multiplies, and of another."""
        return 104, 56

    @property
    def arranged(self) -> activation_tiles.Config:
        """How the activations are put in order."""
        return activation_tiles.Config(self.dtype, self.fmt, self.a_layout, self.by_warp, self.chunk, self.pdl)

    @property
    def chunks(self) -> WeightChunks:
        """Chunks of the weight, one a stage."""
        return WeightChunks(self.fmt, self.layout, ROWS, self.chunk)

    @property
    def stage_bytes(self) -> int:
        """One chunk of everything, and of the unit's tokens which they are and their factors."""
        return self.chunks.size_bytes + self.group * (self.arranged.token_bytes + PAIR_BYTES)

    @property
    def sum_bytes(self) -> int:
        """Sums of the tile."""
        return self.tokens * ROWS * 4

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA that multiplies."""
        return self.stages * self.stage_bytes + self.sum_bytes + LIST_BYTES + BARRIER_BYTES

    def workers(self, n: int, sms: int) -> int:
        """CTAs that share the work on a tile: one for each SM, if none has parts of more than two slices then."""
        slices = -(-n // ROWS)
        return slices if self.classes == 1 or slices > sms else min(sms, slices * self.classes)

    def workspace_bytes(self, m: int, experts: int, workers: int) -> int:
        """Bytes for what the products read: for each tile and expert the activations of its tokens, in order, which
        tokens they are with what factors, and how many; and if CTAs share slices, for each tile and worker the sums
        that it leaves for another, and whether it has. All tiles of the first come first, then of the others."""
        entry = self.expert_chunks * self.arranged.token_bytes + PAIR_BYTES
        left = workers * (self.sum_bytes + 4) if self.classes > 1 else 0
        return -(-m // self.tokens) * (experts * (self.capacity * entry + 4) + left)

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if arch.name != "sm_90a":
            return f"is of sm_90a; this is {arch.name}"
        return self.chunks.reason_not_copied or reason_beyond(self.dtype, self.fmt, self.smem_bytes, arch)


def plan(
    *,
    dtype: torch.dtype,
    fmt: FP4Format,
    layout: ScaleLayout,
    a_layout: ScaleLayout | None,
    out_dtype: torch.dtype,
    width: int,
    group: int,
    tokens: int,
    classes: int,
    arch: Arch,
    pdl: bool,
) -> Config | None:
    """The configuration with the first of ``WAYS``, and then the most stages, that ``arch`` has room for; ``None`` if
    it has none for two of a slot."""
    for chunk, slots, parts in WAYS:
        for stages in range(4 * slots, slots, -slots):
            sizes = (width, chunk, group, tokens, slots, parts, stages, classes)
            config = Config(dtype, fmt, layout, a_layout, out_dtype, *sizes, pdl)
            if config.reason_unsupported(arch) is None:
                return config
    return None
