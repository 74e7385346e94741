"""Samples (valid calls) and error inputs of ``mm_fp8_fp4``."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from samples import mm_fp8_block
from samples._epilogue import epilogues, exact_epilogue, special_epilogues
from samples._fp4 import FORMATS
from samples._fp8_fp4 import formats_and_layouts, scale_values, weight_errors, with_fp4_weight
from samples._fp8_fp4_tokens import token_errors, token_samples, with_tokens
from samples._fp8_gemm import FP8, NAN, option_errors, tensor_errors
from samples._inputs import ErrorInput, Sample
from samples._prefetch import prefetch_errors, prefetched, prefetches
from samples._row_errors import error_maker, out_errors
from samples._rows import DTYPES, short
from samples._weights import scale_stride_errors, stride_errors, unaligned, with_padding
from torch_cute_ops.formats import MXFP4, NVFP4, FP4Format

ROW_DIMENSIONS = mm_fp8_block.ROW_DIMENSIONS
NAMES = ("a", "b", "a_scale", "b_scale")


def call(*shape: int, device: torch.device) -> Sample:
    """Return a call with this number of rows and columns, and K = 512."""
    return with_fp4_weight(mm_fp8_block.call(*shape, device=device), NVFP4, "128x4")


def sample(
    name: str,
    m: int,
    n: int,
    k: int,
    fmt: FP4Format,
    layout: str,
    device: torch.device,
    *,
    exact: bool = False,
    weight: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Sample:
    """Return a random call. With ``exact``, all its sums are exact. ``weight`` contains arguments of
    ``with_fp4_weight``."""
    one = mm_fp8_block.sample(name, m, n, k, device, exact=exact, **kwargs)
    return with_fp4_weight(one, fmt, layout, exact=exact, **(weight or {}))


def sample_inputs(device: torch.device | str) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    device = torch.device(device)
    for i, (fmt, layout, name) in enumerate(formats_and_layouts()):
        for out_dtype in DTYPES:
            to = f"{name}-to-{short(out_dtype)}"
            yield sample(to, 19, 136, 384, fmt, layout, device, out_dtype=out_dtype)
            yield sample(f"{to}-exact", 9, 264, 640, fmt, layout, device, exact=True, out_dtype=out_dtype)
        yield sample(f"{name}-half-a-block", (1, 17, 70, 130)[i], 136, 448, fmt, layout, device)
    for i, (name, sizes) in enumerate(mm_fp8_block.SIZES.items()):
        yield sample(name, *sizes, FORMATS[i % 2], "128x4", device)
    for backend in ("auto", "reference"):
        yield sample(f"backend-{backend}", 9, 24, 256, NVFP4, "128x4", device, backend=backend)
    yield sample("static-weight", 5, 136, 1344, NVFP4, "128x4", device, static_weight=True)
    for m, fmt in ((1, MXFP4), (9, NVFP4), (64, MXFP4)):
        for name, given in prefetches(device):
            yield sample(f"{name}-{m}", m, 136, 256, fmt, "128x4", device, prefetch=given)
    for m in (5, 130):
        yield from scale_values(
            lambda name, fmt, layout, m=m, **weight: sample(
                f"{name}-{m}", m, 136, 384, fmt, layout, device, out_dtype=torch.float32, weight=weight
            )
        )
        one = sample(f"nan-of-rows-{m}", m, 136, 256, NVFP4, "128x4", device)
        one.args[0].view(torch.uint8)[1::3, 5] = NAN
        one.args[2][1, 2::3] = torch.nan
        yield one
    yield from _epilogues(device)
    yield from _views(device)
    yield from _tokens(device)


def _epilogues(device: torch.device) -> Iterator[Sample]:
    for i, out_dtype in enumerate(DTYPES):
        m, n, k = (1, 70, 17)[i], (40, 136, 264)[i], (256, 192, 128)[i]
        for name, given in epilogues(n, out_dtype, device):
            chosen: dict[str, Any] = {"out_dtype": out_dtype, **given}
            yield sample(f"{name}-to-{short(out_dtype)}", m, n, k, FORMATS[i % 2], "128x4", device, **chosen)
    exact = exact_epilogue(136, device) | {"out_dtype": torch.float32}
    yield sample("epilogue-exact", 9, 136, 320, MXFP4, "128x4", device, exact=True, **exact)
    for name, given in special_epilogues(136, device):
        yield sample(name, 9, 136, 256, NVFP4, "128x4", device, **given)


def _views(device: torch.device) -> Iterator[Sample]:
    m, n, k = 6, 24, 256
    one = sample("", m, n, k, NVFP4, "linear", device)
    a, b, a_scale, b_scale = one.args
    wide = torch.cat((a.view(torch.uint8),) * 3, 1).view(FP8)
    for name, args in (
        ("a-offset", (wide[:, 1 : 1 + k], b, a_scale, b_scale)),
        ("b-float4", (a, b.view(torch.float4_e2m1fn_x2), a_scale, b_scale)),
        ("b-every-other-row", (a, b[:, ::3], a_scale, b_scale[::3])),
        ("b-pitched", (a, with_padding(b), a_scale, b_scale)),
        ("b-offset", (a, unaligned(b), a_scale, b_scale)),
        ("a-scale-row-major", (a, b, a_scale.contiguous(), b_scale)),
    ):
        yield replace(one, name=name, args=args)
    one = sample("b-scale-e8m0", m, n, k, MXFP4, "128x4", device)
    yield replace(one, args=(*one.args[:3], one.args[3].view(torch.float8_e8m0fnu)))
    one = sample("positional", m, n, k, NVFP4, "128x4", device)
    alpha, bias = torch.rand(2, n, device=device)
    rest = (torch.float16, 16, "e4m3", "128x4", "auto", True, prefetched(device))
    yield replace(one, args=(*one.args, alpha, bias, *rest), kwargs={})


def _tokens(device: torch.device) -> Iterator[Sample]:
    """Yield calls with per-token scales, or with one scale for all rows."""
    sizes = itertools.cycle((19, 9, 1, 70))

    def make(name: str, n: int, k: int, fmt: FP4Format, layout: str, **given: Any) -> Sample:
        weight = {key: given.pop(key) for key in ("scales", "scale_rows") if key in given}
        return sample(name, next(sizes), n, k, fmt, layout, device, weight=weight, **given)

    yield from token_samples(make, device)
    one = sample("", 6, 24, 512, NVFP4, "128x4", device, prefetch=prefetched(device))
    yield with_tokens(replace(one, name="no-rows", args=(one.args[0][:0], one.args[1], one.args[2][:0], one.args[3])))
    one = with_tokens(replace(one, name="views"), prepared=True, interleaved=True)
    a, b, a_scale, b_scale = one.args
    wide = torch.cat((a.view(torch.uint8),) * 2, 2).view(FP8)[..., 256:]
    args = (wide, b, torch.cat((a_scale, -a_scale), 1)[:, :1], torch.stack((b_scale,) * 2, -1)[..., 0])
    yield replace(one, args=args)


def error_inputs(device: torch.device | str) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    device = torch.device(device)
    m, n, k = 4, 136, 384
    good = sample("good", m, n, k, NVFP4, "128x4", device)
    tensors = dict(zip(NAMES, good.args, strict=True))
    bad = error_maker(tensors, good.kwargs)

    yield from tensor_errors({name: tensors[name] for name in ("a", "a_scale")}, bad, device)
    yield from weight_errors(good, bad, NAMES)
    a, b = tensors["a"], tensors["b"]
    yield bad("b-short", ValueError, "b has K = 160; expected a positive multiple of 64", b=b[:80])
    yield bad("b-no-k", ValueError, "b has K = 0; expected a positive multiple of 64", b=b[:0])
    yield bad("b-narrow", ValueError, "b has N = 132; expected a multiple of 8", b=b[:, :132])
    yield bad("a-of-other-k", ValueError, r"got a with shape \(4, 128\); expected \(4, 384\)", a=a[:, :128])
    yield from option_errors(bad, n, device, "wgmma_ss")
    yield from prefetch_errors(bad, device)
    yield from token_errors(good, bad)
    yield from stride_errors(good, "b")
    yield from stride_errors(sample("square", m, k // 2, k, NVFP4, "128x4", device), "b")
    for layout in ("linear", "128x4"):
        yield from scale_stride_errors(sample(layout, m, n, k, NVFP4, layout, device), 3)
    out = {"out": torch.zeros(m, n, dtype=torch.bfloat16, device=device)}
    yield from out_errors(good.args, good.kwargs, out, device)
