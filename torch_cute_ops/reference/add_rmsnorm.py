"""Reference of ``add_rmsnorm``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.add_rmsnorm_fp4quant import add_rows
from torch_cute_ops.reference.rmsnorm_fp4quant import rmsnorm_rows


def add_rmsnorm(input: Tensor, residual: Tensor, **named: Any) -> Tensor:
    """Add ``input`` to ``residual`` in place, then normalise the sum and round it to the dtype of ``input``; see the
    op's docstring."""
    return rmsnorm_rows(add_rows(input, residual), **named).to(input.dtype).contiguous()
