"""Sizes of activations that are rearranged for MMAs with an FP4 weight (``kernels.common.fp4.activations``): no device
code. Limits of the kernels that decode FP4 weights: no device code. Sizes of the chunks of an FP4 weight in shared
memory: no device code."""

import math
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from torch_cute_ops.formats import NVFP4, SCALE_LAYOUTS, FP4Format, ScaleLayout
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.runtime.arch import Arch

# activation layout
#
# Sizes of activations that are rearranged for MMAs with an FP4 weight (``kernels.common.fp4.activations``): no device
# code.

K_TILE: Final = 256
"""Elements of k that are rearranged together; GEMMs over experts may use half of it."""
ATOM_M: Final = 8
ATOM_ROW_BYTES: Final = 128
"""Bytes of a token in a tile."""
ATOM_BYTES: Final = ATOM_M * ATOM_ROW_BYTES
"""Bytes of a tile of 8 tokens x 64 positions of 16 bits."""
Quantises = Literal["plain", "scaled"]


@dataclass(frozen=True)
class ActivationLayout:
    """How activations are read, and rearranged.

    Attributes:
        a_dtype: dtype of the activations as given: uint8 for FP4 codes, else bfloat16 or float16.
        dtype: dtype of what is written, which the MMAs take: that of the activations; float16 or bfloat16 for FP4
            codes; bfloat16 for float16 activations beside MXFP4 weights, which are rounded
            (``FP4Format.operand_dtype``).
        fmt: format of the weight, and of activations in FP4.
        layout: scale layout of activations in FP4; ``None`` for 16-bit ones.
        by_warp: whether the layout is that of warp-level MMAs (mma.sync), not that of wgmma.
        k_tile: elements of k that are rearranged together.
        gated: whether a row as given is 2K elements of 16 bits, gate and up, of which ``silu(gate) · up`` is a row of
            activations, rounded to their dtype where it is not quantised.
        quantises: whether what is given, in 16 bits, is quantised to FP4 first, as ``kernels.row_quant`` does it:
            ``"scaled"`` with a global scale, ``"plain"`` without one.
    """

    a_dtype: torch.dtype
    dtype: torch.dtype
    fmt: FP4Format
    layout: ScaleLayout | None
    by_warp: bool
    k_tile: int
    gated: bool = field(default=False, kw_only=True)
    quantises: Quantises | None = field(default=None, kw_only=True)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in a chunk."""
        return self.k_tile * self.dtype.itemsize

    def reason_unsupported(self) -> str | None:
        """Why such activations cannot be rearranged; ``None`` if they can."""
        if (self.a_dtype == torch.uint8) == (self.layout is None):
            scales = "no scales" if self.layout is None else "scales"
            return f"activations in {self.a_dtype} with {scales}: those in FP4 are uint8 and have scales, others none"
        if (self.gated or self.quantises) and self.layout is not None:
            return "activations in FP4 have no gate in front, and are not quantised again"
        held = torch.float16 if self.quantises else self.a_dtype
        if self.layout is None and self.dtype != self.fmt.operand_dtype(held):
            return f"activations in {self.a_dtype} are not multiplied as {self.dtype} beside {self.fmt.name} weights"
        return None


# limits
#
# Limits of the kernels that decode FP4 weights: no device code.


def reason_undecodable(dtype: torch.dtype, fmt: FP4Format, smem_bytes: int, arch: Arch) -> str | None:
    """Why ``dtype`` cannot hold decoded weights, or ``arch`` cannot hold a CTA; ``None`` if both can."""
    if dtype == torch.float16 and fmt != NVFP4:
        return f"decoded {fmt.name} weights exceed float16"
    if smem_bytes > arch.smem_per_cta:
        return f"needs {smem_bytes} bytes of shared memory; {arch.name} has {arch.smem_per_cta}"
    return None


# weight chunks
#
# Sizes of the chunks of an FP4 weight in shared memory: no device code.

SCALE_TILE_ROWS: Final = SCALE_LAYOUTS["128x4"].tile_rows
"""Rows of a tile of scales; tiles are copied whole."""
SCALE_TILE_BYTES: Final = SCALE_TILE_ROWS * TILE_BLOCKS
"""Bytes of a tile of scales, 128 rows x 4 blocks."""
BOX_BYTES: Final = 16
"""The least bytes of a row in a box of a tensor map."""


@dataclass(frozen=True)
class WeightTile:
    """Chunks of ``elements`` of k, 256 or 128, of ``rows`` rows, a multiple of 8. ``spread``: whether their k may begin
    in the middle of a tile of scales; rows may anyway."""

    fmt: FP4Format
    layout: ScaleLayout
    tile_n: int
    k_tile: int = K_TILE
    spread: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of codes of a row in a chunk: a whole cache line, or half of one."""
        return self.k_tile // 2

    @property
    def blocks(self) -> int:
        """Blocks of a row in a chunk."""
        return self.k_tile // self.fmt.block_size

    @property
    def scale_columns(self) -> int:
        """Scales of a row in a stage: those of a chunk; spread, of whole tiles around it."""
        return self.blocks + TILE_BLOCKS * self.spread

    @property
    def code_bytes(self) -> int:
        """Codes of a chunk."""
        return self.tile_n * self.row_bytes

    @property
    def scale_row_tiles(self) -> int:
        """Most tiles of scales that a chunk spans along the rows; 0 in the linear layout."""
        last_start = SCALE_TILE_ROWS - math.gcd(self.tile_n, SCALE_TILE_ROWS)
        return 0 if self.layout.is_linear else -(-(last_start + self.tile_n) // SCALE_TILE_ROWS)

    @property
    def scale_bytes(self) -> int:
        """Scales of a chunk."""
        return (self.scale_row_tiles * SCALE_TILE_ROWS or self.tile_n) * self.scale_columns

    @property
    def reason_not_copied(self) -> str | None:
        """Why a tensor map cannot copy a chunk's scales; ``None`` if one can, or none is needed."""
        if self.layout.is_linear and self.blocks < BOX_BYTES:
            return f"a box of linear scales has {BOX_BYTES} bytes of a row; {self.k_tile} elements have {self.blocks}"
        return None

    @property
    def size_bytes(self) -> int:
        """A chunk, codes and scales."""
        return self.code_bytes + self.scale_bytes
