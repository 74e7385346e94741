"""``reference/`` compared with the specification in NumPy, over shapes, formats, layouts, dtypes and values."""

import importlib
import inspect
import math

import numpy as np
import pytest
import torch
from expected import assert_same, fp4_dequantize, fp4_quantize, residual_sum
from hypothesis import given, settings
from hypothesis import strategies as st
from support import spec
from support.strategies import DTYPES, KINDS, generators, leads, one_of, values

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.ops._define import as_tuple
from torch_cute_ops.reference.add_rmsnorm_fp4quant import add_rows
from torch_cute_ops.reference.moe_route import places_of
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows
from torch_cute_ops.registry import OPS

quantized, dequantized = OPS["fp4_quantize"].reference, OPS["fp4_dequantize"].reference


FP4_POWERS = st.one_of(st.integers(-10, 10), st.integers(-60, 59))
FP8_POWERS = st.one_of(st.integers(-10, 10), st.integers(-100, 100))
"""Exponents of global scales that are powers of two: mostly small, sometimes as large as the scales allow."""


@st.composite
def rows(draw, kinds=KINDS, parts=1):
    """Draw a tensor, (..., K) or with two ``parts`` (..., 2K); the arguments of its format; and a random generator."""
    fmt = draw(one_of((NVFP4, MXFP4)))
    shape = [*draw(leads()), draw(st.integers(1, 9)) * fmt.block_size * parts]
    dtype, generator = draw(one_of(DTYPES)), draw(generators())
    value = values(draw(one_of(kinds)), shape, dtype, generator)
    arguments = {
        "block_size": fmt.block_size,
        "scale_format": draw(one_of((None, fmt.scale_format))),
        "scale_layout": draw(one_of(tuple(SCALE_LAYOUTS))),
        "global_scale": None,
    }
    if fmt == NVFP4 and draw(st.booleans()):
        mantissa = torch.rand(1, generator=generator) + 1
        arguments["global_scale"] = mantissa * 2.0 ** draw(FP4_POWERS)
    return value, arguments, generator


@st.composite
def fp8_rows(draw, parts=1):
    """Draw a tensor, the arguments of an FP8 format, and a random generator."""
    choices = (("tensor", "row"), ("token", "row"), ("block128", "row"), ("block128", "column"), ("block32", "linear"))
    granularity, layout = draw(one_of((*choices, ("block32", "128x4"), ("block32", "8x4"))))
    step = {"block128": 64, "block32": 32}.get(granularity)
    width = draw(st.integers(1, 300)) if step is None else draw(st.integers(1, 6)) * step
    dtype, generator = draw(one_of(DTYPES)), draw(generators())
    value = values(draw(one_of(KINDS)), [*draw(leads()), width * parts], dtype, generator)
    interleaved = step is None and draw(one_of((False, True)))
    arguments = {"granularity": granularity, "scale_layout": layout, "scale": None, "interleaved": interleaved}
    arguments["scale_format"] = None if step is None else draw(one_of((None, "ue8m0")))
    if granularity == "tensor":
        mantissa = torch.rand(1, generator=generator) + 1
        arguments["scale"] = mantissa * 2.0 ** draw(FP8_POWERS)
    return value, arguments, generator


def rounded_to_bfloat16(a):
    """Round float16 ``a`` to 8 significant bits (to nearest, ties to even), and return float32."""
    bits = a.float().numpy().view(np.uint32)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return torch.from_numpy(kept.astype(np.uint32).view(np.float32))


def test_float16_with_mxfp4_is_rounded_to_bfloat16():
    """Multiply float16 activations by the identity: MXFP4 must return them rounded to bfloat16, NVFP4 unchanged."""
    k = 64
    a = (torch.randn(40, k) * 2.0 ** torch.randint(-24, 14, (40, k))).half()
    a[0] = torch.arange(k) + 2**9  # every second number is a tie
    ones = torch.full((k, k // 2), 0, dtype=torch.uint8)
    ones[torch.arange(k), torch.arange(k) // 2] = torch.tensor([0x02, 0x20], dtype=torch.uint8).repeat(k // 2)
    for block_size, one, want in ((32, 127, rounded_to_bfloat16(a)), (16, 0x38, a.float())):
        scale = torch.full((k, k // block_size), one, dtype=torch.uint8)
        scale = scale if block_size == 32 else scale.view(torch.float8_e4m3fn)
        given = {"block_size": block_size, "scale_layout": "linear", "out_dtype": torch.float32}
        assert torch.equal(OPS["mm_fp4_weight_only"].reference(a, ones.t(), scale, **given), want)
        alpha = torch.ones(len(a), 1)
        assert torch.equal(OPS["moe_fc2_fp4_weight_only"].reference(a, ones.t(), scale, alpha, **given), want)
    assert not torch.equal(rounded_to_bfloat16(a), a.float())


@settings(deadline=None, max_examples=400)
@given(rows())
def test_quantize(drawn):
    value, arguments, _ = drawn
    call = {"input": value, **arguments}
    assert_same(quantized(**call), fp4_quantize.results(call))


@settings(deadline=None, max_examples=200)
@given(fp8_rows())
def test_quantize_fp8(drawn):
    value, arguments, _ = drawn
    check("fp8_quantize", {"input": value, **arguments})


@settings(deadline=None, max_examples=200)
@given(rows(), st.sampled_from(DTYPES))
def test_dequantize(drawn, out_dtype):
    """Check arbitrary codes and scale bytes, including NaN scales and padding."""
    value, arguments, generator = drawn
    y, scale = quantized(value, **arguments)
    y = torch.randint(0, 256, y.shape, generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 256, scale.shape, generator=generator, dtype=torch.uint8).view(scale.dtype)
    call = {"y": y, "scale": scale, **arguments, "out_dtype": out_dtype}
    assert_same([dequantized(**call)], fp4_dequantize.results(call))


EPS = st.sampled_from([0.0, 1e-6, 1e-5, 1.0])


def norm_call(drawn, eps, weight_in_fp32):
    """Draw the arguments of a norm."""
    value, arguments, generator = drawn
    if eps == 0.0:
        # Avoid tiny values: without eps, squares that underflow in fp32 would decide the result.
        value = torch.where(value.abs() < 1e-12, 1.0, value.double()).to(value.dtype)
    weight = torch.randn(value.shape[-1], generator=generator).to(torch.float32 if weight_in_fp32 else value.dtype)
    plus_one = bool(torch.rand((), generator=generator) < 0.5)
    return {"input": value, "weight": weight, **arguments, "eps": eps, "weight_plus_one": plus_one}


@settings(deadline=None, max_examples=200)
@given(rows(), EPS, st.booleans())
def test_rmsnorm(drawn, eps, weight_in_fp32):
    call = norm_call(drawn, eps, weight_in_fp32)
    check("rmsnorm_fp4quant", call)
    check("rmsnorm_fp4quant_with_norm", call)


@settings(deadline=None, max_examples=100)
@given(rows(), EPS, st.booleans())
def test_add_rmsnorm_with_norm_both_layouts(drawn, eps, weight_in_fp32):
    call = norm_call(drawn, eps, weight_in_fp32)
    del call["scale_layout"]
    residual = torch.randn(call["input"].shape, generator=drawn[2]).to(call["input"].dtype)
    check("add_rmsnorm_fp4quant_with_norm_both_layouts", {**call, "residual": residual})


@settings(deadline=None, max_examples=200)
@given(fp8_rows(), EPS, st.booleans())
def test_rmsnorm_fp8(drawn, eps, weight_in_fp32):
    check("rmsnorm_fp8quant", norm_call(drawn, eps, weight_in_fp32))


GATES = st.fixed_dictionaries(
    {
        "swiglu_alpha": st.sampled_from([1.0, 1.702, 0.3, -2.0]),
        "swiglu_beta": st.sampled_from([0.0, 1.0, -0.25]),
        "swiglu_limit": st.sampled_from([None, 7.0, 0.5, 2.0**-12, 1e39]),
    }
)


@settings(deadline=None, max_examples=400)
@given(rows(parts=2) | fp8_rows(parts=2), st.just({}) | GATES)
def test_silu_mul(drawn, gate):
    value, arguments, _ = drawn
    name = "silu_mul_fp8quant" if "granularity" in arguments else "silu_mul_fp4quant"
    check(name, {"input": value, **arguments, **gate})


def test_swiglu_by_hand():
    """Check, in the reference and in the NumPy specification, that the gate is clamped only from above, and that clamps
    propagate NaN."""
    cases = [  # gate, up, alpha, beta, limit, result
        (2.0, 3.0, 0.0, 1.0, None, 4.0),
        (9.0, 9.0, 0.0, 1.0, 7.0, 28.0),
        (2.0, -9.0, 0.0, 1.0, 7.0, -6.0),
        (-16.0, 1.0, 0.0, 0.0, 7.0, -8.0),
        (1.0, 1.0, 1.702, 1.0, 7.0, 2 / (1 + math.exp(-1.702))),
        (-1.0, 1.0, 1.702, 1.0, 7.0, -2 / (1 + math.exp(1.702))),
        (math.inf, math.inf, 1.702, 1.0, 7.0, 56 / (1 + math.exp(-1.702 * 7))),
        (0.0, -math.inf, 1.702, 0.0, 7.0, -0.0),
        (-math.inf, 1.0, 1.702, 1.0, 7.0, math.nan),
        (math.nan, 1.0, 1.702, 1.0, 7.0, math.nan),
        (1.0, math.nan, 1.702, 1.0, 7.0, math.nan),
        (-1e4, 1.0, 1.0, 1.0, 7.0, -0.0),
        (-1e30, 1.0, 1e30, 1.0, 7.0, -0.0),
        (1e30, 0.0, 1e30, 1.0, None, 1e30),
    ]
    for gate, up, *parameters, want in cases:
        pair = torch.tensor([gate, up])
        independent = torch.from_numpy(spec.swiglu(pair[None].numpy(), *parameters)[0])
        for got in (silu_mul_rows(pair, *parameters), independent):
            torch.testing.assert_close(got, torch.tensor([want]), rtol=2.0**-22, atol=0.0, equal_nan=True)
            assert math.isnan(want) or torch.signbit(got) == (math.copysign(1.0, want) < 0)


def test_the_usual_gate_is_silu():
    """Check that the default gate is bitwise equal to silu, including signs of zero."""
    values = torch.cat([torch.randn(1000), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])])
    pairs = torch.cartesian_prod(values[-200:], values[-200:]).t().reshape(-1)
    gate, up = pairs.chunk(2)
    silu = gate / (1 + torch.exp(-gate.double()).float())
    assert_same([silu_mul_rows(pairs)], [silu * up])


@settings(deadline=None, max_examples=300)
@given(leads(), st.sampled_from(DTYPES), st.sampled_from(KINDS), st.sampled_from(KINDS), generators())
def test_add_rows(lead, dtype, kind, other, generator):
    """Check that the sum is exact to the bit and is written in place."""
    call = {
        "input": values(kind, [*lead, 33], dtype, generator),
        "residual": values(other, [*lead, 33], dtype, generator),
    }
    want = residual_sum(call)
    added = add_rows(**call)
    assert added is call["residual"]
    assert_same([added], [want])


@st.composite
def routes(draw):
    """Draw expert ids (M, topk), some of them invalid and some repeated within a token, and the arguments that
    determine the layout of the experts' rows."""
    experts, tokens, topk = draw(st.integers(1, 20)), draw(st.integers(0, 30)), draw(st.integers(1, 16))
    beyond = draw(one_of((0, 1, 5)))
    ids = torch.randint(-beyond, experts + beyond, (tokens, topk), generator=draw(generators()), dtype=torch.int32)
    alignment, max_rows = draw(one_of(((1, None), (8, None), (128, None), (128, 1), (128, 7))))
    return {"ids": ids, "experts": experts, "alignment": alignment, "max_rows": max_rows}


@settings(deadline=None, max_examples=300)
@given(routes())
def test_route_ids(call):
    check("moe_route_ids", call)


EXTREMES = st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 3e38]), max_size=2)


@st.composite
def choices(draw):
    """Draw logits, some of which are not finite, and the arguments that choose experts, with sizes up to the
    largest."""
    groups = draw(one_of((1, 1, 2, 3, 4, 17, 32)))
    group_size = draw(st.integers(1, 1024 // groups) | st.just(1024 // groups))
    experts, generator = groups * group_size, draw(generators())
    topk_groups = draw(st.integers(1, groups))
    logits = torch.randn(draw(st.integers(0, 6)), experts, generator=generator)
    logits *= draw(one_of((1.0, 30.0)))
    for value in draw(EXTREMES):
        logits = torch.where(torch.rand(logits.shape, generator=generator) < 0.02, value, logits)
    return {
        "logits": logits.to(draw(one_of(DTYPES))),
        "topk": draw(st.integers(1, min(32, topk_groups * group_size))),
        "bias": torch.randn(experts, generator=generator) if draw(st.booleans()) else None,
        "scoring": draw(one_of(("softmax", "sigmoid"))),
        "num_groups": groups,
        "topk_groups": topk_groups,
        "renormalize": draw(st.booleans()),
        "scaling_factor": 2.5,
        "finite": draw(st.booleans()),
    }


@settings(deadline=None, max_examples=200)
@given(choices(), st.booleans())
def test_route_dense(call, has_factor):
    """Check that the result matches the specification, and that it contains the weights and experts of ``moe_route``
    bit for bit."""
    tokens, experts = call["logits"].shape
    factor = torch.linspace(-2.0, 2.0, experts) if has_factor else None
    check("moe_route_dense", {**call, "expert_factor": factor})
    weights, ids, *_ = OPS["moe_route"].reference(**call)
    assert not call["finite"] or weights.isfinite().all()
    want = torch.zeros(tokens, experts)
    for m in range(tokens):
        for weight, expert in zip(weights[m], ids[m].tolist(), strict=True):
            want[m, expert] = weight if factor is None else weight * factor[expert]
    assert_same([OPS["moe_route_dense"].reference(**call, expert_factor=factor)], [want])


def test_routes_by_hand():
    """Check small routings worked out by hand: rows are ordered by expert, then token, up to the size of the buffer. A
    token may name an expert twice, or no expert."""
    ids = torch.tensor([[1, -1], [0, 1], [1, 1], [3, 0]], dtype=torch.int32)
    want = {
        "alignment": ([[2, -1], [0, 3], [4, 5], [-1, 1]], [2, 7, 0, 3, 4, 5, -1, -1, -1, -1], [0, 2, 6, 6], [2, 4, 0]),
        "max_rows": ([[3, -1], [0, 4], [5, -1], [-1, 1]], [2, 7, -1, 0, 3, 4, -1, -1, -1], [0, 3, 6, 9], [2, 3, 0]),
    }
    for room, places in want.items():
        got = places_of(ids, 3, **{room: 2 if room == "alignment" else 3})
        assert [place.tolist() for place in got] == list(map(list, places))


def check(name, call):
    """Compare the results of a reference with the expected results of its op."""
    expected = importlib.import_module(f"expected.{name}")
    want = expected.results(call)
    updated = [call["residual"]] if "residual" in call else []
    expected.assert_results((*as_tuple(OPS[name].reference(**call)), *updated), want, call)


# Quantise, then dequantise


def half_step(code_space: np.ndarray) -> np.ndarray:
    """Return half the distance of neighbouring e2m1 numbers at a magnitude, in units of the scale."""
    return np.select([code_space <= 2, code_space <= 4], [0.25, 0.5], 1.0)


@settings(deadline=None, max_examples=300)
@given(rows(kinds=("normal", "grid", "sparse", "tiny")))
def test_round_trip(drawn):
    """Check that after quantising and dequantising the error is at most half a step, unless the number saturates.

    Also check that the scale is as near to amax/6 as its format allows.
    """
    value, arguments, _ = drawn
    g = 1.0 if arguments["global_scale"] is None else float(arguments["global_scale"])
    y, scale = quantized(value, **arguments)
    back = dequantized(y, scale, **arguments, out_dtype=torch.float32)
    assert back.shape == value.shape
    width, block = value.shape[-1], arguments["block_size"]
    x = value.double().reshape(-1, width // block, block).numpy()
    error = np.abs(back.double().reshape(x.shape).numpy() - x)
    raw = scale.view(torch.uint8).numpy()
    stored = spec.collect(raw, arguments["scale_layout"], x.shape[0], x.shape[1])
    s = spec.scale_value(stored, {16: "e4m3", 32: "ue8m0"}[block]).astype(np.float64)[..., None] / g
    amax = np.abs(x).max(-1, keepdims=True) if x.size else np.zeros_like(s)
    with np.errstate(all="ignore"):
        magnitude = np.where(s > 0, np.abs(x) / s, 0)
    bound = s * np.maximum(half_step(magnitude), magnitude - 6) * (1 + 2.0**-20)
    bound = np.where(s > 0, bound, np.abs(x)) + 2.0**-149
    assert (error <= bound).all()
    wanted = amax / 6
    if block == 32:
        lowest = 2.0**-127
        assert ((s >= wanted) & ((s < 2 * wanted) | (s == lowest))).all()
    else:
        # Half an ulp of e4m3 is 2^-4 relative, or 2^-10 absolute; larger numbers than 448 saturate.
        off = np.abs(s - np.minimum(wanted, 448 / g))
        assert (off <= np.maximum(wanted * 2.0**-4, 2.0**-10 / g) * (1 + 2.0**-20)).all()


def test_representable_values_survive():
    """Check that values that are a code times a scale survive quantising and dequantising exactly."""
    codes = torch.randint(0, 16, (50, 64), dtype=torch.uint8)
    codes[:, ::16] = 7
    for block, scales in ((16, 2.0 ** torch.randint(-6, 8, (50, 4))), (32, 2.0 ** torch.randint(-100, 100, (50, 2)))):
        exact = torch.from_numpy(spec.e2m1_value(codes.numpy())).view(50, -1, block) * scales[..., None]
        y, scale = quantized(exact.view(50, 64), block_size=block)
        back = dequantized(y, scale, block_size=block, out_dtype=torch.float32)
        assert_same([back], [exact.view(50, 64)])


@pytest.mark.parametrize("power", [-60, -30, 30, 60])
def test_global_scale_shifts_by_powers_of_two(power):
    """Check that dividing the values by 2^p and multiplying the global scale by 2^p changes neither codes nor
    scales."""
    value = torch.randn(20, 64)
    plain = quantized(value)
    g = torch.tensor([2.0**power])
    shifted = quantized(value * 2.0**-power, g)
    assert_same(shifted, plain)
    back = dequantized(*shifted, g, out_dtype=torch.float32)
    assert torch.equal(back * 2.0**power, dequantized(*plain, out_dtype=torch.float32))


def test_norm_of_a_row_of_equal_values_is_the_weight():
    weight = torch.randn(64)
    for size in (1e-3, 1.0, 1e4):
        rows = torch.full((2, 64), size)
        *_, norm = OPS["rmsnorm_fp4quant_with_norm"].reference(rows, weight, eps=0.0)
        torch.testing.assert_close(norm, weight.expand(2, 64), rtol=1e-6, atol=0)


def test_every_reference_takes_its_ops_arguments():
    """Check that references take the op's arguments by name, and all other arguments as ``**named``. Only ops define
    defaults. A reference defines a default only for scales of activations or rows, because some ops that share the
    reference lack this argument."""
    for name, op in OPS.items():
        reference = getattr(importlib.import_module(f"torch_cute_ops.reference.{name}"), name)
        theirs = inspect.signature(reference).parameters.values()
        named = {p.name for p in theirs if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
        ours = {p.name: p.default for p in op.signature.parameters}
        assert named <= ours.keys() and (len(named) < len(theirs) or len(named) == len(ours))
        defaults = {p.name for p in theirs if p.default is not p.empty}
        assert all(ours[each] is inspect.Parameter.empty or each == "row_scale" for each in defaults)
        assert reference.__doc__


def test_silu_does_not_depend_on_the_position():
    """Check that an element gives the same bits anywhere in a row, inside a SIMD vector or after the last one."""
    gate, up = torch.randn(2, 1000)
    whole = silu_mul_rows(torch.cat([gate, up]))
    for begin, end in ((0, 999), (1, 1000), (3, 40), (500, 501), (7, 70)):
        part = silu_mul_rows(torch.cat([gate[begin:end], up[begin:end]]))
        assert torch.equal(part, whole[begin:end])
