"""Samples (valid calls) and error inputs of ``mm_fp8``."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from samples import mm_fp8_block
from samples._epilogue import epilogues, exact_epilogue, special_epilogues
from samples._fp8_gemm import FP8, NAN, codes, integers, option_errors, powers, scales, tensor_errors
from samples._inputs import ErrorInput, Sample
from samples._prefetch import prefetch_errors, prefetched, prefetches
from samples._row_errors import error_maker, out_errors
from samples._rows import DTYPES, short
from samples._weights import stride_errors, with_padding

SIZES = mm_fp8_block.SIZES | {"k-of-several-promotions": (70, 136, 1344), "promotions-of-few-rows": (9, 136, 1088)}
"""M, N and K of samples, keyed by the feature of the sizes that the sample tests."""
ROW_DIMENSIONS = mm_fp8_block.ROW_DIMENSIONS


def call(*shape: int, device: torch.device) -> Sample:
    """Return a call with this number of rows and columns, and K = 512."""
    *lead, width = shape
    return sample("", math.prod(lead), width, 512, device)


def sample(
    name: str,
    m: int,
    n: int,
    k: int,
    device: torch.device,
    *,
    exact: bool = False,
    one_a_scale: bool = False,
    one_b_scale: bool = False,
    **kwargs: Any,
) -> Sample:
    """Return a random call. With ``exact``, all its sums are exact.

    Args:
        one_a_scale, one_b_scale: True for one scale per tensor, False for one scale per row of ``a`` or per
            column of the result.
    """
    numbers, factors = (integers, powers) if exact else (codes, scales)
    a, b = (numbers(rows, k, device=device) for rows in (m, n))
    a_scale = factors(*((1,) if one_a_scale else (m, 1)), device=device)
    b_scale = factors(1 if one_b_scale else n, device=device)
    return Sample(name, (a, b.t(), a_scale, b_scale), kwargs)


def sample_inputs(device: torch.device | str) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    device = torch.device(device)
    for out_dtype in DTYPES:
        name, given = short(out_dtype), {"out_dtype": out_dtype}
        yield sample("plain" if out_dtype == torch.bfloat16 else f"to-{name}", 19, 136, 384, device, **given)
        yield sample(f"exact-{name}", 9, 264, 640, device, exact=True, **given)
        yield sample(f"fast-{name}", 19, 136, 1344, device, fast_accum=True, **given)
    for i, (name, sizes) in enumerate(SIZES.items()):
        yield sample(name, *sizes, device, one_a_scale=i % 3 == 1, one_b_scale=i % 4 == 1, fast_accum=i % 2 == 1)
    for m in (1, 9, 70, 300):
        one = {"one_a_scale": True, "one_b_scale": True}
        yield sample(f"per-tensor-{m}", m, 136, 1088, device, **one)
        yield sample(f"exact-per-tensor-{m}", m, 136, 1088, device, exact=True, fast_accum=True, **one)
        yield sample(f"per-tensor-activations-{m}", m, 136, 704, device, one_a_scale=True)
        yield sample(f"per-tensor-weight-{m}", m, 136, 704, device, one_b_scale=True, fast_accum=True)
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


def _values(device: torch.device) -> Iterator[Sample]:
    for name, m in (("few", 5), ("many", 130)):
        one = sample(f"nan-of-{name}-rows", m, 136, 256, device)
        one.args[0].view(torch.uint8)[1::3, 5] = NAN
        one.args[2][2::3] = torch.nan
        yield one
        one = sample(f"nan-of-columns-for-{name}-rows", m, 264, 256, device)
        one.args[1].t().view(torch.uint8)[1::7, 5] = NAN
        one.args[3][2::7] = torch.nan
        yield one
        one = sample(f"nan-scale-for-{name}-rows", m, 136, 256, device, one_b_scale=True)
        one.args[3].fill_(torch.nan)
        yield one
        one = sample(f"zero-scales-of-{name}-rows", m, 136, 256, device, out_dtype=torch.float32)
        one.args[2][::2] = 0.0
        one.args[3][::3] = 0.0
        yield one
        one = sample(f"negative-scales-of-{name}-rows", m, 136, 256, device, out_dtype=torch.float32)
        one.args[2][::2] *= -1
        one.args[3][::3] *= -1
        yield one
        one = sample(f"large-{name}", m, 136, 256, device, out_dtype=torch.float32)
        one.args[2].mul_(2.0**60)
        yield one
        one = sample(f"cancelling-{name}", m, 136, 1024, device, out_dtype=torch.float32)
        a, b, *_ = one.args
        a[:, 512:] = (-a[:, :512].float()).to(FP8)
        b.t()[:, 512:] = b.t()[:, :512]
        yield one
        largest = sample(f"largest-{name}", m, 136, 1088, device, out_dtype=torch.float32)
        for operand in (largest.args[0], largest.args[1].t()):
            operand.copy_((operand.float().sign() * 448).to(FP8))
        yield largest


def _epilogues(device: torch.device) -> Iterator[Sample]:
    for i, out_dtype in enumerate(DTYPES):
        m, n, k = (1, 70, 17)[i], (40, 136, 264)[i], (256, 192, 704)[i]
        for name, given in epilogues(n, out_dtype, device):
            if "alpha" not in given:
                one = {"one_b_scale": name == "bias", "fast_accum": i == 1}
                yield sample(f"{name}-to-{short(out_dtype)}", m, n, k, device, out_dtype=out_dtype, **one, **given)
    bias = exact_epilogue(136, device)["bias"]
    yield sample("epilogue-exact", 9, 136, 320, device, exact=True, bias=bias, out_dtype=torch.float32)
    for name, given in special_epilogues(136, device):
        if "bias" in given:
            yield sample(name, 9, 136, 256, device, bias=given["bias"])


def _views(device: torch.device) -> Iterator[Sample]:
    m, n, k = 6, 24, 256
    one = sample("", m, n, k, device)
    a, b, a_scale, b_scale = one.args
    wide = torch.cat((a.view(torch.uint8),) * 3, 1).view(FP8)
    for name, args in (
        ("a-columns-first", (a.view(torch.uint8).t().contiguous().view(FP8).t(), b, a_scale, b_scale)),
        ("a-row-strided", (wide[:, :k], b, a_scale, b_scale)),
        ("a-offset", (wide[:, 1 : 1 + k], b, a_scale, b_scale)),
        ("a-rows-expanded", (a[:1].expand(m, -1), b, a_scale, b_scale)),
        ("b-pitched", (a, with_padding(b), a_scale, b_scale)),
        ("b-every-other-row", (a, b[:, ::3], a_scale, b_scale[::3])),
        ("a-scale-every-other", (a, b, torch.cat((a_scale, -a_scale), 1)[:, :1], b_scale)),
        ("a-scale-transposed", (a, b, a_scale.flatten()[None].mT, b_scale)),
        ("a-scale-rows-expanded", (a, b, a_scale[:1].expand(m, -1), b_scale)),
        ("a-scale-expanded", (a, b, a_scale[0].as_strided((1,), (0,)), b_scale)),
        ("b-scale-strided", (a, b, a_scale, torch.stack((b_scale, -b_scale), 1)[:, 0])),
        ("b-scale-expanded", (a, b, a_scale, b_scale[:1].expand(n))),
        ("b-scale-unaligned", (a, b, a_scale, torch.cat((b_scale, b_scale))[1 : 1 + n])),
    ):
        yield Sample(name, args, {})
    bias = torch.rand(n, device=device)
    yield Sample("positional", (*one.args, bias, torch.float16, "auto", True, prefetched(device), True), {})
    square, ones = integers(128, 128, device=device), torch.ones(1, device=device)
    yield Sample("same-tensor", (square, square.t(), ones, ones), {})


def error_inputs(device: torch.device | str) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    device = torch.device(device)
    m, n, k = 4, 136, 256
    good = sample("good", m, n, k, device)
    tensors = dict(zip(("a", "b", "a_scale", "b_scale"), good.args, strict=True))
    bad = error_maker(tensors, {})

    yield from tensor_errors(tensors, bad, device)
    a, b, a_scale, b_scale = tensors.values()
    yield bad("b-short", ValueError, "b has K = 160; expected a positive multiple of 64", b=b[:160])
    yield bad("b-no-k", ValueError, "b has K = 0; expected a positive multiple of 64", b=b[:0])
    yield bad("b-narrow", ValueError, "b has N = 132; expected a multiple of 8", b=b[:, :132])
    yield bad("a-of-other-k", ValueError, r"got a with shape \(4, 128\); expected \(4, 256\)", a=a[:, :128])
    for name, wrong in (
        ("flat", a_scale[:, 0]),
        ("of-one-row", a_scale[:1]),
        ("0d", a_scale[0, 0]),
        ("of-blocks", a_scale.expand(m, 2)),
        ("row", a_scale.t()),
    ):
        text = r"got a_scale with shape .*; expected \(4, 1\), a scale for each row of a, or \(1,\)"
        yield bad(f"a-scale-{name}", ValueError, text, a_scale=wrong)
    for name, wrong in (
        ("column", b_scale[:, None]),
        ("row", b_scale[None]),
        ("0d", b_scale[0]),
        ("short", b_scale[:-1]),
        ("of-blocks", b_scale[:4].view(2, 2)),
    ):
        text = r"got b_scale with shape .*; expected \(136,\), a scale for each column of b, or \(1,\)"
        yield bad(f"b-scale-{name}", ValueError, text, b_scale=wrong)
    for error in option_errors(bad, n, device, gpu_backend="wgmma"):
        if not error.name.startswith("alpha"):
            yield error
    yield from prefetch_errors(bad, device)
    yield from stride_errors(good, "b")
    yield from stride_errors(sample("square", m, k, k, device), "b")
    out = {"out": torch.zeros(m, n, dtype=torch.bfloat16, device=device)}
    yield from out_errors(good.args, {}, out, device)
