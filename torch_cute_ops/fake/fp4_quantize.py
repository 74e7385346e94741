"""Outputs of ``fp4_quantize``, and the FP4 output pair that every FP4-producing fake shares."""

from collections.abc import Sequence

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout, resolve_fp4_format, resolve_scale_layout


def row_count(lead: Sequence[int]) -> int:
    """Rows of a tensor with these leading dimensions."""
    rows = 1
    for extent in lead:
        rows = rows * extent
    return rows


def fp4_shapes(shape: Sequence[int], fmt: FP4Format, layout: ScaleLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the packed codes and of the scales of a tensor of ``shape`` (..., K)."""
    *lead, width = shape
    blocks = width // fmt.block_size
    if layout.is_linear:
        scale: tuple[int, ...] = (*lead, blocks)
    else:
        scale = (layout.padded_rows(row_count(lead)), layout.padded_blocks(blocks))
    return (*lead, width // 2), scale


def empty_fp4(
    shape: Sequence[int], like: torch.Tensor, block_size: int, scale_format: str | None, scale_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised codes and scales of a tensor of ``shape`` (..., K), where ``like`` is."""
    fmt = resolve_fp4_format(block_size, scale_format)
    y, scale = fp4_shapes(shape, fmt, resolve_scale_layout(scale_layout))
    return like.new_empty(y, dtype=torch.uint8), like.new_empty(scale, dtype=fmt.scale_dtype)


def fp4_quantize(
    input: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (..., K/2) and scales."""
    return empty_fp4(input.shape, input, block_size, scale_format, scale_layout)
