"""Values, shapes and memory layouts that hypothesis draws for tests."""

from __future__ import annotations

import functools
from typing import Any

import torch
from hypothesis import strategies as st
from samples._moe import unaligned

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = ("normal", "bits", "grid", "sparse", "tiny", "huge")
SIZES = st.lists(st.integers(0, 5), max_size=3)


@functools.cache
def one_of(choices: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """Return the strategy that draws one of these values. The strategy is made only once, because hypothesis takes
    longer to check a new strategy than to draw from it."""
    return st.sampled_from(choices)


@functools.cache
@st.composite
def leads(draw) -> list[int]:
    """Draw zero to three leading dimensions. Sometimes a dimension is 0, sometimes the product is large."""
    lead = draw(SIZES)
    return [*lead[:-1], lead[-1] * draw(one_of((1, 1, 30)))] if lead else lead


@functools.cache
@st.composite
def generators(draw) -> torch.Generator:
    return torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))


def values(kind: str, shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return random values of one kind: any bit pattern, many ties, and so on."""
    value = torch.randn(shape, generator=generator)
    if kind == "bits":
        # any bit pattern, which includes NaN and infinity
        bits = torch.randint(-(2**15), 2**15, (*shape, dtype.itemsize // 2), generator=generator, dtype=torch.int16)
        value = bits.view(dtype).squeeze(-1)
    elif kind == "grid":
        # multiples of 1/8 up to 8; many are ties between two codes
        value = torch.randint(-64, 65, shape, generator=generator) / 8
    elif kind == "sparse":
        value = value * (torch.rand(shape, generator=generator) < 0.05)
    elif kind in ("tiny", "huge"):
        value = value * (torch.finfo(dtype).smallest_normal if kind == "tiny" else torch.finfo(dtype).max / 8)
    return value.to(dtype)


PLACES = ("contiguous", "rows apart", "columns apart", "off by one", "columns first", "dimensions turned")


def placed(value: torch.Tensor, place: str) -> torch.Tensor:
    """Copy the values to a new storage with another memory layout."""
    *lead, width = value.shape
    if place == "rows apart":
        return value.new_zeros(*lead, width + 16)[..., 8 : 8 + width].copy_(value)
    if place == "columns apart":
        return value.new_zeros(*lead, width, 2)[..., 1].copy_(value)
    if place == "off by one":
        return unaligned(value)
    if place == "columns first":
        return value.new_zeros(width, *lead).movedim(0, -1).copy_(value)
    if place == "dimensions turned":
        turned = value.new_zeros(*reversed(lead), width)
        return turned.permute(*reversed(range(len(lead))), len(lead)).copy_(value)
    return value.clone(memory_format=torch.contiguous_format)
