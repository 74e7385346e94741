"""Samples (valid calls) and error inputs of ``grouped_mm_fp8_fp4``."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from samples import grouped_mm_fp8
from samples._epilogue import epilogues, exact_epilogue, special_epilogues
from samples._fp4 import FORMATS
from samples._fp8_fp4 import formats_and_layouts, scale_values, weight_errors, with_fp4_weight
from samples._fp8_fp4_tokens import token_errors, token_samples, with_tokens
from samples._fp8_gemm import option_errors, tensor_errors
from samples._inputs import ErrorInput, Sample
from samples._row_errors import error_maker, out_errors
from samples._rows import DTYPES, short
from samples._weights import every_other_expert, scale_stride_errors, stride_errors, with_padding
from torch_cute_ops.formats import MXFP4, NVFP4, FP4Format

ROW_DIMENSIONS = grouped_mm_fp8.ROW_DIMENSIONS
NAMES = ("a", "b", "a_scale", "b_scale", "offsets", "counts")


def call(*shape: int, device: torch.device) -> Sample:
    """Return a call with this number of rows and columns, and five experts."""
    return with_fp4_weight(grouped_mm_fp8.call(*shape, device=device), NVFP4, "128x4")


def contiguous(name: str, fmt: FP4Format, layout: str, *sizes: Any, exact: bool = False, **kwargs: Any) -> Sample:
    """Return a call in the contiguous layout. ``sizes`` are arguments of ``grouped_mm_fp8.contiguous``."""
    weight = {key: kwargs.pop(key) for key in ("scales", "scale_rows") if key in kwargs}
    one = grouped_mm_fp8.contiguous(name, *sizes, exact=exact, **kwargs)
    return with_fp4_weight(one, fmt, layout, exact=exact, **weight)


def masked(name: str, fmt: FP4Format, layout: str, *sizes: Any, exact: bool = False, **kwargs: Any) -> Sample:
    """Return a call in the masked layout. ``sizes`` are arguments of ``grouped_mm_fp8.masked``."""
    return with_fp4_weight(grouped_mm_fp8.masked(name, *sizes, exact=exact, **kwargs), fmt, layout, exact=exact)


def sample_inputs(device: torch.device | str) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    device = torch.device(device)
    for fmt, layout, name in formats_and_layouts():
        for out_dtype in DTYPES:
            to = f"{name}-to-{short(out_dtype)}"
            yield contiguous(to, fmt, layout, [5, 0, 19], 136, 384, device, out_dtype=out_dtype)
            yield contiguous(f"{to}-exact", fmt, layout, [3, 20], 264, 256, device, exact=True, out_dtype=out_dtype)
            yield masked(f"masked-{to}", fmt, layout, [5, 0, 8], 8, 136, 384, device, out_dtype=out_dtype)
        yield masked(f"masked-{name}-exact", fmt, layout, [1, 70], 72, 264, 256, device, exact=True)
        yield contiguous(f"uncounted-{name}", fmt, layout, [16, 0, 5], 72, 448, device, counted=False)
    for i, (name, counts, n, k) in enumerate(
        (
            ("one-expert", [7], 136, 256),
            ("one-row", [0, 0, 1, 0], 8, 128),
            ("no-rows-of-any", [0, 0, 0], 24, 128),
            ("many-rows", [130, 3, 257], 264, 256),
            ("many-experts", [i % 3 for i in range(1024)], 8, 128),
            ("odd-counts", [1, 2, 3, 5, 7, 11, 13], 24, 256),
            ("long", [2, 3], 16, 4096),
            ("no-columns", [3, 4], 0, 128),
            ("of-2880", [5, 0, 19], 136, 2880),
        )
    ):
        yield contiguous(name, FORMATS[i % 2], "128x4", counts, n, k, device)
    for name, counts, rows, n, k in (
        ("one-row", [1, 0, 1], 1, 136, 256),
        ("sixteen", [16, 3, 0], 16, 136, 256),
        ("sixty-four", [1, 64, 33], 64, 136, 256),
        ("many", [130, 0, 200], 200, 264, 128),
        ("all-empty", [0, 0], 8, 24, 128),
        ("no-room", [0, 0], 0, 24, 128),
    ):
        yield masked(f"masked-{name}", NVFP4, "128x4", counts, rows, n, k, device)
    yield contiguous("packed", MXFP4, "128x4", [5, 0, 19, 64], 136, 128, device, alignment=1)
    yield contiguous("spare-rows", NVFP4, "128x4", [5, 9], 136, 128, device, spare=200)
    yield contiguous("no-rows", NVFP4, "128x4", [0, 0], 24, 128, device)
    for backend in ("auto", "reference"):
        yield contiguous(f"backend-{backend}", NVFP4, "128x4", [4, 3], 24, 256, device, backend=backend)
    yield contiguous("static-weight", NVFP4, "128x4", [4, 3], 24, 256, device, static_weight=True)
    yield from scale_values(
        lambda name, fmt, layout, **weight: contiguous(
            name, fmt, layout, [5, 130], 72, 384, device, out_dtype=torch.float32, **weight
        )
    )
    yield from _epilogues(device)
    yield from _views(device)
    yield from _tokens(device)


def _epilogues(device: torch.device) -> Iterator[Sample]:
    for i, out_dtype in enumerate(DTYPES):
        n, k, fmt = (40, 136, 264)[i], (256, 192, 128)[i], FORMATS[i % 2]
        for name, given in epilogues(n, out_dtype, device, experts=3):
            chosen: dict[str, Any] = {"out_dtype": out_dtype, **given}
            yield contiguous(f"{name}-to-{short(out_dtype)}", fmt, "128x4", [5, 0, 19], n, k, device, **chosen)
            rows = (8, 40, 70)[i]
            yield masked(f"masked-{name}-to-{short(out_dtype)}", fmt, "128x4", [5, 0, 8], rows, n, k, device, **chosen)
    exact = {**exact_epilogue(136, device, experts=3), "out_dtype": torch.float32}
    yield contiguous("epilogue-exact", NVFP4, "128x4", [5, 0, 19], 136, 320, device, exact=True, **exact)
    for name, given in special_epilogues(136, device, experts=3):
        yield contiguous(name, NVFP4, "128x4", [5, 0, 19], 136, 256, device, **given)


def _views(device: torch.device) -> Iterator[Sample]:
    one = contiguous("", NVFP4, "linear", [5, 3], 24, 256, device)
    a, b, a_scale, b_scale, offsets, counts = one.args
    for name, args in (
        ("b-float4", (a, b.view(torch.float4_e2m1fn_x2), a_scale, b_scale, offsets, counts)),
        ("b-pitched", (a, with_padding(b), a_scale, b_scale, offsets, counts)),
        ("b-every-other-expert", (a, every_other_expert(b), a_scale, b_scale, offsets, counts)),
        ("a-scale-pitched", (a, b, torch.cat((a_scale,) * 2).t().contiguous().t()[: len(a)], b_scale, offsets, counts)),
    ):
        yield replace(one, name=name, args=args)
    alpha, bias = torch.rand(2, 2, 24, device=device)
    rest = (torch.float16, 16, "e4m3", "linear", "auto", True)
    yield replace(one, name="positional", args=(*one.args, alpha, bias, *rest), kwargs={})


def _tokens(device: torch.device) -> Iterator[Sample]:
    """Yield calls with per-token scales, or with one scale for all rows, in both layouts."""
    is_masked = itertools.cycle((False, True, False))

    def make(name: str, n: int, k: int, fmt: FP4Format, layout: str, **given: Any) -> Sample:
        if next(is_masked) and "scales" not in given and "scale_rows" not in given:
            return masked(f"masked-{name}", fmt, layout, [5, 0, 8], 8, n, k, device, **given)
        return contiguous(name, fmt, layout, [5, 0, 19], n, k, device, **given)

    yield from token_samples(make, device, experts=3)
    for name, counts in (("one-expert", [7]), ("no-rows-of-any", [0, 0]), ("many-rows", [130, 3])):
        yield with_tokens(contiguous(name, MXFP4, "128x4", counts, 24, 576, device), prepared=True)
    many = contiguous("many-experts", NVFP4, "128x4", [i % 3 for i in range(1024)], 8, 128, device)
    yield with_tokens(many, prepared=True, interleaved=True)
    room = masked("masked-no-room", NVFP4, "128x4", [0, 0], 0, 24, 256, device)
    yield with_tokens(room, prepared=True, interleaved=True)


def error_inputs(device: torch.device | str) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    device = torch.device(device)
    n, k = 136, 384
    good = contiguous("good", NVFP4, "128x4", [4, 3], n, k, device)
    tensors = dict(zip(NAMES, good.args, strict=True))
    bad = error_maker(tensors, good.kwargs)

    yield from tensor_errors({name: one for name, one in tensors.items() if name[0] != "b"}, bad, device)
    yield from weight_errors(good, bad, NAMES)
    a, b = tensors["a"], tensors["b"]
    yield bad("no-layout", ValueError, "offsets and counts are None; expected offsets", offsets=None, counts=None)
    yield bad("masked-a-2d", ValueError, r"expected \(E, rows of an expert, K\), since offsets is None", offsets=None)
    yield bad("b-2d", ValueError, r"got b with shape \(192, 136\); expected \(E, K/2, N\)", b=b[0])
    yield bad("b-short", ValueError, "b has K = 160; expected a positive multiple of 64", b=b[:, :80])
    yield bad("b-narrow", ValueError, "b has N = 132; expected a multiple of 8", b=b[..., :132])
    yield bad("b-no-experts", ValueError, "b is of 0 experts; expected 1 to 1024", b=b[:0])
    yield bad("b-1025-experts", ValueError, "b is of 1025 experts", b=b[:1].expand(1025, -1, -1))
    yield bad("a-of-other-k", ValueError, r"got a with shape .*; expected .*, the K of b", a=a[:, :128])
    yield from token_errors(good, bad)
    yield from stride_errors(good, "b")
    yield from stride_errors(contiguous("square", NVFP4, "128x4", [4, 3], k // 2, k, device), "b")
    for layout in ("linear", "128x4"):
        yield from scale_stride_errors(contiguous(layout, NVFP4, layout, [4, 3], 136, k, device), 3)
    yield from option_errors(bad, n, device, "wgmma_ss", experts=2)
    out = {"out": torch.zeros(len(a), n, dtype=torch.bfloat16, device=device)}
    yield from out_errors(good.args, good.kwargs, out, device)
