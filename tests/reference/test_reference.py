"""``reference/`` against the NumPy specification, over shapes, formats, layouts, dtypes and values."""

import importlib
import inspect

import numpy as np
import pytest
import torch
from expected import assert_same, fp4_dequantize, fp4_quantize, residual_sum
from hypothesis import given, settings
from hypothesis import strategies as st
from support import spec
from support.strategies import DTYPES, KINDS, generators, leads, values

from torch_cute_ops import reference
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.ops._spec import as_tuple
from torch_cute_ops.reference import fp4_dequantize as dequantize_reference
from torch_cute_ops.reference import fp4_quantize as quantize_reference
from torch_cute_ops.reference import rmsnorm_fp4quant_with_norm as with_norm_reference
from torch_cute_ops.reference.add_rmsnorm_fp4quant import add_rows
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows
from torch_cute_ops.registry import OPS


@st.composite
def rows(draw, kinds=KINDS, parts=1):
    """A tensor (..., K), or (..., 2K) in two ``parts``, its format's arguments, and a generator for more."""
    fmt = draw(st.sampled_from([NVFP4, MXFP4]))
    shape = [*draw(leads()), draw(st.integers(1, 9)) * fmt.block_size * parts]
    dtype, generator = draw(st.sampled_from(DTYPES)), draw(generators())
    value = values(draw(st.sampled_from(kinds)), shape, dtype, generator)
    arguments = {
        "block_size": fmt.block_size,
        "scale_format": draw(st.sampled_from([None, fmt.scale_format])),
        "scale_layout": draw(st.sampled_from(list(SCALE_LAYOUTS))),
        "global_scale": None,
    }
    if fmt == NVFP4 and draw(st.booleans()):
        mantissa = torch.rand(1, generator=generator) + 1
        arguments["global_scale"] = mantissa * 2.0 ** draw(st.one_of(st.integers(-10, 10), st.integers(-60, 59)))
    return value, arguments, generator


@st.composite
def fp8_rows(draw, parts=1):
    """The same for FP8."""
    choices = [("tensor", "row"), ("token", "row"), ("block128", "row"), ("block128", "column")]
    granularity, layout = draw(st.sampled_from(choices))
    width = draw(st.integers(1, 3)) * 128 if granularity == "block128" else draw(st.integers(1, 300))
    dtype, generator = draw(st.sampled_from(DTYPES)), draw(generators())
    value = values(draw(st.sampled_from(KINDS)), [*draw(leads()), width * parts], dtype, generator)
    arguments = {"granularity": granularity, "scale_layout": layout, "scale": None}
    if granularity == "tensor":
        mantissa = torch.rand(1, generator=generator) + 1
        arguments["scale"] = mantissa * 2.0 ** draw(st.one_of(st.integers(-10, 10), st.integers(-100, 100)))
    return value, arguments, generator


@settings(deadline=None, max_examples=400)
@given(rows())
def test_quantize(drawn):
    value, arguments, _ = drawn
    call = {"input": value, **arguments}
    assert_same(quantize_reference.fp4_quantize(**call), fp4_quantize.results(call))


@settings(deadline=None, max_examples=200)
@given(rows(), st.sampled_from(DTYPES))
def test_dequantize(drawn, out_dtype):
    """Any codes with any scale bytes, NaN scales and padding included."""
    value, arguments, generator = drawn
    y, scale = quantize_reference.fp4_quantize(value, **arguments)
    y = torch.randint(0, 256, y.shape, generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 256, scale.shape, generator=generator, dtype=torch.uint8).view(scale.dtype)
    call = {"y": y, "scale": scale, **arguments, "out_dtype": out_dtype}
    assert_same([dequantize_reference.fp4_dequantize(**call)], fp4_dequantize.results(call))


EPS = st.sampled_from([0.0, 1e-6, 1e-5, 1.0])


def norm_call(drawn, eps, weight_in_fp32):
    """Arguments of a norm."""
    value, arguments, generator = drawn
    if eps == 0.0:
        # Without eps, squares that are lost below fp32's range decide the result: a value of the sum's order again.
        value = torch.where(value.abs() < 1e-12, 1.0, value.double()).to(value.dtype)
    weight = torch.randn(value.shape[-1], generator=generator).to(torch.float32 if weight_in_fp32 else value.dtype)
    return {"input": value, "weight": weight, **arguments, "eps": eps}


@settings(deadline=None, max_examples=200)
@given(rows(), EPS, st.booleans())
def test_rmsnorm(drawn, eps, weight_in_fp32):
    call = norm_call(drawn, eps, weight_in_fp32)
    check("rmsnorm_fp4quant", call)
    check("rmsnorm_fp4quant_with_norm", call)


@settings(deadline=None, max_examples=200)
@given(fp8_rows(), EPS, st.booleans())
def test_rmsnorm_fp8(drawn, eps, weight_in_fp32):
    check("rmsnorm_fp8quant", norm_call(drawn, eps, weight_in_fp32))


@settings(deadline=None, max_examples=200)
@given(rows(parts=2) | fp8_rows(parts=2))
def test_silu_mul(drawn):
    value, arguments, _ = drawn
    check("silu_mul_fp8quant" if "granularity" in arguments else "silu_mul_fp4quant", {"input": value, **arguments})


@settings(deadline=None, max_examples=300)
@given(leads(), st.sampled_from(DTYPES), st.sampled_from(KINDS), st.sampled_from(KINDS), generators())
def test_add_rows(lead, dtype, kind, other, generator):
    """Bit for bit, in place."""
    call = {
        "input": values(kind, [*lead, 33], dtype, generator),
        "residual": values(other, [*lead, 33], dtype, generator),
    }
    want = residual_sum(call)
    added = add_rows(**call)
    assert added is call["residual"]
    assert_same([added], [want])


def check(name, call):
    """The reference's results are the expected ones."""
    expected = importlib.import_module(f"expected.{name}")
    expected.assert_results(as_tuple(OPS[name].reference(**call)), expected.results(call), call)


# Round trip


def half_step(code_space: np.ndarray) -> np.ndarray:
    """Half the distance of e2m1 values at a magnitude, in units of the scale."""
    return np.select([code_space <= 2, code_space <= 4], [0.25, 0.5], 1.0)


@settings(deadline=None, max_examples=300)
@given(rows(kinds=("normal", "grid", "sparse", "tiny")))
def test_round_trip(drawn):
    """Quantised and back: no element is further off than half a step of its scale, or than saturation takes it; and the
    scale is as near to amax/6 as its format allows."""
    value, arguments, _ = drawn
    g = 1.0 if arguments["global_scale"] is None else float(arguments["global_scale"])
    y, scale = quantize_reference.fp4_quantize(value, **arguments)
    back = dequantize_reference.fp4_dequantize(y, scale, **arguments, out_dtype=torch.float32)
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
        # Half an ulp of e4m3: 2^-4 relative, 2^-10 absolute; nothing above 448.
        off = np.abs(s - np.minimum(wanted, 448 / g))
        assert (off <= np.maximum(wanted * 2.0**-4, 2.0**-10 / g) * (1 + 2.0**-20)).all()


def test_what_fp4_can_say_comes_back():
    """Values that are codes times a scale survive exactly."""
    codes = torch.randint(0, 16, (50, 64), dtype=torch.uint8)
    codes[:, ::16] = 7
    for block, scales in ((16, 2.0 ** torch.randint(-6, 8, (50, 4))), (32, 2.0 ** torch.randint(-100, 100, (50, 2)))):
        exact = torch.from_numpy(spec.e2m1_value(codes.numpy())).view(50, -1, block) * scales[..., None]
        y, scale = quantize_reference.fp4_quantize(exact.view(50, 64), block_size=block)
        back = dequantize_reference.fp4_dequantize(y, scale, block_size=block, out_dtype=torch.float32)
        assert_same([back], [exact.view(50, 64)])


@pytest.mark.parametrize("power", [-60, -30, 30, 60])
def test_global_scale_shifts_by_powers_of_two(power):
    """A global scale of 2^p on values 2^-p times as large gives the same codes and scales, and comes back."""
    value = torch.randn(20, 64)
    plain = quantize_reference.fp4_quantize(value)
    g = torch.tensor([2.0**power])
    shifted = quantize_reference.fp4_quantize(value * 2.0**-power, g)
    assert_same(shifted, plain)
    back = dequantize_reference.fp4_dequantize(*shifted, g, out_dtype=torch.float32)
    assert torch.equal(back * 2.0**power, dequantize_reference.fp4_dequantize(*plain, out_dtype=torch.float32))


def test_norm_of_a_row_of_equal_values_is_the_weight():
    weight = torch.randn(64)
    for size in (1e-3, 1.0, 1e4):
        rows = torch.full((2, 64), size)
        *_, norm = with_norm_reference.rmsnorm_fp4quant_with_norm(rows, weight, eps=0.0)
        torch.testing.assert_close(norm, weight.expand(2, 64), rtol=1e-6, atol=0)


def test_every_reference_takes_its_ops_arguments():
    for name, op in OPS.items():
        ours = inspect.signature(op.function).parameters
        for function in (op.reference, op.fake):
            theirs = inspect.signature(function).parameters
            assert function.__name__ == name
            assert [(p.name, p.default) for p in theirs.values()] == [
                (p.name, p.default) for p in ours.values() if p.name != "out"
            ]
    assert reference.__doc__


def test_silu_does_not_depend_on_the_place():
    """An element gives the same bits wherever it is in a row, in the middle of a vector or at the end."""
    gate, up = torch.randn(2, 1000)
    whole = silu_mul_rows(torch.cat([gate, up]))
    for begin, end in ((0, 999), (1, 1000), (3, 40), (500, 501), (7, 70)):
        part = silu_mul_rows(torch.cat([gate[begin:end], up[begin:end]]))
        assert torch.equal(part, whole[begin:end])
