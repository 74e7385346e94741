"""Reference of ``all_reduce_add_rmsnorm_fp4quant``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.add_rmsnorm_fp4quant import add_rmsnorm_fp4quant
from torch_cute_ops.runtime.groups import sum_over_ranks


def all_reduce_add_rmsnorm_fp4quant(input: Tensor, group: str, **named: Any) -> tuple[Tensor, Tensor]:
    """Sum ``input`` over the ranks, then apply ``add_rmsnorm_fp4quant`` to the sum; see the op's docstring."""
    return add_rmsnorm_fp4quant(input=sum_over_ranks(input, group), **named)
