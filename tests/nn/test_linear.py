"""Quantised linear layers: results, casts, state dicts, merged layers, errors."""

from __future__ import annotations

import copy
import gc
import io

import numpy as np
import pytest
import torch
from support import spec, weights
from support.layers import CLASSES, KINDS, assert_compiles_once, assert_computes, assert_product, by_kind
from torch import nn

from torch_cute_ops import fp8_quantize, mm_fp8_block
from torch_cute_ops.nn import (
    FP8BlockLinear,
    FP8ChannelLinear,
    FP8TensorLinear,
    MXFP4Linear,
    NVFP4Linear,
    QuantLinear,
    fp4_linear,
    fp8_linear,
    merge,
    prefetch_,
)
from torch_cute_ops.nn._base import following_of

N, K = 136, 320  # neither is a multiple of a scale tile or of 128 elements
INPUT_AMAX = 3.0


def quantised(
    cls: type[QuantLinear], activations: str, n: int = N, factor: float = 1.0, dtype=torch.bfloat16, **given
) -> QuantLinear:
    linear = nn.Linear(K, n, dtype=dtype)
    linear.weight.data *= factor
    if cls is NVFP4Linear and activations == "fp4":
        given["input_amax"] = INPUT_AMAX
    return cls.from_float(linear, activations=activations, **given)


@by_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_values(cls, activations, dtype, device):
    layer = quantised(cls, activations, dtype=dtype).to(device)
    assert_computes(layer, torch.randn(2, 5, K, dtype=dtype, device=device))


def test_powers_of_two_as_scales_of_blocks():
    """Check that FP8BlockLinear stores e8m0 block scales as float32, and that its GEMM takes activations whose scales
    are powers of two."""
    weight = torch.randn(N, K).to(torch.float8_e4m3fn)
    powers = torch.randint(118, 132, (2, 3), dtype=torch.uint8)
    layer = FP8BlockLinear.from_tensors(weight, powers.view(torch.float8_e8m0fnu))
    assert layer.weight_scale_inv.dtype == torch.float32
    assert np.array_equal(layer.weight_scale_inv.double().numpy(), np.ldexp(1.0, powers.numpy().astype(int) - 127))
    assert_computes(layer, torch.randn(2, 5, K, dtype=torch.bfloat16))
    x = torch.randn(5, K)
    a, a_scale = fp8_quantize(x, granularity="block128", scale_format="ue8m0")
    y = mm_fp8_block(a, layer.weight.t(), a_scale, layer.weight_scale_inv, out_dtype=torch.float32)
    decoded = a.double() * a_scale.double().repeat_interleave(128, 1)[:, :K]
    exact = decoded @ layer.dequantize().double().t()
    assert (y - exact).norm() < 1e-6 * exact.norm()
    nan = powers.clone()
    nan[0, 0] = 0xFF
    assert FP8BlockLinear.from_tensors(weight, nan.view(torch.float8_e8m0fnu)).weight_scale_inv[0, 0].isnan()


@by_kind
def test_rows_quantised_before(cls, activations, device):
    """Check that rows quantised in advance give the same result as the input itself, in the rows' stored dtype."""
    layer = quantised(cls, activations).to(device)
    layer.bias = None
    x = torch.randn(2, 3, K, dtype=torch.bfloat16, device=device)
    rows = layer.quantize(x)
    assert rows.lead == (2, 3) and rows.dtype == x.dtype
    assert torch.equal(layer(rows), layer(x))
    assert_product(layer(rows._replace(dtype=torch.float32)).bfloat16(), layer, x)


@by_kind
def test_shapes_of_input(cls, activations):
    layer = quantised(cls, activations)
    x = torch.randn(3, 1, K).bfloat16()
    y = layer(x)
    assert torch.equal(layer(x[0, 0]), y[0, 0])
    assert layer(x[:0]).shape == (0, 1, N)
    with pytest.raises(ValueError, match="expected"):
        layer(torch.randn(2, 2 * K).bfloat16())


@pytest.mark.parametrize(("cls", "activations"), [kind for kind in KINDS if kind[0] in CLASSES[:4]])
def test_the_weight_is_static(cls, activations, monkeypatch):
    """Check that the GEMM gets ``static_weight``, and that every method that writes the weight then launches another
    kernel, so that the weight is static in the next forward."""
    given, written = [], []
    for name in ("mm_fp4", "mm_fp4_weight_only", "fp4quant_mm_fp4", "mm_fp8_block", "mm_fp8_fp4"):
        module = fp8_linear if name == "mm_fp8_block" else fp4_linear
        multiply = getattr(module, name)
        spy = lambda *args, multiply=multiply, **kwargs: given.append(kwargs) or multiply(*args, **kwargs)  # noqa: E731
        monkeypatch.setattr(module, name, spy)
    monkeypatch.setattr(QuantLinear, "_complete", lambda layer: written.append(copy.deepcopy(layer._buffers)))
    layer = quantised(cls, activations)
    merged = merge([layer])
    layer.to(torch.bfloat16)
    layer.load_state_dict(quantised(cls, activations).state_dict())
    assert len(written) == 5
    for held, last in ((merged, written[1]), (layer, written[4])):
        assert all(torch.equal(byte_view(last[name]), byte_view(held.get_buffer(name))) for name in last)
    layer(torch.randn(2, K).bfloat16())
    assert [kwargs["static_weight"] for kwargs in given] == [True]


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_from_float_follows_the_formats():
    linear = nn.Linear(K, N, bias=False)
    layer = NVFP4Linear.from_float(linear)
    amax = np.abs(linear.weight.detach().numpy()).max()
    want = spec.quantise(linear.weight.detach().numpy(), 16, np.float32(2688) / amax)
    assert np.array_equal(spec.unpack(layer.state_dict()["weight"].numpy()), want.codes)
    assert np.array_equal(weights.raw(layer.state_dict()["weight_scale"]), want.scales)
    assert float(layer.weight_scale_2) == np.float32(1) / (np.float32(2688) / amax)

    layer = MXFP4Linear.from_float(linear)
    want = spec.quantise(linear.weight.detach().numpy(), 32)
    assert np.array_equal(spec.unpack(layer.state_dict()["weight"].numpy()), want.codes)
    assert np.array_equal(layer.state_dict()["weight_scale"].numpy(), want.scales)

    linear.weight.data[:128, 128:256] = 0  # an all-zero block
    layer = FP8BlockLinear.from_float(linear)
    weight = linear.weight.detach().numpy()
    for i, j in np.ndindex(2, 3):
        block = weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        scale = np.abs(block).max() / np.float32(448)
        assert layer.weight_scale_inv[i, j].item() == scale
        got = weights.raw(layer.weight)[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        assert np.array_equal(got, spec.e4m3(block / (scale or np.float32(1))))


@by_kind
def test_dequantize(cls, activations):
    layer = merge([quantised(cls, activations, n=128), quantised(cls, activations, n=8, factor=50)])
    want = weights.decoded(layer.state_dict(), layer.parts)
    got = layer.dequantize().double().numpy()
    assert np.allclose(got, want, rtol=1.2e-7, atol=0)
    assert torch.equal(layer.dequantize(torch.bfloat16), layer.dequantize().bfloat16())


# Moving and casting layers


@by_kind
@pytest.mark.parametrize(
    "move",
    [
        nn.Module.bfloat16,
        nn.Module.half,
        lambda layer: layer.to(torch.float16),
        lambda layer: layer.to("cpu", torch.bfloat16),
        lambda layer: layer.type(torch.float16),
        lambda layer: copy.deepcopy(layer).to(torch.bfloat16),
    ],
    ids=["bfloat16", "half", "to", "to device", "type", "deepcopy"],
)
def test_nothing_is_cast(cls, activations, move):
    layer = quantised(cls, activations, dtype=torch.float32)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    moved = move(nn.Sequential(layer))[0]
    after = dict(moved.named_buffers())
    assert after.keys() == before.keys()
    for name, buffer in after.items():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer.view(torch.uint8), before[name].view(torch.uint8)), name
    assert moved.bias.dtype.itemsize == 2
    assert_computes(moved, torch.randn(3, K, dtype=moved.bias.dtype))


@by_kind
def test_a_layer_without_tensors_returns_nan(cls, activations):
    """Check that a layer without loaded tensors returns NaN."""
    assert cls(K, N, activations=activations)(torch.randn(2, K).bfloat16()).isnan().all()


# State dicts


@by_kind
@pytest.mark.parametrize("is_meta", [False, True], ids=["copy", "assign"])
def test_state_dict(cls, activations, is_meta):
    layer = merge([quantised(cls, activations, n=128), quantised(cls, activations, n=8, factor=9)])
    file = io.BytesIO()
    torch.save(nn.Sequential(layer).state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    by_row = ("weight",) if cls is FP8TensorLinear else ("weight", "weight_scale")
    assert all(tensor.shape[0] == N for name, tensor in state.items() if name.endswith(by_row))
    fresh = cls(K, N, bias=True, activations=activations, parts=layer.parts, device="meta" if is_meta else None)
    nn.Sequential(fresh).load_state_dict(state, assign=is_meta)
    assert {name: tensor.dtype for name, tensor in fresh.named_buffers()} == {
        name: tensor.dtype for name, tensor in layer.named_buffers()
    }
    x = torch.randn(3, K).bfloat16()
    assert torch.equal(fresh(x), layer(x))


@pytest.mark.parametrize(
    "change",
    [lambda t: t.float(), lambda t: t[:, :-1].contiguous(), lambda t: t.view(torch.uint8)],
    ids=["dtype", "shape", "bytes"],
)
def test_a_state_dict_that_does_not_fit(change):
    layer = quantised(NVFP4Linear, "16bit")
    state = layer.state_dict()
    state["weight_scale"] = change(state["weight_scale"])
    with pytest.raises(RuntimeError, match=r"weight_scale is .*; expected \(136, 20\) torch.float8_e4m3fn"):
        NVFP4Linear(K, N, bias=True).load_state_dict(state)


@pytest.mark.parametrize(
    ("cls", "name", "argument"),
    [
        (NVFP4Linear, "input_global_scale", "global_scale"),
        (FP8TensorLinear, "input_scale", "scale"),
        (FP8ChannelLinear, "input_scale", "scale"),
    ],
    ids=["nvfp4", "fp8_tensor", "fp8_channel"],
)
def test_the_input_is_quantised_with_the_buffer(cls, name, argument):
    """Check that the input is quantised with the current value of the buffer, also after the buffer was moved or
    replaced."""
    activations = "fp4" if cls is NVFP4Linear else "fp8"
    layer = quantised(cls, activations, input_amax=INPUT_AMAX)
    x = torch.randn(3, K).bfloat16()
    rows = layer.quantize(x).operands[0].view(torch.uint8)
    for each in (layer, copy.deepcopy(layer), copy.deepcopy(layer).to("meta"), copy.deepcopy(layer).half()):
        assert each.quantization().arguments[argument] is each.get_buffer(name)
    layer._buffers[name] = layer._buffers[name] * 4
    assert not torch.equal(layer.quantize(x).operands[0].view(torch.uint8), rows)


def test_loading_reaches_captured_graphs():
    """Check that loading overwrites derived buffers in place, like the loaded tensors, so that captured graphs read the
    new values."""
    layer, other = (merge([quantised(NVFP4Linear, "fp4", factor=f) for f in (1, f)]) for f in (3, 5))
    addresses = {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}
    layer.load_state_dict(other.state_dict())
    assert addresses == {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}
    assert torch.equal(layer.alpha, other.alpha)


# Merged layers


@by_kind
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_merged(cls, activations, bias, device):
    """Check that each part's columns equal the result of the part alone, even if the parts' global scales are very
    different."""
    parts = [quantised(cls, activations, n, factor).to(device) for n, factor in ((128, 1.0), (256, 40.0), (8, 0.01))]
    for part in parts:
        part.bias = part.bias if bias else None
    merged = merge(parts)
    assert merged.parts == (128, 256, 8)
    x = torch.randn(4, K, dtype=torch.bfloat16, device=device)
    for got, part in zip(merged(x).split(merged.parts, -1), parts, strict=True):
        want = part(x)
        assert (got - want).abs().max() <= 2**-7 * want.abs().max()
    assert_computes(merged, x)
    for got, part in zip(merged.split(), parts, strict=True):
        for name, tensor in part.state_dict().items():
            assert torch.equal(got.state_dict()[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_merged_input_scales():
    """Check that the largest of the input scales is used, so that no part saturates earlier than before."""
    layers = []
    for amax in (1.0, 4.0):
        layers.append(NVFP4Linear.from_float(nn.Linear(K, N).bfloat16(), activations="fp4", input_amax=amax))
    merged = merge(layers)
    assert torch.equal(merged.input_scale, layers[1].input_scale)
    assert_computes(merged, torch.randn(3, K).bfloat16())


def test_layers_that_cannot_be_merged():
    nvfp4 = quantised(NVFP4Linear, "16bit")
    for other, what in {
        quantised(MXFP4Linear, "16bit"): "class",
        quantised(NVFP4Linear, "fp4"): "activations",
        NVFP4Linear(2 * K, N, bias=True): "in_features",
        NVFP4Linear(K, N): "a bias",
        quantised(NVFP4Linear, "16bit", input_amax=1.0): "an input scale",
    }.items():
        with pytest.raises(ValueError, match=f"differ in {what}"):
            merge([nvfp4, other])
    with pytest.raises(ValueError, match="multiples of 128, except for the last"):
        merge([quantised(FP8BlockLinear, "fp8")] * 2)
    with pytest.raises(ValueError, match="layers is empty"):
        merge([])


# Compiled calls


@by_kind
def test_compiled(cls, activations):
    assert_compiles_once(merge([quantised(cls, activations, n=128), quantised(cls, activations, n=8)]))


# Errors


def test_errors():
    for cls, sizes, message in (
        (NVFP4Linear, (48, 64), "in_features is 48; expected a positive multiple of 32"),
        (MXFP4Linear, (64, 12), "out_features is 12; expected a positive multiple of 8"),
        (FP8BlockLinear, (96, 64), "in_features is 96; expected a positive multiple of 64"),
    ):
        with pytest.raises(ValueError, match=f"{cls.__name__}: {message}"):
            cls(*sizes)
        with pytest.raises(ValueError, match=f"{cls.__name__}: {message}"):
            cls.from_float(nn.Linear(*sizes))
    for cls in (NVFP4Linear, MXFP4Linear):  # these sizes are supported with other activations
        cls(96, 64)
        with pytest.raises(ValueError, match="in_features is 96; expected a positive multiple of 64"):
            cls(96, 64, activations="fp8")
    for cls, activations in ((NVFP4Linear, "int8"), (FP8BlockLinear, "fp4")):
        with pytest.raises(ValueError, match=f"activations is '{activations}'; expected one of 'auto', "):
            cls(64, 64, activations=activations)
    with pytest.raises(ValueError, match="sum is out_features"):
        NVFP4Linear(64, 64, parts=(32, 24))
    with pytest.raises(ValueError, match="needs input_amax"):
        NVFP4Linear.from_float(nn.Linear(64, 64), activations="fp4")


def test_errors_of_tensors():
    state = quantised(NVFP4Linear, "16bit").state_dict()
    bias = state.pop("bias")
    NVFP4Linear.from_tensors(**state, bias=bias)
    with pytest.raises(ValueError, match=r"input_scale is missing; activations='fp4' needs it"):
        NVFP4Linear.from_tensors(**state, activations="fp4")
    with pytest.raises(ValueError, match=r"got bias with shape \(8,\); expected \(136,\)"):
        NVFP4Linear.from_tensors(**state, bias=bias[:8])
    with pytest.raises(ValueError, match=r"got weight_scale_2 with shape \(2,\); expected \(1,\)"):
        NVFP4Linear.from_tensors(**{**state, "weight_scale_2": torch.ones(2)})
    with pytest.raises(ValueError, match=r"got weight_scale with shape \(136, 10\); expected \(136, 20\)"):
        NVFP4Linear.from_tensors(**{**state, "weight_scale": state["weight_scale"][:, ::2]})
    with pytest.raises(TypeError, match=r"got weight_scale with dtype torch\.uint8; expected torch\.float8_e4m3fn"):
        NVFP4Linear.from_tensors(**{**state, "weight_scale": state["weight_scale"].view(torch.uint8)})
    for value in (0.0, -1.0, torch.nan, torch.inf):
        with pytest.raises(ValueError, match=rf"weight_scale_2 contains {value}; expected positive, finite numbers"):
            NVFP4Linear.from_tensors(**{**state, "weight_scale_2": torch.tensor([value])})
    zeros = {"weight": torch.full_like(state["weight"], 0x80), "weight_scale_2": torch.zeros(1)}
    assert not NVFP4Linear.from_tensors(**{**state, **zeros}).dequantize().any()


@pytest.mark.parametrize(
    ("cls", "shapes"),
    [
        (NVFP4Linear, {"weight": (64, 64), "weight_scale": (64, 8)}),
        (NVFP4Linear, {"weight": (32, 256), "weight_scale": (32, 32)}),
        (MXFP4Linear, {"weight": (32, 512), "weight_scale": (32, 32)}),
        (FP8BlockLinear, {"weight": (256, 256), "weight_scale_inv": (2, 2)}),
    ],
)
def test_transposed_views_of_square_tensors(cls, shapes):
    """Check that a square weight and square scales are refused if they are transposed, and accepted as stored."""
    dtypes = {name: dtype for name, (_, dtype) in cls(256, 256, device="meta").layout().items()}
    stored = {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in shapes.items()}
    if cls is NVFP4Linear:
        stored["weight_scale_2"] = torch.ones(1)
    cls.from_tensors(**stored)
    for name, shape in shapes.items():
        if shape[0] == shape[1]:
            with pytest.raises(ValueError, match=rf"got {name} with shape .* a transposed view; pass tensors as"):
                cls.from_tensors(**{**stored, name: stored[name].mT})


@pytest.mark.parametrize("static", [False, True], ids=["no input scale", "input scale"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_one_row_in_fp4_is_one_op(dtype, static, monkeypatch):
    """Check that one op quantises and multiplies few rows, with the same bits as the two separate ops."""
    cls = NVFP4Linear if static else MXFP4Linear
    layer, called = quantised(cls, "fp4", dtype=dtype), []
    fused = fp4_linear.fp4quant_mm_fp4
    spy = lambda *args, **named: called.append(1) or fused(*args, **named)  # noqa: E731
    monkeypatch.setattr(fp4_linear, "fp4quant_mm_fp4", spy)
    for rows in (1, 8, 9):
        x = torch.randn(rows, K, dtype=dtype)
        codes = layer.quantize(x)
        assert len(codes.operands) == 2 and torch.equal(layer(x), layer(codes))
        assert called == [1] * (rows <= 8 and cls is NVFP4Linear)
        called.clear()
    assert not layer.prologue_quantises(torch.randn(1, K))  # float32 rows are not quantised by the GEMM


@pytest.mark.parametrize("activations", NVFP4Linear.choices)
@torch.no_grad()
def test_layers_prefetch_the_next_one(activations, monkeypatch):
    """Check that layers prefetch the next layer's weight in the order of calls, even if the next layer was moved, and
    that results do not change."""
    given, names = [], ("mm_fp4", "mm_fp4_weight_only", "fp4quant_mm_fp4")
    for name in names:
        op = getattr(fp4_linear, name)
        spy = lambda *args, op=op, **named: given.append(named.get("prefetch")) or op(*args, **named)  # noqa: E731
        monkeypatch.setattr(fp4_linear, name, spy)
    layers = [quantised(NVFP4Linear, activations, n=K) for _ in range(3)]
    x = torch.randn(2, K).bfloat16()
    want = [layer(x) for layer in layers]
    prefetch_(layers)
    layers[1].weight = layers[1].weight.clone()
    state = layers[0].state_dict()
    for i, layer in enumerate(layers):
        given.clear()
        assert torch.equal(layer(x), want[i]) and torch.equal(layer(x[:1]), layer(x[:1]))
        following = layers[i + 1].weight if i < 2 else None
        assert all(each is following for each in given) and (given or activations.startswith("fp8"))
    assert layers[0].state_dict().keys() == state.keys() and len([*layers[0].modules()]) == 1
    prefetch_(layers[:1])
    given.clear()
    layers[0](x)
    assert given in ([None], [])


@torch.no_grad()
def test_copies_and_files_exclude_the_prefetch_chain():
    """Check that copying or saving a layer does not include the later layers, and that links between layers do not keep
    removed layers alive."""
    layers = nn.ModuleList([quantised(NVFP4Linear, "16bit", n=K) for _ in range(300)])
    alone = io.BytesIO()
    torch.save(layers[0], alone)
    prefetch_(layers)
    linked = io.BytesIO()
    torch.save(layers[0], linked)
    assert linked.tell() == alone.tell()
    x = torch.randn(1, K).bfloat16()
    assert torch.equal(copy.deepcopy(layers)[0](x), layers[0](x))
    assert following_of(layers[0]) is layers[1]
    layers[1] = layers[2]
    gc.collect()
    assert following_of(layers[0]) is None


@torch.no_grad()
def test_weights_that_a_layer_cannot_prefetch():
    """Check that a layer does not prefetch a weight on another device, or a weight whose rows are not multiples of 16
    bytes."""
    first, second = (quantised(NVFP4Linear, "16bit", n=K) for _ in range(2))
    x = torch.randn(1, K).bfloat16()
    want = first(x)
    prefetch_([first, second.to("meta")])
    assert torch.equal(first(x), want) and first._prefetch_weight() is None
    narrow = FP8TensorLinear.from_float(nn.Linear(40, 64).bfloat16())
    prefetch_([first, narrow])
    assert torch.equal(first(x), want) and (narrow.weight.shape[1] % 16 == 0) == (first._prefetch_weight() is not None)


def test_compiled_programs_exclude_the_prefetch_chain():
    """Check that weights of other layers are neither inputs nor constants of exported or compiled programs."""
    layers = [quantised(NVFP4Linear, "16bit", n=K) for _ in range(2)]
    prefetch_(layers)
    x = torch.randn(2, K).bfloat16()
    with torch.no_grad():
        program = torch.export.export(layers[0], (x,))
        assert torch.equal(program.module()(x), layers[0](x))
    names = {*program.state_dict, *program.constants}
    assert names == {*dict(layers[0].named_buffers()), *dict(layers[0].named_parameters())}


@torch.no_grad()
def test_static_scale_of_fp8_activations(monkeypatch):
    """Check layers that quantise all rows with one calibrated scale (the largest scale in merged layers), and check
    that layers pass ``fast_accum``."""
    given, multiply = [], fp4_linear.mm_fp8_fp4
    spy = lambda *args, **named: given.append(named) or multiply(*args, **named)  # noqa: E731
    monkeypatch.setattr(fp4_linear, "mm_fp8_fp4", spy)
    layers = [quantised(NVFP4Linear, "fp8_token", n=n, input_amax=amax) for n, amax in ((N, 3.0), (64, 5.0))]
    x = torch.randn(6, K).bfloat16()
    for layer in (*layers, merge(layers)):
        assert layer.quantize(x).operands[1].shape == (1,)
        assert_computes(layer, x)
    assert [layer.input_scale.item() for layer in layers] == [np.float32(amax) / np.float32(448) for amax in (3, 5)]
    assert merge(layers).input_scale.item() == layers[1].input_scale.item()
    assert not any(named["fast_accum"] for named in given)
    layers[0].fast_accum = True
    layers[0](x)
    assert given[-1]["fast_accum"] is True


@pytest.mark.parametrize("cls", [NVFP4Linear, MXFP4Linear])
@torch.no_grad()
def test_prepared_scales_follow_the_weight(cls):
    """Check that prepared scales are in no state dict, follow a loaded state dict in place, and are not cast."""
    layer, other = (quantised(cls, "fp8_token") for _ in range(2))
    x = torch.randn(5, K).bfloat16()
    before, place = layer(x), layer.prepared_scale.data_ptr()
    assert "prepared_scale" not in layer.state_dict()
    assert layer.state_dict().keys() == quantised(cls, "fp8").state_dict().keys()
    layer.load_state_dict(other.state_dict())
    assert layer.prepared_scale.data_ptr() == place
    assert torch.equal(layer(x), other(x)) and not torch.equal(layer(x), before)
    assert layer.half().prepared_scale.dtype == torch.uint8
    blank = cls(K, N, activations="fp8_token")
    assert blank(x).isnan().all()
    blank.load_state_dict(quantised(cls, "fp8").state_dict(), strict=False)
