"""Samples (valid calls) and error inputs of ``fp4_dequantize``."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from samples._fp4 import FORMATS, FP4, random_global_scale
from samples._inputs import ErrorInput, Sample
from samples._row_errors import out_errors
from samples._rows import DTYPES
from samples._weights import scale_stride_errors
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.formats.shapes import fp4_shapes


def random_blocks(*shape: int, fmt: FP4Format, layout: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random codes and scales of a tensor of ``shape`` (..., K). Scales contain no NaN, but their padding
    does."""
    y, scale = fp4_shapes(torch.Size(shape), fmt, SCALE_LAYOUTS[layout])
    codes = torch.randint(0, 256, y, dtype=torch.uint8, device=device)
    scales = torch.randint(0, 256, scale, dtype=torch.uint8, device=device)
    if layout == "linear":
        scales = torch.where((scales & 0x7F) == 0x7F, 0x38, scales)
    return codes, scales.view(fmt.scale_dtype)


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    yield from _grid(device)
    yield from _shapes(device)
    yield from _views(device)


def _grid(device: torch.device) -> Iterator[Sample]:
    rows = {"linear": 5, "128x4": 130, "8x4": 19}
    for fmt in FORMATS:
        for layout in SCALE_LAYOUTS:
            for dtype in DTYPES:
                blocks = random_blocks(rows[layout], 5 * fmt.block_size, fmt=fmt, layout=layout, device=device)
                kwargs: dict[str, Any] = {"block_size": fmt.block_size, "out_dtype": dtype}
                if fmt.has_global_scale and dtype is not torch.float16:
                    kwargs["global_scale"] = random_global_scale(device)
                yield Sample(f"{fmt.name}-{layout}-{str(dtype).removeprefix('torch.')}", blocks, kwargs)


def _shapes(device: torch.device) -> Iterator[Sample]:
    def sample(name: str, fmt: FP4Format, layout: str, *shape: int, **kwargs: Any) -> Sample:
        blocks = random_blocks(*shape, fmt=fmt, layout=layout, device=device)
        return Sample(name, blocks, {"block_size": fmt.block_size, **kwargs})

    for fmt in FORMATS:
        b = fmt.block_size
        yield sample(f"{fmt.name}-one-block", fmt, "linear", 1, b)
        yield sample(f"{fmt.name}-one-block-tiled", fmt, "128x4", 3, b)
        yield sample(f"{fmt.name}-1d", fmt, "linear", 6 * b)
        yield sample(f"{fmt.name}-3d", fmt, "linear", 2, 5, 4 * b)
        yield sample(f"{fmt.name}-3d-tiled", fmt, "8x4", 2, 5, 4 * b)
        yield sample(f"{fmt.name}-wide", fmt, "128x4", 2, 769 * 32)
    for layout in SCALE_LAYOUTS:
        yield sample(f"empty-{layout}", NVFP4, layout, 0, 80)
    yield sample("empty-3d", MXFP4, "linear", 2, 0, 64)
    yield sample("empty-3d-tiled", MXFP4, "8x4", 0, 3, 64)
    yield sample("1d-tiled", NVFP4, "128x4", 96)
    yield sample("4d-tiled", NVFP4, "128x4", 2, 2, 67, 64)
    yield sample("4d", NVFP4, "linear", 2, 2, 8, 64)
    yield sample("5d-tiled", NVFP4, "8x4", 2, 1, 3, 4, 64)
    # Pass the layout by name if the shape of the scales fits two layouts.
    yield sample("linear-like-8x4", NVFP4, "linear", 3, 1, 8, 64, scale_layout="linear")
    yield sample("8x4-like-linear", NVFP4, "8x4", 3, 1, 8, 64, scale_layout="8x4")
    yield sample("linear-like-128x4", MXFP4, "linear", 2, 1, 32, 4, 128, scale_layout="linear")
    yield sample("128x4-like-linear", MXFP4, "128x4", 2, 1, 32, 4, 128, scale_layout="128x4")
    for layout, rows in (("128x4", 130), ("8x4", 19)):
        y, scale = random_blocks(rows, 96, fmt=NVFP4, layout=layout, device=device)
        tile_rows = 128 if layout == "128x4" else 8
        matrix = scale.reshape(scale.shape[0] * tile_rows, scale.shape[1] * 4)
        for name, given in (("tiles", scale), ("flat", scale.flatten()), ("matrix", matrix)):
            yield Sample(f"named-{layout}-{name}", (y, given), {"scale_layout": layout})
    yield sample("many-rows", NVFP4, "128x4", 2500, 48)
    yield sample("widest", NVFP4, "linear", 1, 65536)
    for shape in ((), (1, 1)):
        g = random_global_scale(device).reshape(shape)
        yield sample(f"global-scale-{len(shape)}d", NVFP4, "linear", 3, 64, global_scale=g)
    for power in (-60, 60):
        g = torch.full((1,), 2.0**power, device=device)
        yield sample(f"global-scale-2^{power}", NVFP4, "linear", 3, 64, global_scale=g, out_dtype=torch.float32)
    yield sample("format-named-e4m3", NVFP4, "linear", 2, 32, scale_format="e4m3")
    yield sample("format-named-ue8m0", MXFP4, "linear", 2, 32, scale_format="ue8m0")
    every_byte = torch.arange(256, dtype=torch.uint8, device=device)
    for fmt in FORMATS:
        codes = every_byte[:, None].expand(256, 256) if fmt == NVFP4 else every_byte.repeat(256, 1)
        scale = every_byte.repeat_interleave(512 // fmt.block_size).view(256, -1)
        kwargs = {"block_size": fmt.block_size, "out_dtype": torch.float32}
        yield Sample(f"every-code-and-scale-{fmt.name}", (codes.t().contiguous(), scale.view(fmt.scale_dtype)), kwargs)
    g = torch.full((1,), 100.0, device=device)
    blocks = random_blocks(4, 64, fmt=NVFP4, layout="8x4", device=device)
    yield Sample("positional", (*blocks, g, 16, "e4m3", "8x4", torch.float16))


def _views(device: torch.device) -> Iterator[Sample]:
    fp4, e8m0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu

    def sample(name: str, fmt: FP4Format, layout: str, y: torch.Tensor, scale: torch.Tensor) -> Sample:
        return Sample(name, (y, scale), {"block_size": fmt.block_size})

    y, scale = random_blocks(6, 128, fmt=NVFP4, layout="linear", device=device)
    linear = (NVFP4, "linear")
    yield sample("y-float4", *linear, y.view(fp4), scale)
    wider = random_blocks(6, 256, fmt=NVFP4, layout="linear", device=device)[0]
    yield sample("codes-row-strided", *linear, wider[:, :64], scale)
    yield sample("codes-columns-first", *linear, y.t().contiguous().t(), scale)
    yield sample("codes-offset", *linear, wider[:, 1:65], scale)
    yield sample("every-other-row", *linear, y[::2], scale[::2])
    yield sample("rows-expanded", *linear, y[:1].expand(6, 64), scale)
    y, scale = random_blocks(3, 4, 64, fmt=NVFP4, layout="linear", device=device)
    yield sample("leading-transposed", *linear, y.transpose(0, 1), scale.transpose(0, 1))
    y, scale = random_blocks(5, 96, fmt=MXFP4, layout="linear", device=device)
    yield sample("scale-e8m0", MXFP4, "linear", y, scale.view(e8m0))
    yield sample("y-float4-scale-e8m0", MXFP4, "linear", y.view(fp4), scale.view(e8m0))
    y, scale = random_blocks(5, 96, fmt=MXFP4, layout="128x4", device=device)
    yield sample("scale-e8m0-tiled", MXFP4, "128x4", y, scale.view(e8m0))
    padded = random_blocks(256, 192, fmt=NVFP4, layout="128x4", device=device)[1]
    y, scale = random_blocks(130, 96, fmt=NVFP4, layout="128x4", device=device)
    yield sample("scale-tiled-strided", NVFP4, "128x4", y, padded[:, :2])
    yield Sample("defaults", (y, scale))


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    y, scale = random_blocks(4, 64, fmt=NVFP4, layout="linear", device=device)
    meta = torch.device("meta")
    for error in FP4.errors(torch.zeros(4, 128, dtype=torch.bfloat16, device=device)):
        if not error.name.startswith(("input-", "width-")):
            mxfp4 = error.name == "global-scale-mxfp4"
            given = scale[:, :2].view(torch.uint8) if mxfp4 else scale
            yield replace(error, args=(y, given), kwargs={"scale_layout": "linear", **error.kwargs})

    def bad(
        name: str, error: type[Exception], match: str, y: torch.Tensor = y, scale: torch.Tensor = scale, **kwargs: Any
    ) -> ErrorInput:
        return ErrorInput(name, (y, scale), {"scale_layout": "linear", **kwargs}, error, match)

    for dtype in (torch.int8, torch.int32, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        yield bad(f"y-{short}", TypeError, f"got y with dtype {short}; expected uint8 or float4", y=y.to(dtype))
    yield bad("y-0d", ValueError, "y has no dimension", y=y[0, 0])
    yield bad("y-width", ValueError, "y holds 40 elements per row; .* 16", y=y[:, :20])
    yield bad("y-width-mxfp4", ValueError, "y holds 48 elements per row; .* 32", y=y[:, :24], block_size=32)
    yield bad("y-width-zero", ValueError, "y holds 0 elements per row", y=y[:, :0])
    for wrong in (
        scale.view(torch.uint8),
        scale.float(),
        scale.view(torch.float8_e8m0fnu),
        scale.view(torch.float8_e5m2),
    ):
        short = str(wrong.dtype).removeprefix("torch.")
        yield bad(f"scale-{short}", TypeError, f"got scale with dtype {short}; expected float8_e4m3fn", scale=wrong)
    ue8m0 = scale[:, :2]
    yield bad(
        "scale-e4m3-mxfp4", TypeError, "got scale with dtype float8_e4m3fn; expected uint8", scale=ue8m0, block_size=32
    )
    for name, wrong, text in (
        ("rows", scale[:3], r"\(3, 4\); expected \(4, 4\)"),
        ("blocks", scale[:, :3], r"\(4, 3\); expected \(4, 4\)"),
        ("flat", scale.reshape(16), r"\(16,\); expected \(4, 4\)"),
        ("0d", scale[0, 0], r"\(\); expected \(4, 4\)"),
    ):
        yield bad(f"scale-shape-{name}", ValueError, f"got scale with shape {text}, the linear scales", scale=wrong)
        text = (
            r"expected \(4, 4\) \(linear\) or \(1, 1, 32, 4, 4\) \(128x4\) or \(1, 1, 8, 4\) \(8x4\), the scales of y"
        )
        yield bad(f"scale-read-{name}", ValueError, text, scale=wrong, scale_layout=None)
    for name, shape, fits in (("8x4", (3, 1, 8), "linear and 8x4"), ("128x4", (2, 1, 32, 4), "linear and 128x4")):
        both = random_blocks(*shape, 64, fmt=NVFP4, layout="linear", device=device)
        text = f"got scale with shape .*, which {fits} scales of y with shape .* both have; name scale_layout"
        yield bad(f"scale-ambiguous-{name}", ValueError, text, *both, scale_layout=None)
    for shape in ((1, 2, 8, 4), (1, 1, 32, 4, 4)):
        tiles = torch.zeros(shape, dtype=torch.uint8, device=device).view(scale.dtype)
        text = r"got scale with shape .*; expected \(4, 4\), the linear scales of y"
        yield bad(f"scale-tiled-{len(shape)}d", ValueError, text, scale=tiles)
    yield bad("scale-requires-grad", ValueError, "no gradient", scale=scale.clone().requires_grad_())
    text = r"got scale with shape \(4, 4\), which are not the 128x4 scales of y: expected \(1, 1, 32, 4, 4\), or the "
    yield bad("scale-not-tiled", ValueError, text, scale_layout="128x4")
    text = r"got scale with shape \(4, 4\), which are not the 8x4 scales of y: expected \(1, 1, 8, 4\), or the same "
    yield bad("scale-not-tiled-8x4", ValueError, text, scale_layout="8x4")
    yield from scale_stride_errors(Sample("linear", (y, scale), {}), 1)
    tiles = random_blocks(136, 128, fmt=NVFP4, layout="128x4", device=device)
    yield from scale_stride_errors(Sample("tiles", tiles, {}), 1)
    yield bad("scale-device", ValueError, "scale is on meta, y on", scale=scale.to(meta))
    if device.type == "cuda":
        yield bad("scale-cpu", ValueError, "scale is on cpu, y on", scale=scale.cpu())
    for dtype in (torch.float64, torch.int8, torch.uint8, torch.float8_e4m3fn):
        yield bad(f"out-dtype-{dtype}", TypeError, f"out_dtype is {dtype}; expected bfloat16", out_dtype=dtype)
    out = {"out": torch.zeros(4, 64, dtype=torch.bfloat16, device=device)}
    yield from out_errors((y, scale), {"scale_layout": "linear"}, out, device)
