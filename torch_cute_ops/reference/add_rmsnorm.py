"""Reference of ``add_rmsnorm``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.add_rmsnorm_fp4quant import add_rows
from torch_cute_ops.reference.rmsnorm import rmsnorm


def add_rmsnorm(input: Tensor, residual: Tensor, **named: Any) -> Tensor:
    """Add ``input`` to ``residual`` in place, then apply ``rmsnorm`` to the sum; see the op's docstring."""
    return rmsnorm(input=add_rows(input, residual), **named)
