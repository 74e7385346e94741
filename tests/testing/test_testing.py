"""``torch_cute_ops.testing``: differences that the comparisons accept or refuse; and our tests' own helpers."""

import pytest
import torch
from expected import assert_same
from expected.rmsnorm_fp4quant_with_norm import assert_norm_close
from samples import sample_inputs
from support.cases import PLAIN, arguments, op_cases, plain_sample, poisoned
from support.launch_model import launches  # noqa: F401  (a fixture)

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, resolve_fp8_format
from torch_cute_ops.reference.fp8_quantize import quantize_fp8_rows
from torch_cute_ops.registry import OPS
from torch_cute_ops.testing import assert_fp4_close, assert_fp8_close, raw_call

TILED = SCALE_LAYOUTS["128x4"]


def blocks(fmt, rows=100, width=320, layout="128x4"):
    """Return ``(y, scale)`` of quantised random rows."""
    y, scale = OPS["fp4_quantize"].reference(torch.randn(rows, width), block_size=fmt.block_size, scale_layout=layout)
    return y.clone(), scale.clone()


def with_codes(y, count, change):
    """Return a copy of ``y`` in which ``change`` was applied to the low nibble of ``count`` bytes, each in a different
    block."""
    y = y.clone()
    at = torch.arange(count) * 16
    flat = y.view(-1)
    low = flat[at] & 0xF
    flat[at] = (flat[at] & 0xF0) | change(low)
    return y


def step_down(code):
    return torch.where((code & 7) > 0, code - 1, code + 1)


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
def test_allowed_differences(fmt):
    y, scale = blocks(fmt)
    assert_fp4_close((y, scale), (y, scale), fmt, TILED)
    # 32 of 32,000 elements may differ by a step.
    assert_fp4_close((with_codes(y, 32, step_down), scale), (y, scale), fmt, TILED)
    moved = scale.clone().view(torch.uint8)
    moved.view(-1)[0] += 1
    assert_fp4_close((y, moved.view(scale.dtype)), (y, scale), fmt, TILED)


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
def test_refused_differences(fmt):
    y, scale = blocks(fmt)
    nan = {NVFP4: 0x7F, MXFP4: 0xFF}[fmt]

    def scale_with(row, block, byte):
        changed = scale.clone().view(torch.uint8)
        changed.view(-1)[TILED.row_offset(row, 320 // fmt.block_size) + TILED.block_offset(block)] = byte
        return changed.view(scale.dtype)

    raw = int(scale.view(torch.uint8).view(-1)[0])
    several = scale.clone().view(torch.uint8)
    several.view(-1)[:4] += 1  # four scales of row 0
    cases = {
        "33 of 32000 elements differ": (with_codes(y, 33, step_down), scale),
        "more than one step": (with_codes(y, 1, lambda code: (code & 8) | ((code & 7) + 2) % 8), scale),
        "differ in sign": (with_codes(y, 1, lambda code: code ^ 8), scale),
        "more than one ulp": (y, scale_with(0, 0, raw + 2)),
        "or in being NaN": (y, scale_with(0, 0, nan)),
        "of .* scales differ": (y, several.view(scale.dtype)),
        "padding that is not zero": (y, scale_with(127, 0, 1)),
    }
    for message, actual in cases.items():
        with pytest.raises(AssertionError, match=message):
            assert_fp4_close(actual, (y, scale), fmt, TILED)
    with pytest.raises(AssertionError, match="y: "):
        assert_fp4_close((y[1:], scale), (y, scale), fmt, TILED)
    with pytest.raises(AssertionError, match="scale: "):
        assert_fp4_close((y, scale.view(torch.int8)), (y, scale), fmt, TILED)


def test_differences_on_boundaries():
    """Check that differences of scales and elements count, except on rounding boundaries."""
    y, scale = blocks(NVFP4)
    several = scale.clone().view(torch.uint8)
    several[0, 0, :8, 0, 0] += 1  # scales of block 0 of rows 0 to 7
    moved = with_codes(y, 60, step_down), several.view(scale.dtype)
    scales, elements = torch.zeros(100, 20, dtype=torch.bool), torch.zeros(100, 320, dtype=torch.bool)
    with pytest.raises(AssertionError, match="8 of 2000 scales differ"):
        assert_fp4_close(moved, (y, scale), NVFP4, TILED, lambda: (scales, elements))
    scales[:8, 0] = True
    with pytest.raises(AssertionError, match="54 of 32000 elements differ"):  # 6 are in blocks that do not count
        assert_fp4_close(moved, (y, scale), NVFP4, TILED, lambda: (scales, elements))
    elements[:3, ::32] = True  # 27 of the 54
    assert_fp4_close(moved, (y, scale), NVFP4, TILED, lambda: (scales, elements))


def fp8_rows(granularity="token"):
    """Return ``(y, scale)`` of random rows quantised to FP8."""
    fmt, layout = resolve_fp8_format(granularity, "row")
    y, scale = quantize_fp8_rows(torch.randn(100, 384), fmt, None, layout)
    return y.clone(), scale.clone()


def with_bytes(y, count, change):
    """Return a copy of ``y`` in which ``change`` was applied to ``count`` elements in different rows."""
    raw = y.clone().view(torch.uint8)
    raw[:count, 7] = change(raw[:count, 7])
    return raw.view(y.dtype)


@pytest.mark.parametrize("granularity", ["token", "block128"])
def test_allowed_differences_of_fp8(granularity):
    y, scale = fp8_rows(granularity)
    fmt, _ = resolve_fp8_format(granularity, "row")
    assert_fp8_close((y, scale), (y, scale), fmt)
    # 39 of 38,400 elements may differ by a step.
    down = with_bytes(y, 39, fp8_step)
    assert_fp8_close((down, scale), (y, scale), fmt)
    assert_fp8_close((y, scale * (1 + 2.0**-21)), (y, scale), fmt)
    more = with_bytes(y, 60, fp8_step)
    excused = torch.zeros(100, 384, dtype=torch.bool)
    excused[:30, 7] = True
    assert_fp8_close((more, scale), (y, scale), fmt, lambda: excused)
    # Equal rows count as one row, so the same change in each of 100 equal rows is accepted.
    same = y[:1].expand(100, 384), scale[:1].expand(scale.shape)
    assert_fp8_close((with_bytes(same[0].contiguous(), 100, fp8_step), same[1]), same, fmt)


def fp8_step(byte):
    return torch.where(byte & 0x7F > 0, byte - 1, byte + 1)


def test_refused_differences_of_fp8():
    y, scale = fp8_rows()
    fmt, _ = resolve_fp8_format("token", "row")

    def scale_with(value):
        changed = scale.clone()
        changed[3] = value
        return changed

    cases = {
        "40 of 38400 elements differ": (with_bytes(y, 40, fp8_step), scale),
        "more than one step": (with_bytes(y, 1, lambda byte: fp8_step(fp8_step(byte))), scale),
        "or in being NaN": (with_bytes(y, 1, lambda byte: byte | 0x7F), scale),
        "differ in sign": (with_bytes(y, 1, lambda byte: byte ^ 0x80), scale),
        "computation explains": (y, scale_with(scale[3] * (1 + 2.0**-19))),
        "scales that differ in being NaN": (y, scale_with(torch.nan)),
        "scales that differ in being zero": (y, scale_with(0.0)),
    }
    for message, actual in cases.items():
        with pytest.raises(AssertionError, match=message):
            assert_fp8_close(actual, (y, scale), fmt)
    given_scale, _ = resolve_fp8_format("tensor", "row")
    with pytest.raises(AssertionError, match="computation explains"):
        assert_fp8_close((y, torch.full((1,), 1 + 2.0**-23)), (y, torch.ones(1)), given_scale)
    with pytest.raises(AssertionError, match="y: "):
        assert_fp8_close((y[1:], scale), (y, scale), fmt)


@pytest.mark.parametrize("granularity", ["block128", "block32"])
def test_differences_of_fp8_with_powers_of_two(granularity):
    """Check that one scale in 1,000 may differ by a factor of two, together with the codes of its block."""
    fmt, layout = resolve_fp8_format(granularity, None, "ue8m0")
    # Make all rows different: equal rows count as one row.
    x = torch.randn(100, 384) * 2.0 ** torch.arange(-50.0, 50.0).unsqueeze(1)
    good = quantize_fp8_rows(x, fmt, None, layout)
    named = {"layout": layout} if granularity == "block32" else {}
    assert_fp8_close(good, good, fmt, **named)

    def scale_with(factors):
        """Return codes and scales if the scales of the first blocks of some rows are multiplied by powers of two."""
        y, scale = (each.clone() for each in good)
        for row, power in factors.items():
            block = slice(0, fmt.block_size)
            y[row, block] = (y[row, block].float() * 2.0**-power).to(y.dtype)
            if granularity == "block32":
                scale[0, 0, row % 32, row // 32, 0] += power
            else:
                scale[row, 0] *= 2.0**power
        return y, scale

    assert_fp8_close(scale_with({3: 1}), good, fmt, **named)
    for message, factors in (
        ("3 of .* scales differ; at most", {3: 1, 40: 1, 57: 1}),
        ("by more than a factor of two", {3: 2}),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_fp8_close(scale_with(factors), good, fmt, **named)
    if granularity == "block32":
        padding = good[1].clone()
        padding[0, 0, 31, 3, 0] = 1
        with pytest.raises(AssertionError, match="padding that is not zero"):
            assert_fp8_close((good[0], padding), good, fmt, **named)
    else:
        for wrong in (good[1] * 1.5, -good[1], torch.zeros_like(good[1])):
            with pytest.raises(AssertionError, match="no powers of two"):
                assert_fp8_close((good[0], wrong), good, fmt, **named)
        # Rows of experts' ops that are only padding have the scale 0.
        padded = torch.zeros_like(good[0]), torch.zeros_like(good[1])
        assert_fp8_close(padded, padded, fmt)


def test_norm_close():
    exact = torch.randn(20, 64, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rounded = exact.to(dtype)
        assert_norm_close(rounded, exact)
        off = rounded.clone()
        off[3, 4] *= 1 + 4 * max(torch.finfo(dtype).eps, 2.0**-19)
        with pytest.raises(AssertionError, match="1 elements of the norm are off"):
            assert_norm_close(off, exact)
        bad = rounded.clone()
        bad[0, 0] = torch.nan
        with pytest.raises(AssertionError):
            assert_norm_close(bad, exact)


def test_same():
    a = torch.randn(4, 4)
    assert_same([a], [a.clone()])
    assert_same([torch.tensor([torch.nan])], [-torch.tensor([torch.nan])])
    minus_zero = [torch.tensor([0.0])], [torch.tensor([-0.0])]
    for got, want in (minus_zero, ([a], [a + 1]), ([a], [a.double()]), ([a], [a[:2]]), ([a], [a.view(16)])):
        with pytest.raises(AssertionError):
            assert_same(got, want)
    with pytest.raises(ValueError):
        assert_same([a], [a, a])


@pytest.mark.parametrize("op", op_cases())
def test_poison_is_no_result(op, device):
    """Check that no correct result equals the poison with which outputs are filled before a call."""
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        like = torch.empty(3, 4, dtype=dtype, device=device)
        (poison,) = poisoned([like])
        assert poison.shape == like.shape and poison.dtype == dtype and poison.device == like.device
        if dtype.itemsize > 1:
            assert poison.isnan().all()
        else:
            assert (poison.view(torch.uint8) == 0xAA).all()
    assert plain_sample(op, device).name in PLAIN


def test_raw_call(launches):  # noqa: F811
    """Check that each call launches the op's kernel once, and nothing else."""
    x, w = torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    y = torch.zeros(3, 32, dtype=torch.uint8)
    scale = torch.zeros(1, 1, 32, 4, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    call = raw_call("rmsnorm_fp4quant", x, w, None, 1e-6, 16, None, "128x4", out=(y, scale))
    want = torch.ops.cute.rmsnorm_fp4quant(x, w, scale_layout="128x4")
    before = len(launches.calls)
    y.fill_(0xAA)
    assert call() is None
    assert len(launches.calls) == before + 1
    assert len(launches.compiled) == 1
    assert_same((y, scale), want)


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in OPS.values() if "counts" in op.signature.names])
def test_samples_state_valid_row_counts(op):
    """Check that in samples each expert's count is at least 0 and fits into its rows, because kernels do not check
    this."""
    for sample in sample_inputs(op.name, "cpu"):
        given = arguments(op, sample)
        rows, offsets, counts = next(iter(given.values())), given["offsets"], given["counts"]
        if offsets is None:
            room = torch.full_like(counts, rows.shape[1])
        else:
            room = offsets.diff()
            assert offsets[0] >= 0 and offsets[-1] <= len(rows), sample.name
        assert (room >= 0).all(), sample.name
        assert counts is None or ((counts >= 0) & (counts <= room)).all(), sample.name
