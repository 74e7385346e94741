"""Reference of ``silu_mul``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows


def silu_mul(input: Tensor, **named: Any) -> Tensor:
    """Compute SwiGLU of ``input`` (..., 2I) and round the result to the dtype of ``input``; see the op's docstring."""
    return silu_mul_rows(input, **named).to(input.dtype).contiguous()
