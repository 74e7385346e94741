"""Samples and error inputs of the ops that quantise rows to NVFP4 with a scale per row."""

from collections.abc import Iterator
from typing import Any

import torch

from samples._fp4 import FP4
from samples._inputs import ErrorInput
from samples._rows import DTYPES, Family, Rows, random_rows, short, special_rows, views
from torch_cute_ops.formats import SCALE_LAYOUTS


def _named(layout: str) -> dict[str, Any]:
    return {"scale_layout": layout}


def _rows(device: torch.device, halves: bool = False) -> Iterator[Rows]:
    parts = 2 if halves else 1

    def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return random_rows(*shape[:-1], shape[-1] * parts, dtype=dtype, device=device)

    for (layout, count), dtype in ((each, dtype) for each in _TILE_ROWS.items() for dtype in DTYPES):
        yield Rows(f"nvfp4-{layout}-{short(dtype)}", rows(count, 80, dtype=dtype), _named(layout))
    yield Rows("one-block", rows(1, 16), _named("linear"))
    yield Rows("1d", rows(96), _named("linear"))
    yield Rows("1d-tiled", rows(96), _named("128x4"))
    yield Rows("3d-tiled", rows(2, 5, 64), _named("8x4"))
    yield Rows("4d", rows(2, 1, 3, 64), _named("linear"))
    yield Rows("decode", rows(1, 7168), _named("128x4"))
    yield Rows("several-ctas-a-row", rows(2, 769 * 32), _named("128x4"))
    yield Rows("widest", rows(1, 65536), _named("linear"))
    for layout in SCALE_LAYOUTS:
        yield Rows(f"empty-{layout}", rows(0, 80), _named(layout))
    yield Rows("empty-3d", rows(2, 0, 64), _named("linear"))
    yield Rows("many-rows", rows(2500, 48), _named("128x4"))
    yield Rows("width-2880", rows(3, 2880), _named("8x4"))
    yield Rows("defaults", rows(2, 32), {})
    for i, (name, viewed) in enumerate(views(32, device)):
        yield Rows(name, viewed, _named(tuple(SCALE_LAYOUTS)[i % 3]))
    for dtype in DTYPES:
        yield Rows(f"special-{short(dtype)}", special_rows(dtype, device), _named("linear"))
    yield Rows("zeros", torch.zeros(3, 64, dtype=torch.bfloat16, device=device), _named("128x4"))
    powers = torch.arange(-126, 112, device=device)[:, None]
    magnitudes = torch.ldexp(torch.randn(len(powers), 96, device=device), powers)
    yield Rows("magnitudes", magnitudes, _named("linear"))


_TILE_ROWS = {"linear": 5, "128x4": 130, "8x4": 19}
"""Numbers of rows, keyed by layout, that leave padding in tiles."""


def _errors(good: torch.Tensor, halves: bool = False) -> Iterator[ErrorInput]:
    # Keep the errors of ``fp4_quantize`` that name neither another format nor a global scale.
    names = {"input", "width", "layout"}
    for error in FP4.errors(good, halves):
        if error.name.split("-")[0] in names and not error.name.endswith("mxfp4"):
            yield ErrorInput(error.name, error.args, _without_format(error.kwargs), error.error, error.match)


def _without_format(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "block_size"}


def _positional(device: torch.device) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    return (), ("8x4",)


def _outputs(device: torch.device) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    kwargs, good = FP4.outputs(device)
    return kwargs, {**good, "row_scale": torch.zeros(4, device=device)}


FP4_ROWS = Family(
    rows=_rows,
    errors=_errors,
    plain=_named("128x4"),
    small=_named("linear"),
    positional=_positional,
    outputs=_outputs,
)
