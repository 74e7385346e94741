"""Rows to quantise, for samples and error inputs of all ops that quantise rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from samples._inputs import ErrorInput, Sample

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Rows(NamedTuple):
    """Rows, and the arguments that say how to quantise them."""

    name: str
    input: torch.Tensor
    kwargs: dict[str, Any]


class RowsOf(Protocol):
    """Function that yields rows on a device. With ``halves`` the rows contain gate and up, so they are twice as
    long."""

    def __call__(self, device: torch.device, halves: bool = False) -> Iterator[Rows]: ...


class ErrorsOf(Protocol):
    """Function that yields error inputs of an op whose first argument is rows, given valid rows (4, 128)."""

    def __call__(self, good: torch.Tensor, halves: bool = False) -> Iterator[ErrorInput]: ...


@dataclass(frozen=True)
class Family:
    """Samples that ops share if they quantise to the same family of formats, FP4 or FP8.

    Attributes:
        rows: function that yields rows with the arguments that say how to quantise them.
        errors: function that yields wrong rows, formats, layouts and factors.
        plain: arguments for samples that do not test the format. They also fit rows of 96 elements.
        small: same as ``plain``, for the format with the smallest scales.
        positional: positional arguments: the factor (global or static scale), if ops take one, and then a format and
            layout that use the factor.
        outputs: arguments with which outputs are matrices, and these outputs by name for (4, 512) values.
    """

    rows: RowsOf
    errors: ErrorsOf
    plain: dict[str, Any]
    small: dict[str, Any]
    positional: Callable[[torch.device], tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]]
    outputs: Callable[[torch.device], tuple[dict[str, Any], dict[str, torch.Tensor]]]


def short(dtype: torch.dtype) -> str:
    """Return the dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def random_rows(*shape: int, dtype: torch.dtype = torch.bfloat16, device: torch.device) -> torch.Tensor:
    """Return normally distributed values in which some columns are outliers. The magnitudes of rows differ by powers of
    two."""
    rows = torch.randn(shape, device=device)
    rows[..., ::37] *= 16
    return (rows * 2.0 ** torch.randint(-5, 6, (*shape[:-1], 1), device=device)).to(dtype)


def special_rows(dtype: torch.dtype, device: torch.device, block: int = 32) -> torch.Tensor:
    """Return rows of 6 blocks that contain special values."""
    info = torch.finfo(dtype)
    width = 6 * block
    rows = torch.randn(14, width, device=device).to(dtype)
    rows[0, 40] = torch.nan
    rows[1, 40] = torch.inf
    rows[2, -1] = -torch.inf
    rows[3, :100] = 0.0
    rows[3, 100:] = -0.0
    subnormal = torch.arange(-width // 2, width // 2, device=device) * info.smallest_normal * info.eps
    rows[4] = subnormal.to(dtype)
    rows[5, 0::2] = info.max
    rows[5, 1::2] = info.min
    rows[6, block : 2 * block] = -0.0
    # With an amax of 6 the scale is 1. This row contains both zeros and every rounding boundary of e2m1, where ties go
    # to the even code.
    ties = torch.tensor(
        [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -0.0], device=device
    )
    rows[7] = ties.repeat(width // 16).to(dtype)
    rows[8] = info.smallest_normal
    rows[9, 5], rows[9, block + 8], rows[9, block + 9] = torch.nan, -torch.inf, torch.nan
    rows[10] = 2.0**15
    rows[11, 7] = info.max
    # One block is much smaller than the rest of its row, so that rounding the normalised rows to 16 bits would lose
    # bits of the block's products with a weight.
    rows[12, block : 2 * block] *= info.smallest_normal
    rows[13] *= info.smallest_normal**0.25
    rows[13, -block:] *= info.smallest_normal**0.75 * info.eps**0.5
    return rows


def views(unit: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, rows): rows of 2 or 3 times ``unit`` elements in every memory layout."""

    def base(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return random_rows(*shape, dtype=dtype, device=device)

    two, three, five = 2 * unit, 3 * unit, 5 * unit
    yield "row-strided", base(6, five)[:, :three]
    yield "row-strided-float32", base(6, five, dtype=torch.float32)[:, unit : unit + three]
    yield "every-other-row", base(12, two)[::2]
    yield "row-stride-not-16-bytes", base(5, three + 1)[:, :three]
    yield "column-offset", base(5, three + 8)[:, 1 : 1 + three]
    yield "column-offset-one-row", base(1, three + 8)[:, 3 : 3 + three]
    yield "column-offset-3d", base(2, 3, three + 8)[..., 1 : 1 + three]
    yield "column-step", base(5, 2 * two)[:, ::2]
    yield "columns-first", base(two, 7).t()
    yield "leading-transposed", base(3, 4, two).transpose(0, 1)
    yield "rows-expanded", base(two).expand(5, two)
    yield "rows-expanded-3d", base(3, 1, two).expand(3, 4, two)
    yield "offset-in-storage", base(4, two)[2:]


ODD_WIDTHS = (1, 2, 7, 17, 100, 1152, 2880, 4616)
"""Widths that are not multiples of 16, or not multiples of the elements that a thread or a warp processes."""


def odd_views(parts: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, rows): rows of ``parts`` times 100 elements inside longer rows. The op must copy and pad them."""
    for name, start in (("row-strided", 0), ("column-offset", 1)):
        yield f"width-100-{name}", random_rows(5, 128 * parts, device=device)[:, start : start + 100 * parts]


def rows_samples(family: Family, device: torch.device) -> Iterator[Sample]:
    """Yield samples of an op that quantises rows and takes no other inputs."""
    for name, rows, kwargs in family.rows(device):
        yield Sample(name, (rows,), kwargs)
    factor, choices = family.positional(device)
    yield Sample("positional", (random_rows(4, 64, device=device), *factor, *choices))
