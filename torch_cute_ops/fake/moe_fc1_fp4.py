"""Outputs of ``moe_fc1_fp4``."""

from typing import Any

import torch

from torch_cute_ops.fake.fp4_quantize import fp4_outputs
from torch_cute_ops.formats.scale_layout import layout_of_operand
from torch_cute_ops.formats.shapes import OutputShapes


def moe_fc1_fp4(
    a: torch.Tensor,
    w: torch.Tensor,
    a_scale: torch.Tensor,
    block_size: int,
    scale_format: str | None,
    scale_layout: str | None,
    **_: Any,
) -> OutputShapes:
    """Describe the codes (M, E·I/2), and their scales in the layout of ``a_scale``."""
    layout = layout_of_operand(a_scale).name if scale_layout is None else scale_layout
    return fp4_outputs((a.shape[0], gated_columns(w)), block_size, scale_format, layout)


def gated_columns(w: torch.Tensor) -> int:
    """Return the number of result columns, E·I, for a weight (E, H/2, 2·I)."""
    return w.shape[0] * (w.shape[2] // 2)
