"""Samples (valid calls) and error inputs of ``moe_permute_fp8quant``."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from samples._inputs import ErrorInput, Sample
from samples._moe import (
    ROUTINGS,
    integer_errors,
    output_errors,
    random_routing,
    unaligned,
)
from samples._row_errors import input_errors
from samples._rows import DTYPES, random_rows, short, special_rows, views

TOPK = 11
"""Number of experts per token in a ``call``."""


def call(*shape: int, device: torch.device) -> Sample:
    """Return a call with M tokens (the product of all dimensions except the last) and rows of length ``input_width``.

    The experts' buffer has the same number of rows for every M in the tests that count compilations, so that calls
    differ only in M. No test uses eleven tokens, because PyTorch treats equal sizes as one symbol.
    """
    m = math.prod(shape[:-1])
    slots = max(TOPK * m, 7000)
    index = torch.randperm(slots)[: TOPK * m].to(torch.int32)
    permuted = torch.full((slots,), -1, dtype=torch.int32)
    permuted[index.long()] = torch.arange(TOPK * m, dtype=torch.int32)
    rows = random_rows(m, input_width(shape[-1]), device=device)
    return Sample("call", (rows, permuted.to(device), TOPK, index.view(m, TOPK).to(device)))


def input_width(width: int) -> int:
    """Return ``width`` rounded up to a valid row length that no test uses as its number of tokens, because PyTorch
    treats equal sizes as one symbol."""
    return max(2, -(-width // 128)) * 128


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""

    def sample(name: str, width: int, dtype: torch.dtype, has_inverse: bool, **sizes: Any) -> Sample:
        routed = random_routing(device=device, **sizes)
        rows = random_rows(sizes["m"], width, dtype=dtype, device=device)
        inverse = (routed.expanded_to_permuted,) if has_inverse else ()
        return Sample(name, (rows, routed.permuted_to_expanded, sizes["topk"], *inverse))

    small: dict[str, Any] = {"m": 19, "topk": 3, "experts": 5}
    yield sample("plain", 256, torch.bfloat16, True, **small)
    for dtype in DTYPES:
        for has_inverse in (True, False):
            name = f"{short(dtype)}{'' if has_inverse else '-inverted'}"
            yield sample(name, 640, dtype, has_inverse, **small)
            yield sample(f"masked-{name}", 640, dtype, has_inverse, max_rows=8, **small)
            yield sample(f"decode-{name}", 7168, dtype, has_inverse, m=1, topk=8, experts=32)
    for i, (name, sizes) in enumerate(ROUTINGS):
        yield sample(f"of-{name}", 128, DTYPES[i % 3], i % 2 == 0, **sizes)
    for i, width in enumerate((64, 128, 192, 384, 1152, 2048, 2880, 7168, 24704)):
        yield sample(f"width-{width}", width, DTYPES[i % 3], True, **small)
    for name, rows in views(128, device):
        if rows.dim() == 2 and rows.shape[1] % 128 == 0:
            routed = random_routing(len(rows), 2, 3, device)
            given = (rows, routed.permuted_to_expanded, 2)
            yield Sample(name, (*given, routed.expanded_to_permuted))
    rows, routed = random_rows(9, 256, device=device), random_routing(9, 2, 4, device)
    permuted, inverse = routed.permuted_to_expanded, routed.expanded_to_permuted
    yield Sample("index-transposed", (rows, permuted, 2, inverse.t().contiguous().t()))
    yield Sample("index-unaligned", (rows, permuted, 2, unaligned(inverse)))
    four = random_routing(9, 4, 4, device)
    indices = unaligned(four.permuted_to_expanded), unaligned(four.expanded_to_permuted)
    yield Sample("indices-of-four-unaligned", (rows, indices[0], 4, indices[1]))
    yield Sample("permuted-strided", (rows, permuted.repeat_interleave(2)[::2], 2))
    yield Sample("dropped", (rows, torch.full_like(permuted, -1), 2, torch.full_like(inverse, -1)))
    yield Sample("no-rows", (rows, permuted[:0], 2, torch.full_like(inverse, -1)))
    if device.type == "cuda":  # a CPU would refuse these indices
        yield Sample("other-negative-indices", (rows, torch.where(permuted < 0, -(2**31), permuted).to(torch.int32), 2))
    for dtype in DTYPES:
        rows = special_rows(dtype, device, 128)
        special = random_routing(len(rows), 2, 3, device)
        of_special = (rows, special.permuted_to_expanded, 2, special.expanded_to_permuted)
        yield Sample(f"special-{short(dtype)}", of_special)
        yield Sample(f"special-ue8m0-{short(dtype)}", of_special, {"scale_format": "ue8m0"})
    for width in (64, 384, 2880):
        one = sample(f"ue8m0-width-{width}", width, torch.bfloat16, True, **small)
        yield replace(one, kwargs={"scale_format": "ue8m0"})


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    rows, pairs = random_rows(4, 256, device=device), torch.arange(8, dtype=torch.int32, device=device)
    good = (rows, pairs, 2, pairs.view(4, 2))

    def bad(name: str, match: str, *args: Any) -> ErrorInput:
        return ErrorInput(name, args, {}, ValueError, match)

    for error in input_errors(rows):
        yield ErrorInput(error.name, (*error.args, *good[1:]), {}, error.error, error.match)
    for width in (32, 127, 200):
        text = f"last dimension of {width}; expected a positive multiple of 64"
        yield bad(f"width-{width}", text, rows[:, :width], *good[1:])
    yield bad("input-1d", r"expected \(M, H\)", rows[0], *good[1:])
    yield bad("input-3d", r"expected \(M, H\)", rows[None], *good[1:])
    yield from integer_errors("permuted_to_expanded", pairs, good, 1)
    yield from integer_errors("expanded_to_permuted", good[3], good, 3)
    yield bad("permuted-2d", "got permuted_to_expanded with shape .*expected one dimension", rows, pairs[None], 2)
    for topk in (0, -1, 33):
        yield bad(f"topk-{topk}", f"topk is {topk}; expected 1 to 32", rows, pairs, topk)
    for shape in ((8,), (2, 4), (8, 1), (4, 2, 1)):
        text = r"got expanded_to_permuted with shape .*expected \(4, 2\), topk elements per row of input"
        yield bad(f"inverse-shape-{list(shape)}", text, rows, pairs, 2, pairs.view(shape))
    for scale_format in ("e4m3", ""):
        text = f"scale_format='{scale_format}' does not fit granularity='block128'; use None or 'ue8m0'"
        yield bad(f"scale-format-{scale_format}", text, *good, scale_format)
    yield from output_errors(good, {}, 8, 256, device)
