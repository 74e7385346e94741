"""Layouts of FP4 scales that ops derive from shapes: the index of every byte, detection for ranks and sizes, and shapes
of other libraries. The expected positions follow the index formulas of the documents, not the package's offsets."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import spec

import torch_cute_ops as tco
from torch_cute_ops.formats.scale_layout import SCALE_LAYOUTS, fitting_layouts

TILED = ("128x4", "8x4")
BLOCK = {torch.float8_e4m3fn: 16, torch.uint8: 32, torch.float8_e8m0fnu: 32}


def index(layout: str, m: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the index, in a tensor of tiles, of the scale of row ``m`` and block ``k``."""
    if layout == "128x4":
        return m // 128, k // 4, m % 32, m % 128 // 32, k % 4
    return m // 8, k // 4, m % 8, k % 4


def tiles_of(linear: np.ndarray, layout: str, padding: int = 0) -> np.ndarray:
    """Arrange a (rows, blocks) matrix of scale bytes as tiles, by the function ``index``."""
    rows, blocks = linear.shape
    shape = {"128x4": (-(-rows // 128), -(-blocks // 4), 32, 4, 4), "8x4": (-(-rows // 8), -(-blocks // 4), 8, 4)}
    placed = np.full(shape[layout], padding, np.uint8)
    placed[index(layout, *np.indices(linear.shape))] = linear
    return placed


def random_bytes(*shape: int, seed: int, below: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, below, shape, dtype=np.uint8)


def tensor(bytes_: np.ndarray, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bytes_)).view(dtype)


leads = st.lists(st.integers(0, 9), min_size=0, max_size=4).map(tuple)
seeds = st.integers(0, 2**32 - 1)


@given(
    layout=st.sampled_from(TILED),
    rows=st.integers(0, 300),
    blocks=st.integers(1, 20),
    dtype=st.sampled_from(list(BLOCK)),
    seed=seeds,
)
def test_place_of_every_byte(layout, rows, blocks, dtype, seed):
    linear = random_bytes(rows, blocks, seed=seed)
    got = tco.convert_scales(tensor(linear, dtype), rows, blocks * BLOCK[dtype], "linear", layout)
    assert got.dtype == dtype and got.is_contiguous()
    assert np.array_equal(got.view(torch.uint8).numpy(), tiles_of(linear, layout))


@given(
    layouts=st.permutations(("linear", *TILED)),
    rows=st.integers(1, 300),
    blocks=st.integers(1, 20),
    step=st.integers(1, 2),
)
@settings(max_examples=50)
def test_strided_scales_are_converted(layouts, rows, blocks, step):
    """Convert scales with any strides, such as a slice of a larger tensor."""
    source, target, _ = layouts
    linear = random_bytes(rows, blocks, seed=rows)
    placed = {"linear": linear, **{layout: tiles_of(linear, layout) for layout in TILED}}
    scale = tensor(np.repeat(placed[source], step, -1))[..., ::step]
    got = tco.convert_scales(scale, rows, 16 * blocks, source, target)
    assert np.array_equal(got.view(torch.uint8).numpy(), placed[target])


@given(layout=st.sampled_from(TILED), lead=leads, blocks=st.integers(1, 6), block=st.sampled_from([16, 32]), seed=seeds)
@settings(max_examples=50)
def test_quantisers_write_tiles(layout, lead, blocks, block, seed):
    """Check tensors with 1 to 5 dimensions: tiles cover the flattened rows, and linear scales have the input's
    dimensions."""
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((*lead, blocks * block), np.float32))
    y, linear = tco.fp4_quantize(x, block_size=block, scale_layout="linear")
    assert linear.shape == (*lead, blocks)
    codes, scale = tco.fp4_quantize(x, block_size=block, scale_layout=layout)
    rows = linear.view(torch.uint8).reshape(math.prod(lead), blocks).numpy()
    assert torch.equal(codes, y)
    assert np.array_equal(scale.view(torch.uint8).numpy(), tiles_of(rows, layout))


def shapes_of(lead: tuple[int, ...], blocks: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of the scales in each layout, as the documents state it."""
    rows = math.prod(lead)
    return {
        "linear": (*lead, blocks),
        "128x4": (math.ceil(rows / 128), math.ceil(blocks / 4), 32, 4, 4),
        "8x4": (math.ceil(rows / 8), math.ceil(blocks / 4), 8, 4),
    }


ambiguous = st.one_of(
    st.tuples(st.integers(1, 3), st.just(1), st.just(8)),
    st.tuples(st.integers(1, 2), st.just(1), st.just(32), st.just(4)),
)


@given(
    layout=st.sampled_from(list(SCALE_LAYOUTS)),
    lead=st.one_of(leads, ambiguous),
    blocks=st.integers(1, 9),
    block=st.sampled_from([16, 32]),
    seed=seeds,
)
@settings(max_examples=200)
def test_dequantise_reads_the_layout(layout, lead, blocks, block, seed):
    """Decode codes with 1 to 5 dimensions without naming the layout, and compare with a decoder in NumPy. If two
    layouts fit, the op must raise."""
    shapes = shapes_of(lead, blocks)
    rows, width = math.prod(lead), blocks * block
    codes, linear = random_bytes(rows, width // 2, seed=seed), random_bytes(rows, blocks, seed=seed + 1, below=0x7F)
    placed = linear if layout == "linear" else tiles_of(linear, layout, padding=0xFF)
    dtype = torch.float8_e4m3fn if block == 16 else torch.uint8
    y, scale = torch.from_numpy(codes).view(*lead, width // 2), tensor(placed, dtype).view(shapes[layout])
    fits = [name for name, shape in shapes.items() if shape == shapes[layout]]
    assert fits == [each.name for each in fitting_layouts(scale.shape, lead, blocks)]
    want = torch.from_numpy(spec.dequantise(spec.unpack(codes), linear)).view(*lead, width)
    given = {"block_size": block, "out_dtype": torch.float32}
    assert torch.equal(tco.fp4_dequantize(y, scale, scale_layout=layout, **given), want)
    if len(fits) > 1:
        assert len(lead) > 2
        with pytest.raises(
            ValueError, match=f"which {fits[0]} and {fits[1]} scales of y .* both have; name scale_layou"
        ):
            tco.fp4_dequantize(y, scale, **given)
    else:
        assert torch.equal(tco.fp4_dequantize(y, scale, **given), want)
    for other in shapes:
        # The shape of a linear matrix without padding, or of stacked matrices of whole tiles, and any shape without
        # elements, may also be the shape of another library's tiles.
        is_stack = len(lead) == 2 and lead[1] % {"128x4": 128, "8x4": 8}.get(other, 1) == 0
        is_flat = len(lead) == 1 or is_stack or linear.size == 0
        is_matrix = layout == "linear" and is_flat and math.prod(shapes[other]) == linear.size
        if other not in fits and not is_matrix:
            with pytest.raises(ValueError, match="scale"):
                tco.fp4_dequantize(y, scale, scale_layout=other, **given)


def test_ambiguous_example():
    y = torch.zeros(3, 1, 8, 32, dtype=torch.uint8)
    scale = torch.ones(3, 1, 8, 4).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"linear and 8x4 scales of y .* name scale_layout"):
        tco.fp4_dequantize(y, scale)


@given(m=st.integers(0, 400), blocks=st.integers(1, 64))
def test_operands_of_gemms_never_fit_two_layouts(m, blocks):
    for lead in ((m,), (3, m)):
        shapes = shapes_of(lead, blocks)
        assert len(set(shapes.values())) == 3
        for shape in shapes.values():
            assert len(fitting_layouts(shape, lead, blocks)) == 1


def product(
    m: int, n: int, k: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, np.ndarray, torch.Tensor]:
    """Return random codes of ``a`` and of the weight, their linear scales, and the product in float64."""
    codes = [random_bytes(rows, k // 2, seed=seed + i) for i, rows in enumerate((m, n))]
    linear = [random_bytes(rows, k // 16, seed=seed + 2 + i, below=8) + 0x34 for i, rows in enumerate((m, n))]
    a, b = (
        spec.dequantise(spec.unpack(each), scale).astype(np.float64) for each, scale in zip(codes, linear, strict=True)
    )
    return *map(torch.from_numpy, codes), *linear, torch.from_numpy(a @ b.T)


@given(m=st.integers(1, 140), n=st.integers(1, 17).map(lambda n: 8 * n), k=st.sampled_from([64, 128, 192]), seed=seeds)
@settings(max_examples=25)
def test_gemm_reads_the_layout(m, n, k, seed):
    """Multiply with scales in every layout, and with tiles in other libraries' shapes if the layout is named. If scales
    were read in a wrong layout, the error would far exceed the bound."""
    a, b, a_linear, b_linear, want = product(m, n, k, seed)
    limit = 1e-5 * want.abs().max()
    for layout in SCALE_LAYOUTS:
        own = layout if layout == "linear" else "128x4"
        a_scale, b_scale = (
            tensor(scale if name == "linear" else tiles_of(scale, name, padding=0x7F))
            for scale, name in ((a_linear, layout), (b_linear, own))
        )
        for name in (None, layout):
            got = tco.mm_fp4(a, b.t(), a_scale, b_scale, out_dtype=torch.float32, scale_layout=name)
            assert (got - want).abs().max() <= limit
        if layout == "linear":
            continue
        shapes = [
            [scale, scale.flatten(), scale.reshape(scale.shape[0] * rows, -1)]
            for scale, rows in ((a_scale, 128 if layout == "128x4" else 8), (b_scale, 128))
        ]
        for one, other in itertools.product(*shapes):
            got = tco.mm_fp4(a, b.t(), one, other, out_dtype=torch.float32, scale_layout=layout)
            assert (got - want).abs().max() <= limit
            viewed = tco.as_tiles(one, m, k, layout), tco.as_tiles(other, n, k, "128x4")
            got = tco.mm_fp4(a, b.t(), *viewed, out_dtype=torch.float32)
            assert (got - want).abs().max() <= limit


def test_mixed_layouts_are_refused():
    a, b, a_linear, b_linear, _ = product(128, 128, 64, 0)
    tiles = tensor(tiles_of(b_linear, "128x4"))
    with pytest.raises(
        ValueError, match=r"got b_scale .*; expected \(128, 4\), the linear scales of b, since a_scale has"
    ):
        tco.mm_fp4(a, b.t(), tensor(a_linear), tiles)
    with pytest.raises(
        ValueError, match=r"expected \(1, 1, 32, 4, 4\), the 128x4 scales of b, since a_scale has .* tiles"
    ):
        tco.mm_fp4(a, b.t(), tiles, tensor(b_linear))
    with pytest.raises(
        ValueError, match=r"got b_scale with shape \(16, 1, 8, 4\), 8x4 tiles, which are for activations"
    ):
        tco.mm_fp4_weight_only(torch.zeros(1, 64, dtype=torch.bfloat16), b.t(), tensor(tiles_of(b_linear, "8x4")))


@pytest.mark.parametrize("n", [128, 192])
def test_experts_padded_one_by_one(n):
    """Check tiles that are padded expert by expert: for N = 128 they are accepted, because the bytes are equal; for N =
    192 the error names the conversion."""
    experts, k, m = 2, 128, 3
    codes, linear = (
        random_bytes(experts * n, k // 2, seed=1),
        random_bytes(experts * n, k // 16, seed=2, below=8) + 0x34,
    )
    x = np.random.default_rng(3).integers(-8, 8, (m, k)).astype(np.float32)
    x[:, 0] = 448  # makes the scales 1
    a, a_scale = tco.fp8_quantize(torch.from_numpy(x), granularity="block128", scale_layout="column")
    offsets = torch.tensor([0, 2, 3], dtype=torch.int32)
    b = torch.from_numpy(codes).view(experts, n, -1).mT
    separate = np.stack([tiles_of(scale, "128x4") for scale in linear.reshape(experts, n, -1)])

    def multiply(scale: torch.Tensor, layout: str | None) -> torch.Tensor:
        return tco.grouped_mm_fp8_fp4(a, b, a_scale, scale, offsets, out_dtype=torch.float32, scale_layout=layout)

    want = multiply(tensor(linear).view(experts, n, -1), None)
    weight = spec.dequantise(spec.unpack(codes), linear).reshape(experts, n, k).astype(np.float64)
    exact = torch.from_numpy(np.stack([x[i] @ weight[e].T for i, e in enumerate((0, 0, 1))]))
    assert (want - exact).norm() <= 0.05 * exact.norm()
    assert torch.equal(multiply(tensor(tiles_of(linear, "128x4")), None), want)
    shapes = separate, separate.reshape(experts, -1, k // 16), separate.reshape(-1, k // 16), separate.reshape(-1)
    for shape in shapes:
        if n % 128 == 0:
            assert torch.equal(multiply(tensor(shape), "128x4"), want)
        else:
            with pytest.raises(ValueError, match=rf"padded expert by expert, {n} rows .*convert_scales\(one, {n}, K"):
                multiply(tensor(shape), "128x4")
    # Follow the advice of the error message.
    rows = torch.stack([tco.convert_scales(tensor(one), n, k, "128x4", "linear") for one in separate])
    assert torch.equal(multiply(rows, None), want)


@given(layout=st.sampled_from(TILED), rows=st.integers(1, 300), blocks=st.integers(1, 20), seed=seeds)
def test_as_tiles_is_a_view(layout, rows, blocks, seed):
    placed = tiles_of(random_bytes(rows, blocks, seed=seed), layout)
    height = 128 if layout == "128x4" else 8
    for shape in (placed.shape, (-1,), (placed.shape[0] * height, placed.shape[1] * 4)):
        scale = tensor(placed.reshape(shape))
        got = tco.as_tiles(scale, rows, 16 * blocks, layout)
        assert got.data_ptr() == scale.data_ptr() and got.shape == placed.shape
        assert np.array_equal(got.view(torch.uint8).numpy(), placed)


def test_as_tiles_of_experts():
    placed = np.stack([tiles_of(random_bytes(256, 5, seed=i), "128x4") for i in range(3)])
    for shape in (placed.shape, (3, 256, 8)):
        got = tco.as_tiles(tensor(placed.reshape(shape)), 3 * 256, 80, "128x4")
        assert np.array_equal(got.view(torch.uint8).numpy(), placed.reshape(got.shape))


E4M3 = torch.zeros(256, 8, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("scale", "rows", "k", "layout", "error", "text"),
    [
        (E4M3, 100, 128, "128x4", ValueError, r"expected \(1, 2, 32, 4, 4\), or the same tiles as a matrix \(128, 8\)"),
        (E4M3, 256, 200, "128x4", ValueError, "whole blocks of 16 elements"),
        (E4M3, 256, 128, "linear", ValueError, "linear scales have no tiles"),
        (E4M3, 256, 128, "tiled", ValueError, "scale_layout='tiled' is unknown"),
        (
            E4M3.t().contiguous().t(),
            256,
            128,
            "128x4",
            ValueError,
            r"got scale with strides .*; pass scale.contiguous\(\)",
        ),
        (E4M3.float(), 256, 128, "128x4", TypeError, "float8_e4m3fn \\(NVFP4\\), or uint8 or float8_e8m0fnu"),
        (E4M3.view(2, 128, 8), 200, 128, "128x4", ValueError, "padded expert by expert, 100 rows"),
    ],
)
def test_as_tiles_refuses(scale, rows, k, layout, error, text):
    with pytest.raises(error, match=f"as_tiles: .*{text}|{text}"):
        tco.as_tiles(scale, rows, k, layout)


@given(rows=st.integers(1, 3).map(lambda n: 128 * n), blocks=st.integers(1, 5).map(lambda n: 4 * n), seed=seeds)
def test_convert_scales_refuses_what_fits_two_layouts(rows, blocks, seed):
    """Check that tiles are refused, unless ``as_tiles`` is given, if their shape as a matrix is also the shape of
    linear scales."""
    linear = random_bytes(rows, blocks, seed=seed)
    matrix = tensor(tiles_of(linear, "128x4").reshape(rows, blocks))
    with pytest.raises(
        ValueError, match=rf"linear scales of {rows} rows .* pass as_tiles\(scale, {rows}, {16 * blocks}, '1"
    ):
        tco.convert_scales(matrix, rows, 16 * blocks, "128x4", "linear")
    tiles = tco.as_tiles(matrix, rows, 16 * blocks, "128x4")
    back = tco.convert_scales(tiles, rows, 16 * blocks, "128x4", "linear")
    assert np.array_equal(back.view(torch.uint8).numpy(), linear)
    for source in ("linear", "8x4"):
        with pytest.raises(ValueError, match="convert_scales: got scale with shape"):
            tco.convert_scales(tiles, rows, 16 * blocks, source, "linear")
