"""Outputs of ``rmsnorm_fp8quant`` and of other ops that quantise rows to FP8."""

from typing import Any

import torch

from torch_cute_ops.formats import resolve_fp8_format
from torch_cute_ops.formats.shapes import OutputShapes, fp8_shapes


def rmsnorm_fp8quant(input: torch.Tensor, granularity: str, scale_layout: str, **_: Any) -> OutputShapes:
    """Describe the codes (..., H) and the scales."""
    return fp8_outputs(input.shape, granularity, scale_layout)


def fp8_outputs(shape: tuple[int, ...], granularity: str, scale_layout: str) -> OutputShapes:
    """Describe the codes and the scales of a tensor of ``shape`` (..., K)."""
    y, scale = fp8_shapes(shape, *resolve_fp8_format(granularity, scale_layout))
    return [(y, torch.float8_e4m3fn), (scale, torch.float32)]
