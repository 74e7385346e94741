"""Reference of ``all_reduce_add_rmsnorm``."""

from typing import Any

from torch import Tensor

from torch_cute_ops.reference.add_rmsnorm import add_rmsnorm
from torch_cute_ops.runtime.groups import sum_over_ranks


def all_reduce_add_rmsnorm(input: Tensor, group: str, **named: Any) -> Tensor:
    """Sum ``input`` over the ranks, then apply ``add_rmsnorm`` to the sum; see the op's docstring."""
    return add_rmsnorm(input=sum_over_ranks(input, group), **named)
