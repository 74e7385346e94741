"""Host-side constants, layouts and choices that GEMM kernels share. No device code."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, Protocol, TypeVar

import torch

from torch_cute_ops.runtime.arch import Arch

WARPGROUP: Final = 128
"""Number of threads of a warpgroup."""
SCHEDULERS: Final = 4
"""Number of warp schedulers of an SM. Warp w belongs to scheduler w % 4."""
WGMMA_M: Final = 64
"""Number of rows (M) of a wgmma instruction (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions")."""
WARP_MMA_TILE_M: Final = 8
"""Largest ``tile_m`` for which kernels with an FP4 weight use mma.sync instead of wgmma. On an H200, mma.sync is 7 %
faster than wgmma with tiles of 8 tokens. With tiles of 16 tokens it is not faster, because every warp reads all
activations. Exception: FP4 activations with a tile of one token use wgmma (``kernels.fp4_wgmma.mma.CodeMma``)."""
RASTER_WIDTH: Final = 8
"""Number of neighbouring tiles along M that are computed at the same time and share the weight in L2
(``kernels.common.core.launch.raster_tile``)."""


class Fits(Protocol):
    """A configuration that can report whether an architecture supports it."""

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Return the reason that this configuration cannot run on ``arch``, or None if it can."""


Config = TypeVar("Config", bound=Fits)


def first_fit(configs: Iterable[Config], arch: Arch) -> Config | None:
    """Return the first configuration that ``arch`` supports, or None if it supports none."""
    return next((config for config in configs if config.reason_unsupported(arch) is None), None)


@dataclass(frozen=True)
class PartialSums:
    """Layout of a tile's partial sums in shared memory: ``tile_m`` contiguous rows of float32.

    Attributes:
        tile_m: number of rows, one per token.
        tile_n: number of columns, one per row of the weight.
        split_n: number of columns at the end of the tile that several warps compute together.
        warp_split_k: number of warps that divide the k tiles of these ``split_n`` columns. Each warp stores its own
            partial sums.
    """

    tile_m: int
    tile_n: int
    split_n: int = 0
    warp_split_k: int = 1

    @cached_property
    def pitch(self) -> int:
        """Distance between neighbouring rows, in elements: ``tile_n`` plus four elements of padding, which avoid bank
        conflicts."""
        return self.tile_n + (self.warp_split_k - 1) * self.split_n + 4

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of shared memory that the partial sums take."""
        return self.tile_m * self.pitch * 4

    def received_bytes(self, split_k: int) -> int:
        """Return the number of bytes of partial sums that a CTA receives. The CTA reduces every ``split_k``-th row of
        the tile, and receives these rows from every CTA of the cluster."""
        return -(-self.tile_m // split_k) * split_k * self.tile_n * 4


AlphaKind = Literal["one", "column", "expert", "expert_column", "expert_half"]


@dataclass(frozen=True)
class Epilogue:
    """Epilogue of a GEMM: ``out = round(fl32(fl32(fl32(sum · row_scale) · alpha) + bias))``, where ``fl32`` rounds to
    fp32. All kernels compute the same bits from the same sum.

    Each operation rounds to nearest even. Multiplication and addition are never contracted to an fma. The last rounding
    is to the dtype of the result. If an operand is absent, its operation is omitted.

    Attributes:
        out_dtype: dtype of the result.
        alpha: kind of the float32 factors, or None without factors. ``"one"``: (1,). ``"column"``: (N,), one per column
            of the result. In grouped GEMMs, ``"expert"``: (E,), and ``"expert_column"``: (E, N). In kernels with a
            gate, ``"expert_half"``: (E, 2), the factors of an expert's gate and up.
        bias_dtype: dtype of the bias: float32 or the dtype of the result, or None without a bias. The bias is (N,), or
            (E, N) in grouped GEMMs.
        has_row_scale: True if each row of the result has a float32 factor, (M,). Kernels with two FP4 operands support
            these factors.
    """

    out_dtype: torch.dtype
    alpha: AlphaKind | None = None
    bias_dtype: torch.dtype | None = None
    has_row_scale: bool = False

    @cached_property
    def is_by_expert(self) -> bool:
        """Return True if ``alpha`` depends on the expert. (In a grouped GEMM, the bias always depends on the
        expert.)"""
        return self.alpha in ("expert", "expert_column")

    def reason_unsupported(self, *, is_grouped: bool = False) -> str | None:
        """Return the reason that a GEMM, grouped or not, cannot apply this epilogue, or None if it can."""
        if self.bias_dtype not in (None, torch.float32, self.out_dtype):
            return f"got bias with dtype {self.bias_dtype}; expected float32 or the result's, {self.out_dtype}"
        if self.alpha == "expert_half":
            return "alpha is 'expert_half', but the GEMM is not gated"
        if self.is_by_expert and not is_grouped:
            return f"alpha is {self.alpha!r}, but the GEMM is not grouped"
        if self.has_row_scale and is_grouped:
            return "grouped GEMMs take no row_scale"
        if self.alpha == "column" and is_grouped:
            return "alpha is 'column'; in a grouped GEMM columns belong to experts: 'expert_column'"
        return None
