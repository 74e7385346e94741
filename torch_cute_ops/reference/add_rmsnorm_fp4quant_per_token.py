"""Reference of ``add_rmsnorm_fp4quant_per_token``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.add_rmsnorm_fp4quant import add_rows
from torch_cute_ops.reference.rmsnorm_fp4quant_per_token import rmsnorm_fp4quant_per_token


def add_rmsnorm_fp4quant_per_token(input: Tensor, residual: Tensor, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Add ``input`` to ``residual`` in place, then apply ``rmsnorm_fp4quant_per_token`` to the sum; see the op's
    docstring."""
    return rmsnorm_fp4quant_per_token(input=add_rows(input, residual), **named)
