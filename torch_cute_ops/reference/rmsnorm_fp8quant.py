"""Reference of ``rmsnorm_fp8quant``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.fp8_quantize import fp8_quantize
from torch_cute_ops.reference.rmsnorm_fp4quant import normalised


def rmsnorm_fp8quant(**named: Any) -> tuple[Tensor, Tensor]:
    """Normalise ``input`` (..., H), then apply ``fp8_quantize``; see the op's docstring."""
    norm, rest = normalised(**named)
    return fp8_quantize(norm, **rest)
