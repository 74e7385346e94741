"""What a GEMM does to a finished sum before it stores it: no device code."""

from dataclasses import dataclass
from typing import Literal

import torch

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
