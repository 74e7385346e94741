"""Outputs of ``rmsnorm_fp8quant``, and the FP8 output pair that every FP8-producing fake shares."""

from collections.abc import Sequence

import torch

from torch_cute_ops.fake.fp4_quantize import row_count
from torch_cute_ops.formats import FP8_TENSOR, FP8Format, ScaleLayout, resolve_fp8_format
from torch_cute_ops.formats.fp8 import COLUMN


def fp8_shapes(shape: Sequence[int], fmt: FP8Format, layout: ScaleLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes and of the scales of a tensor of ``shape`` (..., K)."""
    *lead, width = shape
    blocks = fmt.scales_per_row(width)
    if fmt == FP8_TENSOR:
        scale: tuple[int, ...] = (1,)
    elif layout == COLUMN:
        scale = (blocks, row_count(lead))
    else:
        scale = (*lead, blocks)
    return (*lead, width), scale


def empty_fp8(
    shape: Sequence[int], like: torch.Tensor, granularity: str, scale_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised codes and scales of a tensor of ``shape`` (..., K), where ``like`` is."""
    y, scale = fp8_shapes(shape, *resolve_fp8_format(granularity, scale_layout))
    return like.new_empty(y, dtype=torch.float8_e4m3fn), like.new_empty(scale, dtype=torch.float32)


def rmsnorm_fp8quant(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    granularity: str = "token",
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (..., H) and scales."""
    return empty_fp8(input.shape, input, granularity, scale_layout)
