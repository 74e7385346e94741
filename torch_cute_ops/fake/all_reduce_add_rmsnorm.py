"""Outputs of ``all_reduce_add_rmsnorm``."""

from typing import Any

from torch_cute_ops.fake.add_rmsnorm import add_rmsnorm
from torch_cute_ops.formats.shapes import OutputShapes


def all_reduce_add_rmsnorm(*, group: str, **named: Any) -> OutputShapes:
    """Describe the outputs, which do not depend on the group."""
    return add_rmsnorm(**named)
