"""Samples (valid calls) and error inputs of ``grouped_mm_fp8``."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from support import spec

from samples._epilogue import epilogues, exact_epilogue, special_epilogues
from samples._fp8_gemm import (
    FP8,
    NAN,
    matrix,
    mx_scales,
    option_errors,
    powers,
    scales,
    tensor_errors,
    weight,
    with_row_scales,
)
from samples._inputs import ErrorInput, Sample
from samples._row_errors import error_maker, out_errors
from samples._rows import DTYPES, short
from samples._weights import every_other_expert, stride_errors, with_padding

ROW_DIMENSIONS = {"a": 0, "a_scale": 0}
"""For each tensor of a ``call``, the index of the dimension that is the number of rows."""


def call(*shape: int, device: torch.device) -> Sample:
    """Return a call with this number of rows and columns. The call uses five experts, three of them without rows, and K
    = 512, which is four blocks. No test uses these sizes as its number of rows, because PyTorch treats equal sizes as
    one symbol."""
    *lead, width = shape
    rows = math.prod(lead)
    return contiguous("", [rows // 2, 0, rows - rows // 2, 0, 0], width, 512, device, alignment=1)


def contiguous(
    name: str,
    counts: Sequence[int],
    n: int,
    k: int,
    device: torch.device,
    *,
    alignment: int = 16,
    spare: int = 0,
    counted: bool = True,
    exact: bool = False,
    **kwargs: Any,
) -> Sample:
    """Return a call in the contiguous layout. Each expert begins at a multiple of ``alignment``, ``spare`` rows follow
    the last expert, and rows of padding are NaN. If not ``counted``, an expert owns all rows up to the next expert."""
    begins = [0]
    for count in counts:
        begins.append(-(-(begins[-1] + count) // alignment) * alignment)
    rows = begins[-1] + spare
    offsets = torch.tensor(begins, dtype=torch.int32, device=device)
    lengths = counts if counted else [end - begin for begin, end in itertools.pairwise(begins)]
    a, a_scale = matrix(rows, k, device, exact)
    exists = torch.zeros(rows, dtype=torch.bool)
    for begin, count in zip(begins, lengths, strict=False):
        exists[begin : begin + count] = True
    _poison(a, a_scale, exists.to(device))
    b, b_scale = weight(n, k, device=device, exact=exact, experts=len(counts))
    _poison_unused(b_scale, lengths)
    given = torch.tensor(counts, dtype=torch.int32, device=device) if counted else None
    return Sample(name, (a, b.mT, a_scale, b_scale, offsets, given), kwargs)


def masked(
    name: str,
    counts: Sequence[int],
    rows: int,
    n: int,
    k: int,
    device: torch.device,
    *,
    exact: bool = False,
    **kwargs: Any,
) -> Sample:
    """Return a call in the masked layout, with ``rows`` rows reserved per expert. Unused rows are NaN."""
    experts = len(counts)
    given = torch.tensor(counts, dtype=torch.int32, device=device)
    a, a_scale = matrix(experts * rows, k, device, exact)
    exists = (torch.arange(rows, device=device) < given[:, None]).reshape(-1)
    _poison(a, a_scale, exists)
    b, b_scale = weight(n, k, device=device, exact=exact, experts=experts)
    _poison_unused(b_scale, counts)
    args = (a.view(experts, rows, k), b.mT, a_scale.unflatten(0, (experts, rows)), b_scale)
    return Sample(name, args, {"counts": given, **kwargs})


def _poison(a: torch.Tensor, a_scale: torch.Tensor, exists: torch.Tensor) -> None:
    """Write NaN to the rows and scales of padding, where ``exists`` is False."""
    a.view(torch.uint8).masked_fill_(~exists[:, None], NAN)
    a_scale.masked_fill_(~exists[:, None], torch.nan)


def _poison_unused(b_scale: torch.Tensor, counts: Sequence[int]) -> None:
    """Write NaN to the weight scales of experts without rows."""
    for expert, count in enumerate(counts):
        if count == 0:
            b_scale[expert] = torch.nan


def sample_inputs(device: torch.device | str) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    device = torch.device(device)
    for out_dtype in DTYPES:
        dtype = short(out_dtype)
        yield contiguous(
            "plain" if out_dtype == torch.bfloat16 else f"to-{dtype}", [5, 0, 19], 136, 384, device, out_dtype=out_dtype
        )
        yield contiguous(f"exact-{dtype}", [3, 20], 264, 256, device, exact=True, out_dtype=out_dtype)
        yield masked(f"masked-{dtype}", [5, 0, 8], 8, 136, 384, device, out_dtype=out_dtype)
        yield masked(f"masked-exact-{dtype}", [1, 70], 72, 264, 256, device, exact=True, out_dtype=out_dtype)
        one = contiguous(f"uncounted-{dtype}", [16, 0, 5], 72, 128, device, counted=False, out_dtype=out_dtype)
        yield one
    for name, counts, n, k in (
        ("one-expert", [7], 136, 256),
        ("one-row", [0, 0, 1, 0], 8, 128),
        ("no-rows-of-any", [0, 0, 0], 24, 128),
        ("all-on-the-last", [0, 0, 0, 70], 136, 128),
        ("many-rows", [130, 3, 257], 264, 256),
        ("many-experts", [i % 3 for i in range(1024)], 8, 128),
        ("odd-counts", [1, 2, 3, 5, 7, 11, 13], 24, 256),
        ("long", [2, 3], 16, 4096),
        ("no-columns", [3, 4], 0, 128),
    ):
        yield contiguous(name, counts, n, k, device)
    for k in (64, 448, 2880):
        yield contiguous(f"k-{k}", [5, 0, 19], 136, k, device)
        yield masked(f"masked-k-{k}", [5, 0, 8], 8, 72, k, device)
    yield from _epilogues(device)
    yield from _tokens(device)
    yield from _rows(device)
    yield from _mxfp8(device)
    for backend in ("auto", "reference"):
        yield contiguous(f"backend-{backend}", [4, 3], 24, 256, device, backend=backend)
    yield contiguous("static-weight", [4, 3], 24, 256, device, static_weight=True)
    yield contiguous("aligned-to-128", [5, 0, 129], 136, 128, device, alignment=128)
    yield contiguous("packed", [5, 0, 19, 64], 136, 128, device, alignment=1)
    yield contiguous("spare-rows", [5, 9], 136, 128, device, spare=200)
    yield contiguous("spare-rows-uncounted", [5, 9], 136, 128, device, spare=40, counted=False)
    yield contiguous("no-rows", [0, 0], 24, 128, device)
    for name, counts, rows, n, k in (
        ("one-row", [1, 0, 1], 1, 136, 256),
        ("sixteen", [16, 3, 0], 16, 136, 256),
        ("thirty-two", [32, 17], 32, 72, 128),
        ("sixty-four", [1, 64, 33], 64, 136, 256),
        ("many", [130, 0, 200], 200, 264, 128),
        ("room-for-more", [3, 65, 0, 1], 136, 136, 128),
        ("all-empty", [0, 0], 8, 24, 128),
        ("no-room", [0, 0], 0, 24, 128),
    ):
        yield masked(f"masked-{name}", counts, rows, n, k, device)
    yield from _views(device)


def _epilogues(device: torch.device) -> Iterator[Sample]:
    for i, out_dtype in enumerate(DTYPES):
        n, k = (40, 136, 264)[i], (256, 192, 128)[i]
        for name, given in epilogues(n, out_dtype, device, experts=3):
            named: dict[str, Any] = {"out_dtype": out_dtype, **given}
            yield contiguous(f"{name}-to-{short(out_dtype)}", [5, 0, 19], n, k, device, **named)
            yield masked(f"masked-{name}-to-{short(out_dtype)}", [5, 0, 8], (8, 40, 70)[i], n, k, device, **named)
    exact = {**exact_epilogue(136, device, experts=3), "out_dtype": torch.float32}
    yield contiguous("epilogue-exact", [5, 0, 19], 136, 320, device, exact=True, **exact)
    for name, given in special_epilogues(136, device, experts=3):
        yield contiguous(name, [5, 0, 19], 136, 256, device, **given)


def with_token_scales(
    one: Sample, *, exact: bool = False, one_a_scale: bool = False, one_b_scale: bool = False
) -> Sample:
    """Return the call with per-token and per-channel scales instead of block scales. The NaN scales of padding rows and
    of experts without rows stay NaN.

    Args:
        one: call with block scales.
        exact: True for scales that are powers of two.
        one_a_scale: True for one scale for all rows.
        one_b_scale: True for one scale per expert.
    """
    a, b, a_scale, b_scale, *rest = one.args
    factors = powers if exact else scales
    rows, columns = (1,) if one_a_scale else (*a.shape[:-1], 1), b.shape[:1] if one_b_scale else (len(b), b.shape[2])
    new_a, new_b = factors(*rows, device=a.device), factors(*columns, device=a.device)
    if not one_a_scale:
        new_a.masked_fill_(a_scale[..., :1].isnan(), torch.nan)
    unused = b_scale.flatten(1).isnan().any(1)
    new_b.masked_fill_(unused if one_b_scale else unused[:, None], torch.nan)
    return Sample(f"tokens-{one.name}", (a, b, new_a, new_b, *rest), one.kwargs)


def with_mx_scales(one: Sample, layout: str = "128x4", weight_layout: str = "linear", *, exact: bool = False) -> Sample:
    """Return the call with MXFP8 scales in these layouts instead of block scales of 128. Scales of padding rows and of
    experts without rows are NaN. With ``exact``, all sums of whole numbers are exact."""
    a, b, a_scale, b_scale, *rest = one.args
    made = []
    for scale, lead, name in ((a_scale, a.shape[:-1], layout), (b_scale, b.mT.shape[:-1], weight_layout)):
        linear = mx_scales(tuple(lead), a.shape[-1], exact)
        if not scale.is_meta:
            unused = scale.isnan().flatten(1).any(1) if scale is b_scale else scale.isnan().any(-1)
            linear[unused.cpu()] = 255
        if name != "linear":
            linear = torch.from_numpy(spec.arrange(linear.flatten(0, -2).numpy(), name))
        made.append(linear.to(a.device))
    return Sample(f"mxfp8-{one.name}", (a, b, *made, *rest), one.kwargs)


def _rows(device: torch.device) -> Iterator[Sample]:
    """Yield calls with block scales of each row of the weights."""
    for out_dtype in DTYPES:
        dtype, given = short(out_dtype), {"out_dtype": out_dtype}
        yield with_row_scales(contiguous(f"to-{dtype}", [5, 0, 19], 136, 384, device, **given))
        yield with_row_scales(masked(f"masked-to-{dtype}", [5, 0, 8], 8, 136, 192, device, **given))
        exact = contiguous(f"exact-{dtype}", [3, 70], 264, 320, device, exact=True, **given)
        yield with_row_scales(exact, exact=True)
        exact = masked(f"masked-exact-{dtype}", [1, 130], 136, 264, 256, device, exact=True, **given)
        yield with_row_scales(exact, exact=True)
    for name, epilogue in epilogues(136, torch.bfloat16, device, experts=3):
        named: dict[str, Any] = {"out_dtype": torch.bfloat16, **epilogue}
        yield with_row_scales(contiguous(name, [5, 0, 19], 136, 256, device, **named))
    yield with_row_scales(contiguous("many-rows", [130, 3, 257], 264, 576, device))
    a, b, a_scale, b_scale, *rest = with_row_scales(contiguous("", [4, 3], 24, 256, device)).args
    yield Sample("rows-row-major", (a, b, a_scale, b_scale.contiguous(), *rest), {})


def _mxfp8(device: torch.device) -> Iterator[Sample]:
    """Yield calls with MXFP8 matrices, with scales in each layout."""
    layouts = itertools.cycle(itertools.product(("128x4", "linear", "8x4"), repeat=2))
    for i, out_dtype in enumerate(DTYPES):
        dtype, given = short(out_dtype), {"out_dtype": out_dtype}
        yield with_mx_scales(contiguous(f"to-{dtype}", [5, 0, 19], 136, 384, device, **given), *next(layouts))
        yield with_mx_scales(masked(f"masked-to-{dtype}", [5, 0, 8], 8, 136, 192, device, **given), *next(layouts))
        exact = contiguous(f"exact-{dtype}", [3, 70], 264, 320, device, exact=True, **given)
        yield with_mx_scales(exact, *next(layouts), exact=True)
        exact = masked(f"masked-exact-{dtype}", [1, 70], 72, 264, 256, device, exact=True, **given)
        yield with_mx_scales(exact, *next(layouts), exact=True)
        n = (40, 136, 264)[i]
        for name, epilogue in epilogues(n, out_dtype, device, experts=3):
            one = contiguous(f"{name}-{dtype}", [5, 0, 19], n, 256, device, **given, **epilogue)
            yield with_mx_scales(one, *next(layouts))
    for name, counts, n, k in (
        ("one-expert", [7], 136, 256),
        ("no-rows-of-any", [0, 0, 0], 24, 128),
        ("many-rows", [130, 3, 257], 264, 576),
        ("many-experts", [i % 3 for i in range(1024)], 8, 128),
        ("k-64", [5, 0, 19], 136, 64),
        ("no-columns", [3, 4], 0, 128),
    ):
        yield with_mx_scales(contiguous(name, counts, n, k, device), *next(layouts))
        yield with_mx_scales(contiguous(f"uncounted-{name}", counts, n, k, device, counted=False), *next(layouts))
    for name, counts, rows in (("many", [130, 0, 200], 200), ("room", [3, 65, 0], 136), ("no-room", [0, 0], 0)):
        yield with_mx_scales(masked(f"masked-{name}", counts, rows, 136, 192, device), *next(layouts))
    yield with_mx_scales(contiguous("reference", [4, 3], 24, 256, device, backend="reference"))
    a, b, *scales, offsets, counts = with_mx_scales(contiguous("", [4, 3], 24, 256, device)).args
    powers_ = (scale.view(torch.float8_e8m0fnu) for scale in scales)
    yield Sample("mxfp8-e8m0", (a, b, *powers_, offsets, counts), {})


def _tokens(device: torch.device) -> Iterator[Sample]:
    """Yield calls with per-token and per-channel scales, or with one scale for all rows or per expert."""
    for i, out_dtype in enumerate(DTYPES):
        dtype, one = short(out_dtype), {"one_a_scale": i == 1, "one_b_scale": i == 2}
        given: dict[str, Any] = {"out_dtype": out_dtype, "fast_accum": i == 2}
        yield with_token_scales(contiguous(f"to-{dtype}", [5, 0, 19], 136, 704, device, **given), **one)
        yield with_token_scales(masked(f"masked-to-{dtype}", [5, 0, 8], 8, 136, 704, device, **given), **one)
        exact = contiguous(f"exact-{dtype}", [3, 70], 264, 1088, device, exact=True, **given)
        yield with_token_scales(exact, exact=True, **one)
        n = (40, 136, 264)[i]
        for name, epilogue in epilogues(n, out_dtype, device, experts=3):
            named: dict[str, Any] = {"out_dtype": out_dtype, **epilogue}
            yield with_token_scales(contiguous(f"{name}-{dtype}", [5, 0, 19], n, 256, device, **named), **one)
            one = {"one_a_scale": one["one_b_scale"], "one_b_scale": not one["one_b_scale"]}
    for name, counts, n, k in (
        ("one-expert", [7], 136, 256),
        ("no-rows-of-any", [0, 0, 0], 24, 128),
        ("many-rows", [130, 3, 257], 264, 576),
        ("many-experts", [i % 3 for i in range(1024)], 8, 128),
        ("k-64", [5, 0, 19], 136, 64),
        ("no-columns", [3, 4], 0, 128),
    ):
        yield with_token_scales(contiguous(name, counts, n, k, device))
        yield with_token_scales(contiguous(f"uncounted-{name}", counts, n, k, device, counted=False), one_b_scale=True)
    for name, counts, rows in (("many", [130, 0, 200], 200), ("room", [3, 65, 0], 136), ("no-room", [0, 0], 0)):
        yield with_token_scales(masked(f"masked-{name}", counts, rows, 136, 192, device))
        yield with_token_scales(masked(f"masked-one-{name}", counts, rows, 136, 192, device), one_a_scale=True)
    one = with_token_scales(masked("masked", [5, 3], 8, 24, 256, device))
    a, b, a_scale, b_scale = one.args
    apart = torch.cat((a_scale, a_scale), 1)[:, :8]
    yield Sample("tokens-masked-scale-apart", (a, b, apart, b_scale), one.kwargs)
    yield Sample("tokens-b-scale-strided", (a, b, a_scale, b_scale.t().contiguous().t()), one.kwargs)


def _views(device: torch.device) -> Iterator[Sample]:
    one = contiguous("", [5, 3], 24, 256, device)
    a, b, a_scale, b_scale, offsets, counts = one.args
    bytes_ = a.view(torch.uint8)
    wide = torch.cat((bytes_,) * 2, 1).view(FP8)
    twice = torch.stack((offsets, offsets), 1)
    for name, args in (
        ("a-columns-first", (bytes_.t().contiguous().view(FP8).t(), b, a_scale, b_scale, offsets, counts)),
        ("a-row-strided", (wide[:, :256], b, a_scale, b_scale, offsets, counts)),
        ("b-pitched", (a, with_padding(b), a_scale, b_scale, offsets, counts)),
        ("b-every-other-expert", (a, every_other_expert(b), a_scale, b_scale, offsets, counts)),
        ("a-scale-pitched", (a, b, torch.cat((a_scale,) * 2).t().contiguous().t()[: len(a)], b_scale, offsets, counts)),
        ("a-scale-row-major", (a, b, a_scale.contiguous(), b_scale, offsets, counts)),
        ("offsets-strided", (a, b, a_scale, b_scale, twice[:, 0], counts)),
    ):
        yield Sample(name, args, {})
    alpha, bias = torch.rand(2, 2, 24, device=device)
    yield Sample("positional", (*one.args, alpha, bias, torch.float16, "auto"), {})
    one = masked("", [5, 3], 8, 24, 256, device)
    a, b, a_scale, b_scale = one.args
    more = torch.cat((a.view(torch.uint8),) * 2, 1).view(FP8)
    yield Sample("masked-a-part", (more[:, :8], b, a_scale, b_scale, None, one.kwargs["counts"]), {})
    padded = torch.nn.functional.pad(a_scale.mT.contiguous(), (0, 3))[..., :8].mT
    for name, scale in (
        ("row-major", a_scale.contiguous()),
        ("columns-of-each-expert", a_scale.mT.contiguous().mT),
        ("padded-columns-of-each-expert", padded),
    ):
        yield Sample(f"masked-a-scale-{name}", (a, b, scale, b_scale), dict(one.kwargs))


def error_inputs(device: torch.device | str) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    device = torch.device(device)
    n, k = 136, 256
    good = contiguous("good", [4, 3], n, k, device)
    of_masked = masked("good", [4, 3], 8, n, k, device)
    names = ("a", "b", "a_scale", "b_scale", "offsets", "counts")
    tensors = dict(zip(names, good.args, strict=True))
    in_parts = dict(zip(names, (*of_masked.args, None, of_masked.kwargs["counts"]), strict=True))
    bad = error_maker(tensors, {})

    def bad_masked(name: str, error: type[Exception], match: str, **given: Any) -> ErrorInput:
        return ErrorInput(f"masked-{name}", tuple((in_parts | given).values()), {}, error, match)

    yield from tensor_errors(tensors, bad, device)
    yield from tensor_errors(in_parts, bad_masked, device)
    a, b = tensors["a"], tensors["b"]
    yield bad("no-layout", ValueError, "offsets and counts are None; expected offsets", offsets=None, counts=None)
    yield bad("masked-a-2d", ValueError, r"expected \(E, rows of an expert, K\), since offsets is None", offsets=None)
    yield bad("b-short", ValueError, "b has K = 160; expected a positive multiple of 64", b=b[:, :160])
    yield bad("b-no-k", ValueError, "b has K = 0; expected a positive multiple of 64", b=b[:, :0])
    yield bad("b-narrow", ValueError, "b has N = 132; expected a multiple of 8", b=b[..., :132])
    yield bad("b-no-experts", ValueError, "b is of 0 experts; expected 1 to 1024", b=b[:0])
    yield bad("b-1025-experts", ValueError, "b is of 1025 experts", b=b[:1].expand(1025, -1, -1))
    yield bad("b-one-expert", ValueError, "got b_scale with shape", b=b[:1])
    transposed = tensors["b_scale"].mT.contiguous().mT
    yield bad("b-scale-transposed-view", ValueError, "a transposed view", b_scale=transposed)
    yield bad("a-of-other-k", ValueError, r"got a with shape .*; expected .*, the K of b", a=a[:, :128])
    rows, columns = torch.ones(len(a), 1, device=device), torch.ones(2, n, device=device)
    text = r"got b_scale with shape .*; expected \(2, 136\), a scale for each column of b, or \(2,\)"
    for wrong in (columns[:, :-1], columns[:1], columns.t(), columns[0], columns[:0, 0]):
        yield bad(f"tokens-b-scale-{tuple(wrong.shape)}", ValueError, text, a_scale=rows, b_scale=wrong)
    text = r"got a_scale with shape .*; expected \(\d+, 1\), a scale for each row of a, or \(1,\)"
    for wrong in (rows[:-1], rows[:, 0], rows.t(), rows.expand(-1, 2), rows[0, 0]):
        yield bad(f"tokens-a-scale-{tuple(wrong.shape)}", ValueError, text, a_scale=wrong, b_scale=columns)
    yield bad("tokens-b-scale-of-blocks", ValueError, "got a_scale with shape", a_scale=rows)
    _, _, mx_a, mx_b, *_ = with_mx_scales(good, "linear").args
    text = "got a_scale with dtype float32; expected uint8 or float8_e8m0fnu"
    yield bad("mxfp8-a-scale-float32", TypeError, text, b_scale=mx_b)
    yield bad("mxfp8-a-scale-bytes", TypeError, "got a_scale with dtype uint8; expected float32", a_scale=mx_a)
    text = r"got a_scale with shape .*; expected \(\d+, 8\) \(linear\) or .* \(8x4\), MXFP8 scales of a"
    for wrong in (mx_a[:0], mx_a[:, :7], mx_a.flatten()):
        yield bad(f"mxfp8-a-scale-{list(wrong.shape)}", ValueError, text, a_scale=wrong, b_scale=mx_b)
    text = r"got b_scale with shape .*; expected \(2, 136, 8\) \(linear\) or .* \(8x4\), MXFP8 scales of b"
    for wrong in (mx_b[:1], mx_b[..., :7], mx_b.flatten(0, 1)):
        yield bad(f"mxfp8-b-scale-{list(wrong.shape)}", ValueError, text, a_scale=mx_a, b_scale=wrong)
    wrong = mx_b.mT.contiguous().mT
    yield bad("mxfp8-b-scale-transposed", ValueError, "a transposed view", a_scale=mx_a, b_scale=wrong)
    text = r"got a_scale with shape .*; expected \(2, 8, 8\) \(linear\)"
    yield bad_masked("mxfp8-a-scale-flat", ValueError, text, a_scale=mx_a, b_scale=mx_b)
    yield from stride_errors(good, "b")
    yield from stride_errors(contiguous("square", [4, 3], k, k, device), "b")
    text = r"got offsets with shape \(2,\); expected \(3,\)"
    yield bad("offsets-few", ValueError, text, offsets=tensors["offsets"][1:])
    yield bad("counts-few", ValueError, r"got counts with shape \(1,\); expected \(2,\)", counts=tensors["counts"][1:])
    yield from option_errors(bad, n, device, experts=2)
    out = {"out": torch.zeros(len(a), n, dtype=torch.bfloat16, device=device)}
    yield from out_errors(good.args, {}, out, device)
    apart = torch.zeros(2, 16, n, dtype=torch.bfloat16, device=device)[:, :8]
    args, text = tuple(in_parts.values()), "got out with strides .* contiguous"
    yield ErrorInput("masked-out-apart", args, {}, ValueError, text, (apart,))
