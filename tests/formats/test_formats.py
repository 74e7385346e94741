"""``formats/``: codes, scales, packing and layouts, compared with independent formulas."""

import itertools
import math
from fractions import Fraction
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import spec
from support.edge_values import every_finite, fp32_edges, neighbours
from torch.utils._python_dispatch import TorchDispatchMode

from torch_cute_ops.formats import (
    FP8_BLOCK128,
    FP8_BLOCK128_UE8M0,
    FP8_FORMATS,
    FP8_SCALE_LAYOUTS,
    FP8_TENSOR,
    FP8_TOKEN,
    MXFP4,
    MXFP8,
    NVFP4,
    SCALE_LAYOUTS,
    convert_scales,
    nvfp4_global_scale,
    resolve_fp4_format,
    resolve_fp8_format,
    resolve_scale_layout,
)
from torch_cute_ops.formats import fp4 as formats
from torch_cute_ops.formats.fp8 import (
    is_column_major,
    is_one_column,
    is_packed_column,
    is_row_major,
    new_column_scales,
)
from torch_cute_ops.formats.scale_layout import from_linear, to_linear
from torch_cute_ops.formats.shapes import fp4_shapes, fp8_outputs

# e2m1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_encode_e2m1_of_every_16_bit_value(dtype):
    values = every_finite(dtype).float()
    assert np.array_equal(formats.encode_e2m1(values).numpy(), spec.e2m1(values.numpy()))


def test_encode_e2m1_of_fp32_edges():
    values = fp32_edges()
    assert np.array_equal(formats.encode_e2m1(values).numpy(), spec.e2m1(values.numpy()))
    infinite = torch.tensor([torch.inf, -torch.inf])
    assert formats.encode_e2m1(infinite).tolist() == [7, 15]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=50))
def test_encode_e2m1_is_the_nearest_value(values):
    got = formats.encode_e2m1(torch.tensor(values, dtype=torch.float32)).tolist()
    assert got == [spec.e2m1_exact(value) for value in values]


def test_decode_e2m1():
    # Values in table 5 of OCP MX v1.0.
    want = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    got = formats.decode_e2m1(torch.arange(16, dtype=torch.uint8))
    assert got.dtype == torch.float32
    assert got.tolist() == [*want, *(-v for v in want)]
    assert got[8].signbit()
    assert torch.equal(formats.encode_e2m1(got), torch.arange(16, dtype=torch.uint8))


def test_packing():
    """Check, for every pair of codes, that element 0 is packed into the low nibble."""
    pairs = list(itertools.product(range(16), range(16)))
    codes = torch.tensor(pairs, dtype=torch.uint8)
    packed = formats.pack_e2m1(codes)
    assert packed.flatten().tolist() == [low + 16 * high for low, high in pairs]
    assert torch.equal(formats.unpack_e2m1(packed), codes)
    assert torch.equal(formats.unpack_e2m1(packed.view(16, 4, 4)), codes.view(16, 4, 8))


# e4m3


def test_encode_e4m3():
    middle = (spec.E4M3_POSITIVE[1:] + spec.E4M3_POSITIVE[:-1]) / 2
    values = torch.cat([neighbours(np.concatenate([spec.E4M3_POSITIVE, middle]), 4), fp32_edges()])
    assert np.array_equal(formats.encode_e4m3(values).view(torch.uint8).numpy(), spec.e4m3(values.numpy()))
    extremes = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf])
    assert formats.encode_e4m3(extremes).view(torch.uint8).tolist() == [0x7F, 0x7F, 0x7E, 0xFE]


@given(st.lists(st.floats(width=32), max_size=50))
def test_encode_e4m3_is_the_nearest_value(values):
    got = formats.encode_e4m3(torch.tensor(values, dtype=torch.float32)).view(torch.uint8).tolist()
    assert got == [spec.e4m3_exact(value) for value in values]


# Scales


def test_decode_scale():
    every = torch.arange(256, dtype=torch.uint8)
    got = formats.decode_scale(every.view(torch.float8_e4m3fn), NVFP4)
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy(), [spec.e4m3_value(byte) for byte in range(256)])
    got = formats.decode_scale(every, MXFP4)
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy(), [spec.ue8m0_value(byte) for byte in range(256)])


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (2, 3)])
def test_decode_ue8m0_keeps_shapes(shape):
    byte = torch.full(shape, 130, dtype=torch.uint8)
    assert torch.equal(formats.decode_ue8m0(byte), torch.full(shape, 8.0))


def test_formats():
    assert (NVFP4.block_size, NVFP4.scale_dtype, NVFP4.has_global_scale) == (16, torch.float8_e4m3fn, True)
    assert (MXFP4.block_size, MXFP4.scale_dtype, MXFP4.has_global_scale) == (32, torch.uint8, False)
    valid = {(16, None): NVFP4, (16, "e4m3"): NVFP4, (32, None): MXFP4, (32, "ue8m0"): MXFP4}
    for pair in itertools.product((0, 1, 8, 16, 32, 64, 128, -16), (None, "e4m3", "ue8m0", "e5m2", "", "E4M3")):
        if pair in valid:
            assert resolve_fp4_format(*pair) is valid[pair]
        else:
            with pytest.raises(
                ValueError, match=rf"block_size={pair[0]} with scale_format={pair[1]!r} is no FP4 format"
            ):
                resolve_fp4_format(*pair)


def test_fp8_formats():
    assert FP8_FORMATS == {"tensor": FP8_TENSOR, "token": FP8_TOKEN, "block128": FP8_BLOCK128, "block32": MXFP8}
    assert [fmt.is_static for fmt in FP8_FORMATS.values()] == [True, False, False, False]
    assert [fmt.scale_dtype for fmt in FP8_FORMATS.values()] == [torch.float32] * 3 + [torch.uint8]
    assert [fmt.width_multiple for fmt in (*FP8_FORMATS.values(), FP8_BLOCK128_UE8M0)] == [1, 1, 64, 32, 64]
    powers = {"block128": FP8_BLOCK128_UE8M0, "block32": MXFP8}
    granularities = (*FP8_FORMATS, "row", "")
    layouts = (*FP8_SCALE_LAYOUTS, *SCALE_LAYOUTS, None, "")
    for granularity, layout, scale_format in itertools.product(granularities, layouts, (None, "ue8m0", "e4m3", "")):
        fitting = SCALE_LAYOUTS if granularity == "block32" else FP8_SCALE_LAYOUTS
        if granularity not in FP8_FORMATS:
            message = f"granularity='{granularity}' is unknown; use one of 'tensor', 'token', 'block128', 'block32'"
        elif scale_format is not None and (granularity not in powers or scale_format != "ue8m0"):
            message = f"scale_format='{scale_format}' does not fit granularity='{granularity}'"
        elif layout not in (*fitting, None):
            message = f"scale_layout='{layout}' does not fit granularity='{granularity}'; use one of "
        else:
            fmt, found = resolve_fp8_format(granularity, layout, scale_format)
            # Only block scales have a layout to choose.
            assert fmt == (FP8_FORMATS if scale_format is None else powers)[granularity]
            default = {"block128": "column", "block32": "128x4"}.get(granularity)
            assert found.name == ("row" if default is None else layout or default)
            continue
        with pytest.raises(ValueError, match=message):
            resolve_fp8_format(granularity, layout, scale_format)


# Layouts


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 127, 128, 129, 300])
@pytest.mark.parametrize("blocks", [1, 3, 4, 5, 12])
def test_offsets(layout, rows, blocks):
    """Check that every offset follows the formula, lies inside the matrix, and occurs once."""
    ours = SCALE_LAYOUTS[layout]
    offsets = set()
    for m, k in itertools.product(range(rows), range(blocks)):
        offset = ours.row_offset(m, blocks) + ours.block_offset(k)
        assert offset == spec.layout_offset(layout, m, k, blocks)
        offsets.add(offset)
    shape = ours.shape((rows,), blocks)
    assert shape == spec.layout_shape(layout, rows, blocks)
    assert len(offsets) == rows * blocks
    assert max(offsets) < math.prod(shape)


def test_offset_of_known_places():
    """Check offsets of the 128x4 layout that the PTX ISA shows: 32 rows of 4 bytes form a column of 128 bytes, and the
    next 32 rows form the next column."""
    layout = SCALE_LAYOUTS["128x4"]
    known = {
        (0, 0): 0,
        (0, 3): 3,
        (1, 0): 16,
        (31, 0): 496,
        (32, 0): 4,
        (64, 0): 8,
        (96, 1): 13,
        (127, 3): 511,
        (0, 4): 512,
    }
    for (m, k), offset in known.items():
        assert layout.row_offset(m, 8) + layout.block_offset(k) == offset
    assert layout.row_offset(128, 8) == 1024


@given(
    layout=st.sampled_from(list(SCALE_LAYOUTS)),
    rows=st.integers(0, 300),
    blocks=st.integers(1, 40),
    dtype=st.sampled_from([torch.uint8, torch.float8_e4m3fn]),
    seed=st.integers(0, 2**32 - 1),
)
def test_rearranging(layout, rows, blocks, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(0, 256, (rows, blocks), dtype=torch.uint8, generator=generator)
    arranged = from_linear(scale.view(dtype), SCALE_LAYOUTS[layout])
    assert arranged.dtype == dtype
    assert np.array_equal(arranged.view(torch.uint8).numpy(), spec.arrange(scale.numpy(), layout))
    back = to_linear(arranged, SCALE_LAYOUTS[layout], rows, blocks)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), scale)


@pytest.mark.parametrize("layout", ["128x4", "8x4"])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_rearranging_views(layout, offset):
    """Convert scales that are columns of a wider matrix, or that start at any byte."""
    whole = torch.randint(0, 256, (200, 20), dtype=torch.uint8)
    view = whole[:, offset : offset + 12]
    arranged = from_linear(view, SCALE_LAYOUTS[layout])
    want = spec.arrange(view.numpy(), layout)
    assert np.array_equal(arranged.reshape(want.shape).numpy(), want)
    at = torch.cat((torch.zeros(offset, dtype=torch.uint8), arranged.flatten()))[offset:]
    assert torch.equal(to_linear(at, SCALE_LAYOUTS[layout], 200, 12), view)


@pytest.mark.parametrize("layout", ["128x4", "8x4"])
def test_rearranging_takes_no_more_than_copies(layout):
    """Check that rearranging scales needs no tensor of indices, which would take eight times the scales' bytes, and
    most of a model's loading time."""
    made = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made.append(result.untyped_storage().nbytes())
            return result

    scale = torch.randint(0, 256, (256, 16), dtype=torch.uint8)
    with Sizes():
        to_linear(from_linear(scale, SCALE_LAYOUTS[layout]), SCALE_LAYOUTS[layout], 256, 16)
    assert made and max(made) <= scale.nbytes


@given(
    layouts=st.tuples(*2 * [st.sampled_from(list(SCALE_LAYOUTS))]),
    rows=st.integers(0, 300),
    blocks=st.integers(1, 40),
    dtype=st.sampled_from([torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu]),
    seed=st.integers(0, 2**32 - 1),
)
def test_convert_scales(layouts, rows, blocks, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    linear = torch.randint(0, 256, (rows, blocks), dtype=torch.uint8, generator=generator)
    source, want = (torch.from_numpy(spec.arrange(linear.numpy(), layout)) for layout in layouts)
    # Ignore padding, whose content does not matter.
    occupied = torch.from_numpy(spec.arrange(np.ones_like(linear.numpy()), layouts[0]))
    source = torch.where(occupied == 1, source, 0xAA).to(torch.uint8)
    k = blocks * (16 if dtype == torch.float8_e4m3fn else 32)
    got = convert_scales(source.view(dtype), rows, k, *layouts)
    assert got.dtype == dtype and torch.equal(got.view(torch.uint8), want)
    # Check stacked matrices too, as checkpoints store experts' weights, and flat scales, as torchao stores tiles.
    other = got[None] if layouts[1] == "linear" else got.flatten()
    again = convert_scales(other, rows, k, *reversed(layouts))
    assert torch.equal(again.view(torch.uint8), torch.from_numpy(spec.arrange(linear.numpy(), layouts[0])))


def test_literal_type_names_all_layouts():
    hints = get_type_hints(convert_scales)
    assert [get_args(hints[name]) for name in ("source", "target")] == 2 * [tuple(SCALE_LAYOUTS)]


@pytest.mark.parametrize(
    ("given_scale", "rows", "k", "names", "error", "text"),
    [
        (torch.zeros(4, 2), 4, 32, ("linear", "128x4"), TypeError, "scale with dtype torch.float32; expected float8"),
        (torch.zeros(4, 2, dtype=torch.uint8), 4, 48, ("linear", "128x4"), ValueError, "whole blocks of 32 elements"),
        (torch.zeros(4, 2, dtype=torch.uint8), -4, 64, ("linear", "128x4"), ValueError, "rows=-4 and k=64"),
        (torch.zeros(4, 2, dtype=torch.uint8), 5, 64, ("linear", "8x4"), ValueError, r"expected linear .*, \(5, 2\)"),
        (torch.zeros(4, 2, dtype=torch.uint8), 4, 64, ("128x4", "8x4"), ValueError, r"expected \(1, 1, 32, 4, 4\), or"),
        (torch.zeros(4, 2, dtype=torch.uint8), 4, 64, ("linear", "tiled"), ValueError, "scale_layout='tiled' is unkn"),
        (None, 4, 64, ("linear", "128x4"), TypeError, "scale is None, a NoneType; expected a tensor"),
        (torch.zeros(4, 2, dtype=torch.uint8), "4", 64, ("linear", "128x4"), TypeError, "rows is '4', a str; expected"),
        (torch.zeros(4, 2, dtype=torch.uint8), 4, 64.0, ("linear", "128x4"), TypeError, "k is 64.0, a float; expected"),
    ],
)
def test_convert_scales_refuses(given_scale, rows, k, names, error, text):
    with pytest.raises(error, match=text):
        convert_scales(given_scale, rows, k, *names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_global_scale(dtype, shape):
    """Check that the global scale maps the largest magnitude to the largest product of code and scale. An all-zero
    tensor gets 1."""
    for amax in (6.0, 0.37, 2.0**40, 2.0**-100):
        given_amax = torch.full(shape, amax, dtype=dtype)
        got = nvfp4_global_scale(given_amax)
        assert got.dtype == torch.float32 and got.shape == (1,)
        assert got.item() == np.float32(2688) / np.float32(given_amax.item())
    assert nvfp4_global_scale(torch.tensor(0.0)).item() == 1.0
    assert nvfp4_global_scale(torch.tensor(1e-44)).item() == torch.finfo(torch.float32).max


@pytest.mark.parametrize("amax", [math.inf, math.nan, -1.0])
def test_global_scale_of_no_magnitude(amax):
    """Check that the global scale is 1 if amax is infinite, NaN or negative, with a warning if the value can be read
    without waiting for a device."""
    given_amax = torch.tensor(amax)
    with pytest.warns(UserWarning, match=f"amax is {amax}; expected a finite number.* The global scale is 1"):
        assert nvfp4_global_scale(given_amax).item() == 1.0
    compiled = torch.compile(nvfp4_global_scale, backend="eager", fullgraph=True)
    assert compiled(given_amax).item() == 1.0
    assert torch.vmap(nvfp4_global_scale)(given_amax.expand(2, 1)).eq(1).all()


@pytest.mark.parametrize(
    ("amax", "error", "text"),
    [
        (0.5, TypeError, "amax is 0.5, a float; expected a tensor"),
        (None, TypeError, "amax is None"),
        (torch.ones(3), ValueError, r"got amax with shape \(3,\); expected one element"),
        (torch.ones(0), ValueError, r"got amax with shape \(0,\); expected one element"),
    ],
)
def test_global_scale_refuses(amax, error, text):
    with pytest.raises(error, match=text):
        nvfp4_global_scale(amax)


@pytest.mark.parametrize("source", ["linear", "128x4", "8x4"])
def test_scales_of_nvfp4_as_bytes(source):
    """Pass NVFP4 scales as bytes. Check that the error names the dtype to pass, and that the call succeeds with this
    dtype."""
    linear = torch.randint(0x7F, (24, 12), dtype=torch.uint8)
    scale = from_linear(linear, SCALE_LAYOUTS[source]).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"MXFP4's scales: for NVFP4 pass scale.view\(torch.float8_e4m3fn\)$"):
        convert_scales(scale.view(torch.uint8), 24, 192, source, "linear")
    right = convert_scales(scale, np.int64(24), np.int64(192), source, "linear")
    assert torch.equal(right.view(torch.uint8), linear)
    with pytest.raises(ValueError, match=r"got scale with shape \(3, 3\); .*\d+,?\)$"):
        convert_scales(torch.zeros(3, 3, dtype=torch.uint8), 24, 192, source, "linear")


def test_padding_is_not_read():
    scale = torch.arange(15, dtype=torch.uint8).view(3, 5)
    for layout in ("128x4", "8x4"):
        arranged = from_linear(scale + 1, SCALE_LAYOUTS[layout])
        arranged[arranged == 0] = 0xAA
        assert torch.equal(to_linear(arranged, SCALE_LAYOUTS[layout], 3, 5), scale + 1)


def test_layout_names():
    for name, layout in SCALE_LAYOUTS.items():
        assert resolve_scale_layout(name) is layout
        assert layout.name == name
        assert layout.is_linear == (name == "linear")
    with pytest.raises(ValueError, match="scale_layout='blocked' is unknown; use one of 'linear', '128x4', '8x4'"):
        resolve_scale_layout("blocked")


@given(
    lead=st.lists(st.integers(0, 200), max_size=3),
    blocks=st.integers(1, 9),
    fmt=st.sampled_from([NVFP4, MXFP4]),
    layout=st.sampled_from(list(SCALE_LAYOUTS)),
)
def test_shapes(lead, blocks, fmt, layout):
    width = blocks * fmt.block_size
    y, scale = fp4_shapes(torch.Size((*lead, width)), fmt, SCALE_LAYOUTS[layout])
    assert y == (*lead, width // 2)
    assert scale == ((*lead, blocks) if layout == "linear" else spec.layout_shape(layout, math.prod(lead), blocks))


@given(
    lead=st.lists(st.integers(0, 200), max_size=3),
    blocks=st.integers(1, 9),
    choices=st.sampled_from(
        [("tensor", None), ("token", "column"), ("block128", "row"), ("block128", "column"), ("block128", None)]
    ),
)
def test_fp8_shapes(lead, blocks, choices):
    """Check shapes of FP8 scales, including when the last block of a row is half as long as the others."""
    for width in (blocks * 128 - 64, blocks * 128):
        check_fp8_shapes(lead, width, blocks, choices)


def check_fp8_shapes(lead, width, blocks, choices):
    granularity, layout = choices
    y, scale = fp8_outputs((*lead, width), *resolve_fp8_format(*choices), ("row", "column"))
    assert y.shape == (*lead, width) and y.strides is None
    assert scale.shape == {"tensor": (1,), "token": (*lead, 1), "block128": (*lead, blocks)}[granularity]
    if granularity != "block128" or layout == "row":
        assert scale.strides is None
    elif math.prod(lead):
        by_column = torch.empty(blocks, *lead, device="meta").movedim(0, -1)
        assert scale.strides == by_column.stride()


@given(
    experts=st.integers(1, 3),
    rows=st.integers(1, 4),
    blocks=st.integers(1, 4),
    padding=st.integers(0, 2),
    data=st.data(),
)
def test_fp8_scale_layouts(experts, rows, blocks, padding, data):
    """Check the functions that recognise layouts of FP8 scales against the address of every scale."""
    shape = (experts, rows, blocks)[data.draw(st.integers(0, 1)) :]
    order = data.draw(st.permutations(range(len(shape))))
    step, strides = data.draw(st.sampled_from((1, 1, 2))), [0] * len(shape)
    for dim in order:
        strides[dim] = step
        step = step * shape[dim] + padding
    scale = torch.empty(step * 2).as_strided(shape, strides)

    def at(*index):
        return sum(i * stride for i, stride in zip(index, strides, strict=True))

    lead = list(itertools.product(*map(range, shape[:-1])))
    assert is_row_major(scale) == all(at(*first, b) == at(*first, 0) + b for first in lead for b in range(blocks))
    is_column = all(at(*first, b) == at(*first[:-1], 0, b) + first[-1] for first in lead for b in range(blocks))
    apart = rows == 1 or blocks == 1 or strides[-1] >= rows
    assert is_column_major(scale) == (is_column and apart)
    assert is_one_column(scale) == all(at(*first, 0) == i for i, first in enumerate(lead))
    is_packed = all(at(*first, b) == i + b * len(lead) for i, first in enumerate(lead) for b in range(blocks))
    assert is_packed_column(scale) == is_packed
    made = new_column_scales(scale)
    assert made.shape == scale.shape and is_packed_column(made) and is_column_major(made)


# The vectorised formulas of spec.py, compared with the exact formulas


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_spec_e2m1(value):
    assert spec.e2m1(np.array([value]))[0] == spec.e2m1_exact(value)


@given(st.floats(width=32))
def test_spec_e4m3(value):
    assert spec.e4m3(np.array([value]))[0] == spec.e4m3_exact(value)


@given(st.floats(min_value=0, width=32))
def test_spec_scales(value):
    for largest in (6, 448):
        assert spec.ue8m0_of_amax(np.array([value]), largest)[0] == spec.ue8m0_of_amax_exact(value, largest)


def test_spec_at_boundaries():
    edges = fp32_edges().abs().unique().tolist()
    amax = np.array(edges)
    assert spec.e2m1(amax).tolist() == [spec.e2m1_exact(v) for v in edges]
    assert spec.e4m3(amax).tolist() == [spec.e4m3_exact(v) for v in edges]
    for largest, fraction in ((6, 1.5), (448, 1.75)):
        near = neighbours(fraction * np.exp2(np.arange(-149, 128.0)), 2).abs().unique().tolist()
        exact = [spec.ue8m0_of_amax_exact(v, largest) for v in near]
        assert spec.ue8m0_of_amax(np.array(near), largest).tolist() == exact
    assert spec.ue8m0_of_amax(np.array([np.nan, np.inf, 0.0])).tolist() == [255, 255, 0]


def test_spec_ties_go_to_even_codes():
    for i, boundary in enumerate(spec.E2M1_BOUNDARIES):
        assert spec.e2m1_exact(boundary) == i + i % 2
        assert spec.nearest_even_exact(Fraction(boundary), tuple(map(Fraction, spec.E2M1))) % 2 == 0


@pytest.mark.parametrize(
    ("near_boundary", "exact", "largest"),
    [(spec.near_e4m3_boundary, spec.e4m3_exact, 500), (spec.near_e2m1_boundary, spec.e2m1_exact, 8)],
    ids=["e4m3", "e2m1"],
)
@given(value=st.floats(-1, 1))
def test_spec_boundaries(near_boundary, exact, largest, value):
    """Check that a small relative change changes the code near a rounding boundary, and nowhere else."""
    step, value = 2.0**-18, value * largest
    crosses = exact(value * (1 + step)) != exact(value * (1 - step))
    assert near_boundary(np.array([value]), step * (1 + 1e-9))[0] >= crosses
    assert near_boundary(np.array([value]), step * (1 - 1e-4))[0] <= crosses


NUMPY_FLOATS = {"float16": (np.float16, 16), "float32": (np.float32, 32)}


@pytest.mark.parametrize("dtype", NUMPY_FLOATS)
@given(st.floats() | st.integers(-40, 40).map(lambda n: n * 2.0**-26) | st.integers(0, 100).map(lambda n: 65480.0 + n))
def test_spec_round_to(dtype, value):
    numpy_type, _ = NUMPY_FLOATS[dtype]
    with np.errstate(all="ignore"):
        want = numpy_type(np.float64(value))
    got = spec.round_to(np.array([value]), dtype)
    np.testing.assert_array_equal(got, [np.float64(want)])
    assert np.signbit(got[0]) == np.signbit(value) or math.isnan(value)


@given(st.integers(0, 2**16 - 1), st.sampled_from([-1, 0, 1]))
def test_spec_round_to_bfloat16(bits, direction):
    """Check that a bfloat16 number is unchanged, that the midpoint of two numbers rounds to the even number, and that
    its neighbours round to the nearer number."""
    low, high = torch.tensor([bits, bits + 1]).to(torch.int32).bitwise_left_shift(16).view(torch.float32).tolist()
    if not (math.isfinite(low) and math.isfinite(high)) or bits == 0x7FFF:
        return
    assert spec.round_to(np.array([low]), "bfloat16")[0] == low
    middle = (low + high) / 2
    value = math.nextafter(middle, direction * math.inf) if direction else middle
    nearer = min((low, high), key=lambda bound: abs(bound - value))
    want = nearer if direction else (low, high)[bits % 2]
    assert spec.round_to(np.array([value]), "bfloat16")[0] == want
