"""Rows to quantise: the samples and bad inputs that the FP4-producing ops share."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.testing._inputs import ErrorInput

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = (NVFP4, MXFP4)


class Rows(NamedTuple):
    """Rows and how to quantise them."""

    name: str
    input: torch.Tensor
    kwargs: dict[str, Any]


def random_rows(*shape: int, dtype: torch.dtype = torch.bfloat16, device: torch.device) -> torch.Tensor:
    """Normal values with outlier channels; rows differ in size by powers of two."""
    rows = torch.randn(shape, device=device)
    rows[..., ::37] *= 16
    return (rows * 2.0 ** torch.randint(-5, 6, (*shape[:-1], 1), device=device)).to(dtype)


def random_global_scale(device: torch.device) -> torch.Tensor:
    """One fp32 element, of a usual size and with all its bits used."""
    return torch.rand(1, device=device) * 400 + 10


def named(fmt: FP4Format, layout: str) -> dict[str, Any]:
    """The arguments that choose ``fmt`` and ``layout``."""
    return {"block_size": fmt.block_size, "scale_layout": layout}


def special_rows(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rows of 6 × 32 elements with what arithmetic stumbles over."""
    info = torch.finfo(dtype)
    rows = torch.randn(12, 192, device=device).to(dtype)
    rows[0, 40] = torch.nan
    rows[1, 40] = torch.inf
    rows[2, 191] = -torch.inf
    rows[3, :100] = 0.0
    rows[3, 100:] = -0.0
    subnormal = torch.arange(-96, 96, device=device) * info.smallest_normal * info.eps
    rows[4] = subnormal.to(dtype)
    rows[5, 0::2] = info.max
    rows[5, 1::2] = info.min
    rows[6, 32:64] = -0.0
    # With amax 6 the scale is 1: every boundary of e2m1, where a tie goes to the even code, and both signs of zero.
    ties = torch.tensor(
        [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -0.0], device=device
    )
    rows[7] = ties.repeat(12).to(dtype)
    rows[8] = info.smallest_normal
    rows[9, 5], rows[9, 40], rows[9, 41] = torch.nan, -torch.inf, torch.nan
    rows[10] = 2.0**15
    rows[11, 7] = info.max
    return rows


def row_samples(device: torch.device) -> Iterator[Rows]:
    """What every op that quantises rows must do."""
    yield from _grid(device)
    yield from _shapes(device)
    yield from _strides(device)
    yield from _values(device)


def _grid(device: torch.device) -> Iterator[Rows]:
    """Format × layout × dtype; rows and blocks that leave padding in both directions."""
    tile_rows = {"linear": 5, "128x4": 130, "8x4": 19}
    for fmt in FORMATS:
        for layout in SCALE_LAYOUTS:
            for dtype in DTYPES:
                kwargs = named(fmt, layout)
                if fmt.has_global_scale and dtype is not torch.float16:
                    kwargs["global_scale"] = random_global_scale(device)
                name = f"{fmt.name}-{layout}-{str(dtype).removeprefix('torch.')}"
                yield Rows(name, random_rows(tile_rows[layout], 5 * fmt.block_size, dtype=dtype, device=device), kwargs)


def _shapes(device: torch.device) -> Iterator[Rows]:
    def rows(*shape: int) -> torch.Tensor:
        return random_rows(*shape, device=device)

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
    yield Rows("format-named-e4m3", rows(2, 32), {"block_size": 16, "scale_format": "e4m3"})
    yield Rows("format-named-ue8m0", rows(2, 32), {"block_size": 32, "scale_format": "ue8m0"})
    yield Rows("defaults", rows(2, 32), {})


def _strides(device: torch.device) -> Iterator[Rows]:
    def base(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return random_rows(*shape, dtype=dtype, device=device)

    tiled = named(NVFP4, "128x4")
    yield Rows("row-strided", base(6, 160)[:, :96], tiled)
    yield Rows("row-strided-float32", base(6, 160, dtype=torch.float32)[:, 32:128], tiled)
    yield Rows("every-other-row", base(12, 64)[::2], named(MXFP4, "8x4"))
    yield Rows("row-stride-not-16-bytes", base(5, 97)[:, :96], tiled)
    yield Rows("column-offset", base(5, 104)[:, 1:97], tiled)
    yield Rows("column-offset-one-row", base(1, 104)[:, 3:99], named(NVFP4, "linear"))
    yield Rows("column-offset-3d", base(2, 3, 104)[..., 1:97], named(NVFP4, "linear"))
    yield Rows("column-step", base(5, 128)[:, ::2], named(MXFP4, "linear"))
    yield Rows("columns-first", base(64, 7).t(), tiled)
    yield Rows("leading-transposed", base(3, 4, 64).transpose(0, 1), named(NVFP4, "linear"))
    yield Rows("leading-transposed-tiled", base(3, 4, 64).transpose(0, 1), tiled)
    yield Rows("rows-expanded", base(64).expand(5, 64), tiled)
    yield Rows("rows-expanded-3d", base(3, 1, 64).expand(3, 4, 64), named(NVFP4, "linear"))
    yield Rows("offset-in-storage", base(4, 64)[2:], named(NVFP4, "linear"))


def _values(device: torch.device) -> Iterator[Rows]:
    for dtype in DTYPES:
        short = str(dtype).removeprefix("torch.")
        for fmt in FORMATS:
            yield Rows(f"special-{fmt.name}-{short}", special_rows(dtype, device), named(fmt, "8x4"))
        scaled = {**named(NVFP4, "linear"), "global_scale": random_global_scale(device)}
        yield Rows(f"special-global-scale-{short}", special_rows(dtype, device), scaled)
    yield Rows("zeros", torch.zeros(3, 64, dtype=torch.bfloat16, device=device), named(NVFP4, "128x4"))
    for power in (-60, 60):
        for shift in (-power, 0):
            rows = torch.randn(3, 64, device=device) * 2.0**shift
            g = torch.full((1,), 2.0**power, device=device)
            yield Rows(f"global-scale-2^{power}-times-2^{shift}", rows, {**named(NVFP4, "linear"), "global_scale": g})
    for shape in ((), (1, 1)):
        g = random_global_scale(device).reshape(shape)
        yield Rows(f"global-scale-{len(shape)}d", random_rows(3, 64, device=device), {"global_scale": g})


def row_errors(good: torch.Tensor, device: torch.device) -> Iterator[ErrorInput]:
    """Bad rows, format, layout and global scale of an op that takes rows first; ``good`` ones are (4, 64) bfloat16."""
    other = torch.device("meta")

    def bad(name: str, error: type[Exception], match: str, value: torch.Tensor = good, **kwargs: Any) -> ErrorInput:
        return ErrorInput(name, (value,), kwargs, error, match)

    for dtype in (torch.float64, torch.int32, torch.uint8, torch.float8_e4m3fn, torch.bool):
        short = str(dtype).removeprefix("torch.")
        yield bad(f"input-{short}", TypeError, f"input has dtype {short}; expected bfloat16", good.to(dtype))
    yield bad("input-0d", ValueError, "input has no dimension", good[0, 0])
    yield bad("width-not-a-multiple", ValueError, "last dimension of 56; .* 16", good[:, :56])
    yield bad("width-not-a-multiple-mxfp4", ValueError, "last dimension of 48; .* 32", good[:, :48], block_size=32)
    yield bad("width-zero", ValueError, "last dimension of 0; ", good[:, :0])
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
    one = torch.ones(1, device=device)
    yield bad("global-scale-mxfp4", ValueError, "mxfp4 takes none", global_scale=one, block_size=32)
    for dtype in (torch.bfloat16, torch.float64, torch.int32):
        short = str(dtype).removeprefix("torch.")
        text = f"global_scale has dtype {short}; expected float32"
        yield bad(f"global-scale-{short}", TypeError, text, global_scale=one.to(dtype))
    for shape in ((0,), (2,), (4, 1), (64,)):
        text = rf"global_scale has shape \({', '.join(map(str, shape))},?\); expected one element"
        yield bad(f"global-scale-shape-{list(shape)}", ValueError, text, global_scale=torch.ones(shape, device=device))
    yield bad("global-scale-device", ValueError, "global_scale is on meta", global_scale=one.to(other))
    if device.type == "cuda":
        yield bad("global-scale-cpu", ValueError, "global_scale is on cpu", global_scale=torch.ones(1))
        yield bad("global-scale-cpu-0d", ValueError, "global_scale is on cpu", global_scale=torch.ones(()))
    yield bad("input-requires-grad", ValueError, "no gradient", good.detach().clone().requires_grad_())
    yield bad("global-scale-requires-grad", ValueError, "no gradient", global_scale=one.clone().requires_grad_())


def out_errors(
    args: tuple[Any, ...], kwargs: dict[str, Any], good: dict[str, torch.Tensor], device: torch.device
) -> Iterator[ErrorInput]:
    """Bad outputs of an op that gives these ``good`` 2-D ones, by name, for ``args`` and ``kwargs``."""

    def blank(*shape: int, dtype: torch.dtype, device: torch.device = device) -> torch.Tensor:
        storage = torch.uint8 if dtype.itemsize == 1 else dtype
        return torch.zeros(shape, dtype=storage, device=device).view(dtype)

    for name, tensor in good.items():

        def bad(what: str, error: type[Exception], match: str, value: torch.Tensor, name: str = name) -> ErrorInput:
            out = tuple({**good, name: value}.values())
            return ErrorInput(f"out-{name}-{what}", args, kwargs, error, rf"{name} {match}", out)

        dtype, (rows, columns) = tensor.dtype, tensor.shape
        others = {torch.uint8: torch.int8, torch.float8_e4m3fn: torch.uint8, torch.bfloat16: torch.float16}
        for wrong in (others[dtype], torch.float32):
            short = str(wrong).removeprefix("torch.")
            yield bad(short, TypeError, f"has dtype {short}; expected ", blank(rows, columns, dtype=wrong))
        for shape in (
            (rows + 1, columns),
            (rows - 1, columns),
            (rows, columns + 4),
            (rows * columns,),
            (),
            (1, rows, columns),
        ):
            text = rf"has shape \({', '.join(map(str, shape))},?\); expected \({rows}, {columns}\)"
            yield bad(f"shape-{'x'.join(map(str, shape))}", ValueError, text, blank(*shape, dtype=dtype))
        text = "has strides .* contiguous"
        yield bad("columns-first", ValueError, text, blank(columns, rows, dtype=dtype).t())
        yield bad("row-strided", ValueError, text, blank(rows, columns + 16, dtype=dtype)[:, :columns])
        yield bad("device", ValueError, "is on meta", blank(rows, columns, dtype=dtype, device=torch.device("meta")))
        if device.type == "cuda":
            yield bad("cpu", ValueError, "is on cpu", blank(rows, columns, dtype=dtype, device=torch.device("cpu")))
            offset = blank(rows * columns + 16, dtype=dtype)[1 : 1 + rows * columns].view(rows, columns)
            yield bad("unaligned", ValueError, ".* multiple of 16 bytes", offset)
