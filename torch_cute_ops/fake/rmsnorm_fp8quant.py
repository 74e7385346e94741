"""Outputs of ``rmsnorm_fp8quant`` and of other ops that quantise rows to FP8."""

from typing import Any

import torch

from torch_cute_ops.formats import FP8_SCALE_LAYOUTS, resolve_fp8_format
from torch_cute_ops.formats.interleave import INTERLEAVED_K
from torch_cute_ops.formats.shapes import OutputShapes, Shape, fp8_outputs


def rmsnorm_fp8quant(
    input: torch.Tensor,
    granularity: str,
    scale_layout: str | None,
    interleaved: bool,
    scale_format: str | None,
    **_: Any,
) -> OutputShapes:
    """Describe the codes (..., H), or (..., ⌈H/256⌉, 256) if they are interleaved, and the FP8 scales."""
    return quantised(input.shape, granularity, scale_layout, interleaved, scale_format)


def quantised(
    shape: Shape,
    granularity: str,
    scale_layout: str | None,
    interleaved: bool = False,
    scale_format: str | None = None,
) -> OutputShapes:
    """Describe the codes and scales that quantising a tensor of ``shape`` (..., K) to FP8 gives. If no layout is named,
    block scales of 128 may have any supported layout."""
    layouts = tuple(FP8_SCALE_LAYOUTS) if scale_layout is None else (scale_layout,)
    y, scale = fp8_outputs(shape, *resolve_fp8_format(granularity, scale_layout, scale_format), layouts)
    if interleaved:
        *lead, width = shape
        y = y._replace(shape=(*lead, -(-width // INTERLEAVED_K), INTERLEAVED_K))
    return y, scale
