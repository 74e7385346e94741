"""Samples (valid calls) and error inputs of ``moe_swiglu_fp8quant``."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from samples._inputs import ErrorInput, Sample
from samples._moe import (
    ROUTINGS,
    Routing,
    integer_errors,
    output_errors,
    poisoned_rows,
    random_routing,
)
from samples._row_errors import input_errors
from samples._rows import DTYPES, random_rows, short, special_rows, views
from samples._silu_mul import GATES, GPT_OSS, OTHER_GATES, gate_errors, swiglu_errors


def call(*shape: int, device: torch.device) -> Sample:
    """Return a call with ten experts, and rows of length ``input_width``. The number of rows is the product of all
    dimensions except the last.

    No test uses ten or eleven rows, the numbers of experts and of offsets, because PyTorch treats equal sizes as one
    symbol.
    """
    rows, width = math.prod(shape[:-1]), input_width(shape[-1])
    ends = torch.arange(11) * rows // 10
    counts = (ends.diff() * 2 // 3).to(torch.int32).to(device)
    offsets = ends.to(torch.int32).to(device)
    return Sample("call", (random_rows(rows, width, device=device), offsets, counts))


def input_width(width: int) -> int:
    """Return ``2 * width`` rounded up to a valid row length."""
    return -(-width // 128) * 256


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts. Rows of padding are NaN."""

    def sample(name: str, width: int, dtype: torch.dtype, has_counts: bool = True, **sizes: Any) -> Sample:
        routed = random_routing(device=device, **sizes)
        if "max_rows" in sizes:
            rows = poisoned_rows(routed, 2 * width, dtype, device).view(sizes["experts"], sizes["max_rows"], 2 * width)
            return Sample(name, (rows,), {"counts": routed.counts})
        if has_counts:
            return Sample(name, (poisoned_rows(routed, 2 * width, dtype, device), routed.offsets, routed.counts))
        rows = random_rows(routed.rows, 2 * width, dtype=dtype, device=device)
        # Mask of the rows after the last expert's rows.
        behind = torch.arange(routed.rows, device=device)[:, None] >= routed.offsets[-1]
        return Sample(name, (rows.masked_fill_(behind, torch.nan), routed.offsets))

    small: dict[str, Any] = {"m": 19, "topk": 2, "experts": 4}
    yield sample("plain", 256, torch.bfloat16, **small)
    for dtype in DTYPES:
        yield sample(f"contiguous-{short(dtype)}", 640, dtype, **small)
        yield sample(f"without-counts-{short(dtype)}", 640, dtype, has_counts=False, **small)
        yield sample(f"masked-{short(dtype)}", 640, dtype, max_rows=16, **small)
        yield sample(f"decode-{short(dtype)}", 2048, dtype, m=1, topk=8, experts=32)
        yield sample(f"decode-masked-{short(dtype)}", 2048, dtype, m=3, topk=8, experts=32, max_rows=4)
    for i, (name, sizes) in enumerate(ROUTINGS):
        yield sample(f"of-{name}", 128, DTYPES[i % 3], i % 2 == 0, **sizes)
    for i, width in enumerate((128, 384, 1152, 2048, 7168, 17408)):
        yield sample(f"width-{width}", width, DTYPES[i % 3], **small)
    for i, (name, gate) in enumerate(GATES):
        one = sample(f"swiglu-{name}", (640, 2880)[i % 2], DTYPES[i % 3], **small)
        yield replace(one, kwargs={**one.kwargs, **gate})
    for i, gate in enumerate(OTHER_GATES):
        one = sample(gate, (640, 2880)[i % 2], DTYPES[i], **small)
        yield replace(one, kwargs={**one.kwargs, "gate": gate})
    for i, width in enumerate((64, 640, 2880)):
        one = sample(f"ue8m0-{width}", width, DTYPES[i], **small)
        yield replace(one, kwargs={**one.kwargs, "scale_format": "ue8m0"})
        one = sample(f"masked-ue8m0-{width}", width, DTYPES[i], max_rows=16, **small)
        yield replace(one, kwargs={**one.kwargs, "scale_format": "ue8m0"})
    for width in (64, 192, 2880):
        yield sample(f"half-a-block-{width}", width, torch.bfloat16, **small)
        yield sample(f"masked-half-a-block-{width}", width, torch.float16, max_rows=16, **small)
    for name, rows in views(256, device):
        if rows.dim() == 2 and rows.shape[1] % 256 == 0:
            offsets = torch.tensor([0, 1, 1, len(rows)], dtype=torch.int32).to(device)
            counts = torch.tensor([1, 0, max(0, len(rows) - 2)], dtype=torch.int32).to(device)
            yield Sample(name, (rows, offsets, counts))
        if rows.dim() == 3:
            counts = torch.arange(1, 1 + len(rows), dtype=torch.int32).clamp(max=rows.shape[1]).to(device)
            yield Sample(f"masked-{name}", (rows,), {"counts": counts})
    rows = random_rows(12, 512, device=device)
    offsets = torch.tensor([0, 4, 4, 8], dtype=torch.int32).to(device)
    step = offsets.repeat_interleave(2)[::2]
    yield Sample("offsets-strided", (rows, step, step[1:] - step[:-1]))
    yield Sample("no-rows-used", (rows * torch.nan, torch.zeros_like(offsets), torch.zeros_like(offsets[1:])))
    yield Sample("begins-later", (rows, offsets + 2))
    for dtype in DTYPES:
        special = special_rows(dtype, device, 128)[:, :512]
        plain = torch.randn(special.shape, device=device).to(dtype)
        ends = torch.tensor([0, len(special)], dtype=torch.int32).to(device)
        for name, halves in {"gate": (special, plain), "up": (plain, special)}.items():
            yield Sample(f"special-{name}-{short(dtype)}", (torch.cat(halves, -1), ends, ends[1:]))
            yield Sample(f"special-{name}-swiglu-{short(dtype)}", (torch.cat(halves, -1), ends, ends[1:]), GPT_OSS)
    yield Sample("positional", (rows, offsets, offsets[1:] - offsets[:-1], 1.5, 0.5, 2.0))


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    routed = Routing(*(torch.zeros(1, dtype=torch.int32, device=device),) * 2, *_two_experts(device))
    good = (random_rows(8, 512, device=device), routed.offsets, routed.counts)
    masked = random_rows(2, 4, 256, device=device)

    def bad(name: str, match: str, *args: Any, **kwargs: Any) -> ErrorInput:
        return ErrorInput(name, args, kwargs, ValueError, match)

    for error in input_errors(good[0]):
        yield ErrorInput(error.name, (*error.args, *good[1:]), {}, error.error, error.match)
    for width in (64, 192, 320, 100):
        text = f"last dimension of {width}; expected two halves, each a positive multiple of 64"
        yield bad(f"width-{width}", text, good[0][:, :width], *good[1:])
    yield bad("neither", "neither offsets nor counts are given", good[0])
    yield bad("rows-3d", r"expected \(R, K\), as there are offsets", masked, routed.offsets)
    yield bad("rows-1d", r"expected \(R, K\), as there are offsets", good[0][0], routed.offsets)
    yield bad("masked-2d", r"expected \(E, max_rows, K\), as there are no offsets", good[0], counts=routed.counts)
    yield bad("masked-4d", r"expected \(E, max_rows, K\)", masked[None], counts=routed.counts)
    yield from integer_errors("offsets", routed.offsets, good, 1)
    yield from integer_errors("counts", routed.counts, good, 2)
    yield bad("offsets-2d", "got offsets with shape .*expected one dimension", good[0], routed.offsets[None])
    yield bad("counts-2d", "got counts with shape .*expected one dimension", masked, counts=routed.counts[None])
    yield bad("counts-0d", "got counts with shape .*expected one dimension", masked, counts=routed.counts[0])
    many = torch.zeros(1026, dtype=torch.int32, device=device)
    yield bad("1025-experts", "offsets are of 1025 experts; expected 1 to 1024", good[0], many)
    yield bad("no-experts", "offsets are of 0 experts; expected 1 to 1024", good[0], many[:1])
    wide = random_rows(1025, 1, 256, device=device)
    yield bad("1025-experts-masked", "input has 1025 experts; expected 1 to 1024", wide, counts=many[1:])
    for count in (1, 3):
        text = rf"got counts with shape \({count},\); expected \(2,\), one for each expert"
        yield bad(f"counts-{count}", text, *good[:2], many[:count])
        yield bad(f"counts-{count}-masked", text, masked, counts=many[:count])
    for scale_format in ("e4m3", ""):
        text = f"scale_format='{scale_format}' does not fit granularity='block128'; use None or 'ue8m0'"
        yield bad(f"scale-format-{scale_format}", text, *good, scale_format=scale_format)
    yield from swiglu_errors(good)
    yield from gate_errors(good)
    yield from output_errors(good, {}, 8, 256, device)


def _two_experts(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return offsets and counts of two experts with four rows each. One of the experts uses only three rows."""
    offsets, counts = torch.tensor([0, 4, 8], dtype=torch.int32), torch.tensor([4, 3], dtype=torch.int32)
    return offsets.to(device), counts.to(device)
