"""Reference of ``fp4_quantize_per_token``, and the quantisation that all references with row scales use."""

from torch import Tensor, full_like, nan, where

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.formats.fp4 import EXTREME_ROW_POWER, EXTREME_ROW_SCALE, NVFP4_MAX, SMALLEST_ROW_SCALE
from torch_cute_ops.reference.fp4_quantize import quantize_rows


def quantize_rows_per_token(
    value: Tensor, scale_layout: str, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise fp32 rows (..., K) to NVFP4. Return packed codes (..., K/2), block scales in ``scale_layout``, and the
    scales of the M flattened rows, (M,) fp32.

    ``amax`` contains the largest magnitude of each row, (..., 1), if ``value`` contains only some columns of the rows.
    """
    if amax is None:
        amax = value.abs().amax(-1, keepdim=True)
    # Divide by a tensor, because torch on a GPU replaces the division by a Python number by a multiplication with the
    # reciprocal.
    row_scale = amax / full_like(amax, NVFP4_MAX)
    row_scale = where(amax < NVFP4_MAX * SMALLEST_ROW_SCALE, 0.0, row_scale)
    row_scale = where(amax.isfinite(), row_scale, nan)
    # Multiply an extreme row by a power of two, so that no step of its quantisation over- or underflows.
    power = where(row_scale < 1 / EXTREME_ROW_SCALE, EXTREME_ROW_POWER, 1.0)
    power = where(row_scale > EXTREME_ROW_SCALE, 1 / EXTREME_ROW_POWER, power)
    global_scale = where(row_scale > 0, 1 / (row_scale * power), row_scale)
    return *quantize_rows(value * power, NVFP4, global_scale, scale_layout), row_scale.flatten()


def fp4_quantize_per_token(input: Tensor, scale_layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise ``input`` (..., K) to NVFP4 with a scale per row; see the op's docstring."""
    return quantize_rows_per_token(input.float(), scale_layout)
