"""Warpgroups (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"), and which tiles are left to single warps:
no device code. Which configuration of a kernel fits an SM: no device code. Width of the raster in which CTAs take tiles
of a GEMM (``kernels.common.core.tile_order``). No device code. Layout of a tile's sums in shared memory: no device
code. What a GEMM does to a finished sum before it stores it: no device code."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeVar

import torch

from torch_cute_ops.runtime.arch import Arch

# warpgroup
#
# Warpgroups (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"), and which tiles are left to single warps:
# no device code.

WARPGROUP: Final = 128
"""Threads."""
SCHEDULERS: Final = 4
"""Warp schedulers of an SM: warp w belongs to scheduler w % 4."""
GROUP_ROWS: Final = 64
"""Rows of the M side of a wgmma."""
BY_WARP: Final = 8
"""Most tokens of a tile, or of a unit of work, that warps multiply with FP4 weights each by itself, by mma.sync: 7 %
faster than wgmma for 8 tokens, no faster for 16, since every warp reads all activations (measured on an H200).
One row of codes is an exception (``kernels.fp4_wgmma.codes``)."""


# fit
#
# Which configuration of a kernel fits an SM: no device code.


class Fits(Protocol):
    """A configuration that knows where it cannot run."""

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""


Config = TypeVar("Config", bound=Fits)


def first_fit(configs: Iterable[Config], arch: Arch) -> Config | None:
    """The first configuration that can run on ``arch``; ``None`` if none can."""
    return next((config for config in configs if config.reason_unsupported(arch) is None), None)


# raster
#
# Width of the raster in which CTAs take tiles of a GEMM (``kernels.common.core.tile_order``). No device code.

RASTER_WIDTH: Final = 8
"""Tiles of rows of activations that run side by side, and share the weight in L2."""


# sum tile
#
# Layout of a tile's sums in shared memory: no device code.


@dataclass(frozen=True)
class SumTile:
    """fp32 sums of ``tokens`` rows of activations with ``rows`` rows of the weight, those of a token contiguous.

    Of the last ``shared`` rows there are ``turns`` partial sums, one behind the other.
    """

    tokens: int
    rows: int
    shared: int = 0
    turns: int = 1

    @property
    def pitch(self) -> int:
        """Elements from a token to the next: those of all rows, and four to avoid bank conflicts."""
        return self.rows + (self.turns - 1) * self.shared + 4

    @property
    def size_bytes(self) -> int:
        return self.tokens * self.pitch * 4

    def received_bytes(self, splits: int) -> int:
        """What the CTAs of a cluster send to one that adds up its tokens: every ``splits``-th."""
        return -(-self.tokens // splits) * splits * self.rows * 4


# epilogue
#
# What a GEMM does to a finished sum before it stores it: no device code.

AlphaKind = Literal["one", "column", "expert", "expert_column", "expert_half"]


@dataclass(frozen=True)
class Epilogue:
    """``out = round(fl32(fl32(sum · alpha) + bias))``, the same bits in every kernel.

    One fp32 multiplication and one fp32 addition, each rounded to nearest even and never contracted to an fma, then one
    rounding to the dtype of the result. What is absent is left out.

    Attributes:
        out_dtype: dtype of the result.
        alpha: fp32 factors: ``"one"`` (1,); ``"column"`` (N,), one for each column of the result; in grouped GEMMs
            ``"expert"`` (E,) and ``"expert_column"`` (E, N); of experts' gate and up ``"expert_half"`` (E, 2), which
            only kernels with a gate take. ``None``: there are none.
        bias_dtype: dtype of the bias, (N,), or (E, N) in grouped GEMMs: float32, or the dtype of the result. ``None``:
            there is none.
    """

    out_dtype: torch.dtype
    alpha: AlphaKind | None = None
    bias_dtype: torch.dtype | None = None

    @property
    def is_by_expert(self) -> bool:
        """Whether ``alpha`` depends on the expert; so does any bias of a grouped GEMM."""
        return self.alpha in ("expert", "expert_column")

    def reason_unsupported(self, *, is_grouped: bool = False) -> str | None:
        """Why a GEMM, or a grouped one, has no such epilogue; ``None`` if it has."""
        if self.bias_dtype not in (None, torch.float32, self.out_dtype):
            return f"bias has dtype {self.bias_dtype}; it has to be float32 or that of the result, {self.out_dtype}"
        if self.alpha == "expert_half":
            return "alpha is 'expert_half', but there is no gate"
        if self.is_by_expert and not is_grouped:
            return f"alpha is {self.alpha!r}, but the GEMM is not grouped"
        if self.alpha == "column" and is_grouped:
            return "alpha is 'column'; in a grouped GEMM each expert has its own columns: 'expert_column'"
        return None
