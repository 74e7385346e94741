"""Samples and error inputs of the ops that quantise rows to FP4."""

from collections.abc import Iterator
from typing import Any

import torch

from samples._inputs import ErrorInput
from samples._row_errors import input_errors, scalar_errors
from samples._rows import DTYPES, Family, Rows, random_rows, short, special_rows, views
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format

FORMATS = (NVFP4, MXFP4)


def random_global_scale(device: torch.device) -> torch.Tensor:
    """Return a random fp32 global scale of moderate magnitude whose significand uses all bits."""
    return torch.rand(1, device=device) * 400 + 10


def named(fmt: FP4Format, layout: str) -> dict[str, Any]:
    """Return the arguments that select the format ``fmt`` and the scale layout ``layout``."""
    return {"block_size": fmt.block_size, "scale_layout": layout}


def _rows(device: torch.device, halves: bool = False) -> Iterator[Rows]:
    parts = 2 if halves else 1
    yield from _grid(parts, device)
    yield from _shapes(parts, device)
    for name, rows in views(32, device):
        yield Rows(name, rows, named(*_VIEWED.get(name, (NVFP4, "128x4"))))
    yield Rows("leading-transposed-tiled", random_rows(3, 4, 64, device=device).transpose(0, 1), named(NVFP4, "128x4"))
    yield from _values(device)


_VIEWED = {
    "every-other-row": (MXFP4, "8x4"),
    "column-offset-one-row": (NVFP4, "linear"),
    "column-offset-3d": (NVFP4, "linear"),
    "column-step": (MXFP4, "linear"),
    "leading-transposed": (NVFP4, "linear"),
    "rows-expanded-3d": (NVFP4, "linear"),
    "offset-in-storage": (NVFP4, "linear"),
}


def _grid(parts: int, device: torch.device) -> Iterator[Rows]:
    """Yield rows for each format, layout and dtype. The numbers of rows and of blocks leave padding in both dimensions
    of tiles."""
    tile_rows = {"linear": 5, "128x4": 130, "8x4": 19}
    for fmt in FORMATS:
        for layout in SCALE_LAYOUTS:
            for dtype in DTYPES:
                kwargs = named(fmt, layout)
                if fmt.has_global_scale and dtype is not torch.float16:
                    kwargs["global_scale"] = random_global_scale(device)
                rows = random_rows(tile_rows[layout], 5 * fmt.block_size * parts, dtype=dtype, device=device)
                yield Rows(f"{fmt.name}-{layout}-{short(dtype)}", rows, kwargs)


def _shapes(parts: int, device: torch.device) -> Iterator[Rows]:
    def rows(*shape: int) -> torch.Tensor:
        return random_rows(*shape[:-1], shape[-1] * parts, device=device)

    for fmt in FORMATS:
        b = fmt.block_size
        yield Rows(f"{fmt.name}-one-block", rows(1, b), named(fmt, "linear"))
        yield Rows(f"{fmt.name}-one-block-tiled", rows(3, b), named(fmt, "128x4"))
        yield Rows(f"{fmt.name}-1d", rows(6 * b), named(fmt, "linear"))
        yield Rows(f"{fmt.name}-3d-tiled", rows(2, 5, 4 * b), named(fmt, "8x4"))
        yield Rows(f"{fmt.name}-decode", rows(1, 7168), named(fmt, "128x4"))
        yield Rows(f"{fmt.name}-several-ctas-a-row", rows(2, 769 * 32), named(fmt, "128x4"))
    yield Rows("1d-tiled", rows(96), named(NVFP4, "128x4"))
    yield Rows("4d", rows(2, 1, 3, 64), named(NVFP4, "linear"))
    yield Rows("4d-tiled", rows(2, 2, 67, 64), named(NVFP4, "128x4"))
    for layout in SCALE_LAYOUTS:
        yield Rows(f"empty-{layout}", rows(0, 80), named(NVFP4, layout))
    yield Rows("empty-3d", rows(2, 0, 64), named(MXFP4, "linear"))
    yield Rows("empty-3d-tiled", rows(0, 3, 64), named(MXFP4, "8x4"))
    yield Rows("full-tiles", rows(256, 64), named(NVFP4, "128x4"))
    yield Rows("many-rows", rows(2500, 48), named(NVFP4, "128x4"))
    yield Rows("many-rows-8x4", rows(2501, 64), named(MXFP4, "8x4"))
    yield Rows("many-rows-linear", rows(2502, 32), named(NVFP4, "linear"))
    yield Rows("widest", rows(1, 65536), named(NVFP4, "linear"))
    yield Rows("width-2880", rows(3, 2880), named(NVFP4, "8x4"))
    yield Rows("width-1152", rows(9, 1152), named(MXFP4, "linear"))
    yield Rows("format-named-e4m3", rows(2, 32), {"block_size": 16, "scale_format": "e4m3"})
    yield Rows("format-named-ue8m0", rows(2, 32), {"block_size": 32, "scale_format": "ue8m0"})
    yield Rows("defaults", rows(2, 32), {})


def _values(device: torch.device) -> Iterator[Rows]:
    for dtype in DTYPES:
        for fmt in FORMATS:
            yield Rows(f"special-{fmt.name}-{short(dtype)}", special_rows(dtype, device), named(fmt, "8x4"))
        scaled = {**named(NVFP4, "linear"), "global_scale": random_global_scale(device)}
        yield Rows(f"special-global-scale-{short(dtype)}", special_rows(dtype, device), scaled)
    yield Rows("zeros", torch.zeros(3, 64, dtype=torch.bfloat16, device=device), named(NVFP4, "128x4"))
    for power in (-60, 60):
        for shift in (-power, 0):
            rows = torch.randn(3, 64, device=device) * 2.0**shift
            g = torch.full((1,), 2.0**power, device=device)
            yield Rows(f"global-scale-2^{power}-times-2^{shift}", rows, {**named(NVFP4, "linear"), "global_scale": g})
    for shape in ((), (1, 1)):
        g = random_global_scale(device).reshape(shape)
        yield Rows(f"global-scale-{len(shape)}d", random_rows(3, 64, device=device), {"global_scale": g})


def _errors(good: torch.Tensor, halves: bool = False) -> Iterator[ErrorInput]:
    def bad(name: str, error: type[Exception], match: str, value: torch.Tensor = good, **kwargs: Any) -> ErrorInput:
        return ErrorInput(name, (value,), kwargs, error, match)

    yield from input_errors(good)
    parts, what = (2, "two halves, each ") if halves else (1, "")
    for name, width, block in (("", 56, 16), ("-mxfp4", 48, 32)):
        text = rf"last dimension of {width * parts}; expected {what}a positive multiple of {block}"
        yield bad(f"width-not-a-multiple{name}", ValueError, text, good[:, : width * parts], block_size=block)
    if halves:
        for name, width in (("odd", 33), ("one-block", 16)):
            yield bad(f"width-{name}", ValueError, f"last dimension of {width}; expected two halves", good[:, :width])
    for block_size, scale_format in (
        (8, None),
        (0, None),
        (-16, None),
        (16, "ue8m0"),
        (32, "e4m3"),
        (16, "e5m2"),
        (16, ""),
    ):
        text = f"block_size={block_size} with scale_format={scale_format!r} is no FP4 format"
        name = f"format-{block_size}-{scale_format}"
        yield bad(name, ValueError, text, block_size=block_size, scale_format=scale_format)
    for layout in ("swizzled", "", "128X4", "row"):
        yield bad(f"layout-{layout}", ValueError, f"scale_layout='{layout}' is unknown; .*'128x4'", scale_layout=layout)
    one = torch.ones(1, device=good.device)
    yield bad("global-scale-mxfp4", ValueError, "mxfp4 takes none", global_scale=one, block_size=32)
    yield from scalar_errors("global_scale", good)


def _positional(device: torch.device) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    return (torch.full((1,), 100.0, device=device),), (16, "e4m3", "128x4")


def _outputs(device: torch.device) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return {"scale_layout": "8x4"}, {
        "y": torch.zeros(4, 256, dtype=torch.uint8, device=device),
        "scale": torch.zeros(1, 8, 8, 4, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
    }


FP4 = Family(
    rows=_rows,
    errors=_errors,
    plain=named(NVFP4, "128x4"),
    small=named(MXFP4, "128x4"),
    positional=_positional,
    outputs=_outputs,
)
