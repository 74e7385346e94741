"""Samples and error inputs of the ops that round rows to the input's dtype instead of quantising them."""

from collections.abc import Iterator
from typing import Any

import torch

from samples._inputs import ErrorInput
from samples._row_errors import input_errors
from samples._rows import (
    DTYPES,
    ODD_WIDTHS,
    Family,
    Rows,
    odd_views,
    random_rows,
    short,
    special_rows,
    views,
)


def _rows(device: torch.device, halves: bool = False) -> Iterator[Rows]:
    parts = 2 if halves else 1

    def sample(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Rows:
        return Rows(name, random_rows(*shape[:-1], shape[-1] * parts, dtype=dtype, device=device), {})

    for dtype in DTYPES:
        yield sample("plain" if dtype == torch.bfloat16 else short(dtype), 19, 640, dtype=dtype)
        yield Rows(f"special-{short(dtype)}", special_rows(dtype, device, 128 * parts), {})
    yield sample("1d", 384)
    yield sample("3d", 2, 5, 256)
    yield sample("4d", 2, 1, 3, 256)
    yield sample("decode", 1, 7168)
    yield sample("several-ctas-a-row", 2, 193 * 128)
    yield sample("several-ctas-a-row-float32", 2, 193 * 128, dtype=torch.float32)
    yield sample("widest", 1, 65536)
    yield sample("many-rows", 2501, 128)
    yield sample("empty", 0, 256)
    yield sample("empty-3d", 2, 0, 256)
    for width in (64, *ODD_WIDTHS):
        yield sample(f"width-{width}", 3, width)
    yield sample("width-100-3d", 2, 3, 100)
    yield sample("width-25000", 2, 25000)
    for name, rows in (*odd_views(parts, device), *views(128 * parts, device)):
        yield Rows(name, rows, {})
    yield Rows("zeros", torch.zeros(3, 256 * parts, dtype=torch.bfloat16, device=device), {})
    for size in (2.0**-100, 2.0**60):
        yield Rows(f"times-{size:g}", torch.randn(3, 256 * parts, device=device) * size, {})


def _errors(good: torch.Tensor, halves: bool = False) -> Iterator[ErrorInput]:
    yield from input_errors(good)
    if halves:
        text = "last dimension of 33; expected two halves, each a positive number of elements"
        yield ErrorInput("width-odd", (good[:, :33],), {}, ValueError, text)


def _positional(device: torch.device) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    return (), ()


def _outputs(device: torch.device) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return {}, {"out": torch.zeros(4, 512, dtype=torch.bfloat16, device=device)}


ROUNDED = Family(rows=_rows, errors=_errors, plain={}, small={}, positional=_positional, outputs=_outputs)
