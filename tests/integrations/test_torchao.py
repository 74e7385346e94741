"""Weights that torchao quantised: layers made by ``accelerate_`` and ``load_`` compute with the numbers to which
torchao decodes the weights."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from support import experts as support
from support.experts import TOPK, Block, E, Experts, GptOssExperts, H, I
from torch import nn

pytest.importorskip("torchao")
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization.quantize_.common import KernelPreference

from torch_cute_ops import checkpoint
from torch_cute_ops.integrations import torchao as integration
from torch_cute_ops.nn import MXFP4Linear, NVFP4Linear, QuantExperts, QuantLinear

K, N = 192, 72  # sizes with padding rows and padding blocks in tiled scales
FP4 = torch.float4_e2m1fn_x2


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def nvfp4(weight: torch.Tensor, **given) -> NVFP4Tensor:
    return NVFP4Tensor.to_nvfp4(weight, **{"per_tensor_scale": weight.abs().amax().float() / 2688, **given})


def mx(weight: torch.Tensor, dtype: torch.dtype = FP4, is_swizzled: bool = False) -> MXTensor:
    return MXTensor.to_mx(
        weight,
        dtype,
        32,
        kernel_preference=KernelPreference.EMULATED,
        is_swizzled_scales=is_swizzled,
    )


KINDS = {
    "NVFP4": (nvfp4, NVFP4Linear),
    "NVFP4 swizzled": (lambda weight: nvfp4(weight, is_swizzled_scales=True), NVFP4Linear),
    "NVFP4 without a global scale": (lambda weight: nvfp4(weight, per_tensor_scale=None), NVFP4Linear),
    "MXFP4": (mx, MXFP4Linear),
    "MXFP4 swizzled": (lambda weight: mx(weight, is_swizzled=True), MXFP4Linear),
}


def model_of(quantise, device: str = "cpu", bias: bool = True) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(K, N, bias=bias), nn.SiLU()).bfloat16().to(device)
    model[0].weight = nn.Parameter(quantise(model[0].weight.detach()), requires_grad=False)
    return model


@pytest.mark.parametrize(("quantise", "cls"), KINDS.values(), ids=KINDS)
@torch.no_grad()
def test_values(quantise, cls, device):
    model = model_of(quantise, device)
    weight, bias = model[0].weight.dequantize(torch.float32), model[0].bias
    assert integration.accelerate_(model) is model
    assert type(model[0]) is cls and type(model[1]) is nn.SiLU
    assert torch.allclose(model[0].dequantize(), weight, rtol=1e-6, atol=0)
    x = torch.randn(5, K, device=device).bfloat16()
    want = nn.functional.silu(x.double() @ weight.double().t() + bias.double())
    assert (model(x) - want).norm() < 2**-7 * want.norm()


@torch.no_grad()
def test_fp4_activations():
    scale = torch.tensor(8.0 / 2688)
    model = model_of(lambda weight: nvfp4(weight, act_per_tensor_scale=scale))
    weight, bias = model[0].weight.dequantize(torch.float32), model[0].bias
    integration.accelerate_(model, activations="fp4")
    assert model[0].input_scale.item() == scale.item()
    x = torch.randn(5, K).bfloat16()
    decoded = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)
    want = nn.functional.silu(decoded.double() @ weight.double().t() + bias.double())
    assert (model(x) - want).norm() < 0.01 * want.norm()
    with pytest.raises(ValueError, match=r"accelerate_: 0: NVFP4Linear: input_scale is missing"):
        integration.accelerate_(model_of(nvfp4), activations="fp4")


def test_unsupported_weights():
    model = nn.Sequential(model_of(nvfp4), nn.Linear(K, N), model_of(lambda weight: mx(weight, torch.float8_e4m3fn)))
    with pytest.warns(UserWarning, match=r"layers of unsupported weight types stay unchanged: 2.0 \(MXTensor\)"):
        integration.accelerate_(model)
    kinds = [type(module) for module in model.modules() if isinstance(module, (nn.Linear, QuantLinear))]
    assert kinds == [NVFP4Linear, nn.Linear, nn.Linear]
    model = model_of(nvfp4)
    for ignore in (("0",), r"re:\d"):
        assert type(integration.accelerate_(model, ignore=ignore)[0]) is nn.Linear
    tied = nn.ModuleDict({"a": model[0], "b": nn.Linear(K, N)})
    tied["b"].weight = tied["a"].weight
    with pytest.raises(ValueError, match="a shares its weight with another module"):
        integration.accelerate_(tied)
    embedding = nn.Embedding(N, K)
    embedding.weight = nn.Parameter(nvfp4(torch.randn(N, K)), requires_grad=False)
    with pytest.raises(ValueError, match=r"0: Embedding is not nn\.Linear; expected an unchanged"):
        integration.accelerate_(nn.Sequential(embedding))
    odd = nn.Sequential(nn.Linear(48, N))
    odd[0].weight = nn.Parameter(nvfp4(torch.randn(N, 48)), requires_grad=False)
    with pytest.raises(ValueError, match="in_features is 48; expected a positive multiple of 32"):
        integration.accelerate_(odd)


# Experts


def nvfp4_experts(weight: torch.Tensor, **given: Any) -> NVFP4Tensor:
    """Quantise experts as torchao's configuration does on compute capability 10.0."""
    return nvfp4(weight, per_tensor_scale=(weight.abs().amax((1, 2)).float() / 2688).view(-1, 1, 1), **given)


EXPERTS = {
    "NVFP4": (nvfp4_experts, "nvfp4"),
    "NVFP4 swizzled": (lambda weight: nvfp4_experts(weight, is_swizzled_scales=True), "nvfp4"),
    "NVFP4 with one global scale": (nvfp4, "nvfp4"),
    "MXFP4": (mx, "mxfp4"),
    "MXFP4 swizzled": (lambda weight: mx(weight, is_swizzled=True), "mxfp4"),
}


def block_of(quantise, **given: Any) -> Block:
    block = Block(Experts(**given)).bfloat16()
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(block.mlp.experts, name).detach()
        setattr(block.mlp.experts, name, nn.Parameter(quantise(weight), requires_grad=False))
    return block


@pytest.mark.parametrize(("quantise", "scheme"), EXPERTS.values(), ids=EXPERTS)
@torch.no_grad()
def test_experts(quantise, scheme):
    block = block_of(quantise)
    given = block.mlp.experts
    want = [each.dequantize(torch.float32).double().numpy() for each in (given.gate_up_proj, given.down_proj)]
    experts = integration.accelerate_(block).mlp.experts
    assert isinstance(experts, QuantExperts) and (experts.scheme, experts.topk) == (scheme, TOPK)
    for got, decoded in zip(support.decoded(experts), want, strict=True):
        assert np.allclose(got, decoded, rtol=1e-6, atol=0)
    x, ids, factors = torch.randn(3, H).bfloat16(), torch.tensor([[0, 3], [2, 1], [3, 0]]), torch.rand(3, 2)
    result = support.computed(x, ids, factors, *want)
    bound = 0.07 if scheme == "nvfp4" else 0.015
    assert np.linalg.norm(experts(x, ids, factors).double().numpy() - result) < bound * np.linalg.norm(result)


def test_experts_that_are_refused():
    given = GptOssExperts().bfloat16()
    for name in ("gate_up_proj", "down_proj"):
        setattr(given, name, nn.Parameter(nvfp4_experts(getattr(given, name).detach()), requires_grad=False))
    with pytest.raises(ValueError, match=r"mlp\.experts: experts are transposed"):
        integration.accelerate_(Block(given))
    block = block_of(nvfp4_experts, act_fn=nn.GELU())
    with pytest.raises(ValueError, match="Experts computes something else than experts with SwiGLU"):
        integration.accelerate_(block)
    block = block_of(nvfp4_experts)
    block.mlp.experts.down_proj = nn.Parameter(torch.randn(E, H, I).bfloat16(), requires_grad=False)
    with pytest.raises(ValueError, match=r"mlp\.experts: down_proj is not an FP4 tensor of torchao"):
        integration.accelerate_(block)


# Files


@pytest.mark.parametrize("name", ["NVFP4", "NVFP4 swizzled", "MXFP4 swizzled"])
def test_written_by_torchao(name, tmp_path):
    """Check that layers loaded from torchao's files (safetensors, or a pickle for ``weights_only``) are bitwise equal
    to the layers that ``accelerate_`` makes."""
    from safetensors.torch import save_file

    model = block_of(EXPERTS[name][0])
    model.o_proj.weight = nn.Parameter(KINDS[name][0](model.o_proj.weight.detach()), requires_grad=False)
    tensors, metadata = flatten_tensor_state_dict(model.state_dict())
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    quantization = {"quant_method": "torchao", "quant_type": {"default": {"_type": "NVFP4WeightOnlyConfig"}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    torch.save(model.state_dict(), tmp_path / "pickled.pt")
    want = integration.accelerate_(model).state_dict()

    def on_meta() -> Block:
        with torch.device("meta"):
            return Block(Experts()).bfloat16()

    pickled = on_meta()
    pickled.load_state_dict(torch.load(tmp_path / "pickled.pt", weights_only=True), assign=True)
    for got in (checkpoint.load_(on_meta(), tmp_path), integration.accelerate_(pickled)):
        assert got.state_dict().keys() == want.keys()
        for key, tensor in got.state_dict().items():
            assert torch.equal(tensor.view(torch.uint8), want[key].view(torch.uint8)), key
