"""Outputs of ``all_reduce_add_rmsnorm_fp4quant``."""

from typing import Any

from torch_cute_ops.fake.add_rmsnorm_fp4quant import add_rmsnorm_fp4quant
from torch_cute_ops.formats.shapes import OutputShapes


def all_reduce_add_rmsnorm_fp4quant(*, group: str, **named: Any) -> OutputShapes:
    """Describe the outputs, which do not depend on the group."""
    return add_rmsnorm_fp4quant(**named)
