"""Sizes of activations that are rearranged for MMAs with an FP4 weight (``kernels.common.fp4.activations``): no device
code."""

from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout

CHUNK: Final = 256
"""Elements of k that are rearranged together; GEMMs over experts may use half of it."""
TILE_TOKENS: Final = 8
TILE_LINE: Final = 128
"""Bytes of a token in a tile."""
TILE_BYTES: Final = TILE_TOKENS * TILE_LINE
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
        chunk: elements of k of a chunk.
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
    chunk: int
    gated: bool = field(default=False, kw_only=True)
    quantises: Quantises | None = field(default=None, kw_only=True)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in a chunk."""
        return self.chunk * self.dtype.itemsize

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
