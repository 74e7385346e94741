"""FP8 layers with scales per tensor or per channel: static input scales, ``mm_fp8``, and torch's scaled GEMM."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import weights
from support.layers import assert_compiles_once, assert_computes
from torch import nn

from torch_cute_ops.nn import (
    FP8ChannelLinear,
    FP8TensorLinear,
    QuantLinear,
    _scaled_mm,
    fp8_linear,
    merge,
    prefetch_,
    quantize_,
)

CLASSES = (FP8TensorLinear, FP8ChannelLinear)
by_class = pytest.mark.parametrize("cls", CLASSES, ids=["tensor", "channel"])
by_activations = pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
N, K = 48, 160
"""Sizes that torch's scaled GEMM supports and ``mm_fp8`` does not."""
FITTING = 64 * 3
"""A K that ``mm_fp8`` supports."""


def layer_of(
    cls: type[QuantLinear], is_static: bool, n: int = N, k: int = K, amax: float = 3.0, dtype=torch.bfloat16
) -> QuantLinear:
    """Build a layer from random elements and scales, as a checkpoint would contain."""
    return cls.from_tensors(
        torch.randn(n, k).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn),
        torch.rand(1 if cls is FP8TensorLinear else n) / 100,
        input_scale=torch.tensor(amax / 448) if is_static else None,
        bias=torch.randn(n, dtype=dtype),
    )


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill newly allocated tensors with NaN, so that unwritten elements are detected."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def by_torch_on_cpu(monkeypatch) -> None:
    """Make layers call torch's scaled GEMM on a CPU, too."""
    monkeypatch.setattr(_scaled_mm, "_reason_no_device", lambda device: None)
    ones, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        _scaled_mm.scaled_mm(ones, ones, scale, scale.t(), None, torch.bfloat16)
        torch._scaled_mm(ones, ones.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"this torch has no scaled GEMM of rows for CPUs: {str(error).splitlines()[0]}")


class Calls:
    """Record of the arguments with which torch's scaled GEMM was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_public: bool) -> None:
        self.forms: list[tuple[int, int]] = []
        real = _scaled_mm._public if is_public else torch._scaled_mm

        def spy(a: torch.Tensor, b: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
            scales = [each for each in rest if isinstance(each, torch.Tensor)]
            self.forms.append((scales[0].numel(), scales[1].numel()))
            return real(a, b, *rest, **named)

        if is_public:
            monkeypatch.setattr(_scaled_mm, "_public", spy)
        else:
            monkeypatch.setattr(_scaled_mm, "_public", None)
            monkeypatch.setattr(torch, "_scaled_mm", spy)


@pytest.fixture(params=["scaled_mm", "_scaled_mm"])
def calls(request, monkeypatch, poisoned_memory, by_torch_on_cpu) -> Calls:
    """Record the calls of ``torch.nn.functional.scaled_mm``, or of ``torch._scaled_mm``, as the parameter says."""
    is_public = request.param == "scaled_mm"
    if is_public and _scaled_mm._public is None:
        pytest.skip("this torch has no torch.nn.functional.scaled_mm")
    return Calls(monkeypatch, is_public)


# Values


@by_class
@by_activations
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_values(cls, is_static, dtype, device):
    layer = layer_of(cls, is_static, dtype=dtype).to(device)
    x = torch.randn(2, 3, K, dtype=dtype, device=device)
    x[0, 0, 0] = 50  # saturates with a static scale
    assert_computes(layer, x)


@by_class
@pytest.mark.parametrize(("n", "k"), [(1, 16), (16, 1), (17, 35)])
def test_any_size(cls, n, k, device):
    layer = layer_of(cls, True, n, k).to(device)
    assert_computes(layer, torch.randn(3, k, dtype=torch.bfloat16, device=device))


@by_class
def test_from_float(cls):
    """Check that the largest element is 448, and that each element is off by at most the rounding to e4m3."""
    linear = nn.Linear(K, N).bfloat16()
    linear.weight.data[3] = 0
    layer = cls.from_float(linear, input_amax=2.0)
    assert layer.input_scale.item() == pytest.approx(2 / 448)
    want = linear.weight.detach().double().numpy()
    amax = np.abs(want).max() if cls is FP8TensorLinear else np.abs(want).max(1, keepdims=True)
    got = weights.decoded(layer.state_dict(), layer.parts)
    assert (np.abs(got - want) <= np.maximum(np.abs(want) / 15.9, amax / 448 * 2.0**-9)).all()
    assert np.allclose(np.abs(got).max(), np.abs(want).max(), rtol=1e-6) and not got[3].any()
    assert layer.weight.float().abs().max() == 448


@by_class
def test_merged_static(cls):
    """Check that in a merged layer each part keeps its scale, and that the largest input scale is used."""
    layers = [layer_of(cls, True, n, amax=amax) for n, amax in ((32, 1.0), (16, 8.0))]
    layers[1].weight_scale.mul_(300)
    layers[1]._derive()
    merged = merge(layers)
    assert torch.equal(merged.input_scale, layers[1].input_scale)
    for got, part in zip(merged.split(), layers, strict=True):
        assert torch.equal(got.weight_scale, part.weight_scale)
        assert torch.equal(got.weight.view(torch.uint8), part.weight.view(torch.uint8))
    assert_computes(merged, torch.randn(4, K).bfloat16())
    with pytest.raises(ValueError, match="differ in an input scale"):
        merge([layers[0], layer_of(cls, False)])


@by_class
def test_state_dict_static(cls):
    layer = merge([layer_of(cls, True, n) for n in (16, 32)])
    state = nn.Sequential(layer).state_dict()
    assert state.keys() == {"0.weight", "0.weight_scale", "0.input_scale", "0.bias"}
    fresh = nn.Sequential(cls(K, N, bias=True, parts=(16, 32), has_input_scale=True))
    x = torch.randn(3, K).bfloat16()
    assert fresh(x).isnan().all()
    fresh.load_state_dict(state)
    assert torch.equal(fresh(x), layer(x))
    for name, tensor in state.items():
        assert torch.equal(fresh.state_dict()[name].view(torch.uint8), tensor.view(torch.uint8))
    fresh.half()
    assert fresh[0].input_scale.dtype == fresh[0].weight_scale.dtype == torch.float32
    with pytest.raises(RuntimeError, match=r"0\.weight_scale is .*; expected .* torch\.float32"):
        fresh.load_state_dict({**state, "0.weight_scale": state["0.weight_scale"].bfloat16()})
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\.input_scale"'):
        fresh.load_state_dict({name: tensor for name, tensor in state.items() if "input" not in name})


def test_quantize():
    model = nn.Sequential(nn.Linear(K, N), nn.Linear(N, 5)).bfloat16()
    quantize_(model, "fp8_channel")
    assert [type(layer) for layer in model] == [FP8ChannelLinear] * 2 and not model[0].has_input_scale


@by_class
@torch.no_grad()
def test_quantize_with_calibration(cls):
    """Check that with calibration activations are static, scaled by the largest magnitude of each layer's input."""
    model, x = nn.Sequential(nn.Linear(K, N), nn.Linear(N, 5)).bfloat16(), torch.randn(9, K).bfloat16()
    want = [x.abs().max().item() / 448, model[0](x).abs().max().item() / 448]
    quantize_(model, cls.scheme, calibrate=lambda model: model(x))
    assert [layer.input_scale.item() for layer in model] == pytest.approx(want, rel=1e-6)
    assert_computes(model[0], x)


# mm_fp8


@pytest.fixture
def mm_fp8_calls(monkeypatch) -> list[SimpleNamespace]:
    """Record the arguments with which ``mm_fp8`` is called."""
    made, real = [], fp8_linear.mm_fp8

    def spy(a, b, a_scale, b_scale, **options):
        made.append(SimpleNamespace(shapes=(tuple(a_scale.shape), tuple(b_scale.shape)), b=b, **options))
        return real(a, b, a_scale, b_scale, **options)

    monkeypatch.setattr(fp8_linear, "mm_fp8", spy)
    monkeypatch.setattr(fp8_linear, "scaled_mm", None)
    return made


@by_class
@by_activations
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_by_mm_fp8(cls, is_static, dtype, device, mm_fp8_calls):
    """Check results against float64, and check that a merged layer passes one scale per row of the weight."""
    layers = [layer_of(cls, is_static, n, FITTING, dtype=dtype).to(device) for n in (40, 8)]
    layers[1].weight_scale.mul_(30)
    layers[1]._derive()
    x = torch.randn(2, 3, FITTING, dtype=dtype, device=device)
    for layer in (layers[0], merge(layers)):
        assert_computes(layer, x)
    rows = (1,) if is_static else (6, 1)
    columns = (1,) if cls is FP8TensorLinear else (40,)
    assert [call.shapes for call in mm_fp8_calls] == [(rows, columns), (rows, (48,))]
    for call in mm_fp8_calls:
        assert call.static_weight and call.fast_accum is False and call.out_dtype == dtype and call.prefetch is None


@by_class
@pytest.mark.parametrize("bias", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_bias_in_any_dtype(cls, bias, dtype, device):
    layer = layer_of(cls, False, 40, FITTING, dtype=bias).to(device)
    assert_computes(layer, torch.randn(3, FITTING, dtype=dtype, device=device))


@by_class
def test_options_of_mm_fp8(cls, mm_fp8_calls):
    """Check that a layer can request fast accumulation, and that it prefetches the next layer's weight."""
    layers = nn.ModuleList([layer_of(cls, False, FITTING, FITTING) for _ in range(2)])
    prefetch_(layers)
    layers[1].fast_accum = True
    for layer in layers:
        layer(torch.randn(1, FITTING).bfloat16())
    first, second = mm_fp8_calls
    assert first.prefetch.data_ptr() == layers[1].weight.data_ptr() and second.prefetch is None
    assert (first.fast_accum, second.fast_accum) == (False, True)
    assert layers[0].can_prefetch and not layer_of(cls, False).can_prefetch


@by_class
@by_activations
def test_compiled_by_mm_fp8(cls, is_static):
    assert_compiles_once(merge([layer_of(cls, is_static, n, FITTING) for n in (16, 32)]))


# torch's scaled GEMM


@by_class
@by_activations
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_by_torch(cls, is_static, dtype, calls):
    layer = layer_of(cls, is_static, dtype=dtype)
    x = torch.randn(3, K, dtype=dtype)
    assert_computes(layer, x)
    assert layer(x[:0]).shape == (0, N)
    merged = merge([layer, layer_of(cls, is_static, 16, dtype=dtype)])
    assert_computes(merged, x)
    forms = [(3, N), (0, N), (3, N + 16)]
    if is_static and cls is FP8TensorLinear:
        forms[:2] = [(1, 1)] * 2
    if dtype == torch.float16 and _scaled_mm._public is None:  # torch._scaled_mm supports row scales only for bfloat16
        forms = [form for form in forms if form == (1, 1)]
    assert calls.forms == forms


@by_class
def test_reasons_of_torch_to_refuse(cls, calls):
    """Check that torch's GEMM is refused for an unsupported size, a float32 result or a bias of another dtype, but
    never for the number of rows."""
    for n, k, bias, dtype in (
        (40, K, torch.bfloat16, torch.bfloat16),
        (N, 24, torch.bfloat16, torch.bfloat16),
        (N, K, torch.float32, torch.float32),
        (N, K, torch.float32, torch.bfloat16),
    ):
        layer = layer_of(cls, True, n, k, dtype=bias)
        assert_computes(layer, torch.randn(3, k, dtype=dtype))
    assert not calls.forms


def test_devices(monkeypatch):
    cuda = SimpleNamespace(type="cuda")
    assert _scaled_mm._reason_no_device(torch.device("cpu")) == "the device is cpu"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "NVIDIA" in str(_scaled_mm._reason_no_device(cuda))
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, is_able in (((8, 0), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert (_scaled_mm._reason_no_device(cuda) is None) is is_able


@by_class
@by_activations
@pytest.mark.parametrize("is_by_torch", [False, True], ids=["decoded", "scaled_mm"])
def test_compiled(cls, is_static, is_by_torch, request):
    if is_by_torch:
        request.getfixturevalue("by_torch_on_cpu")
    assert_compiles_once(merge([layer_of(cls, is_static, 16), layer_of(cls, is_static, 32)]))


# Errors


@by_class
def test_errors(cls):
    elements, scale = torch.zeros(N, K).to(torch.float8_e4m3fn), torch.ones(1 if cls is FP8TensorLinear else N)
    cls.from_tensors(elements, scale)
    with pytest.raises(ValueError, match=r"got weight_scale with shape \(2"):
        cls.from_tensors(elements, torch.ones(2))
    with pytest.raises(TypeError, match=r"got weight_scale with dtype torch\.bfloat16; expected torch\.float32"):
        cls.from_tensors(elements, scale.bfloat16())
    with pytest.raises(TypeError, match=r"got weight with dtype torch\.uint8; expected torch\.float8_e4m3fn"):
        cls.from_tensors(elements.view(torch.uint8), scale)
    with pytest.raises(ValueError, match=r"got input_scale with shape \(2,\); expected \(1,\)"):
        cls.from_tensors(elements, scale, input_scale=torch.ones(2))
    with pytest.raises(ValueError, match="activations is '16bit'; expected one of 'auto', 'fp8'"):
        cls.from_tensors(elements, scale, activations="16bit")
    with pytest.raises(ValueError, match="in_features is 0"):
        cls(0, 16)
