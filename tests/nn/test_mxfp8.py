"""MXFP8 layers: layouts of the scales by device, merging and saving, and fused ops that write MXFP8."""

from __future__ import annotations

import copy

import pytest
import torch
from support import spec, weights
from support.experts import Block, E, Experts, H, ops_of
from support.layers import assert_computes, assert_same_layer
from torch import nn

from torch_cute_ops import convert_scales, fp8_quantize, mm_fp8_block, rmsnorm_fp8quant, silu_mul_fp8quant
from torch_cute_ops.nn import MXFP8Linear, QuantizedRows, fp8_linear, merge, quantize_
from torch_cute_ops.nn.fp8_linear import reads_tiles
from torch_cute_ops.runtime.arch import ARCHS

N, K = 136, 320  # neither is a multiple of a scale tile or of 128 elements


def layer_of(n: int = N, k: int = K) -> MXFP8Linear:
    return MXFP8Linear.from_float(nn.Linear(k, n).bfloat16())


@pytest.fixture(params=["linear", "128x4"])
def layout(request, monkeypatch) -> str:
    """Layout of scales that the kernels of the device read in place."""
    monkeypatch.setattr(fp8_linear, "reads_tiles", lambda device: request.param == "128x4")
    return request.param


def test_values(layout):
    """Check weight and activations against the formats, in the layout of the device."""
    linear = nn.Linear(K, N).bfloat16()
    layer = MXFP8Linear.from_float(linear)
    codes, scales = spec.quantise_fp8(linear.weight.detach().float().numpy(), "block32")
    state = layer.state_dict()
    assert state.keys() == {"weight", "weight_scale", "bias"}
    assert (weights.raw(state["weight"]) == codes).all() and (weights.raw(state["weight_scale"]) == scales).all()
    assert torch.equal(layer.weight_scale, convert_scales(state["weight_scale"], N, K, "linear", layout))
    x = torch.randn(2, 3, K).bfloat16()
    assert_computes(layer, x)
    rows = layer.quantize(x)
    want = fp8_quantize(x.flatten(0, 1), granularity="block32", scale_layout=layout)
    for got, each in zip(rows.operands, want, strict=True):
        assert torch.equal(got.view(torch.uint8), each.view(torch.uint8))
    assert (layer.has_scale_tiles, layer.has_linear_scales) == (layout == "128x4", layout == "linear")


def test_merged_and_split(layout):
    """Check merged layers whose parts share tiles of scales."""
    layers = [layer_of(n) for n in (136, 8, 64)]
    merged = merge(layers)
    for got, want in zip(merged.split(), layers, strict=True):
        assert_same_layer(got, want)
    x = torch.randn(5, K).bfloat16()
    assert torch.equal(merged(x), torch.cat([layer(x) for layer in layers], 1))
    again = merge([layer_of(n) for n in (136, 8, 64)])
    again.load_state_dict(merged.state_dict())
    assert_same_layer(again, merged)
    assert torch.equal(again(x), merged(x))


def test_moved_between_gpus_that_read_different_layouts(monkeypatch):
    """Check that a layer that moves to another kind of GPU has the same weight, in the layout of the new GPU, and
    quantises its input in this layout."""
    layer, x = layer_of(), torch.randn(3, K).bfloat16()
    plain, want = copy.deepcopy(layer), layer(x)
    for layout, dims in (("128x4", 5), ("128x4", 5), ("linear", 2)):
        monkeypatch.setattr(fp8_linear, "reads_tiles", lambda device, layout=layout: layout == "128x4")
        layer.to("cpu")
        assert layer.weight_scale.dim() == dims and layer.quantize(x).operands[1].dim() == dims
        assert_same_layer(layer, plain)
        assert torch.equal(layer(x), want) and torch.equal(layer.dequantize(), plain.dequantize())


def test_a_state_dict_of_another_kind_of_gpu(monkeypatch):
    """Check that scales have the layout of the weight's device if a state dict is assigned to a layer on another
    device, or if the layer was opened on another device."""
    plain = layer_of()
    state = plain.state_dict()
    monkeypatch.setattr(fp8_linear, "reads_tiles", lambda device: device.type == "cpu")
    layer = MXFP8Linear(K, N, bias=True, device="meta")
    layer.load_state_dict(state, assign=True)
    assert layer.weight_scale.dim() == 5
    layer.load_state_dict(state)
    assert layer.weight_scale.dim() == 5
    assert_same_layer(layer, plain)
    monkeypatch.setattr(fp8_linear, "reads_tiles", lambda device: False)
    layer.load_state_dict(state)
    assert layer.weight_scale.dim() == 2
    assert_same_layer(layer, plain)


def test_layouts_by_architecture(monkeypatch):
    """Check that data-center Blackwell reads tiles, and that other GPUs and CPUs read linear scales."""
    assert not reads_tiles(torch.device("cpu")) and not reads_tiles(torch.device("meta"))
    select = fp8_linear.gemm_package().select
    for name, arch in ARCHS.items():
        target = select.target_of(arch)
        monkeypatch.setattr(select, "target_of", lambda device, target=target: target)
        assert reads_tiles(torch.device("cuda")) == (name in ("sm_100a", "sm_103a"))
        monkeypatch.undo()


def test_rows_of_fused_ops(layout):
    """Check that norms and gates that quantise write rows for the layer, with the arguments that the layer gives."""
    layer, x = layer_of(), torch.randn(5, 2 * K).bfloat16()
    quantization = layer.quantization()
    assert quantization.suffix == "fp8quant"
    weight = torch.rand(K).bfloat16()
    for operands in (
        rmsnorm_fp8quant(x[:, :K].contiguous(), weight, **quantization.arguments),
        silu_mul_fp8quant(x, **quantization.arguments),
    ):
        got = layer(QuantizedRows(operands, (5,), torch.bfloat16))
        a, a_scale = operands
        want = mm_fp8_block(a, layer.weight.t(), a_scale, layer.state_dict()["weight_scale"], bias=layer.bias)
        assert torch.equal(got, want)


@torch.no_grad()
def test_experts_keep_linear_scales(monkeypatch):
    """Check that experts have linear scales on every GPU, as grouped GEMMs read them, also after a move and after a
    state dict was loaded."""
    block = quantize_(Block(Experts()).bfloat16(), "mxfp8")
    given = torch.randn(5, H).bfloat16(), torch.randint(E, (5, 2)), torch.rand(5, 2)
    want, state = block.mlp.experts(*given), block.state_dict()
    monkeypatch.setattr(fp8_linear, "reads_tiles", lambda device: True)
    again = quantize_(Block(Experts()).bfloat16(), "mxfp8")
    block.to("cpu")
    again.load_state_dict(state)
    for each in (block, again):
        experts = each.mlp.experts
        assert experts.gate_up_proj.weight_scale.dim() == experts.down_proj.weight_scale.dim() == 2
        assert each.o_proj.weight_scale.dim() == 5
        assert torch.equal(experts(*given), want)
    assert ops_of(block.mlp.experts, *given) >= {"fp8_quantize", "grouped_mm_fp8", "silu_mul_fp8quant"}
    with pytest.raises(ValueError, match=r"route_few_: the weights are in FP8; the ops take FP4"):
        block.mlp.experts.route_few_()


def test_refused():
    with pytest.raises(ValueError, match="in_features is 96; expected a positive multiple of 64"):
        layer_of(k=96)
    elements = torch.zeros(N, K).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"got weight_scale with shape \(136, 9\); expected \(136, 10\)"):
        MXFP8Linear.from_tensors(elements, torch.zeros(N, 9, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"got weight_scale with dtype torch\.float32; expected torch\.uint8"):
        MXFP8Linear.from_tensors(elements, torch.zeros(N, 10))
    with pytest.raises(ValueError, match="activations is '16bit'; expected one of 'auto', 'fp8'"):
        MXFP8Linear(K, N, activations="16bit")
