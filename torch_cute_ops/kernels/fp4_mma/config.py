"""Configuration of the FP4 GEMM by mma.sync: no device code."""

from collections import namedtuple
from dataclasses import dataclass

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.core.layouts import Epilogue, PartialSums, first_fit
from torch_cute_ops.kernels.common.fp4.layouts import reason_undecodable
from torch_cute_ops.runtime.arch import Arch

ROWS = 128
"""Rows of the weight of a CTA."""
CHUNK = 256
"""Elements of k of a stage: 128 bytes of codes a row, a whole cache line."""
TOKEN_TILES = (8, 16, 32, 64)
"""Rows of activations that a CTA may have."""
RESERVED = 1024
"""Bytes of shared memory that CUDA reserves for each CTA (CUDA C++ Programming Guide, "Compute Capabilities")."""
WARPS = 8
THREADS = 32 * WARPS
STAGES = range(6, 2, -1)


class Arguments(namedtuple("Arguments", "a a_scale b b_scale alpha bias out")):
    """The run-time arguments, in order. Sizes: M rows of activations, N rows of the weight, K elements of a sum, a
    multiple of 32; N is a multiple of 8.

    Attributes:
        a: (M, K) bfloat16 or float16, or (M, K/2) uint8.
        a_scale: the scales of the latter, in ``Config.a_layout``; or ``None``.
        b: (K/2, N) uint8: the transposed view of a row-major (N, K/2) weight.
        b_scale: its scales, (N, K/B) or, tiled, (rows, blocks) padded to whole tiles; e4m3, or uint8 for ue8m0.
        alpha: (1,) or (N,) float32, or ``None``: as ``Config.epilogue`` says.
        bias: (N,), or ``None``.
        out: (M, N), written.
    """


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel. N, K and M are not.

    Attributes:
        dtype: of the activations and the decoded weight, the operands of the MMAs: bfloat16, or float16 (NVFP4 only);
            uint8 where these multiply codes.
        fmt, layout: format and scale layout of the weight.
        epilogue: what is done to the sums.
        tokens: rows of activations of a CTA.
        splits: CTAs of a cluster, which share the k of a tile.
        stages: chunks in flight.
        ctas_per_sm: CTAs that an SM has room for.
        pdl: whether launches are programmatic dependent launches.
        a_layout: the layout of the activations' scales, where both operands are FP4 and block-scaled MMAs multiply
            their codes; ``None`` if the activations have 16 bits.
    """

    dtype: torch.dtype
    fmt: FP4Format
    layout: ScaleLayout
    epilogue: Epilogue
    tokens: int
    splits: int
    stages: int
    ctas_per_sm: int
    pdl: bool
    a_layout: ScaleLayout | None = None

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
        """Activations of a stage, without scales."""
        return self.tokens * (CHUNK // 2 if self.a_layout else CHUNK * self.dtype.itemsize)

    @property
    def token_scale_bytes(self) -> int:
        """Scales of these: rows of ``chunk_blocks``."""
        return self.tokens * self.chunk_blocks if self.a_layout else 0

    @property
    def stage_bytes(self) -> int:
        """One chunk of everything."""
        return self.code_bytes + self.scale_bytes + self.token_bytes + self.token_scale_bytes

    @property
    def sum_tile(self) -> PartialSums:
        """The sums in shared memory."""
        return PartialSums(self.tokens, ROWS)

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
        if self.a_layout is not None and not arch.has_block_scaled_mma:
            return f"needs block-scaled mma.sync; this is {arch.name}"
        if self.layout.tile_rows not in (0, ROWS):
            return f"the layout {self.layout.name} is not for scales of weights"
        reason = self.epilogue.reason_unsupported() or reason_undecodable(self.dtype, self.fmt, self.smem_bytes, arch)
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
    epilogue: Epilogue,
    tokens: int,
    splits: int,
    ctas_per_sm: int,
    arch: Arch,
    pdl: bool,
    a_layout: ScaleLayout | None = None,
) -> Config | None:
    """The configuration with the most stages that ``arch`` has room for; ``None`` if it has room for none."""
    weight, rest = (dtype, fmt, layout), (ctas_per_sm, pdl, a_layout)
    return first_fit((Config(*weight, epilogue, tokens, splits, stages, *rest) for stages in STAGES), arch)
