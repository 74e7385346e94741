"""Definitions of the quantised formats in plain torch: element codes, packing, block scales and scale layouts."""

from torch_cute_ops.formats.fp4 import MXFP4, NVFP4, FP4Format, nvfp4_global_scale, resolve_fp4_format
from torch_cute_ops.formats.fp8 import (
    FP8_BLOCK128,
    FP8_BLOCK128_UE8M0,
    FP8_FORMATS,
    FP8_SCALE_LAYOUTS,
    FP8_TENSOR,
    FP8_TOKEN,
    MXFP8,
    FP8Format,
    resolve_fp8_format,
)
from torch_cute_ops.formats.scale_layout import (
    SCALE_LAYOUTS,
    ScaleLayout,
    as_tiles,
    convert_scales,
    resolve_scale_layout,
)

__all__ = [
    "FP8_BLOCK128",
    "FP8_BLOCK128_UE8M0",
    "FP8_FORMATS",
    "FP8_SCALE_LAYOUTS",
    "FP8_TENSOR",
    "FP8_TOKEN",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "SCALE_LAYOUTS",
    "FP4Format",
    "FP8Format",
    "ScaleLayout",
    "as_tiles",
    "convert_scales",
    "nvfp4_global_scale",
    "resolve_fp4_format",
    "resolve_fp8_format",
    "resolve_scale_layout",
]
