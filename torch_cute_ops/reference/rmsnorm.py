"""Reference of ``rmsnorm``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.rmsnorm_fp4quant import rmsnorm_rows


def rmsnorm(input: Tensor, **named: Any) -> Tensor:
    """Normalise ``input`` (..., H) and round the result to the dtype of ``input``; see the op's docstring."""
    return rmsnorm_rows(input, **named).to(input.dtype).contiguous()
