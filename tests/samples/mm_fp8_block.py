"""Samples (valid calls) and error inputs of ``mm_fp8_block``."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from support import spec

from samples._epilogue import epilogues, exact_epilogue, special_epilogues
from samples._fp8_gemm import (
    FP8,
    NAN,
    codes,
    integers,
    matrix,
    mx_scales,
    option_errors,
    tensor_errors,
    weight,
    with_row_scales,
)
from samples._inputs import ErrorInput, Sample
from samples._prefetch import prefetch_errors, prefetched, prefetches
from samples._row_errors import error_maker, out_errors
from samples._rows import DTYPES, short
from samples._weights import stride_errors, with_padding

SIZES = {
    "one-row": (1, 8, 128),
    "decode": (1, 256, 1024),
    "eight-rows": (8, 128, 256),
    "nine-rows": (9, 72, 256),
    "sixteen-rows": (16, 136, 128),
    "seventeen-rows": (17, 136, 128),
    "thirty-three-rows": (33, 248, 256),
    "sixty-four-rows": (64, 128, 256),
    "sixty-five-rows": (65, 264, 128),
    "a-tile": (128, 256, 256),
    "several-tiles": (300, 520, 256),
    "rows-of-one-more": (257, 8, 128),
    "k-64": (3, 24, 64),
    "k-ends-in-half-a-block": (9, 136, 448),
    "decode-of-2880": (1, 256, 2880),
    "many-rows-of-2880": (130, 264, 2880),
    "long": (5, 24, 8192),
    "no-rows": (0, 24, 128),
    "no-columns": (5, 0, 128),
}
"""M, N and K of samples, keyed by the feature of the sizes that the sample tests."""
ROW_DIMENSIONS = {"a": 0, "a_scale": 0}
"""For each tensor of a ``call``, the index of the dimension that is the number of rows."""


def call(*shape: int, device: torch.device) -> Sample:
    """Return a call with this number of rows and columns, and K = 512, which is four blocks. No test uses these sizes
    as its number of rows, because PyTorch treats equal sizes as one symbol."""
    *lead, width = shape
    return sample("", math.prod(lead), width, 512, device)


def sample(name: str, m: int, n: int, k: int, device: torch.device, *, exact: bool = False, **kwargs: Any) -> Sample:
    """Return a random call. With ``exact``, all its sums are exact."""
    a, a_scale = matrix(m, k, device, exact)
    b, b_scale = weight(n, k, device=device, exact=exact)
    return Sample(name, (a, b.t(), a_scale, b_scale), kwargs)


def mx_sample(
    name: str,
    m: int,
    n: int,
    k: int,
    device: torch.device,
    *,
    layout: str = "128x4",
    weight_layout: str = "linear",
    exact: bool = False,
    **kwargs: Any,
) -> Sample:
    """Return a random call with MXFP8 matrices, whose scales are bytes in these layouts. With ``exact``, all its sums
    are exact."""
    numbers = integers if exact else codes
    a, b = (numbers(rows, k, device=device) for rows in (m, n))
    scales = []
    for rows, name_of_layout in ((m, layout), (n, weight_layout)):
        linear = mx_scales((rows,), k, exact)
        arranged = spec.arrange(linear.numpy(), name_of_layout) if name_of_layout != "linear" else linear.numpy()
        scales.append(torch.from_numpy(arranged).to(device))
    return Sample(name, (a, b.t(), *scales), kwargs)


def _rows(device: torch.device) -> Iterator[Sample]:
    """Yield calls with block scales of each row of the weight, in several layouts."""
    for name in ("decode", "nine-rows", "thirty-three-rows", "several-tiles", "k-64", "k-ends-in-half-a-block"):
        yield with_row_scales(sample(name, *SIZES[name], device))
    for name in ("no-rows", "one-column-of-blocks"):
        yield with_row_scales(sample(name, *SIZES.get(name, (70, 136, 128)), device))
    for out_dtype in DTYPES:
        exact: dict[str, Any] = {"exact": True, "out_dtype": out_dtype}
        yield with_row_scales(sample(f"exact-{short(out_dtype)}", 130, 264, 640, device, **exact), exact=True)
    for name, given in epilogues(136, torch.bfloat16, device):
        yield with_row_scales(sample(name, 70, 136, 192, device, out_dtype=torch.bfloat16, **given))
    yield with_row_scales(sample("reference", 9, 24, 256, device, backend="reference"))
    a, b, a_scale, b_scale = with_row_scales(sample("", 6, 24, 256, device)).args
    for name, strided in (
        ("row-major", b_scale.contiguous()),
        ("strided", torch.stack((b_scale, b_scale), 2).flatten(1)[:, ::2]),
        ("pitched", torch.cat((b_scale,) * 2).t().contiguous().t()[1 : 1 + len(b_scale)]),
    ):
        yield Sample(f"rows-{name}", (a, b, a_scale, strided), {})
    one = with_row_scales(sample("nan", 70, 136, 256, device))
    one.args[3][3::7, 1], one.args[3][1::7, 0] = torch.nan, 0.0
    yield one


def _mxfp8(device: torch.device) -> Iterator[Sample]:
    """Yield calls with MXFP8 matrices."""
    layouts = ("128x4", "linear", "8x4")
    for i, (name, sizes) in enumerate(SIZES.items()):
        given = {"layout": layouts[i % 3], "weight_layout": layouts[i // 3 % 3]}
        yield mx_sample(f"mxfp8-{name}", *sizes, device, **given)
    for out_dtype in DTYPES:
        yield mx_sample(f"mxfp8-to-{short(out_dtype)}", 19, 136, 384, device, out_dtype=out_dtype)
        exact = {"exact": True, "out_dtype": out_dtype}
        yield mx_sample(f"mxfp8-exact-{short(out_dtype)}", 9, 264, 640, device, **exact)
    yield mx_sample("mxfp8-reference", 9, 24, 256, device, backend="reference")
    for name, given in epilogues(136, torch.bfloat16, device):
        yield mx_sample(f"mxfp8-{name}", 70, 136, 192, device, out_dtype=torch.bfloat16, **given)
    one = mx_sample("mxfp8-nan", 9, 136, 256, device, layout="linear")
    one.args[0].view(torch.uint8)[1, 5] = NAN
    one.args[2][2, 1], one.args[3][7, 3], one.args[2][3] = 255, 255, 0
    yield one
    one = mx_sample("mxfp8-e8m0", 9, 136, 256, device)
    a, b, *scales = one.args
    yield Sample("mxfp8-e8m0", (a, b, *(scale.view(torch.float8_e8m0fnu) for scale in scales)), {})
    one = mx_sample("mxfp8-views", 6, 24, 256, device, layout="linear")
    a, b, a_scale, b_scale = one.args
    wide = torch.cat((a.view(torch.uint8),) * 3, 1).view(FP8)
    strided = torch.cat((a_scale,) * 2, 1)[:, : a_scale.shape[1]]
    pitched = torch.cat((b_scale.flatten()[:1], b_scale.flatten()))[1:].view(b_scale.shape)
    yield Sample("mxfp8-offset", (a, b, a_scale, pitched), {})
    yield Sample("mxfp8-views", (wide[:, 1 : 1 + a.shape[1]], with_padding(b), strided, b_scale), {})


def sample_inputs(device: torch.device | str) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    device = torch.device(device)
    for out_dtype in DTYPES:
        yield sample(
            "plain" if out_dtype == torch.bfloat16 else f"to-{short(out_dtype)}",
            19,
            136,
            384,
            device,
            out_dtype=out_dtype,
        )
        yield sample(f"exact-{short(out_dtype)}", 9, 264, 640, device, exact=True, out_dtype=out_dtype)
    for name, sizes in SIZES.items():
        yield sample(name, *sizes, device)
    for backend in ("auto", "reference"):
        yield sample(f"backend-{backend}", 9, 24, 256, device, backend=backend)
    for name, m in (("few", 5), ("many", 130)):
        yield sample(f"static-weight-for-{name}-rows", m, 136, 1344, device, static_weight=True)
    for m in (1, 64):
        for name, given in prefetches(device):
            yield sample(f"{name}-{m}", m, 136, 256, device, prefetch=given)
    yield from _values(device)
    yield from _epilogues(device)
    yield from _views(device)
    yield from _rows(device)
    yield from _mxfp8(device)


def _values(device: torch.device) -> Iterator[Sample]:
    for name, m in (("few", 5), ("many", 130)):
        one = sample(f"nan-of-{name}-rows", m, 136, 256, device)
        one.args[0].view(torch.uint8)[1::3, 5] = NAN
        one.args[2][2::3, 1] = torch.nan
        yield one
        one = sample(f"nan-of-columns-for-{name}-rows", m, 264, 256, device)
        one.args[1].t().view(torch.uint8)[1::7, 5] = NAN
        one.args[3][1, 0] = torch.nan
        yield one
        one = sample(f"zero-scales-of-{name}-rows", m, 136, 256, device, out_dtype=torch.float32)
        one.args[2][::2] = 0.0
        one.args[3][-1] = 0.0
        yield one
        one = sample(f"large-{name}", m, 136, 256, device, out_dtype=torch.float32)
        one.args[2].mul_(2.0**60)
        yield one
        one = sample(f"cancelling-{name}", m, 136, 256, device, out_dtype=torch.float32)
        a, b, a_scale, b_scale = one.args
        a[:, 128:] = a[:, :128]
        b.t()[:, 128:] = b.t()[:, :128]
        a_scale[:, 1] = -a_scale[:, 0]
        b_scale[:, 1] = b_scale[:, 0]
        yield one
        largest = sample(f"largest-{name}", m, 136, 128, device, out_dtype=torch.float32)
        for operand in (largest.args[0], largest.args[1].t()):
            operand.copy_((operand.float().sign() * 448).to(FP8))
        yield largest


def _epilogues(device: torch.device) -> Iterator[Sample]:
    for i, out_dtype in enumerate(DTYPES):
        m, n, k = (1, 70, 17)[i], (40, 136, 264)[i], (256, 192, 128)[i]
        for name, given in epilogues(n, out_dtype, device):
            yield sample(f"{name}-to-{short(out_dtype)}", m, n, k, device, out_dtype=out_dtype, **given)
    exact = exact_epilogue(136, device) | {"out_dtype": torch.float32}
    yield sample("epilogue-exact", 9, 136, 320, device, exact=True, **exact)
    for name, given in special_epilogues(136, device):
        yield sample(name, 9, 136, 256, device, **given)


def _views(device: torch.device) -> Iterator[Sample]:
    m, n, k = 6, 24, 256
    one = sample("", m, n, k, device)
    a, b, a_scale, b_scale = one.args
    wide = torch.cat((a.view(torch.uint8),) * 3, 1).view(FP8)
    pitched = torch.cat((a_scale,) * 2).t().contiguous().t()
    for name, args in (
        ("a-columns-first", (a.view(torch.uint8).t().contiguous().view(FP8).t(), b, a_scale, b_scale)),
        ("a-row-strided", (wide[:, :k], b, a_scale, b_scale)),
        ("a-offset", (wide[:, 1 : 1 + k], b, a_scale, b_scale)),
        ("a-rows-expanded", (a[:1].expand(m, -1), b, a_scale, b_scale)),
        ("b-pitched", (a, with_padding(b), a_scale, b_scale)),
        ("b-every-other-row", (a, b[:, ::3], a_scale, b_scale)),
        ("a-scale-row-major", (a, b, a_scale.contiguous(), b_scale)),
        ("a-scale-pitched", (a, b, pitched[1 : 1 + m], b_scale)),
        ("a-scale-blocks-expanded", (a, b, a_scale[:, :1].expand(-1, 2), b_scale)),
        ("a-scale-rows-expanded", (a, b, a_scale[:1].expand(m, -1), b_scale)),
        ("a-scale-every-other", (a, b, torch.stack((a_scale, a_scale), 2).flatten(1)[:, ::2], b_scale)),
        ("b-scale-strided", (a, b, a_scale, torch.cat((b_scale,) * 2, 1)[:, : b_scale.shape[1]])),
    ):
        yield Sample(name, args, {})
    alpha, bias = torch.rand(2, n, device=device)
    yield Sample("positional", (*one.args, alpha, bias, torch.float16, "auto", True, prefetched(device)), {})
    yield Sample("same-tensor", (square := integers(128, 128, device=device), square.t(), *_ones(device)), {})


def _ones(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(128, 1, device=device), torch.ones(1, 1, device=device)


def error_inputs(device: torch.device | str) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    device = torch.device(device)
    m, n, k = 4, 136, 256
    good = sample("good", m, n, k, device)
    tensors = dict(zip(("a", "b", "a_scale", "b_scale"), good.args, strict=True))
    bad = error_maker(tensors, {})

    yield from tensor_errors(tensors, bad, device)
    a, b = tensors["a"], tensors["b"]
    yield bad("b-short", ValueError, "b has K = 160; expected a positive multiple of 64", b=b[:160])
    yield bad("b-no-k", ValueError, "b has K = 0; expected a positive multiple of 64", b=b[:0])
    yield bad("b-narrow", ValueError, "b has N = 132; expected a multiple of 8", b=b[:, :132])
    yield bad("b-half", ValueError, "got b_scale with shape", b=b[:, :128])
    yield bad(
        "b-scale-transposed-view", ValueError, "a transposed view", b_scale=tensors["b_scale"].t().contiguous().t()
    )
    yield bad("a-of-other-k", ValueError, r"got a with shape \(4, 128\); expected \(4, 256\)", a=a[:, :128])
    mx = mx_sample("", m, n, k, device)
    _, _, mx_a, mx_b = mx.args
    text = "got a_scale with dtype float32; expected uint8 or float8_e8m0fnu"
    yield bad("mxfp8-a-scale-float32", TypeError, text, b_scale=mx_b)
    yield bad("mxfp8-a-scale-bytes", TypeError, "got a_scale with dtype uint8; expected float32", a_scale=mx_a)
    for name, right, wrong in (("a_scale", mx_b, mx_a[:0]), ("a_scale", mx_b, mx_b), ("a_scale", mx_b, mx_a.flatten())):
        text = r"got a_scale with shape .*; expected \(4, 8\) \(linear\) or .* \(8x4\), MXFP8 scales of a"
        yield bad(f"mxfp8-{name}-{list(wrong.shape)}", ValueError, text, a_scale=wrong, b_scale=right)
    text = r"got b_scale with shape \(136, 7\); expected \(136, 8\) \(linear\)"
    yield bad("mxfp8-b-scale-narrow", ValueError, text, a_scale=mx_a, b_scale=mx_b[:, :7])
    transposed = mx_b.t().contiguous().t()
    yield bad("mxfp8-b-scale-transposed", ValueError, "a transposed view", a_scale=mx_a, b_scale=transposed)
    yield from option_errors(bad, n, device)
    yield from prefetch_errors(bad, device)
    yield from stride_errors(good, "b")
    yield from stride_errors(sample("square", m, k, k, device), "b")
    out = {"out": torch.zeros(m, n, dtype=torch.bfloat16, device=device)}
    yield from out_errors(good.args, {}, out, device)
