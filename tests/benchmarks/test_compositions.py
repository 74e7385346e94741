"""Check the benchmarks' compositions of torch ops against docs/numerics.md, in plain Python, one element at a time."""

import math
import struct

import pytest
import torch

from benchmarks import compositions, ops

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp32(value):
    """Round a Python float to fp32 (overflow to infinity)."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def e4m3_value(byte):
    """Return the value of a positive e4m3 byte."""
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


def nearest(value, grid):
    """Return the index of the number in `grid` that is nearest to `value` ≥ 0, with ties to the even index."""
    if value >= grid[-1]:
        return len(grid) - 1
    return min(range(len(grid)), key=lambda i: (abs(grid[i] - value), i % 2))


E4M3 = [e4m3_value(byte) for byte in range(0x7F)]


def quantize_block(values):
    """Quantise an NVFP4 block with global scale 1: return 16 codes and the scale byte. Each operation rounds to
    fp32."""
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
    """Quantise rows of floats to NVFP4: return packed bytes and scale bytes."""
    packed, scales = [], []
    for row in rows:
        blocks = [quantize_block(row[i : i + 16]) for i in range(0, len(row), 16)]
        codes = [code for codes, _ in blocks for code in codes]
        packed.append([low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)])
        scales.append([byte for _, byte in blocks])
    return packed, scales


def to_128x4(scales):
    """Convert scales to the 128x4 layout byte by byte, with zeros as padding."""
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
    assert tuple(scale.shape) == (math.ceil(m / 128), math.ceil(h / 64), 32, 4, 4)


def test_norm_and_quantise():
    """Check that at most 1 in 1,000 codes and scales differ from plain Python's, and only by one step. They may differ
    because the sum of a row may be rounded differently."""
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


# --- FP8 ------------------------------------------------------------------------------------------


def quantize_fp8(values):
    """Quantise elements that share an FP8 scale: return their bytes and the scale. Each operation rounds to fp32."""
    if not all(math.isfinite(v) for v in values):
        return [0] * len(values), math.nan
    scale = fp32(max(map(abs, values)) / 448)
    if scale == 0:
        return [0] * len(values), 0.0
    return [e4m3_byte(fp32(v / scale)) for v in values], scale


def e4m3_byte(value):
    return nearest(abs(value), E4M3) | (0x80 if math.copysign(1, value) < 0 else 0)


@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize(("granularity", "block"), [("token", 256), ("block128", 128)])
def test_dynamic_fp8_bit_for_bit(granularity, block, layout):
    values = torch.randn(6, 256, generator=torch.Generator().manual_seed(block))
    values *= torch.tensor([1.0, 1e-3, 1e4, 1.0, 1.0, 0.0]).unsqueeze(-1)
    values[3, 0], values[4, 200], values[5, 3] = math.nan, -math.inf, -0.0
    y, scale = compositions.e4m3_quantize(values, None, granularity, "row" if granularity == "token" else layout)
    assert y.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert tuple(scale.shape) == (6, 256 // block)
    assert scale.stride() == ((1, 6) if block == 128 and layout == "column" else (256 // block, 1))
    for row, codes, scales in zip(values.tolist(), y.view(torch.uint8).tolist(), scale.tolist(), strict=True):
        expected = [quantize_fp8(row[i : i + block]) for i in range(0, 256, block)]
        assert codes == [byte for some, _ in expected for byte in some]
        assert scales == pytest.approx([s for _, s in expected], rel=0, abs=0, nan_ok=True)


def test_static_fp8_bit_for_bit():
    values = torch.tensor([[0.0, -0.0, 1.0, -3.0, 27.9, 28.0, 29.0, -1e6, math.inf, 1e-5, 0.3, 7.7]])
    given = torch.tensor([0.0625])
    y, scale = compositions.e4m3_quantize(values, given, "tensor", "row")
    assert y.view(torch.uint8).tolist() == [[e4m3_byte(fp32(v / 0.0625)) for v in values[0].tolist()]]
    assert torch.equal(scale, given) and scale.data_ptr() != given.data_ptr()


# --- sums and gates -------------------------------------------------------------------------------


def test_the_gate():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 64, generator=generator).to(torch.bfloat16)
    expected = [[a / (1 + math.exp(-a)) * b for a, b in zip(r[:32], r[32:], strict=True)] for r in x.tolist()]
    torch.testing.assert_close(compositions.silu_mul_fp32(x), torch.tensor(expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("op", [name for name in ops.names() if name.startswith("add_")])
def test_the_residual_becomes_the_rounded_sum_which_is_normalised(op):
    generator = torch.Generator().manual_seed(5)
    x, residual = (torch.randn(5, 128, generator=generator).to(torch.bfloat16) for _ in range(2))
    w = torch.randn(128, generator=generator).to(torch.bfloat16)
    total = (x.double() + residual.double()).to(torch.bfloat16)  # float64 holds the sum of two bfloat16 numbers exactly
    outputs = getattr(compositions, op)(x, residual, w, 1e-6)
    assert torch.equal(residual, total)
    if op.endswith("both_layouts"):
        assert flat(outputs[1]) == to_128x4(outputs[2].view(torch.uint8).tolist())
        outputs = (*outputs[:2], *outputs[3:])
    plain = getattr(compositions, op.removeprefix("add_").removesuffix("_both_layouts"))(total, w, 1e-6)
    assert all(flat(a) == flat(b) for a, b in zip(outputs, plain, strict=True))


# --- decoding and routing -------------------------------------------------------------------------


def test_every_code_and_scale_is_decoded():
    """Decode a block that contains every code, for each finite scale. The results are exact in bfloat16."""
    finite = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    codes = torch.tensor([low | low + 1 << 4 for low in range(0, 16, 2)], dtype=torch.uint8).repeat(len(finite), 1)
    linear = torch.tensor(finite, dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(1)
    values = [*E2M1, *(-v for v in E2M1)]
    expected = [[v * math.copysign(e4m3_value(byte & 0x7F), 127.5 - byte) for v in values] for byte in finite]
    for dtype in (torch.bfloat16, torch.float64):
        got = compositions.nvfp4_dequantize(codes, linear, dtype)
        assert torch.equal(got, torch.tensor(expected, dtype=dtype))
    got = compositions.fp4_dequantize(codes, compositions.to_128x4(linear))
    assert torch.equal(got, torch.tensor(expected, dtype=torch.bfloat16))


def routed(logits, groups, best, top, factor):
    """Choose the experts of one token by DeepSeek-V3's rule: return the experts and their weights."""
    scores, size = [1 / (1 + math.exp(-x)) for x in logits], len(logits) // groups
    two_best = [sum(sorted(scores[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: -two_best[g])[:best]
    chosen = sorted((e for e in range(len(logits)) if e // size in kept), key=lambda e: -scores[e])[:top]
    total = sum(scores[e] for e in chosen)
    return {e: scores[e] / total * factor for e in chosen}


def test_routing():
    logits = torch.randn(9, 32, generator=torch.Generator().manual_seed(11))
    by_token = [routed(row, 8, 4, 3, 2.5) for row in logits.tolist()]
    choice = {"topk": 3, "scoring": "sigmoid", "num_groups": 8, "topk_groups": 4, "scaling_factor": 2.5}
    dense = compositions.moe_route_dense(logits, **choice)
    torch.testing.assert_close(dense, torch.tensor([[chosen.get(e, 0.0) for e in range(32)] for chosen in by_token]))
    weights, ids, *order = compositions.moe_route(logits, **choice, alignment=8)
    assert ids.tolist() == [list(chosen) for chosen in by_token]
    torch.testing.assert_close(weights, torch.tensor([list(chosen.values()) for chosen in by_token]))
    assert all(torch.equal(a, b) for a, b in zip(order, compositions.moe_route_ids(ids, 32, 8), strict=True))


@pytest.mark.parametrize("alignment", [1, 8])
def test_the_order_of_rows(alignment):
    ids = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i))[:3] for i in range(7)]).int()
    pairs_of = [[pair for pair, expert in enumerate(ids.flatten().tolist()) if expert == e] for e in range(6)]
    rows, firsts = [], [0]
    for pairs in pairs_of:
        rows += pairs + [-1] * (-len(pairs) % alignment)
        firsts.append(len(rows))
    places, pairs_of_rows, offsets, counts = compositions.moe_route_ids(ids, 6, alignment)
    assert offsets.tolist() == firsts and counts.tolist() == list(map(len, pairs_of))
    assert pairs_of_rows.tolist() == rows + [-1] * (len(pairs_of_rows) - len(rows))
    assert [rows[place] for place in places.flatten().tolist()] == list(range(21))


# --- compiled -------------------------------------------------------------------------------------
