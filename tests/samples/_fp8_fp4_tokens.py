"""Samples and error inputs of the GEMMs of FP4 weights and FP8 activations with per-token scales."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from samples._epilogue import epilogues, exact_epilogue
from samples._fp4 import FORMATS
from samples._fp8_fp4 import formats_and_layouts, scale_values
from samples._fp8_gemm import NAN, powers, scales
from samples._inputs import ErrorInput, Sample
from samples._rows import DTYPES
from torch_cute_ops import interleave_k, prepare_scales
from torch_cute_ops.formats import MXFP4, NVFP4


def with_tokens(
    one: Sample,
    *,
    exact: bool = False,
    one_a_scale: bool = False,
    prepared: bool = False,
    interleaved: bool = False,
) -> Sample:
    """Return the call with per-token scales instead of block scales of ``a``. NaN scales of padding rows stay NaN.

    Args:
        one: call of ``mm_fp8_fp4`` or ``grouped_mm_fp8_fp4`` with block scales.
        exact: True for scales that are powers of two.
        one_a_scale: True for one scale for all rows.
        prepared: True for prepared scales of the weight.
        interleaved: True for activations whose k is interleaved.
    """
    a, b, a_scale, b_scale, *rest = one.args
    factors = powers if exact else scales
    rows = factors(*((1,) if one_a_scale else (*a.shape[:-1], 1)), device=a.device)
    if not one_a_scale:
        rows.masked_fill_(a_scale[..., :1].isnan(), torch.nan)
    if prepared:
        experts = b.shape[0] if b.dim() == 3 else None
        block_size = one.kwargs["block_size"]
        b_scale = prepare_scales(b_scale, b.shape[-1], 2 * b.shape[-2], experts=experts, block_size=block_size)
    names = "-prepared" * prepared + "-interleaved" * interleaved
    a = interleave_k(a) if interleaved else a
    return replace(one, name=f"tokens{names}-{one.name}", args=(a, b, rows, b_scale, *rest))


def token_samples(make: Callable[..., Sample], device: torch.device, experts: int | None = None) -> Iterator[Sample]:
    """Yield calls with per-token scales.

    Args:
        make: function that builds a call with block scales from a name, N, K, a format, a layout of scales, ``exact``,
            ``out_dtype`` and other arguments of the op, and ``scales`` and ``scale_rows`` of ``with_fp4_weight``.
        device: device of the tensors.
        experts: number of experts, or None for a GEMM without experts.
    """
    for i, (fmt, layout, name) in enumerate(formats_and_layouts()):
        given: dict[str, Any] = {"out_dtype": DTYPES[i % 3], "fast_accum": i % 2 == 1}
        yield with_tokens(make(name, 136, 704, fmt, layout, **given), one_a_scale=i == 1)
        how = {"prepared": i > 0, "interleaved": i % 2 == 0, "one_a_scale": i == 2}
        yield with_tokens(make(f"exact-{name}", 136, 1088, fmt, layout, exact=True, **given), exact=True, **how)
    for i, fmt in enumerate(FORMATS):
        for k in (64, 128, 256, 2880):
            how = {"prepared": True, "interleaved": k in (128, 256), "one_a_scale": k == 64}
            yield with_tokens(make(f"{fmt.name}-k-{k}", 24, k, fmt, "128x4"), **how)
        yield with_tokens(make(f"{fmt.name}-k-128", 24, 128, fmt, "linear"), interleaved=i == 0)
        for name, epilogue in epilogues(40, DTYPES[i], device, experts):
            named: dict[str, Any] = {"out_dtype": DTYPES[i], **epilogue}
            yield with_tokens(make(f"{fmt.name}-{name}", 40, 192, fmt, "128x4", **named), prepared=i == 0)
    exact = exact_epilogue(136, device, experts=experts) | {"out_dtype": torch.float32}
    yield with_tokens(make("epilogue-exact", 136, 320, MXFP4, "128x4", exact=True, **exact), exact=True, prepared=True)
    yield with_tokens(make("no-columns", 0, 256, NVFP4, "128x4"), prepared=True)

    def of_scales(name: str, fmt: Any, layout: str, **weight: Any) -> Sample:
        return make(name, 72, 384, fmt, layout, out_dtype=torch.float32, **weight)

    for i, one in enumerate(scale_values(of_scales)):
        yield with_tokens(one, prepared="negative" not in one.name, interleaved=i % 2 == 0)
        if "apart" in one.name or "nan" in one.name:
            yield with_tokens(one)
    one = with_tokens(make("nan", 136, 256, NVFP4, "128x4"), prepared=True)
    one.args[0].view(torch.uint8)[..., 1::3, 5] = NAN
    one.args[2][..., 2::3, :] = torch.nan
    yield one


def token_errors(good: Sample, bad: Callable[..., ErrorInput]) -> Iterator[ErrorInput]:
    """Yield wrong scales and wrong interleaved activations. ``good`` is a call with block scales of ``a``, tiled NVFP4
    scales of the weight, K = 384 and N = 136. ``bad`` is as in ``_fp8_gemm.tensor_errors``."""
    a, _, _, b_scale, *_ = good.args
    one = with_tokens(good, prepared=True)
    tokens, prepared = one.args[2:4]
    interleaved = interleave_k(a)
    text = r"got a_scale with shape .*; expected .*, a scale for each row of a, or \(1,\)"
    for name, wrong in (
        ("flat", tokens[..., 0]),
        ("few", tokens[..., 1:, :]),
        ("wide", tokens.expand(*a.shape[:-1], 2)),
    ):
        yield bad(f"tokens-a-scale-{name}", ValueError, text, a_scale=wrong, b_scale=prepared)
    fix = text + r"\. Block scales of a are refused, because "
    text = rf"{fix}b_scale holds prepared scales"
    yield bad("prepared-with-blocks", ValueError, text, b_scale=prepared)
    yield bad("interleaved-with-blocks", ValueError, rf"{fix}k of a is interleaved; deinterleave_k", a=interleaved)
    text = "got b_scale with shape .*; expected .*, prepared scales of b in nvfp4"
    for name, wrong in (("rows", prepared[..., 1:, :]), ("slabs", prepared[..., :-1, :, :])):
        yield bad(f"prepared-{name}", ValueError, text, a_scale=tokens, b_scale=wrong)
    text = "scale_layout is 'linear', and b_scale has the shape .* of prepared scales; expected None"
    yield bad("prepared-layout", ValueError, text, {"scale_layout": "linear"}, a_scale=tokens, b_scale=prepared)
    text = "got b_scale with shape .*, which prepared scales have for block_size=32; got block_size=16"
    yield bad("prepared-narrow", ValueError, text, a_scale=tokens, b_scale=prepared[..., :8])
    text = "got a with shape .*; expected .*, interleaved rows of K = 384, the K of b"
    for name, wrong in (
        ("short", interleaved[..., :1, :]),
        ("long", torch.cat((interleaved.view(torch.uint8),) * 2, -2)),
    ):
        yield bad(f"interleaved-{name}", ValueError, text, a=wrong.view(a.dtype), a_scale=tokens)
    yield bad("tokens-b-scale", ValueError, "got b_scale with shape", a_scale=tokens, b_scale=b_scale[:, 1:])
