"""The torch composition that Inductor compiles, against SPEC.md written out in plain Python, one element at a time."""

import math
import struct

import pytest
import torch

from benchmarks import compositions

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp32(value):
    """Round a Python float to fp32 (overflow to infinity)."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def e4m3_value(byte):
    """The value of a positive e4m3 byte."""
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


def nearest(value, grid):
    """Index of the grid value nearest to `value` ≥ 0, ties to the even index, saturating."""
    if value >= grid[-1]:
        return len(grid) - 1
    return min(range(len(grid)), key=lambda i: (abs(grid[i] - value), i % 2))


E4M3 = [e4m3_value(byte) for byte in range(0x7F)]


def quantize_block(values):
    """(16 codes, scale byte) of one NVFP4 block with global scale 1; fp32 after each operation."""
    if not all(math.isfinite(v) for v in values):
        return [0] * 16, 0x7F
    byte = nearest(fp32(max(map(abs, values)) * fp32(1 / 6)), E4M3)
    scale = E4M3[byte]
    if scale == 0:
        return [0] * 16, 0
    inverse = fp32(1 / scale)
    scaled = [fp32(v * inverse) for v in values]
    return [nearest(abs(v), E2M1) | (8 if math.copysign(1, v) < 0 else 0) for v in scaled], byte


def quantize(rows):
    """Packed bytes and scale bytes of rows of floats."""
    packed, scales = [], []
    for row in rows:
        blocks = [quantize_block(row[i : i + 16]) for i in range(0, len(row), 16)]
        codes = [code for codes, _ in blocks for code in codes]
        packed.append([low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)])
        scales.append([byte for _, byte in blocks])
    return packed, scales


def to_128x4(scales):
    """SPEC.md's byte order, byte by byte, in a zeroed buffer."""
    tiles = math.ceil(len(scales[0]) / 4)
    buffer = [0] * (math.ceil(len(scales) / 128) * 128 * tiles * 4)
    for m, row in enumerate(scales):
        for k, byte in enumerate(row):
            buffer[(m // 128 * tiles + k // 4) * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4] = byte
    return buffer


def flat(scale):
    return scale.view(torch.uint8).flatten().tolist()


SPECIAL = {
    "ties": [0.25, -0.25, 0.75, 1.25, -1.75, 2.5, -3.5, 5.0, 6.0, 0.0, -0.0, 0.1, 1.0, 2.0, 3.0, -6.0],
    "zeros": [0.0, -0.0] * 8,
    "rounds to a zero scale": [1e-4, -1e-3] * 8,
    "smallest scale": [6 * 2.0**-9, -1e-3] * 8,
    "subnormal": [2.0**-149, -(2.0**-140)] * 8,
    "saturates": [2688.0, -3000.0, 1e30, 3e38] * 4,
    "NaN": [1.0] * 15 + [math.nan],
    "infinity": [1.0, -math.inf] * 8,
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_blocks_bit_for_bit(name):
    y, scale = compositions.nvfp4_quantize(torch.tensor([SPECIAL[name]]))
    packed, scales = quantize([[fp32(v) for v in SPECIAL[name]]])
    assert y.tolist() == packed and scale.view(torch.uint8).tolist() == scales


@pytest.mark.parametrize("exponent", [-12, -3, 0, 5])
def test_random_blocks_bit_for_bit(exponent):
    values = torch.randn(8, 128, generator=torch.Generator().manual_seed(exponent + 20)) * 2.0**exponent
    y, scale = compositions.nvfp4_quantize(values)
    packed, scales = quantize(values.tolist())
    assert y.tolist() == packed and scale.view(torch.uint8).tolist() == scales


@pytest.mark.parametrize(("m", "h"), [(1, 16), (130, 96), (257, 64)])
def test_quantise_with_layout_bit_for_bit(m, h):
    x = torch.randn(m, h, generator=torch.Generator().manual_seed(m)).to(torch.bfloat16)
    y, scale = compositions.fp4_quantize(x)
    packed, scales = quantize(x.float().tolist())
    assert y.tolist() == packed and y.dtype == torch.uint8
    assert flat(scale) == to_128x4(scales) and scale.dtype == torch.float8_e4m3fn
    assert tuple(scale.shape) == (math.ceil(m / 128) * 128, math.ceil(h / 64) * 4)


def test_norm_and_quantise():
    """Behind the row reduction at most 1 in 1,000 codes and scales may differ (here: each by one step)."""
    generator = torch.Generator().manual_seed(7)
    x, w = (torch.randn(*shape, generator=generator).to(torch.bfloat16) for shape in ((40, 1024), (1024,)))
    rows = []
    for row in x.tolist():
        r = fp32(1 / math.sqrt(math.fsum(v * v for v in row) / 1024 + 1e-6))
        rows.append([fp32(fp32(v * r) * g) for v, g in zip(row, w.tolist(), strict=True)])
    packed, scales = quantize(rows)
    y, scale, norm = compositions.rmsnorm_fp4quant_with_norm(x, w, 1e-6)
    wrong = (y ^ torch.tensor(packed, dtype=torch.uint8)).flatten().tolist()
    assert sum((byte & 15 != 0) + (byte >> 4 != 0) for byte in wrong) <= x.numel() / 1000
    assert sum(a != b for a, b in zip(flat(scale), to_128x4(scales), strict=True)) <= x.numel() / 16 / 1000
    torch.testing.assert_close(norm, torch.tensor(rows).to(torch.bfloat16))
    again = compositions.rmsnorm_fp4quant(x, w, 1e-6)
    assert torch.equal(again[0], y) and torch.equal(again[1].view(torch.uint8), scale.view(torch.uint8))


def test_one_symbolic_compile_serves_all_row_counts_above_one_tile():
    compiled = torch.compile(compositions.rmsnorm_fp4quant, fullgraph=True, backend="aot_eager")
    w = torch.randn(192)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (300, 129, 1024):
            x = torch.randn(m, 192)
            torch._dynamo.mark_dynamic(x, 0)
            for got, expected in zip(compiled(x, w, 1e-6), compositions.rmsnorm_fp4quant(x, w, 1e-6), strict=True):
                assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
