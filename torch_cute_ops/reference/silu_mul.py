"""Reference of ``silu_mul``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows


def silu_mul(input: Tensor, **named: Any) -> Tensor:
    """Gate ``input`` (..., 2I) and round the result to its dtype; see the op's docstring."""
    return silu_mul_rows(input, **named).to(input.dtype).contiguous()
