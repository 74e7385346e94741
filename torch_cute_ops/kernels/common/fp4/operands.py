"""What a GEMM by warpgroup MMA with an FP4 weight multiplies: no device code."""

from dataclasses import dataclass

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.fp4.layouts import ActivationLayout, Quantises, WeightTile, reason_undecodable
from torch_cute_ops.runtime.arch import Arch


@dataclass(frozen=True)
class FP4Operands:
    """Formats of the activations and of the weight.

    The tensors, with M rows of activations, N rows of the weight and K elements of k: ``a`` is (M, K), or (M, K/2)
    codes, ``b`` (K/2, N) codes, the transposed view of a row-major (N, K/2) weight. Scales of codes are e4m3, or uint8
    for ue8m0: (M, K/B) and (N, K/B) or, tiled, (rows, blocks) padded to whole tiles; ``None`` for 16-bit activations.
    With a gate in front of these ``a`` is (M, 2K). Where they are quantised first, their scale is the global one, (1,)
    float32, or ``None``.

    Attributes:
        a_dtype: dtype of the activations: uint8 for FP4 codes, else bfloat16 or float16.
        dtype: dtype of the MMAs' operands, the decoded weight and the activations: bfloat16, or float16 (NVFP4 only).
        fmt, layout: format and scale layout of the weight.
        a_layout: scale layout of activations in FP4; ``None`` for 16-bit ones.
        gated: whether the activations are ``silu(gate) · up`` of the two halves of each row of ``a``.
        quantises: whether they are quantised to ``fmt`` first; both as of ``ActivationLayout``.
    """

    a_dtype: torch.dtype
    dtype: torch.dtype
    fmt: FP4Format
    layout: ScaleLayout
    a_layout: ScaleLayout | None
    gated: bool = False
    quantises: Quantises | None = None

    @property
    def decodes_both(self) -> bool:
        """Whether activations are multiplied as decoded FP4 numbers too."""
        return self.a_layout is not None or self.quantises is not None

    def arranged(self, *, by_warp: bool, k_tile: int) -> ActivationLayout:
        """How the activations are rearranged for MMAs of warps, or of warpgroups."""
        kinds = self.a_dtype, self.dtype, self.fmt, self.a_layout
        return ActivationLayout(*kinds, by_warp, k_tile, gated=self.gated, quantises=self.quantises)

    def reason_unsupported(
        self, arranged: ActivationLayout, weight_tile: WeightTile, smem_bytes: int, arch: Arch
    ) -> str | None:
        """Why a kernel with these layouts cannot run on ``arch``; ``None`` if it can."""
        if not arch.has_wgmma:
            return f"{arch.name} has no wgmma instructions"
        return (
            weight_tile.reason_not_copied
            or arranged.reason_unsupported()
            or reason_undecodable(self.dtype, self.fmt, smem_bytes, arch)
        )
