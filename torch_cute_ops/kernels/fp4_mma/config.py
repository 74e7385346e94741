"""Configuration of the FP4 GEMM with mma.sync. No device code."""

from collections import namedtuple
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.core.layouts import Epilogue, PartialSums, first_fit
from torch_cute_ops.kernels.common.fp4.layouts import reason_undecodable
from torch_cute_ops.runtime.arch import Arch

TILE_N: Final = 128
"""Number of weight rows that a CTA multiplies."""
K_TILE: Final = 256
"""Number of elements along K of a stage: 128 bytes of codes per row, which is a cache line."""
TILES_M: Final = (8, 16, 32, 64)
"""Supported ``tile_m``, the number of rows of activations that a CTA multiplies."""
RESERVED_BYTES: Final = 1024
"""Bytes of shared memory that CUDA reserves for each CTA (CUDA C++ Programming Guide, "Compute Capabilities")."""
WARPS: Final = 8
THREADS: Final = 32 * WARPS
STAGES: Final = range(6, 2, -1)
"""Supported numbers of stages, the largest first."""


class Arguments(namedtuple("Arguments", "a a_scale b b_scale alpha bias row_scale out")):
    """Run-time arguments, in order.

    M is the number of rows of activations, N the number of rows of the weight (a multiple of 8), and K the number of
    elements of a row (a multiple of 32).

    Attributes:
        a: (M, K) bfloat16 or float16, or (M, K/2) uint8 FP4 codes.
        a_scale: block scales of FP4 ``a``, in ``Config.a_layout``, or None for 16-bit ``a``.
        b: (K/2, N) uint8, the transposed view of a row-major (N, K/2) weight.
        b_scale: block scales of ``b``: (N, K/B) if linear, the shape ``ScaleLayout.shape`` if tiled; e4m3, or uint8 for
            ue8m0.
        alpha: (1,) or (N,) float32, or None, as ``Config.epilogue`` says.
        bias: (N,), or None.
        row_scale: (M,) float32, or None.
        out: (M, N), written.
    """


@dataclass(frozen=True)
class Config:
    """Static parameters of the FP4 GEMM with mma.sync. M, N and K are run-time values.

    Attributes:
        dtype: dtype of the MMAs' operands (activations, decoded weight): bfloat16, or float16 (NVFP4 only), or uint8 if
            the MMAs multiply FP4 codes.
        fmt, layout: format and scale layout of the weight.
        epilogue: operations on the finished accumulators.
        tile_m: number of rows of activations that a CTA multiplies.
        split_k: number of CTAs of a cluster that split a tile's K range.
        stages: number of stages, which is the number of k tiles in flight.
        ctas_per_sm: number of CTAs that must fit into an SM.
        pdl: True to launch with programmatic dependent launch.
        a_layout: scale layout of the activations if both operands are FP4 and block-scaled MMAs multiply their codes,
            or None for 16-bit activations.
    """

    dtype: torch.dtype
    fmt: FP4Format
    layout: ScaleLayout
    epilogue: Epilogue
    tile_m: int
    split_k: int
    stages: int
    ctas_per_sm: int
    pdl: bool
    a_layout: ScaleLayout | None = None

    @cached_property
    def k_tile_blocks(self) -> int:
        """Number of blocks of a row in a k tile."""
        return K_TILE // self.fmt.block_size

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of the weight's codes in a stage."""
        return TILE_N * K_TILE // 2

    @cached_property
    def scale_bytes(self) -> int:
        """Bytes of the weight's scales in a stage."""
        return TILE_N * self.k_tile_blocks

    @cached_property
    def activation_bytes(self) -> int:
        """Bytes of the activations in a stage, without their scales."""
        return self.tile_m * (K_TILE // 2 if self.a_layout else K_TILE * self.dtype.itemsize)

    @cached_property
    def a_scale_bytes(self) -> int:
        """Bytes of the activations' scales in a stage. Each row has ``k_tile_blocks`` scales."""
        return self.tile_m * self.k_tile_blocks if self.a_layout else 0

    @cached_property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        return self.code_bytes + self.scale_bytes + self.activation_bytes + self.a_scale_bytes

    @cached_property
    def partial_sums(self) -> PartialSums:
        """Layout of the partial sums in shared memory."""
        return PartialSums(self.tile_m, TILE_N)

    @cached_property
    def smem_bytes(self) -> int:
        """Bytes of shared memory that a CTA takes. The partial sums overwrite the stages."""
        return max(self.stages * self.stage_bytes, self.partial_sums.size_bytes)

    @cached_property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return THREADS

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Return the reason that this kernel cannot run on ``arch``, or None if it can."""
        if self.a_layout is not None and not arch.has_block_scaled_mma:
            return f"needs block-scaled mma.sync; this is {arch.name}"
        if self.layout.tile_rows not in (0, TILE_N):
            return f"the layout {self.layout.name} is not for scales of weights"
        reason = self.epilogue.reason_unsupported() or reason_undecodable(self.dtype, self.fmt, self.smem_bytes, arch)
        if reason is not None:
            return reason
        if (self.smem_bytes + RESERVED_BYTES) * self.ctas_per_sm > arch.smem_per_sm:
            return f"{self.ctas_per_sm} CTAs need more shared memory than the {arch.smem_per_sm} bytes of an SM"
        return None


def plan(
    *,
    dtype: torch.dtype,
    fmt: FP4Format,
    layout: ScaleLayout,
    epilogue: Epilogue,
    tile_m: int,
    split_k: int,
    ctas_per_sm: int,
    arch: Arch,
    pdl: bool,
    a_layout: ScaleLayout | None = None,
) -> Config | None:
    """Return the configuration with the most stages that fit into the shared memory of ``arch``, or None if none
    fits."""
    weight, rest = (dtype, fmt, layout), (ctas_per_sm, pdl, a_layout)
    return first_fit((Config(*weight, epilogue, tile_m, split_k, stages, *rest) for stages in STAGES), arch)
