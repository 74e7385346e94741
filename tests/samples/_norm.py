"""Samples and error inputs of the ops that normalise rows: rows, weights and eps."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from samples._inputs import ErrorInput, Sample
from samples._row_errors import out_errors
from samples._rows import DTYPES, Family, random_rows, short


def random_weight(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a random weight of a norm: elements around 1, some negative and some zero."""
    weight = torch.randn(width, device=device) * 0.5 + 1
    weight[30::31] = 0
    return weight.to(dtype)


def norm_samples(family: Family, device: torch.device, only_rms: bool = False) -> Iterator[Sample]:
    """Yield samples for the family's rows, with weights that are alternately in the input's dtype and in float32. Then
    yield samples with special weights and special eps and, unless ``only_rms``, other norms."""
    for i, (name, rows, kwargs) in enumerate(family.rows(device)):
        dtype = torch.float32 if i % 2 else rows.dtype
        yield Sample(name, (rows, random_weight(rows.shape[-1], dtype, device)), kwargs)

    def sample(name: str, weight: torch.Tensor, rows: torch.Tensor | None = None, **kwargs: Any) -> Sample:
        rows = random_rows(5, 96, device=device) if rows is None else rows
        return Sample(name, (rows, weight), {**family.plain, **kwargs})

    for dtype in DTYPES:
        for weight_dtype in dict.fromkeys((dtype, torch.float32)):
            rows = random_rows(5, 96, dtype=dtype, device=device)
            yield sample(f"{short(dtype)}-weight-{short(weight_dtype)}", random_weight(96, weight_dtype, device), rows)
    yield sample("weight-strided", random_weight(192, torch.bfloat16, device)[::2])
    yield sample("weight-offset", random_weight(97, torch.float32, device)[1:])
    # Use float32, because with equal weights the ratios of 16-bit numbers often lie halfway between two codes.
    rows = random_rows(5, 96, dtype=torch.float32, device=device)
    yield sample("weight-expanded", random_weight(2, torch.float32, device)[1:].expand(96), rows)
    weight = random_weight(96, torch.float32, device)
    weight[5] = torch.nan
    weight[50] = torch.inf
    yield sample("weight-not-finite", weight)
    yield sample("weight-large", random_weight(96, torch.float32, device) * 2.0**50)
    yield sample("weight-small", random_weight(96, torch.float32, device) * 2.0**-50, **family.small)
    for eps in (0.0, 1e-5, 1.0):
        yield sample(f"eps-{eps}", random_weight(96, torch.bfloat16, device), eps=eps)
    zeros = torch.zeros(5, 96, dtype=torch.bfloat16, device=device)
    yield sample("zeros-eps-0", random_weight(96, torch.bfloat16, device), zeros, eps=0.0)
    yield sample("parameter", torch.nn.Parameter(random_weight(96, torch.bfloat16, device), requires_grad=False))
    for dtype in DTYPES:
        for weight_dtype in dict.fromkeys((dtype, torch.float32)):
            rows = random_rows(5, 96, dtype=dtype, device=device)
            gain = (random_weight(96, torch.float32, device) - 1).to(weight_dtype)  # includes a weight of -1
            yield sample(f"plus-one-{short(dtype)}-{short(weight_dtype)}", gain, rows, weight_plus_one=True)
    # 1 + weight is rounded to 1, to a number next to 1, and to infinity.
    tiny = 2.0 ** torch.linspace(-30, -20, 96, device=device)
    tiny[3::7] *= -1
    tiny[50], tiny[51] = torch.nan, -torch.inf
    rows = random_rows(5, 96, dtype=torch.float32, device=device)
    yield sample("plus-one-tiny", tiny, rows, weight_plus_one=True)
    if not only_rms:
        yield from other_norms(family, device)
    factor, choices = family.positional(device)
    positional = (random_rows(4, 64, device=device), random_weight(64, torch.bfloat16, device))
    yield Sample("positional", (*positional, *factor, 1e-5, *choices))


def other_norms(family: Family, device: torch.device) -> Iterator[Sample]:
    """Yield samples of LayerNorm, and of norms without a weight or with a bias."""
    dtypes = (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.float32)
    for i, (dtype, weight_dtype) in enumerate(dtypes):
        rows = random_rows(5, 192, dtype=dtype, device=device)
        weight, bias = (random_weight(192, weight_dtype, device) for _ in range(2))
        shifted = (rows.float() + rows.float().abs().amax(-1, keepdim=True)).to(dtype)
        layer = {"bias": bias - 1, "subtract_mean": True}
        kind = f"{short(dtype)}-{short(weight_dtype)}"
        yield Sample(f"layer-{kind}", (shifted, weight), {**family.plain, **layer})
        special = rows.clone()
        special[0, 7], special[1, 8], special[2, 9], special[2, 10] = torch.nan, torch.inf, torch.inf, -torch.inf
        special[3] = 0
        yield Sample(f"layer-special-{kind}", (special, weight), {**family.plain, **layer})
        yield Sample(f"bias-{kind}", (rows, weight), {**family.plain, "bias": bias, "weight_plus_one": i % 2 == 0})
        empty = weight.new_empty(0)
        if dtype == torch.float32:  # only float32, for the reason in ``norm_samples``
            yield Sample(f"without-weight-{kind}", (rows, empty), dict(family.plain))
            yield Sample(f"layer-without-weight-{kind}", (shifted, empty), {**family.plain, "subtract_mean": True})
    constant = torch.tensor([[200.0], [-171.0]], dtype=torch.bfloat16, device=device).repeat(1, 7168)
    bias = random_weight(7168, torch.bfloat16, device)
    yield Sample("layer-constant", (constant, bias), {**family.plain, "bias": bias, "subtract_mean": True})
    wide_rows = random_rows(3, 4096, device=device)
    more = {"bias": random_weight(4096, torch.bfloat16, device), "subtract_mean": True}
    yield Sample("layer-wide", (wide_rows, random_weight(4096, torch.bfloat16, device)), {**family.plain, **more})
    strided = {"bias": random_weight(192, torch.float32, device)[::2], "subtract_mean": True}
    rows = random_rows(5, 96, device=device)
    yield Sample("layer-bias-strided", (rows, random_weight(96, torch.float32, device)), {**family.plain, **strided})


def norm_errors(family: Family, device: torch.device, only_rms: bool = False) -> Iterator[ErrorInput]:
    """Yield wrong rows, weights and other arguments, but no wrong outputs. Unless ``only_rms``, the op has a bias."""
    rows, weight = random_rows(4, 128, device=device), random_weight(128, torch.bfloat16, device)
    for error in family.errors(rows):
        (bad_rows,) = error.args
        fitting = random_weight(bad_rows.shape[-1] if bad_rows.dim() else 128, torch.bfloat16, device)
        yield replace(error, args=(bad_rows, fitting))

    def bad(name: str, error: type[Exception], match: str, weight: torch.Tensor) -> ErrorInput:
        return ErrorInput(f"weight-{name}", (rows, weight), {}, error, match)

    for dtype in (torch.float16, torch.float64, torch.int32):
        text = f"got weight with dtype {short(dtype)}; expected bfloat16 or float32"
        yield bad(short(dtype), TypeError, text, torch.ones(128, dtype=dtype, device=device))
    for shape in ((64,), (129,), (1,), (), (1, 128), (128, 1)):
        text = rf"got weight with shape \({', '.join(map(str, shape))},?\); expected \(128,\)"
        yield bad(f"shape-{list(shape)}", ValueError, text, torch.ones(shape, dtype=torch.bfloat16, device=device))
    for eps in (-1e-6, float("nan"), float("inf")):
        text = f"eps is {eps}; expected a finite number of at least 0"
        yield ErrorInput(f"eps-{eps}", (rows, weight), {"eps": eps}, ValueError, text)
    yield bad("device", ValueError, "weight is on meta", weight.to("meta"))
    if device.type == "cuda":
        yield bad("cpu", ValueError, "weight is on cpu", weight.cpu())
    yield bad("requires-grad", ValueError, "no gradient", weight.clone().requires_grad_())
    if not only_rms:
        yield from _other_errors(rows, weight)
    yield bad("parameter-requires-grad", ValueError, "no gradient", torch.nn.Parameter(weight.clone()))


def _other_errors(rows: torch.Tensor, weight: torch.Tensor) -> Iterator[ErrorInput]:
    """Yield wrong biases, and an addition of 1 to a weight without elements."""
    for name, bias, error, text in (
        ("dtype", weight.float(), TypeError, "got bias with dtype float32; expected bfloat16"),
        ("shape", weight[:64], ValueError, r"got bias with shape \(64,\); expected \(128,\)"),
        ("empty", weight[:0], ValueError, r"got bias with shape \(0,\); expected \(128,\)"),
        ("device", weight.to("meta"), ValueError, "bias is on meta"),
        ("requires-grad", weight.clone().requires_grad_(), ValueError, "no gradient"),
    ):
        yield ErrorInput(f"bias-{name}", (rows, weight), {"bias": bias}, error, text)
    text = "weight_plus_one is True, and weight has no elements"
    yield ErrorInput("plus-one-without-weight", (rows, weight[:0]), {"weight_plus_one": True}, ValueError, text)


def norm_out_errors(family: Family, device: torch.device, returns_norm: bool = False) -> Iterator[ErrorInput]:
    """Yield calls with wrong outputs."""
    kwargs, good = family.outputs(device)
    if returns_norm:
        good["norm"] = torch.zeros(4, 512, dtype=torch.bfloat16, device=device)
    rows, weight = random_rows(4, 512, device=device), random_weight(512, torch.bfloat16, device)
    yield from out_errors((rows, weight), kwargs, good, device)
