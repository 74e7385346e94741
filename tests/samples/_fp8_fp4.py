"""Samples and error inputs of the GEMMs of FP8 activations and FP4 weights."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from samples._fp4 import FORMATS
from samples._fp4_gemm import random_matrix
from samples._inputs import ErrorInput, Sample
from samples._rows import short
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.formats.scale_layout import from_linear

SCALE_NAN = {NVFP4: 0x7F, MXFP4: 0xFF}
LAYOUTS = ("128x4", "linear")
POWERS = {NVFP4: (0x30, 0x41, 8), MXFP4: (126, 129, 1)}
"""Range of the scale bytes for 1/2, 1 and 2, for each format."""


def with_fp4_weight(
    sample: Sample,
    fmt: FP4Format,
    layout: str,
    *,
    exact: bool = False,
    scales: tuple[int, ...] | None = None,
    scale_rows: Callable[[torch.Tensor], None] | None = None,
) -> Sample:
    """Return a call of ``mm_fp8_block`` or ``grouped_mm_fp8`` whose FP8 weight is replaced by an FP4 weight. If all
    scales of an expert are NaN, its new scales are NaN, too.

    Args:
        sample: call whose weight is replaced.
        fmt, layout: format of the weight, and layout of its scales.
        exact: True to give each weight row a single scale that is a power of two. With integers as activations, all
            sums are then exact.
        scales: range of the scale bytes, as in ``random_matrix``.
        scale_rows: function that changes the scale bytes (rows, K/block) in place.
    """
    a, fp8, a_scale, fp8_scale, *rest = sample.args
    is_grouped = fp8.dim() == 3
    (*lead, k), device = fp8.mT.shape, a.device
    rows = torch.Size(lead).numel()
    codes, scale = random_matrix(rows, k, fmt, "linear", device, POWERS[fmt] if exact else scales)
    bytes_ = scale.view(torch.uint8)
    if exact:
        bytes_.copy_(bytes_[:, :1].expand_as(bytes_))
    if scale_rows is not None:
        scale_rows(bytes_)
    if is_grouped and rows:
        unused = fp8_scale.isnan().flatten(1).all(1) if fp8_scale.numel() else torch.zeros(len(fp8), dtype=torch.bool)
        bytes_.view(len(fp8), -1)[unused] = SCALE_NAN[fmt]
    if layout == "linear":
        placed = scale.view(*lead, k // fmt.block_size)
    else:
        # Replace the zeros that ``from_linear`` writes to padding by NaN, which shows if the op reads padding.
        is_real = from_linear(torch.ones_like(bytes_), SCALE_LAYOUTS[layout]) == 1
        tiled = from_linear(bytes_, SCALE_LAYOUTS[layout])
        placed = torch.where(is_real, tiled, SCALE_NAN[fmt]).to(torch.uint8).view(fmt.scale_dtype)
    b = codes.view(*lead, k // 2).mT
    return replace(sample, args=(a, b, a_scale, placed, *rest), kwargs={**sample.kwargs, "block_size": fmt.block_size})


def formats_and_layouts() -> Iterator[tuple[FP4Format, str, str]]:
    """Yield (format, scale layout, name) for each pair of a format and a scale layout."""
    for fmt in FORMATS:
        for layout in LAYOUTS:
            yield fmt, layout, f"{fmt.name}-{layout}"


def scale_values(make: Callable[..., Sample]) -> Iterator[Sample]:
    """Yield calls whose scales are hard to re-encode in FP8. ``make`` builds a sample from a name, a format, a layout
    and additional arguments of ``with_fp4_weight``."""

    def zeros(scale: torch.Tensor) -> None:
        scale[1::3, ::2] = 0
        scale[::5] = 0

    for fmt in FORMATS:
        bits = f"{fmt.name}-scales"
        # Within 128 elements, scales differ by factors of up to 2^17 in NVFP4 and 2^40 in MXFP4, so that re-encoding
        # rounds elements with small scales.
        yield make(f"{bits}-apart", fmt, "128x4", scales=(1, 0x7F) if fmt == NVFP4 else (100, 140))
        yield make(f"{bits}-nan", fmt, "linear", scale_rows=_nans(fmt))
    yield make("nvfp4-scales-zero", NVFP4, "128x4", scale_rows=zeros)
    yield make("nvfp4-scales-subnormal", NVFP4, "linear", scales=(0, 9))
    yield make("nvfp4-scales-negative", NVFP4, "128x4", scale_rows=lambda scale: scale[1::3].add_(0x80))
    yield make("mxfp4-scales-least", MXFP4, "linear", scales=(0, 9))
    yield make("mxfp4-scales-large", MXFP4, "128x4", scales=(180, 190))


def _nans(fmt: FP4Format) -> Callable[[torch.Tensor], None]:
    def nans(scale: torch.Tensor) -> None:
        scale[1::3, 1::5] = SCALE_NAN[fmt]
        scale[2::9] = SCALE_NAN[fmt]

    return nans


def weight_errors(good: Sample, bad: Callable[..., ErrorInput], names: tuple[str, ...]) -> Iterator[ErrorInput]:
    """Yield wrong dtypes, shapes and formats of the weight and its scales. ``bad`` is as in
    ``_fp8_gemm.tensor_errors``."""
    by_name: dict[str, Any] = dict(zip(names, good.args, strict=False))
    b, scale = by_name["b"], by_name["b_scale"]
    for wrong in (torch.int8, torch.float8_e4m3fn):
        text = f"got b with dtype {short(wrong)}; expected uint8 or float4_e2m1fn_x2"
        yield bad(f"b-{short(wrong)}", TypeError, text, b=b.view(wrong))
    for tensor in (scale.view(torch.uint8), scale.float()):
        text = f"got b_scale with dtype {short(tensor.dtype)}; expected float8_e4m3fn"
        yield bad(f"b-scale-{short(tensor.dtype)}", TypeError, text, b_scale=tensor)
    for name in ("b", "b_scale"):
        yield bad(f"{name}-device", ValueError, f"{name} is on meta|a on meta", **{name: by_name[name].to("meta")})
        yield bad(f"{name}-flat", ValueError, f"got {name} with shape", **{name: by_name[name].reshape(-1)})
    yield bad("scale-narrow", ValueError, "got b_scale with shape .*, the scales of b", b_scale=scale[:, :-1])
    for value, given in (
        ("block_size=8", {"block_size": 8}),
        ("scale_format='ue8m0'", {"scale_format": "ue8m0"}),
        ("scale_layout='8x4' is for activations", {"scale_layout": "8x4"}),
        ("scale_layout='tiled' is unknown", {"scale_layout": "tiled"}),
    ):
        yield bad(value, ValueError, value, given)
