"""Reference of ``rmsnorm_fp4quant_per_token``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.fp4_quantize_per_token import quantize_rows_per_token
from torch_cute_ops.reference.rmsnorm_fp4quant import normalised


def rmsnorm_fp4quant_per_token(**named: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise ``input`` (..., H), then apply ``fp4_quantize_per_token``; see the op's docstring."""
    norm, rest = normalised(**named)
    return quantize_rows_per_token(norm, **rest)
