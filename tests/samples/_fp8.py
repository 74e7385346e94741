"""Samples and error inputs of the ops that quantise rows to FP8."""

from collections.abc import Iterator
from typing import Any

import torch

from samples._inputs import ErrorInput
from samples._row_errors import input_errors, scalar_errors
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
from torch_cute_ops.formats import FP8_BLOCK128, FP8_BLOCK128_UE8M0, FP8_TENSOR, FP8_TOKEN, MXFP8, FP8Format

CHOICES = (
    (FP8_TENSOR, "row"),
    (FP8_TOKEN, "row"),
    (FP8_BLOCK128, "row"),
    (FP8_BLOCK128, "column"),
    (FP8_BLOCK128_UE8M0, "column"),
    (MXFP8, "linear"),
    (MXFP8, "128x4"),
)
BLOCKS128 = (FP8_BLOCK128, FP8_BLOCK128_UE8M0)


def name_of(fmt: FP8Format, layout: str) -> str:
    """Return a name that differs for each choice of format and layout."""
    powers = "-ue8m0" if fmt == FP8_BLOCK128_UE8M0 else ""
    return f"{fmt.granularity}{powers}-{layout}"


WIDTHS = {0: ODD_WIDTHS, 32: (32, 96, 160, 1152, 2880), 128: (64, 128, 192, 1152, 2880)}
"""Widths of rows, keyed by the block size of the format."""


def random_scale(device: torch.device) -> torch.Tensor:
    """Return a random fp32 scale of moderate magnitude whose significand uses all bits."""
    return torch.rand(1, device=device) * 0.05 + 0.001


def named(fmt: FP8Format, layout: str, device: torch.device) -> dict[str, Any]:
    """Return the arguments that select ``fmt`` and ``layout``, with a static scale if the format needs one."""
    scale = {"scale": random_scale(device)} if fmt.is_static else {}
    powers = {"scale_format": "ue8m0"} if fmt == FP8_BLOCK128_UE8M0 else {}
    return {"granularity": fmt.granularity, "scale_layout": layout, **scale, **powers}


def _rows(device: torch.device, halves: bool = False) -> Iterator[Rows]:
    parts = 2 if halves else 1
    yield from _grid(parts, device)
    yield from _shapes(parts, device)
    for i, (name, rows) in enumerate(views(128 * parts, device)):
        yield Rows(name, rows, named(*CHOICES[i % len(CHOICES)], device))
    yield from _values(parts, device)
    yield from _interleaved(parts, device)


def _grid(parts: int, device: torch.device) -> Iterator[Rows]:
    """Yield rows for each granularity, layout and dtype."""
    for fmt, layout in CHOICES:
        for dtype in DTYPES:
            rows = random_rows(19, 5 * (fmt.block_size or 16) * parts, dtype=dtype, device=device)
            yield Rows(f"{name_of(fmt, layout)}-{short(dtype)}", rows, named(fmt, layout, device))


def _shapes(parts: int, device: torch.device) -> Iterator[Rows]:
    def sample(name: str, fmt: FP8Format, layout: str, *shape: int) -> Rows:
        rows = random_rows(*shape[:-1], shape[-1] * parts, device=device)
        return Rows(name, rows, named(fmt, layout, device))

    for fmt, layout in CHOICES:
        prefix = name_of(fmt, layout)
        yield sample(f"{prefix}-1d", fmt, layout, 384)
        yield sample(f"{prefix}-3d", fmt, layout, 2, 5, 256)
        yield sample(f"{prefix}-decode", fmt, layout, 1, 7168)
        yield sample(f"{prefix}-several-ctas-a-row", fmt, layout, 2, 193 * 128)
        yield sample(f"{prefix}-many-rows", fmt, layout, 2501, 128)
        yield sample(f"{prefix}-empty", fmt, layout, 0, 256)
        yield sample(f"{prefix}-empty-3d", fmt, layout, 2, 0, 256)
        for width in WIDTHS[fmt.block_size]:
            yield sample(f"{prefix}-width-{width}", fmt, layout, 3, width)
        if not fmt.block_size:
            yield sample(f"{prefix}-width-100-3d", fmt, layout, 2, 3, 100)
            yield sample(f"{prefix}-width-25000", fmt, layout, 2, 25000)
        if fmt in BLOCKS128:
            # the last block of a row is 64 elements
            yield sample(f"{prefix}-half-a-block-3d", fmt, layout, 2, 5, 320)
            yield sample(f"{prefix}-half-a-block-many-rows", fmt, layout, 2503, 192)
            yield sample(f"{prefix}-half-a-block-several-ctas-a-row", fmt, layout, 2, 193 * 128 + 64)
    yield sample("4d", FP8_BLOCK128, "row", 2, 1, 3, 256)
    yield sample("4d-column", FP8_BLOCK128, "column", 2, 2, 67, 256)
    yield sample("widest", FP8_BLOCK128, "row", 1, 65536)
    yield sample("4d-linear", MXFP8, "linear", 2, 1, 3, 96)
    yield sample("4d-tiles", MXFP8, "128x4", 2, 2, 67, 96)
    for rows, width in ((1, 32), (9, 96), (300, 416)):
        yield sample(f"8x4-{rows}x{width}", MXFP8, "8x4", rows, width)
    default = random_rows(131, 96 * parts, device=device)
    yield Rows("block32-defaults", default, {"granularity": "block32"})
    yield Rows("block32-ue8m0", default, {"granularity": "block32", "scale_format": "ue8m0"})
    yield Rows("defaults", random_rows(2, 96 * parts, device=device), {})
    for name, rows in odd_views(parts, device):
        yield Rows(name, rows, {"granularity": "token"})


def _values(parts: int, device: torch.device) -> Iterator[Rows]:
    for dtype in DTYPES:
        for fmt, layout in CHOICES:
            rows = special_rows(dtype, device, 128 * parts)
            yield Rows(f"special-{name_of(fmt, layout)}-{short(dtype)}", rows, named(fmt, layout, device))
    for fmt, layout in CHOICES:
        zeros = torch.zeros(3, 256 * parts, dtype=torch.bfloat16, device=device)
        yield Rows(f"zeros-{name_of(fmt, layout)}", zeros, named(fmt, layout, device))
    for power in (-100, -60, 60, 100):
        # Without a norm, the static scale makes these rows saturate or become zero. A norm brings all rows to a
        # magnitude of about 1.
        scale = (torch.rand(1, device=device) + 1) * 2.0**power
        rows = torch.randn(3, 100 * parts, device=device)
        yield Rows(f"scale-2^{power}", rows, {"granularity": "tensor", "scale": scale})
    for size in (2.0**-100, 2.0**60):
        rows = torch.randn(3, 256 * parts, device=device) * size
        for fmt, layout in CHOICES[1:]:
            yield Rows(f"{name_of(fmt, layout)}-times-{size:g}", rows, named(fmt, layout, device))
    for shape in ((), (1, 1)):
        scale = random_scale(device).reshape(shape)
        rows = random_rows(3, 64 * parts, device=device)
        yield Rows(f"scale-{len(shape)}d", rows, {"granularity": "tensor", "scale": scale})


def _interleaved(parts: int, device: torch.device) -> Iterator[Rows]:
    """Yield rows whose codes are interleaved along k."""
    tokens: dict[str, Any] = {"granularity": "token", "interleaved": True}
    tensor: dict[str, Any] = {"granularity": "tensor", "interleaved": True}
    for shape in ((5, 512), (2, 3, 2880), (256,), (3, 100), (0, 300), (1, 7168)):
        rows = random_rows(*shape[:-1], shape[-1] * parts, device=device)
        yield Rows(f"interleaved-{'x'.join(map(str, shape))}", rows, tokens)
    strided = random_rows(6, 576 * parts + 64, dtype=torch.float32, device=device)
    yield Rows("interleaved-row-strided", strided[:, : 576 * parts], {**tensor, "scale": random_scale(device)})
    unaligned = random_rows(6, 333 * parts + 1, device=device)
    yield Rows("interleaved-column-offset", unaligned[:, 1:], tokens)


def _errors(good: torch.Tensor, halves: bool = False) -> Iterator[ErrorInput]:
    def bad(name: str, error: type[Exception], match: str, value: torch.Tensor = good, **kwargs: Any) -> ErrorInput:
        return ErrorInput(name, (value,), kwargs, error, match)

    yield from input_errors(good)
    what = "two halves, each " if halves else ""
    for width in (64, 100, 120) if halves else (32, 127, 100):
        text = rf"last dimension of {width}; expected {what}a positive multiple of 64"
        yield bad(f"width-{width}-block128", ValueError, text, good[:, :width], granularity="block128")
    for width in (32, 96) if halves else (16, 100):
        text = rf"last dimension of {width}; expected {what}a positive multiple of 32"
        yield bad(f"width-{width}-block32", ValueError, text, good[:, :width], granularity="block32")
    if halves:
        for granularity, scale in (("token", None), ("tensor", torch.ones(1, device=good.device))):
            text = "last dimension of 33; expected two halves, each a positive number of elements"
            yield bad(f"width-odd-{granularity}", ValueError, text, good[:, :33], granularity=granularity, scale=scale)
    for granularity in ("row", "", "TOKEN", "block", "block64", "channel"):
        text = f"granularity='{granularity}' is unknown; use one of 'tensor', 'token', 'block128', 'block32'"
        yield bad(f"granularity-{granularity}", ValueError, text, granularity=granularity)
    for layout in ("linear", "", "ROW", "128x4"):
        text = f"scale_layout='{layout}' does not fit granularity='token'; use one of 'row', 'column', or None"
        yield bad(f"layout-{layout}", ValueError, text, scale_layout=layout)
    for layout in ("row", "column", "", "4x128"):
        text = (
            f"scale_layout='{layout}' does not fit granularity='block32'; use one of 'linear', '128x4', '8x4', or None"
        )
        yield bad(f"layout-block32-{layout}", ValueError, text, granularity="block32", scale_layout=layout)
    for granularity, scale_format, fitting in (
        ("token", "ue8m0", "None"),
        ("tensor", "ue8m0", "None"),
        ("block128", "e4m3", "None or 'ue8m0'"),
        ("block32", "e4m3", "None or 'ue8m0'"),
        ("block32", "", "None or 'ue8m0'"),
    ):
        text = f"scale_format='{scale_format}' does not fit granularity='{granularity}'; use {fitting}"
        given = {"granularity": granularity, "scale_format": scale_format}
        yield bad(f"scale-format-{granularity}-{scale_format}", ValueError, text, **given)
    one = torch.ones(1, device=good.device)
    yield bad("scale-none", ValueError, "scale is None; granularity='tensor' takes", granularity="tensor")
    for granularity in ("token", "block128", "block32"):
        text = f"scale is given; granularity='{granularity}' computes its own"
        # Make the rows fit the granularity, so that only the tested argument is wrong.
        rows = good.repeat(1, 4)
        yield bad(f"scale-given-{granularity}", ValueError, text, rows, granularity=granularity, scale=one)
    yield from scalar_errors("scale", good, {"granularity": FP8_TENSOR.granularity})
    rows = good.repeat(1, 4)
    for granularity in ("block128", "block32"):
        text = f"interleaved is True with granularity='{granularity}'; expected granularity='token' or 'tensor'"
        yield bad(f"interleaved-{granularity}", ValueError, text, rows, granularity=granularity, interleaved=True)


def _positional(device: torch.device) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    return (torch.full((1,), 0.01, device=device),), ("tensor", "row")


def _outputs(device: torch.device) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return {"granularity": "block128"}, {
        "y": torch.zeros(4, 512, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
        "scale_out": torch.zeros(4, 4, device=device).t(),
    }


FP8 = Family(
    rows=_rows,
    errors=_errors,
    plain={"granularity": "token"},
    small={"granularity": "token"},
    positional=_positional,
    outputs=_outputs,
)
