"""Reference of ``all_reduce_add_rmsnorm_fp8quant``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.add_rmsnorm_fp8quant import add_rmsnorm_fp8quant
from torch_cute_ops.runtime.groups import sum_over_ranks


def all_reduce_add_rmsnorm_fp8quant(input: Tensor, group: str, **named: Any) -> tuple[Tensor, Tensor]:
    """Sum ``input`` over the ranks, then apply ``add_rmsnorm_fp8quant`` to the sum; see the op's docstring."""
    return add_rmsnorm_fp8quant(input=sum_over_ranks(input, group), **named)
