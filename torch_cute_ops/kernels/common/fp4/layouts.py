"""Operands of GEMMs with an FP4 weight, and the layouts of the operands in shared memory. No device code."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal

import torch

from torch_cute_ops.formats import NVFP4, SCALE_LAYOUTS, FP4Format, ScaleLayout
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.runtime.arch import Arch

K_TILE: Final = 256
"""Number of elements of a k tile along K: 128 bytes of codes, a cache line. GEMMs over experts may use half as many
elements."""
ATOM_M: Final = 8
"""Number of tokens of a swizzle atom of activations, which holds 8 tokens x 64 elements of 16 bits."""
ATOM_ROW_BYTES: Final = 128
"""Bytes of one token in a swizzle atom."""
ATOM_BYTES: Final = ATOM_M * ATOM_ROW_BYTES
"""Bytes of a swizzle atom."""
SCALE_TILE_ROWS: Final = SCALE_LAYOUTS["128x4"].tile_rows
"""Number of rows of a scale tile. Kernels always copy whole scale tiles."""
SCALE_TILE_BYTES: Final = SCALE_TILE_ROWS * TILE_BLOCKS
"""Bytes of a scale tile: 128 rows x 4 blocks."""
BOX_BYTES: Final = 16
"""Smallest number of bytes that a row of a TMA box may have."""
CODE_MMA_K: Final = 64
"""Number of elements along K of an MMA that multiplies FP4 codes of both operands (block-scaled mma.sync)."""
TOKEN_SCALE_BYTES: Final = 16
"""Bytes that follow a token's FP4 codes in a k tile: the scales of the token's blocks, and padding."""
PrologueQuant = Literal["plain", "scaled"]
"""Quantisation of activations to FP4 before the GEMM: ``"plain"`` without a global scale, ``"scaled"`` with a global
scale."""


@dataclass(frozen=True)
class ActivationLayout:
    """Format of activations, before and after they are rearranged to an operand of MMAs
    (``kernels.common.fp4.activations``).

    Attributes:
        a_dtype: dtype of the tensor ``a``: uint8 for FP4 codes, else bfloat16 or float16.
        dtype: dtype of the rearranged activations. 16-bit activations stay in their dtype, except that float16 becomes
            bfloat16 if the weight is MXFP4 (``FP4Format.operand_dtype``). FP4 codes become float16 or bfloat16, or stay
            codes (uint8) if block-scaled MMAs multiply them (``kernels.common.fp4.code_mma``).
        fmt: format of the weight, and of activations in FP4.
        layout: scale layout of activations in FP4, or None for 16-bit activations.
        by_warp: True for the operand layout of mma.sync, False for the operand layout of wgmma.
        k_tile: number of elements along K that are rearranged together.
        prologue_gate: activation function if a row of ``a`` consists of gate and up, 2K 16-bit elements, or None. A row
            of activations is then ``act(gate) · up``, rounded to the 16-bit dtype unless the activations are quantised.
        prologue_quant: kind of quantisation of 16-bit activations to FP4 (see ``PrologueQuant``), or None without
            quantisation.
    """

    a_dtype: torch.dtype
    dtype: torch.dtype
    fmt: FP4Format
    layout: ScaleLayout | None
    by_warp: bool
    k_tile: int
    prologue_gate: Gate | None = field(default=None, kw_only=True)
    prologue_quant: PrologueQuant | None = field(default=None, kw_only=True)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in a k tile of rearranged activations."""
        if self.dtype == torch.uint8:
            return self.k_tile // 2 + TOKEN_SCALE_BYTES
        return self.k_tile * self.dtype.itemsize

    def reason_unsupported(self) -> str | None:
        """Return the reason that these activations cannot be rearranged, or None if they can."""
        if (self.a_dtype == torch.uint8) == (self.layout is None):
            scales = "no scales" if self.layout is None else "scales"
            return (
                f"got activations in {self.a_dtype} with {scales}; FP4 activations are uint8 and have scales, "
                "16-bit activations have no scales"
            )
        if (self.prologue_gate is not None or self.prologue_quant is not None) and self.layout is not None:
            return "a gate or a quantisation before the GEMM takes 16-bit activations, not FP4"
        held = torch.float16 if self.prologue_quant else self.a_dtype
        if self.layout is None and self.dtype != self.fmt.operand_dtype(held):
            return f"activations in {self.a_dtype} are not multiplied as {self.dtype} with {self.fmt.name} weights"
        if self.dtype == torch.uint8 and not self.by_warp:
            return "warpgroup MMAs do not multiply FP4 codes"
        return None


@dataclass(frozen=True)
class WeightTile:
    """A weight's FP4 codes and block scales for one output tile and k tile, in shared memory.

    Attributes:
        fmt, layout: format and scale layout of the weight.
        tile_n: number of rows of the weight, a multiple of 8.
        k_tile: number of elements along K, 256 or 128.
        spread: True if an expert's range of k may begin in the middle of a scale tile. (The rows of the tile may always
            begin in the middle of a scale tile.)
    """

    fmt: FP4Format
    layout: ScaleLayout
    tile_n: int
    k_tile: int = K_TILE
    spread: bool = False

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row's codes: a cache line of 128 bytes, or half a line."""
        return self.k_tile // 2

    @cached_property
    def blocks(self) -> int:
        """Number of blocks of a row."""
        return self.k_tile // self.fmt.block_size

    @cached_property
    def scale_columns(self) -> int:
        """Number of scales per row in a stage. If ``spread``, the number includes all scales in the scale tiles that
        the row's blocks touch. Otherwise, the number equals the number of blocks."""
        return self.blocks + TILE_BLOCKS * self.spread

    @cached_property
    def code_bytes(self) -> int:
        """Number of bytes of the weight tile's codes."""
        return self.tile_n * self.row_bytes

    @cached_property
    def scale_row_tiles(self) -> int:
        """Largest number of scale tiles that the rows may span, or 0 in the linear layout."""
        last_start = SCALE_TILE_ROWS - math.gcd(self.tile_n, SCALE_TILE_ROWS)
        return 0 if self.layout.is_linear else -(-(last_start + self.tile_n) // SCALE_TILE_ROWS)

    @cached_property
    def scale_bytes(self) -> int:
        """Number of bytes of the weight tile's scales."""
        return (self.scale_row_tiles * SCALE_TILE_ROWS or self.tile_n) * self.scale_columns

    @cached_property
    def reason_not_copied(self) -> str | None:
        """Reason that TMA cannot copy the scales, or None. Tiled scales are not copied by TMA."""
        if self.layout.is_linear and self.blocks < BOX_BYTES:
            return (
                f"a TMA box of linear scales needs {BOX_BYTES} bytes per row; "
                f"{self.k_tile} elements have {self.blocks} scales"
            )
        return None

    @cached_property
    def size_bytes(self) -> int:
        """Number of bytes of the weight tile's codes and scales."""
        return self.code_bytes + self.scale_bytes


@dataclass(frozen=True)
class FP4Operands:
    """Formats of the activations and the weight of a GEMM with an FP4 weight.

    M is the number of rows of activations, N the number of rows of the weight, and K the number of elements of a row of
    either operand. ``a`` is (M, K) in 16 bits, or (M, K/2) uint8 FP4 codes. ``b`` is (K/2, N) uint8 FP4 codes, the
    transposed view of a row-major (N, K/2) weight. Block scales of FP4 codes are e4m3, or uint8 for ue8m0. Linear
    scales are (M, K/B) and (N, K/B) for blocks of B elements. Tiled scales have the shape ``ScaleLayout.shape``. 16-bit
    activations need no scales. With a gate before the GEMM, ``a`` is (M, 2K). With a quantisation before the GEMM, the
    scale of ``a`` is the global scale, (1,) float32, or None.

    Attributes:
        a_dtype: dtype of the activations: uint8 for FP4 codes, else bfloat16 or float16.
        dtype: dtype of the MMAs' operands (decoded weight, activations): bfloat16, or float16 (NVFP4 only), or uint8 if
            the MMAs multiply FP4 codes.
        fmt, layout: format and scale layout of the weight.
        a_layout: scale layout of activations in FP4, or None for 16-bit activations.
        prologue_gate: activation function if the activations are ``act(gate) · up``, where gate and up are the two
            halves of each row of ``a``, or None.
        prologue_quant: kind of quantisation of the activations to ``fmt`` before the GEMM, or None without
            quantisation.
    """

    a_dtype: torch.dtype
    dtype: torch.dtype
    fmt: FP4Format
    layout: ScaleLayout
    a_layout: ScaleLayout | None
    prologue_gate: Gate | None = None
    prologue_quant: PrologueQuant | None = None

    @cached_property
    def by_codes(self) -> bool:
        """True if MMAs multiply the FP4 codes of both operands, so that neither operand is decoded."""
        return self.dtype == torch.uint8

    @cached_property
    def decodes_both(self) -> bool:
        """True if the activations are FP4 numbers, too. Unless ``by_codes``, both operands are then decoded."""
        return self.a_layout is not None or self.prologue_quant is not None

    def reason_codes_unsupported(self, arch: Arch) -> str | None:
        """If ``by_codes``, return the reason that no MMA of ``arch`` multiplies the operands' codes, or None if
        ``arch`` supports the MMA. Otherwise return None."""
        if self.by_codes and not arch.has_block_scaled_mma:
            return f"needs block-scaled mma.sync; this is {arch.name}"
        return None

    def arranged(self, *, by_warp: bool, k_tile: int) -> ActivationLayout:
        """Return the layout of the rearranged activations, for mma.sync if ``by_warp``, otherwise for wgmma."""
        kinds = self.a_dtype, self.dtype, self.fmt, self.a_layout
        return ActivationLayout(
            *kinds, by_warp, k_tile, prologue_gate=self.prologue_gate, prologue_quant=self.prologue_quant
        )

    def reason_unsupported(
        self, arranged: ActivationLayout, weight_tile: WeightTile, smem_bytes: int, arch: Arch
    ) -> str | None:
        """Return the reason that a kernel with these layouts cannot run on ``arch``, or None if it can."""
        if not arch.has_wgmma:
            return f"{arch.name} has no wgmma instructions"
        return (
            weight_tile.reason_not_copied
            or arranged.reason_unsupported()
            or reason_undecodable(self.dtype, self.fmt, smem_bytes, arch)
        )


def reason_undecodable(dtype: torch.dtype, fmt: FP4Format, smem_bytes: int, arch: Arch) -> str | None:
    """Return the reason that ``dtype`` cannot hold decoded weights or that ``arch`` cannot run the CTA, or None."""
    if dtype == torch.float16 and fmt != NVFP4:
        return f"decoded {fmt.name} weights exceed float16"
    if smem_bytes > arch.smem_per_cta:
        return f"needs {smem_bytes} bytes of shared memory; {arch.name} has {arch.smem_per_cta}"
    return None
