"""``prepare_scales`` compared with exact arithmetic, and its errors."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from support import spec
from torch._subclasses import FakeTensorMode

from torch_cute_ops import convert_scales, prepare_scales
from torch_cute_ops.formats import MXFP4, NVFP4
from torch_cute_ops.formats.prepared_scales import scales_of_prepared
from torch_cute_ops.reference.mm_fp8_fp4 import prepared_weight

FORMATS = {16: NVFP4, 32: MXFP4}
by_format = pytest.mark.parametrize("block_size", FORMATS)


def scale_bytes(rows: int, blocks: int, block_size: int) -> torch.Tensor:
    """Return random scale bytes that are not negative, with rows of NaN, rows of the smallest byte, and rows whose
    scales are near each other."""
    bytes_ = torch.randint(0, 0x80 if block_size == 16 else 0x100, (rows, blocks), dtype=torch.uint8)
    bytes_[1::5] = 0x7F if block_size == 16 else 0xFF
    bytes_[2::5] = 0
    near = torch.randint(0, 0x60 if block_size == 16 else 0xE0, (len(bytes_[3::5]), 1))
    bytes_[3::5] = near.to(torch.uint8) + bytes_[3::5] % 24
    return bytes_


def exact_row(scales: list[Fraction | None]) -> tuple[int, list[Fraction | None]]:
    """Return the least u with 6 · (largest scale) · 2^-u ≤ 448, and the scales times 2^-u. None stands for NaN."""
    largest = max((each for each in scales if each is not None), default=Fraction(0))
    u = -150 if largest else 0
    while largest and largest * 6 > 448 * Fraction(2) ** u:
        u += 1
    return u, [None if each is None else each / Fraction(2) ** u for each in scales]


def fractions_of(bytes_: torch.Tensor, block_size: int) -> list[list[Fraction | None]]:
    values = spec.scale_value(bytes_.numpy(), {16: "e4m3", 32: "ue8m0"}[block_size]).astype(np.float64)
    return [[None if np.isnan(each) else Fraction(float(each)) for each in row] for row in values]


def value_of_index(index: int, block_size: int) -> Fraction | None:
    """Return the scale that a table index stands for, divided by its row's power of two."""
    if index in (0, 255):
        return None if index else Fraction(0)
    if block_size == 32:
        return Fraction(2) ** (index - 14)
    e, m = divmod(index - 1, 8)
    return Fraction(8 + m, 8) * Fraction(2) ** (e - 13)


@by_format
def test_bytes(block_size):
    """Check each byte against exact fractions: the power of two of each row, the index of each block, and the zeros.
    Index 0 stands for scales so small that their products with all codes round to 0 in e4m3."""
    n, k = 40, 576
    bytes_ = scale_bytes(n, k // block_size, block_size)
    fmt = FORMATS[block_size]
    prepared = prepare_scales(bytes_.view(fmt.scale_dtype), n, k, block_size=block_size)
    assert prepared.dtype == torch.uint8 and prepared.shape == (4, n, 256 // block_size)
    powers = prepared[0, :, :4].contiguous().view(torch.float32).double()
    index = prepared[1:].transpose(0, 1).flatten(1)
    assert not prepared[0, :, 4:].any() and not index[:, k // block_size :].any()
    for row, scales in enumerate(fractions_of(bytes_, block_size)):
        u, want = exact_row(scales)
        assert Fraction(powers[row].item()) == Fraction(2) ** u
        for got, s in zip(index[row].tolist(), want, strict=False):
            if got == 0:
                assert s is not None and s * 6 <= Fraction(1, 1024)  # half of e4m3's smallest number rounds to 0
            else:
                assert value_of_index(got, block_size) == s
            if got not in (0, 255):
                bits = (got + 15) << 7 if block_size == 16 else (got + 1) << 10
                assert Fraction(torch.tensor([bits], dtype=torch.int16).view(torch.float16).item()) == s
    s, first = scales_of_prepared(prepared, k, fmt)
    assert torch.equal(first.double(), powers[:, 0])
    by_index = [[value_of_index(each, block_size) for each in row[: k // block_size]] for row in index.tolist()]
    want = torch.tensor([[np.nan if each is None else float(each) for each in row] for row in by_index])
    assert torch.equal(s.nan_to_num(-1), want.nan_to_num(-1))


@by_format
def test_every_code_with_every_scale(block_size):
    """Check the e4m3 codes of all 16 FP4 codes times each scale byte, for rows with several powers of two."""
    fmt, count = FORMATS[block_size], 0x80 if block_size == 16 else 0x100
    tops = (0x01, 0x30, 0x45, 0x7E) if block_size == 16 else (0x00, 0x09, 0x80, 0xFE)
    each = torch.arange(count, dtype=torch.int64).repeat(len(tops), 1)
    top = torch.tensor(tops)[:, None]
    nan = 0x7F if block_size == 16 else 0xFF
    each = torch.where((each > top) & (each != nan), top, each).to(torch.uint8)
    n, k = len(tops), count * block_size
    codes = torch.arange(16, dtype=torch.uint8).repeat(n, k // 16)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    prepared = prepare_scales(each.view(fmt.scale_dtype), n, k, block_size=block_size)
    weight, powers = prepared_weight(packed, prepared, fmt)
    got = weight.view(torch.uint8)
    scales = torch.from_numpy(spec.scale_value(each.numpy(), fmt.scale_format)).double()
    value = torch.from_numpy(spec.e2m1_value(codes.numpy())).double() * scales.repeat_interleave(block_size, 1)
    value /= powers.double()[:, None]
    want = torch.from_numpy(spec.e4m3(value.nan_to_num(0).float().numpy()))
    is_nan = value.isnan()
    assert torch.equal(got == 0x7F, is_nan) and torch.equal(got[~is_nan], want[~is_nan])


@by_format
def test_layouts(block_size):
    """Check that tiles, another library's tiles and linear scales of experts' weights give the same bytes."""
    fmt, experts, n, k = FORMATS[block_size], 3, 128, 320
    linear = scale_bytes(experts * n, k // block_size, block_size).view(fmt.scale_dtype)
    given = {"block_size": block_size, "scale_format": fmt.scale_format}
    want = torch.stack([prepare_scales(linear[e * n : (e + 1) * n], n, k, **given) for e in range(experts)])
    tiles = convert_scales(linear, experts * n, k, "linear", "128x4")
    for scale, more in (
        (linear.view(experts, n, -1), {}),
        (tiles, {}),
        (tiles.view(-1), {"scale_layout": "128x4"}),
        (tiles.view(experts, n, -1), {"scale_layout": "128x4"}),
    ):
        assert torch.equal(prepare_scales(scale, n, k, experts=experts, **given, **more), want)
    if block_size == 32:
        scale = linear.view(torch.float8_e8m0fnu)
        assert torch.equal(prepare_scales(scale[:n], n, k, **given), want[0])
    assert prepare_scales(linear[:0], 0, k, **given).shape == (3, 0, 256 // block_size)


def test_without_values():
    """Check that fake and meta scales are not read, and that the function compiles without a graph break."""
    scale = torch.full((16, 24), -1.0).to(torch.float8_e4m3fn)
    with FakeTensorMode() as mode:
        assert prepare_scales(mode.from_tensor(scale), 16, 384).shape == (3, 16, 16)
    assert prepare_scales(scale.to("meta"), 16, 384).shape == (3, 16, 16)
    positive = torch.rand(16, 24).to(torch.float8_e4m3fn)
    compiled = torch.compile(prepare_scales, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(positive, 16, 384), prepare_scales(positive, 16, 384))


NVFP4_SCALE = torch.ones(16, 24).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"b_scale": (NVFP4_SCALE.float() * -1).to(torch.float8_e4m3fn)}, ValueError, "b_scale holds negative scales"),
        ({"b_scale": NVFP4_SCALE.float()}, TypeError, "got b_scale with dtype torch.float32; expected float8_e4m3fn"),
        ({"b_scale": None}, TypeError, "b_scale is None, a NoneType; expected a tensor"),
        ({"block_size": 32}, TypeError, "got b_scale with dtype torch.float8_e4m3fn; expected uint8 or float8_e8m0fnu"),
        ({"block_size": 8}, ValueError, "block_size=8 with scale_format=None is no FP4 format"),
        ({"k": 376}, ValueError, "k is 376; expected a multiple of 16"),
        ({"k": 0}, ValueError, "k is 0; expected 1 or more"),
        ({"n": 16.0}, TypeError, "n is 16.0, a float; expected an int"),
        ({"n": 8}, ValueError, r"got b_scale with shape \(16, 24\); expected \(8, 24\), the linear scales"),
        ({"experts": 2}, ValueError, r"got b_scale with shape \(16, 24\); expected \(2, 16, 24\)"),
        ({"experts": 1025}, ValueError, "experts is 1025; expected 1 to 1024"),
        ({"scale_layout": "8x4"}, ValueError, "8x4 scales are for activations"),
        ({"scale_layout": "128x4"}, ValueError, r"got b_scale with shape \(16, 24\); expected \(1, 6, 32, 4, 4\)"),
    ],
)
def test_errors(change, error, match):
    given = {"b_scale": NVFP4_SCALE, "n": 16, "k": 384}
    prepare_scales(**given)
    with pytest.raises(error, match=f"^prepare_scales: .*{match}"):
        prepare_scales(**{**given, **change})
