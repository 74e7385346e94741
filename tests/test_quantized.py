"""``quantize``, ``linear`` and ``dequantize``: values, compiled and exported programs, errors."""

from __future__ import annotations

import copy
import io
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import spec, weights
from support.layers import assert_product
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import torch_cute_ops
from torch_cute_ops import QuantizedWeight, dequantize, linear, quantize
from torch_cute_ops.nn import FP8BlockLinear, MXFP4Linear, MXFP8Linear, NVFP4Linear
from torch_cute_ops.runtime import settings

LAYERS = {"nvfp4": NVFP4Linear, "mxfp4": MXFP4Linear, "fp8_block": FP8BlockLinear, "mxfp8": MXFP8Linear}
ACTIVATIONS = {"nvfp4": ("16bit", "fp8"), "mxfp4": ("16bit", "fp8", "fp4"), "fp8_block": ("fp8",), "mxfp8": ("fp8",)}
KINDS = [(name, activations) for name, every in ACTIVATIONS.items() for activations in every]
by_format = pytest.mark.parametrize("name", LAYERS)
by_kind = pytest.mark.parametrize(("name", "activations"), KINDS)
N, K = 136, 320  # neither is a multiple of a scale tile or of 128 elements
ROWS = (1, 2, 3, 7, 16, 33, 128, 129, 300)


def float_layer(dtype=torch.bfloat16, factor=1.0) -> nn.Linear:
    layer = nn.Linear(K, N, dtype=dtype)
    layer.weight.data *= factor
    return layer


def decoded_by_the_specification(weight: torch.Tensor, name: str) -> np.ndarray:
    """Return the float64 numbers to which a quantised weight (N, K) decodes, computed without the package."""
    numbers = weight.detach().float().cpu().numpy()
    if name == "fp8_block":
        result = np.zeros(numbers.shape)
        for i, j in np.ndindex(-(-N // 128), -(-K // 128)):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale = np.abs(numbers[at]).max() / np.float32(448)
            result[at] = spec.scale_value(spec.e4m3(numbers[at] / scale), "e4m3").astype(np.float64) * float(scale)
        return result
    if name == "mxfp8":
        codes, scales = spec.quantise_fp8(numbers, "block32")
        factors = spec.scale_value(scales, "ue8m0").astype(np.float64).repeat(32, 1)
        return spec.scale_value(codes, "e4m3").astype(np.float64) * factors
    block, kind = (16, "e4m3") if name == "nvfp4" else (32, "ue8m0")
    factor = np.float32(2688) / np.abs(numbers).max() if name == "nvfp4" else None
    found = spec.quantise(numbers, block, factor)
    scales = spec.scale_value(found.scales, kind).astype(np.float64).repeat(block, 1)
    return spec.e2m1_value(found.codes) * scales / (1.0 if factor is None else float(factor))


# Values


def test_four_over_six_reduces_the_error(device):
    """Check that a weight with the better of two scales per block has a smaller error, and that GEMMs take it."""
    weight = torch.randn(N, K, device=device)
    plain, better = quantize(weight, "nvfp4"), quantize(weight, "nvfp4", four_over_six=True)
    assert better.global_scale is not None
    assert better.global_scale.item() == np.float32(1536) / np.float32(weight.abs().max().item())
    errors = [float((dequantize(q).double() - weight.double()).square().mean()) for q in (plain, better)]
    assert errors[1] < 0.9 * errors[0]
    x = torch.randn(5, K, device=device).bfloat16()
    exact = x.double() @ dequantize(better).double().t()
    assert (linear(x, better).double() - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("name", ["mxfp4", "fp8_block"])
def test_four_over_six_is_for_nvfp4(name):
    with pytest.raises(ValueError, match=f"four_over_six is True; format='{name}' has no second scale, so pass False"):
        quantize(torch.randn(N, K), name, four_over_six=True)


@by_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("factor", [1.0, 1e-4, 1e4])
def test_decoded_weight(name, dtype, factor, device):
    """Check the decoded weight for weights of very different magnitudes, which the global scale must compensate."""
    weight = float_layer(dtype, factor).weight.to(device)
    q = quantize(weight, name)
    want = decoded_by_the_specification(weight, name)
    got = dequantize(q).double().cpu().numpy()
    assert np.allclose(got, want, rtol=3e-7, atol=0)
    assert torch.equal(dequantize(q, torch.bfloat16), dequantize(q).bfloat16())
    assert q.shape == (N, K) and q.format == name and q.device == weight.device


@by_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_linear(name, activations, dtype, device):
    """Check that the product equals the float64 product, for any leading dimensions of x, with and without a bias."""
    source = float_layer(dtype, factor=1e-2).to(device)
    layer = LAYERS[name].from_float(source, activations=activations)
    q = quantize(source.weight, name)
    x = torch.randn(2, 5, K, dtype=dtype, device=device)
    got = linear(x, q, source.bias.detach(), activations=activations)
    assert_product(got, layer, x)
    for part in (x[1], x[1, 3], x[:0]):
        want = got[:0] if part.numel() == 0 else got[1] if part.dim() == 2 else got[1, 3]
        assert torch.equal(linear(part, q, source.bias.detach(), activations=activations), want)
    layer.bias = None
    assert_product(linear(x, q, activations=activations), layer, x)


@by_format
def test_automatic_activations(name):
    """Check that with ``activations="auto"`` FP4 weights are multiplied by 16-bit activations, and FP8 weights by FP8
    activations."""
    q, x = quantize(torch.randn(N, K), name), torch.randn(3, K).bfloat16()
    chosen = "fp8" if name in ("fp8_block", "mxfp8") else "16bit"
    assert torch.equal(linear(x, q), linear(x, q, activations=chosen))


@by_format
def test_autocast(name):
    """Check that float32 activations are cast as ``nn.functional.linear`` casts them under autocast."""
    q, x = quantize(torch.randn(N, K), name), torch.randn(3, K)
    with torch.autocast("cpu", torch.bfloat16):
        got = linear(x, q)
    assert got.dtype == torch.bfloat16 and torch.equal(got, linear(x.bfloat16(), q))


@by_format
@given(power=st.integers(-60, 60))
def test_relative_error_at_any_magnitude(name, power):
    """Check that the relative error is small. A missing or inverted global scale would give errors of 100 % and
    more."""
    weight, x = torch.randn(64, 256) * 2.0**power, torch.randn(32, 256).bfloat16()
    exact = x.double() @ weight.t().double()
    error = (linear(x, quantize(weight, name)).double() - exact).norm() / exact.norm()
    assert error < {"nvfp4": 0.12, "mxfp4": 0.16, "fp8_block": 0.05, "mxfp8": 0.05}[name]


def test_amax_of_several_weights():
    """Check that weights quantised with one amax share one global scale, so that their codes can be concatenated."""
    q, k = torch.randn(N, K), torch.randn(8, K) / 3
    amax = torch.stack([q.abs().amax(), k.abs().amax()]).amax()
    records = [quantize(each, amax=amax) for each in (q, k)]
    assert all(each.global_scale.item() == np.float32(2688) / np.float32(amax) for each in records)
    want = spec.quantise(k.numpy(), 16, np.float32(2688) / np.float32(amax))
    assert np.array_equal(spec.unpack(weights.raw(records[1].codes)), want.codes)


def test_quantised_tensors_of_a_checkpoint():
    """Check that a QuantizedWeight can be made from a checkpoint's tensors, such as ModelOpt's, whose weight_scale_2 is
    the reciprocal of the global scale."""
    weight = torch.randn(N, K) / 100
    weight_scale_2 = weight.abs().max() / 2688
    codes, scale = torch_cute_ops.fp4_quantize(weight, weight_scale_2.reciprocal())
    q = QuantizedWeight(codes, scale, weight_scale_2.reciprocal(), format="nvfp4")
    assert torch.allclose(dequantize(q), weight, atol=weight.abs().max().item() / 6)
    x = torch.randn(4, K).bfloat16()
    exact = x.double() @ weight.t().double()
    assert (linear(x, q) - exact).norm() < 0.12 * exact.norm()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_scales_of_a_checkpoint(name):
    """Check that linear scales, tiled scales, and torch's own dtypes of packed codes and scales give the same
    object."""
    weight = torch.randn(N, K)
    want = quantize(weight, name)
    block = 16 if name == "nvfp4" else 32
    codes, linear = torch_cute_ops.fp4_quantize(weight, want.global_scale, block_size=block, scale_layout="linear")
    dtype = torch.float8_e4m3fn if name == "nvfp4" else torch.float8_e8m0fnu
    tiles = torch_cute_ops.as_tiles(want.scale.flatten(), N, K, "128x4")
    for scale in (linear, tiles, linear.view(dtype)):
        for each in (codes, codes.view(torch.float4_e2m1fn_x2)):
            q = QuantizedWeight(each, scale, want.global_scale, format=name)
            assert q.scale.shape == want.scale.shape and q.scale.dtype == want.scale.dtype
            assert np.array_equal(weights.raw(q.scale), weights.raw(want.scale)) and torch.equal(q.codes, codes)


@pytest.mark.parametrize("rows", [N, 256])
def test_powers_of_two_as_scales_of_blocks(rows):
    """Check that FP8 block scales in e8m0 give the same object as the same numbers in float32."""
    codes = torch.randn(rows, K).to(torch.float8_e4m3fn)
    powers = torch.randint(118, 132, (2, 3), dtype=torch.uint8)
    numbers = torch.from_numpy(np.ldexp(1.0, powers.numpy().astype(int) - 127)).float()
    q, want = (
        QuantizedWeight(codes, scale, format="fp8_block") for scale in (powers.view(torch.float8_e8m0fnu), numbers)
    )
    assert q.scale.dtype == torch.float32 and torch.equal(q.scale, numbers)
    x = torch.randn(4, K).bfloat16()
    assert torch.equal(linear(x, q), linear(x, want)) and torch.equal(dequantize(q), dequantize(want))
    with pytest.raises(
        TypeError, match=r"got scale with dtype torch\.uint8; expected torch\.float32 or torch\.float8_e8m0"
    ):
        QuantizedWeight(codes, powers, format="fp8_block")


def test_scales_of_mxfp8():
    """Check that scales in every layout and in torch's own dtype give the same product, and are kept in the given
    layout."""
    want, x = quantize(torch.randn(N, K), "mxfp8"), torch.randn(4, K).bfloat16()
    assert want.scale.shape == (N, K // 32) and want.scale.dtype == torch.uint8 and want.global_scale is None
    for layout in ("128x4", "8x4", "linear"):
        scale = torch_cute_ops.convert_scales(want.scale, N, K, "linear", layout)
        for each in (scale, scale.view(torch.float8_e8m0fnu)):
            q = QuantizedWeight(want.codes, each, format="mxfp8")
            assert q.scale.dtype == torch.uint8 and torch.equal(q.scale, scale)
            assert torch.equal(linear(x, q), linear(x, want)) and torch.equal(dequantize(q), dequantize(want))
    with pytest.raises(
        TypeError, match=r"got scale with dtype torch\.float32; expected torch\.uint8 or torch\.float8_e8"
    ):
        QuantizedWeight(want.codes, want.scale.float(), format="mxfp8")
    with pytest.raises(
        ValueError, match=r"got scale with shape \(136, 20\); expected .*, or linear scales \(136, 10\)"
    ):
        QuantizedWeight(want.codes, want.scale.repeat(1, 2), format="mxfp8")
    with pytest.raises(ValueError, match="a transposed view"):
        QuantizedWeight(want.codes, want.scale.t().contiguous().t(), format="mxfp8")


# Properties of QuantizedWeight


@by_format
def test_tensors_are_the_leaves(name):
    q = quantize(torch.randn(N, K), name)
    leaves, tree = pytree.tree_flatten(q)
    names = ["codes", "scale", "global_scale", "alpha"][: 4 if name == "nvfp4" else 2]
    assert [getattr(q, each) for each in names] == leaves
    assert [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(q)] == [f".{each}" for each in names]
    assert q.nbytes == sum(each.numel() * each.itemsize for each in leaves)
    again = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(tree)))
    assert (again.format, again.shape) == (name, (N, K)) and again.codes is q.codes
    assert pytree.tree_structure(q) != pytree.tree_structure(quantize(torch.randn(8, K), name))
    shapes = pytree.tree_map(lambda tensor: tensor.shape, q)
    assert shapes.codes == q.codes.shape and shapes.format == name


@by_format
def test_copies(name):
    """Check that copies made by ``to``, tree_map, deepcopy or a file contain the same bytes, and that nothing is
    cast."""
    q = quantize(torch.randn(N, K), name)
    file = io.BytesIO()
    torch.save({"q": q}, file)
    file.seek(0)
    for other in (torch.load(file)["q"], copy.deepcopy(q), pytree.tree_map(torch.clone, q), q.to("cpu")):
        assert repr(other) == repr(q) == f"QuantizedWeight({name}, (136, 320), device='cpu')"
        for one, two in zip(pytree.tree_leaves(q), pytree.tree_leaves(other), strict=True):
            assert one.dtype == two.dtype and np.array_equal(weights.raw(one), weights.raw(two))
    meta = q.to("meta")
    assert meta.device.type == "meta" and linear(torch.empty(3, K, dtype=torch.bfloat16, device="meta"), meta).is_meta


def test_it_is_immutable():
    """Check that attributes cannot be set, because a new global scale without a new alpha would give wrong results."""
    q = quantize(torch.randn(N, K))
    with pytest.raises(AttributeError, match="immutable: global_scale cannot be set"):
        q.global_scale = torch.ones(1)
    with pytest.raises(AttributeError, match="immutable: alpha cannot be deleted"):
        del q.alpha


# Compiled and exported programs


@by_kind
@pytest.mark.parametrize("dynamic", [None, True], ids=["default", "dynamic"])
def test_compiles_thrice_at_most(name, activations, dynamic, device):
    """Check that the quantised weight can be an input of a compiled graph, which is compiled at most three times: for 0
    rows, 1 row, and more rows."""

    def program(x, q, bias):
        return linear(x, q, bias, activations=activations)

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in ROWS:
        q, bias = quantize(torch.randn(N, K, device=device), name), torch.randn(N, device=device)
        x = torch.randn(rows, K, device=device).bfloat16()
        assert torch.equal(compiled(x, q, bias), program(x, q, bias))
    assert 1 <= len(_debug_get_cache_entry_list(program.__code__)) <= 3
    torch._dynamo.reset()


@by_format
def test_quantised_inside_a_program(name, device):
    def program(x, w):
        q = quantize(w, name)
        return linear(x, q), q

    torch._dynamo.reset()
    w, x = torch.randn(N, K, device=device), torch.randn(5, K, device=device).bfloat16()
    got, want = torch.compile(program, backend="aot_eager", fullgraph=True)(x, w), program(x, w)
    assert torch.equal(got[0], want[0]) and got[1].format == name
    assert torch.equal(dequantize(got[1]), dequantize(want[1]))
    torch._dynamo.reset()


class Program(nn.Module):
    """Linear layer whose quantised weight is an input."""

    def forward(self, x: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
        return linear(x, q) * 2


@by_format
def test_export(name, device):
    q = quantize(torch.randn(N, K, device=device), name)
    x = torch.randn(5, K, device=device).bfloat16()
    shapes = {"x": {0: torch.export.Dim("rows", max=512)}, "q": [None] * len(pytree.tree_leaves(q))}
    program = torch.export.export(Program(), (x, q), dynamic_shapes=shapes).module()
    for rows in (2, 9, 300):
        x, q = torch.randn(rows, K, device=device).bfloat16(), quantize(torch.randn(N, K, device=device), name)
        assert torch.equal(program(x, q), linear(x, q) * 2)


@pytest.mark.slow
@by_format
def test_inductor(name, device):
    """Check that Inductor compiles operations before and after the product correctly, for any number of rows."""

    def program(x, q):
        return linear(x * 2, q).relu() + 1

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True)
    for rows in (1, 2, 7, 128, 300):
        q, x = quantize(torch.randn(N, K, device=device), name), torch.randn(rows, K, device=device).bfloat16()
        assert torch.equal(compiled(x, q), program(x, q))
    assert 1 <= len(_debug_get_cache_entry_list(program.__code__)) <= 3
    torch._dynamo.reset()


# Errors

W = torch.randn(N, K)
Q = quantize(W)
LINEAR = torch_cute_ops.convert_scales(Q.scale, N, K, "128x4", "linear")
X = torch.randn(2, K).bfloat16()
MX = quantize(W, "mxfp4")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quantize(W, "fp4"), ValueError, "quantize: format is 'fp4'; expected one of 'nvfp4', 'mxfp4'"),
        (lambda: quantize(nn.Linear(K, N)), TypeError, "w is a Linear; expected a tensor: pass its weight"),
        (lambda: quantize(W.tolist()), TypeError, "quantize: w is .*, a list; expected a tensor"),
        (lambda: quantize(W.to(torch.int8)), TypeError, "quantize: got w with dtype torch.int8; expected torch.bfl"),
        (lambda: quantize(W[None]), ValueError, r"quantize: got w with shape (1, 136, 320); expected (N, K)"),
        (lambda: quantize(W[:4]), ValueError, "w has shape (4, 320); expected N to be a positive multiple of 8"),
        (lambda: quantize(W[:, :48]), ValueError, "w has shape (136, 48); expected K to be a positive multiple of 32"),
        (lambda: quantize(W[:, :96], "fp8_block"), ValueError, "expected K to be a positive multiple of 64"),
        (lambda: quantize(W, "mxfp4", amax=torch.ones(1)), ValueError, "amax is given; format='mxfp4' has no global"),
        (lambda: linear(X, W), TypeError, "linear: q is a Tensor; expected the result of torch_cute_ops.quantize"),
        (lambda: linear(X, (Q.codes, Q.scale)), TypeError, "linear: q is a tuple; expected the result of"),
        (lambda: linear(X[:, :64], Q), ValueError, "got x with shape (2, 64); expected (..., 320) for q of shape (136"),
        (lambda: linear(X.t(), Q), ValueError, "got x with shape (320, 2); expected (..., 320)"),
        (lambda: linear(X[0, 0], Q), ValueError, "got x with shape (); expected (..., 320)"),
        (
            lambda: linear(X.float(), Q),
            TypeError,
            "got x with dtype torch.float32; expected torch.bfloat16 or",
        ),
        (lambda: Q.to(torch.float16), TypeError, "QuantizedWeight.to: got torch.float16; expected a device"),
        (lambda: linear(X, Q.to("meta")), ValueError, "linear: x is on cpu, q on meta; pass q.to(x.device)"),
        (lambda: linear(X, Q, activations="fp4"), ValueError, "need a calibrated global scale: use nn.NVFP4Linear"),
        (
            lambda: linear(X, MX, activations="int8"),
            ValueError,
            "expected one of 'auto', '16bit', 'fp8', 'fp4' for",
        ),
        (lambda: linear(X, Q, torch.ones(3)), ValueError, "got bias with shape (3,); expected (136,)"),
        (lambda: linear(X.clone().requires_grad_(), Q), ValueError, "requires grad"),
        (
            lambda: linear(X[:, :96].detach(), quantize(W[:, :96]), activations="fp8"),
            ValueError,
            "got x with 96 columns; expected a multiple of 64",
        ),
        (lambda: dequantize(W), TypeError, "dequantize: q is a Tensor; expected the result of torch_cute_ops.quantize"),
        (lambda: dequantize(Q, torch.int8), TypeError, "dequantize: dtype is torch.int8; expected torch.bfloat16"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message if ".*" in message else re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"global_scale": None}, ValueError, "global_scale is None for format='nvfp4'"),
        ({"format": "mxfp4"}, ValueError, "global_scale is given for format='mxfp4'; pass None"),
        ({"global_scale": 0.5}, TypeError, "global_scale is 0.5, a float; expected a tensor"),
        ({"global_scale": torch.ones(2)}, ValueError, "got global_scale with shape (2,); expected one element"),
        ({"global_scale": torch.ones(1).double()}, TypeError, "got global_scale with dtype torch.float64"),
        ({"codes": Q.codes.view(torch.int8)}, TypeError, "got codes with dtype torch.int8; expected torch.uint8"),
        ({"codes": Q.codes[0]}, ValueError, "got codes with shape (160,); expected (N, K/2)"),
        ({"scale": Q.scale.view(torch.uint8)}, TypeError, "got scale with dtype torch.uint8"),
        ({"scale": Q.scale.flatten()}, ValueError, "pass as_tiles(scale, 136, 320, '128x4')"),
        ({"scale": Q.scale[:1]}, ValueError, "expected (2, 5, 32, 4, 4), or linear scales (136, 20)"),
        ({"codes": Q.codes.t().contiguous().t()}, ValueError, "got codes with strides (1, 136); expected row-major"),
        ({"scale": Q.scale.to("meta")}, ValueError, "scale is on meta, codes on cpu; move them to one"),
        (
            {"scale": Q.scale.mT},
            ValueError,
            "a transposed view; if the view has the right order, pass scale.contiguous()",
        ),
        (
            {"scale": LINEAR.t().contiguous().t()},
            ValueError,
            "got scale with shape (136, 20) and strides (1, 136), a tran",
        ),
        *(
            (
                {"global_scale": torch.tensor([value])},
                ValueError,
                f"global_scale is {value}; expected a positive, finite",
            )
            for value in (0.0, -0.0, -2.0, torch.inf, -torch.inf, torch.nan)
        ),
        ({"global_scale": torch.tensor([2.0**-128])}, ValueError, "expected a number with a finite reciprocal"),
        ({"format": "int4"}, ValueError, "QuantizedWeight: format is 'int4'"),
    ],
)
def test_errors_of_the_record(change, error, message):
    tensors = {"codes": Q.codes, "scale": Q.scale, "global_scale": Q.global_scale, "format": "nvfp4"}
    with pytest.raises(error, match=re.escape(message)):
        QuantizedWeight(**{**tensors, **change})


def test_the_smallest_global_scale():
    """Check that the smallest global scale whose reciprocal is finite is accepted, and decodes to finite numbers."""
    smallest = torch.tensor([2.0**-128 + 2.0**-149])
    q = QuantizedWeight(torch.full((8, 16), 0x22, dtype=torch.uint8), Q.scale.new_ones(8, 2), smallest, format="nvfp4")
    want = 1 / (2.0**-128 + 2.0**-149)
    assert abs(q.alpha.item() / want - 1) < 1e-6 and abs(dequantize(q).double() / want - 1).max() < 1e-6


def test_a_global_scale_without_a_value():
    """Check that the value of a global scale is not checked where it is unknown: in fake tensors, on meta, and in
    compiled code."""

    def decoded(codes, scale, global_scale):
        return dequantize(QuantizedWeight(codes, scale, global_scale, format="nvfp4"))

    tensors, zero = (Q.codes, Q.scale), torch.zeros(1)
    with pytest.raises(ValueError, match=r"global_scale is 0\.0; expected a positive, finite number"):
        decoded(*tensors, zero)
    with FakeTensorMode() as mode:
        assert decoded(*(mode.from_tensor(each) for each in (*tensors, zero))).shape == Q.shape
    assert decoded(*(each.to("meta") for each in (*tensors, zero))).shape == Q.shape
    compiled = torch.compile(decoded, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*tensors, Q.global_scale), dequantize(Q))


@pytest.mark.gpu
def test_a_global_scale_on_a_gpu_is_read_in_debug_mode(monkeypatch):
    tensors = {"codes": Q.codes.cuda(), "scale": Q.scale.cuda(), "global_scale": torch.zeros(1, device="cuda")}
    QuantizedWeight(**tensors, format="nvfp4")
    monkeypatch.setattr(settings, "CHECK", True)
    with pytest.raises(ValueError, match=r"global_scale is 0\.0; expected a positive, finite number"):
        QuantizedWeight(**tensors, format="nvfp4")
