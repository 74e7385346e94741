"""Samples (valid calls) and error inputs of ``moe_finalize``."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from samples._inputs import ErrorInput, Sample
from samples._moe import (
    ROUTINGS,
    Routing,
    integer_errors,
    poisoned_rows,
    random_routing,
    unaligned,
)
from samples._row_errors import error_maker, out_errors
from samples._rows import DTYPES, random_rows, short, special_rows, views


def call(*shape: int, device: torch.device) -> Sample:
    """Return a call with M tokens (the product of all dimensions except the last) and rows as long as the last
    dimension, rounded up to a valid width. Every third pair is dropped.

    The buffer also contains M rows, so that calls differ only in M. topk is 11, and no test uses eleven tokens, because
    PyTorch treats equal sizes as one symbol.
    """
    m, width = math.prod(shape[:-1]), shape[-1]
    index = torch.randint(0, max(m, 1), (m, 11), dtype=torch.int32, device=device)
    index.view(-1)[::3] = -1
    rows = random_rows(m, input_width(width), device=device)
    return Sample("call", (rows, index, torch.rand(m, 11, device=device)), {"residual": torch.randn_like(rows)})


def input_width(width: int) -> int:
    """Return ``width`` rounded up to a valid row length."""
    return -(-width // 8) * 8


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""

    def weights_of(routed: Routing) -> torch.Tensor:
        # Dropped pairs must add nothing, even if their weight is NaN.
        index = routed.expanded_to_permuted
        return torch.rand(index.shape, device=device).masked_fill_(index < 0, torch.nan)

    def sample(name: str, width: int, dtype: torch.dtype, has_residual: bool, **sizes: Any) -> Sample:
        routed = random_routing(device=device, **sizes)
        rows, index = poisoned_rows(routed, width, dtype, device), routed.expanded_to_permuted
        residual = random_rows(len(index), width, dtype=dtype, device=device) if has_residual else None
        return Sample(name, (rows, index, weights_of(routed)), {"residual": residual})

    small: dict[str, Any] = {"m": 19, "topk": 4, "experts": 8}
    yield sample("plain", 256, torch.bfloat16, True, **small)
    for dtype, has_residual in itertools.product(DTYPES, (True, False)):
        name = f"{short(dtype)}{'-residual' if has_residual else ''}"
        yield sample(name, 384, dtype, has_residual, **small)
        yield sample(f"{name}-decode", 7168, dtype, has_residual, m=1, topk=8, experts=32)
    for i, (name, sizes) in enumerate(ROUTINGS):
        yield sample(name, 136, DTYPES[i % 3], i % 2 == 0, **sizes)
    for i, width in enumerate((8, 16, 1032, 2880, 8200)):
        yield sample(f"width-{width}", width, DTYPES[i % 3], i % 2 == 1, **small)
    for topk in (2, 3, 6, 7, 11):
        yield sample(f"top-{topk}", 128, torch.bfloat16, topk % 2 == 0, m=10, topk=topk, experts=12)

    index = torch.randint(-1, 4, (9, 3), dtype=torch.int32, device=device)
    weights = torch.rand(9, 3, device=device)
    for name, rows in views(128, device):
        if rows.dim() == 2 and name != "column-offset-one-row":
            some = torch.randint(-1, len(rows), (9, 3), dtype=torch.int32, device=device)
            yield Sample(name, (rows, some, weights))
    for name, rows in views(128, device):
        if rows.dim() == 2 and rows.dtype == torch.bfloat16:
            some = torch.randint(-1, 7, (len(rows), 2), dtype=torch.int32, device=device)
            given = (random_rows(7, rows.shape[1], device=device), some, torch.rand(len(rows), 2, device=device))
            yield Sample(f"residual-of-{name}", given, {"residual": rows})
    rows = random_rows(4, 256, device=device)
    yield Sample("index-transposed", (rows, index.t().contiguous().t(), weights))
    yield Sample("weights-expanded", (rows, index, weights[:, :1].expand(9, 3)))
    yield Sample("index-column-step", (rows, index.repeat_interleave(2, 1)[:, ::2], weights.repeat(1, 2)[:, ::2]))
    if device.type == "cuda":  # a CPU would refuse these indices
        yield Sample("negative-indices", (rows, torch.where(index < 0, -(2**31), index).to(torch.int32), weights))
    for topk in (3, 4):
        some, factors = torch.randint(-1, 4, (9, topk), dtype=torch.int32, device=device), torch.rand(9, topk)
        yield Sample(f"pairs-unaligned-{topk}", (rows, unaligned(some), unaligned(factors.to(device))))
    yield Sample("no-pairs", (rows, torch.full_like(index, -1), torch.full_like(weights, torch.nan)))
    yield Sample("no-rows", (rows[:0], torch.full_like(index, -1), torch.rand(9, 3, device=device)))
    for dtype in DTYPES:
        special = special_rows(dtype, device)
        every = torch.arange(12, dtype=torch.int32, device=device)
        some = torch.stack((every, every.flip(0)), 1)
        yield Sample(f"special-{short(dtype)}", (special, some, torch.randn(12, 2, device=device)))
        factors = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 2.0**-149, 3e38, 1.0] * 3, device=device)
        ordinary = random_rows(12, 128, dtype=dtype, device=device)
        yield Sample(f"special-weights-{short(dtype)}", (ordinary, some, factors.view(12, 2)))


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    rows, residual = random_rows(6, 64, device=device), random_rows(4, 64, device=device)
    index, weights = torch.zeros(4, 2, dtype=torch.int32, device=device), torch.rand(4, 2, device=device)
    good = (rows, index, weights, residual)
    names = ("input", "expanded_to_permuted", "weights", "residual")
    bad = error_maker(dict(zip(names, good, strict=True)), {})

    for dtype in (torch.float64, torch.int32, torch.float8_e4m3fn, torch.uint8):
        text = f"got input with dtype {short(dtype)}; expected bfloat16"
        yield bad(f"input-{short(dtype)}", TypeError, text, input=rows.to(dtype))
    yield bad("input-1d", ValueError, r"got input with shape \(64,\); expected \(R, H\)", input=rows[0])
    yield bad("input-3d", ValueError, r"expected \(R, H\)", input=rows[None])
    for width in (0, 4, 12, 63):
        text = f"rows of {width} elements; expected a positive multiple of 8"
        yield bad(f"width-{width}", ValueError, text, input=rows[:, :width], residual=None)
    yield from integer_errors("expanded_to_permuted", index, good, 1)
    yield bad("index-1d", ValueError, r"expected \(M, topk\)", expanded_to_permuted=index[0])
    for topk in (0, 33):
        more = torch.zeros(4, topk, dtype=torch.int32, device=device)
        yield bad(f"topk-{topk}", ValueError, f"topk is {topk}; expected 1 to 32", expanded_to_permuted=more)
    for dtype in (torch.bfloat16, torch.float64):
        yield bad(f"weights-{short(dtype)}", TypeError, "got weights with dtype", weights=weights.to(dtype))
    for shape in ((4, 3), (3, 2), (4,), (1, 4, 2)):
        text = r"got weights with shape .*expected \(4, 2\)"
        yield bad(f"weights-shape-{list(shape)}", ValueError, text, weights=torch.rand(shape, device=device))
    yield bad("weights-device", ValueError, "weights is on meta", weights=weights.to("meta"))
    text = "got residual with dtype float16; expected bfloat16"
    yield bad("residual-float16", TypeError, text, residual=residual.half())
    for shape in ((4, 56), (6, 64), (64,)):
        text = r"got residual with shape .*expected \(4, 64\)"
        wrong = random_rows(*shape, device=device)
        yield bad(f"residual-shape-{list(shape)}", ValueError, text, residual=wrong)
    yield bad("residual-device", ValueError, "residual is on meta", residual=residual.to("meta"))
    for name, tensor in {"input": rows, "weights": weights, "residual": residual}.items():
        grad = tensor.detach().clone().requires_grad_()
        yield bad(f"{name}-requires-grad", ValueError, "no gradient", **{name: grad})
    yield from out_errors(good, {}, {"out": torch.zeros(4, 64, dtype=torch.bfloat16, device=device)}, device)
