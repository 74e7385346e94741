"""vLLM's quantisation methods, with stubs of vLLM."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import vllm_stub
from support.engine_layers import Recorded, installed, stored_layer
from torch import nn

import torch_cute_ops
from torch_cute_ops import registry
from torch_cute_ops.checkpoint.spec import LayerScheme, compressed_arguments
from torch_cute_ops.integrations._engines import gemms, invariant, linear, prepare
from torch_cute_ops.nn.quantize import SCHEMES
from torch_cute_ops.runtime import compiler, settings
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.compile_pool import FEWEST_KERNELS, Ranks, compile_ahead
from torch_cute_ops.runtime.compiler import is_kept


@pytest.fixture
def vllm(monkeypatch):
    """Replace vLLM by stubs, and return the integration's modules by name."""
    monkeypatch.setattr(vllm_stub, "VLLM_CONFIG", [None])
    with installed(vllm_stub, ("_config", "_checkpoints", "_linear", "_prepare"), monkeypatch) as modules:
        yield modules


# Choice of the method


def compressed(fmt: str, inputs: dict[str, Any] | None = None, **own: Any) -> dict[str, Any]:
    stored = {
        "nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"
    }.get(fmt, "float-quantized")  # fmt: skip
    group = {"weights": compressed_arguments(fmt), "input_activations": inputs, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"0": group}, **own}


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A16_NVFP4"}, "d": {"quant_algo": "MXFP8"}},
}
INT4 = {"quant_method": "gptq", "bits": 4}
MXFP8 = {"quant_method": "modelopt", "quant_algo": "MXFP8"}


@pytest.mark.parametrize("config", [compressed("nvfp4"), NVFP4, DEEPSEEK, MIXED, {"quantization": NVFP4, **NVFP4}])
@pytest.mark.parametrize("name", ["torch_cute_ops", "torch_cute_ops_fp4", "torch_cute_ops_fp8"])
def test_users_choose_the_method(config, name, vllm, monkeypatch):
    chosen = [each for each in vllm._config.CONFIGS if each.name == name]
    others = [each for each in vllm._config.CONFIGS if each.name != name]
    assert [each.override_quantization_method(config, name) for each in chosen] == [name]
    assert [each.override_quantization_method(config, name, hf_config=None) for each in others] == [None, None]
    for user in (None, "modelopt"):
        assert [each.override_quantization_method(config, user) for each in chosen] == [None]
    activations = {"torch_cute_ops": "auto"}.get(name, name[-3:])
    monkeypatch.setattr(settings, "VLLM", activations)
    assert [each.override_quantization_method(config, None) for each in (*chosen, *others)] == [name, None, None]
    assert chosen[0].override_quantization_method(config, "modelopt") is None


@pytest.mark.parametrize(
    "config", [INT4, MXFP8, {**DEEPSEEK, "weight_block_size": None}, {**MIXED, "quantized_layers": {}}]
)
def test_other_checkpoints_are_left_to_vllm(config, vllm):
    cls = vllm._config.CONFIGS[0]
    assert cls.override_quantization_method(config, cls.name) is None
    with pytest.raises(
        ValueError, match=r"--quantization torch_cute_ops: quant_method is '\w+'.*expected a checkpoint"
    ):
        cls.from_config(config)


def test_register(vllm, monkeypatch):
    """Check that a second call of ``register``, as vLLM makes in each process, changes nothing."""
    monkeypatch.setattr(vllm_stub, "REGISTERED", {})
    before = list(vllm_stub.QUANTIZATION_METHODS)
    try:
        for _ in range(2):
            vllm.root.register()
        assert [*before, *vllm.root.METHODS.values()] == vllm_stub.QUANTIZATION_METHODS
    finally:
        vllm_stub.QUANTIZATION_METHODS[:] = before
    assert {name: cls.activations for name, cls in vllm_stub.REGISTERED.items()} == {
        name: activations for activations, name in vllm.root.METHODS.items()
    }


FP8_INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
LAYERS = [
    (compressed("nvfp4"), "a", LayerScheme("nvfp4", "compressed-tensors", "16bit")),
    (compressed("mxfp4"), "a", LayerScheme("mxfp4", "compressed-tensors", "16bit")),
    (compressed("fp8_channel", FP8_INPUTS), "a", LayerScheme("fp8_channel", "compressed-tensors", "fp8")),
    (compressed("fp8_block", FP8_INPUTS), "a", LayerScheme("fp8_block", "compressed-tensors", "fp8")),
    (compressed("mxfp8"), "a", None),
    (compressed("nvfp4", transform_config={"config_groups": {}}), "a", None),
    (compressed("nvfp4", ignore=["a"]), "a", None),
    (NVFP4, "a", LayerScheme("nvfp4", "modelopt", "fp4")),
    ({**NVFP4, "quant_algo": "W4A16_NVFP4"}, "a", LayerScheme("nvfp4", "modelopt", "16bit")),
    ({**NVFP4, "ignore": ["a"]}, "a", None),
    ({**NVFP4, "quant_algo": "FP8"}, "a", LayerScheme("fp8_tensor", "modelopt", "fp8_static")),
    ({**NVFP4, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "a", LayerScheme("fp8_channel", "modelopt", "fp8")),
    ({**NVFP4, "quant_algo": "FP8_PB_WO"}, "a", LayerScheme("fp8_block", "modelopt", "fp8")),
    (DEEPSEEK, "a", LayerScheme("fp8_block", "deepseek", "fp8")),
    (MIXED, "a", LayerScheme("fp8_tensor", "modelopt", "fp8_static")),
    (MIXED, "b", LayerScheme("nvfp4", "modelopt", "16bit")),
    (MIXED, "d", None),
]  # fmt: skip


@pytest.mark.parametrize(("config", "prefix", "scheme"), LAYERS)
def test_method_of_a_layer(config, prefix, scheme, vllm):
    made = vllm._config.CONFIGS[1].from_config(config)
    assert made.get_supported_act_dtypes() == [torch.bfloat16, torch.float16] and made.get_min_capability() == 90
    method = made.get_quant_method(vllm_stub.LinearBase(), prefix)
    if scheme is None:
        is_quantised = config.get("transform_config") or prefix == "d" or config == compressed("mxfp8")
        assert isinstance(method, vllm_stub.OwnMethod if is_quantised else vllm_stub.UnquantizedLinearMethod)
    else:
        assert isinstance(method, vllm._linear.CuteLinearMethod)
        assert (method.scheme, method.prefix, method.activations) == (scheme, prefix, "fp4")
        assert method.preparation is made.get_quant_method(vllm_stub.LinearBase(), prefix).preparation
    assert made.get_quant_method(nn.Module(), prefix) is None  # vLLM's own method for attention, embeddings and experts


def test_quantised_output_heads(vllm):
    """Check that compressed-tensors' target "Linear" includes output heads, which are not linear layers in vLLM."""
    for config, scheme in (
        (compressed("nvfp4"), LayerScheme("nvfp4", "compressed-tensors", "16bit")),
        (NVFP4, LayerScheme("nvfp4", "modelopt", "fp4")),
    ):
        method = vllm._config.CONFIGS[0].from_config(config).get_quant_method(vllm_stub.ParallelLMHead(), "lm_head")
        assert method.scheme == scheme
        excluded = vllm._config.CONFIGS[0].from_config({**config, "ignore": ["lm_head"]})
        method = excluded.get_quant_method(vllm_stub.ParallelLMHead(), "lm_head")
        assert isinstance(method, vllm_stub.UnquantizedLinearMethod)


def test_layers_of_mla(vllm):
    """Check that FP4 activations are not used for kv_b_proj, whose weight vLLM decodes by multiplying an identity
    matrix. vLLM's own method must load DeepSeek-V4's wo_a, because vLLM reads this weight directly."""
    made = vllm._config.CONFIGS[1].from_config(NVFP4)
    for name in ("model.layers.0.self_attn.kv_b_proj", "o_proj"):
        method = made.get_quant_method(vllm_stub.LinearBase(), name)
        assert method.activations == ("fp4" if name == "o_proj" else "auto")
    assert isinstance(made.get_quant_method(vllm_stub.LinearBase(), "a.wo_a"), vllm_stub.OwnMethod)


@pytest.mark.parametrize(
    "scheme", [LayerScheme("nvfp4", "modelopt", "fp4"), LayerScheme("fp8_tensor", "modelopt", "fp8_static")]
)
def test_weights_decoded_by_an_identity_matrix(scheme, vllm, device):
    """Check that an identity matrix times the weight gives the weight, even if the number 1 saturates with the
    checkpoint's input scale."""
    layer = vllm_stub.LinearBase()
    layer.input_size, k = 128, 128
    config = NVFP4 if scheme.format == "nvfp4" else {**NVFP4, "quant_algo": "FP8"}
    method = vllm._config.CONFIGS[1].from_config(config).get_quant_method(layer, "kv_b_proj")
    tensors, weight = stored_layer(scheme, 64, k)
    tensors["input_scale"] = torch.tensor(1e-4)
    with torch.device(device):
        method.create_weights(layer, k, [64], k, 64, torch.bfloat16, weight_loader=None)
    load(layer, [tensors], (64,))
    method.process_weights_after_loading(layer)
    got = method.apply(layer, torch.eye(k, dtype=torch.bfloat16, device=device)).T.double().cpu().numpy()
    assert np.abs(got - weight).max() <= 2**-8 * np.abs(weight).max()
    assert (np.abs(got - weight) <= 2**-8 * np.abs(weight)).all()


# Loading and values

Stored = list[dict[str, torch.Tensor]]
"""Tensors of a checkpoint for each merged layer, by the last component of their names."""


def load(layer: nn.Module, stored: Stored, parts: tuple[int, ...]) -> None:
    """Load a checkpoint's tensors as vLLM's loaders of merged layers do."""
    for i, (tensors, rows) in enumerate(zip(stored, parts, strict=True)):
        begin = sum(parts[:i])
        for name, tensor in tensors.items():
            parameter = getattr(layer, name)
            if isinstance(parameter, vllm_stub.PerTensorScaleParameter):
                parameter.data[i] = tensor.reshape(())
                continue
            per_scale = 128 if isinstance(parameter, vllm_stub.BlockQuantScaleParameter) else 1
            assert parameter.output_dim == 0
            span = slice(begin // per_scale, -(-(begin + rows) // per_scale))
            assert parameter.data[span].shape == tensor.shape, name
            parameter.data[span] = tensor.to(parameter.device)


def loaded(vllm, scheme, parts, k, *, activations="auto", device="cpu", bias=False, dtype=torch.bfloat16):
    """Return a layer that has loaded random tensors, its method, and its weight in float64."""
    made = [stored_layer(scheme, rows, k) for rows in parts]
    layer = vllm_stub.LinearBase()
    layer.input_size, layer.has_bias = k, bias
    layer.bias = nn.Parameter(torch.randn(sum(parts), device=device).to(dtype), requires_grad=False) if bias else None
    method = vllm._linear.CuteLinearMethod(
        scheme, "model.layer", activations, prepare.Preparation(vllm._prepare.serving), vllm_stub.OwnMethod
    )
    with torch.device(device):
        method.create_weights(layer, k, list(parts), k, sum(parts), dtype, weight_loader=None)
    load(layer, [tensors for tensors, _ in made], parts)
    method.process_weights_after_loading(layer)
    return layer, method, np.concatenate([weight for _, weight in made])


def check_values(layer, method, weight, k, device, bound, dtype=torch.bfloat16):
    x = torch.randn(2, 3, k, device=device).to(dtype)
    with torch.no_grad():
        got = method.apply(layer, x, layer.bias)
    assert got.shape == (2, 3, len(weight)) and got.dtype == dtype
    want = x.double().cpu().numpy() @ weight.T
    if layer.bias is not None:
        want = want + layer.bias.double().cpu().numpy()
    for each in range(3):  # check each part, because errors of a part with small factors are invisible in the whole
        span = slice(each * 64, each * 64 + 64)
        apart = np.linalg.norm(got.double().cpu().numpy()[..., span] - want[..., span])
        assert apart < bound * np.linalg.norm(want[..., span]), (apart, np.linalg.norm(want[..., span]))
    return x, got


BOUNDS = {"16bit": 2**-7, "fp8": 0.05, "fp4": 0.2}
"""Largest relative error, by the format of activations."""
FORMATS = [
    ("nvfp4", "modelopt", "16bit"), ("nvfp4", "modelopt", "fp4"), ("nvfp4", "compressed-tensors", "16bit"),
    ("nvfp4", "compressed-tensors", "fp4"), ("mxfp4", "compressed-tensors", "16bit"), ("mxfp4", "modelopt", "16bit"),
    ("fp8_tensor", "modelopt", "fp8_static"), ("fp8_tensor", "compressed-tensors", "fp8"),
    ("fp8_channel", "modelopt", "fp8"), ("fp8_channel", "compressed-tensors", "fp8"),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "style", "stored_for"), FORMATS)
@pytest.mark.parametrize("bias", [False, True])
def test_values_of_merged_layers(fmt, style, stored_for, bias, vllm, device):
    """Check that in a merged layer each part keeps its own scales."""
    scheme = LayerScheme(fmt, style, stored_for)
    layer, method, weight = loaded(vllm, scheme, (64, 64, 64), 192, device=device, bias=bias)
    chosen = "16bit" if fmt in ("nvfp4", "mxfp4") else "fp8"
    x, got = check_values(layer, method, weight, 192, device, BOUNDS[chosen])
    torch.compiler.reset()
    compiled = torch.compile(lambda x: method.apply(layer, x, layer.bias), fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), got)


@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors", "deepseek"])
def test_values_of_block_scales(style, vllm, device):
    scheme = LayerScheme("fp8_block", style, "fp8")
    layer, method, weight = loaded(vllm, scheme, (256, 128, 64), 384, device=device)
    check_values(layer, method, weight, 384, device, BOUNDS["fp8"])


@pytest.mark.parametrize(
    ("fmt", "stored_for", "activations", "chosen"),
    [
        ("nvfp4", "fp4", "fp4", "fp4"), ("nvfp4", "16bit", "fp4", "16bit"), ("nvfp4", "16bit", "fp8", "fp8"),
        ("mxfp4", "16bit", "fp4", "fp4"), ("mxfp4", "16bit", "fp8", "fp8"), ("fp8_channel", "fp8", "fp4", "fp8"),
    ],
)  # fmt: skip
def test_formats_of_activations(fmt, stored_for, activations, chosen, vllm, device):
    """Check that NVFP4 layers without input scales keep 16-bit activations if FP4 activations are requested."""
    scheme = LayerScheme(fmt, "compressed-tensors", stored_for)
    layer, method, weight = loaded(vllm, scheme, (64, 64, 64), 192, activations=activations, device=device)
    check_values(layer, method, weight, 192, device, BOUNDS[chosen])
    called = [op for op, _ in method._form.calls(1)]
    assert called[0].startswith({"16bit": "mm_fp4_weight_only"}.get(chosen, f"{chosen}_quantize"))


@pytest.mark.parametrize(
    ("fmt", "parts", "k"),
    [("nvfp4", (60, 64, 65), 192), ("nvfp4", (64, 64, 64), 208), ("mxfp4", (63, 64, 64), 192),
     ("fp8_tensor", (60, 64, 65), 192), ("fp8_channel", (64, 64, 64), 200), ("fp8_block", (128, 128, 60), 384)],
)  # fmt: skip
def test_sizes_without_a_kernel_are_decoded(fmt, parts, k, vllm, device):
    """Check that the weight is decoded exactly and rounded once."""
    scheme = LayerScheme(fmt, "compressed-tensors", "fp8" if fmt.startswith("fp8") else "16bit")
    layer, _, weight = loaded(vllm, scheme, parts, k, device=device)
    want = torch.from_numpy(weight).float().bfloat16()
    assert torch.equal(layer.weight.cpu(), want) and [*dict(layer.named_parameters())] == ["weight"]
    assert not prepare.jobs_of([], 16, "sm_90a")


class Reload:
    """Second load of a layer's weights, in the steps of vLLM's ``reload_weights``.

    Create the object after the parameters are made, and before they are loaded.

    Args:
        layer: layer with the parameters that a checkpoint fills.
        content: byte that fills new tensors, whose content vLLM leaves undefined. 0x3C is positive in each format.
    """

    def __init__(self, layer: nn.Module, content: int = 0x3C) -> None:
        self.content = content
        self.made = {}
        for name, parameter in layer.named_parameters(recurse=False):
            if name != "bias":
                self.made[name] = (
                    type(parameter),
                    parameter.shape,
                    parameter.dtype,
                    parameter.device,
                    {**vars(parameter)},
                )

    def __call__(self, layer: nn.Module, method: Any, load: Callable[[], Any]) -> Any:
        """Replace the tensors that the kernels read by new parameters, load and process these, and copy the results
        into the original tensors, whose addresses captured graphs contain. Return the result of ``load``."""
        kernel_tensors = {name: each for name, each in layer.named_parameters(recurse=False) if name != "bias"}
        for name in kernel_tensors:
            delattr(layer, name)
        for name, (cls, shape, dtype, device, attributes) in self.made.items():
            tensor: Any = torch.empty(shape, dtype=dtype, device=device)
            tensor.view(torch.uint8).fill_(self.content)
            tensor = nn.Parameter(tensor, requires_grad=False)
            tensor.__class__ = cls
            vars(tensor).update(attributes)
            layer.register_parameter(name, tensor)
        loaded = load()
        method.process_weights_after_loading(layer)
        for name, tensor in kernel_tensors.items():
            tensor.data.copy_(getattr(layer, name))
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]:
            delattr(layer, name)
        for name, tensor in kernel_tensors.items():
            layer.register_parameter(name, tensor)
        return loaded


def load_rows(layer, param, loaded_weight, i, parts):
    """Load part ``i`` of merged layers."""
    if isinstance(param, vllm_stub.PerTensorScaleParameter):
        param.data[i] = loaded_weight.reshape(())
        return
    per_scale = 1 if len(param) == sum(parts) else 128
    begin, own = sum(parts[:i]) // per_scale, loaded_weight[: -(-parts[i] // per_scale)]
    param.data[begin : begin + len(own)] = own.to(param.device)


def reloadable(vllm, scheme, parts, k, activations, device):
    """Return a layer without weights, its method, and functions that load random tensors and reload them."""
    layer = vllm_stub.LinearBase()
    layer.input_size, layer.bias = k, None
    method = vllm._linear.CuteLinearMethod(
        scheme, "model.layer", activations, prepare.Preparation(vllm._prepare.serving), vllm_stub.OwnMethod
    )
    loader = types.MethodType(functools.partial(load_rows, parts=parts), layer)
    with torch.device(device):
        method.create_weights(layer, k, list(parts), k, sum(parts), torch.bfloat16, weight_loader=loader)

    def load(*without):
        made = [stored_layer(scheme, rows, k) for rows in parts]
        for i, (tensors, _) in enumerate(made):
            for name in tensors.keys() - set(without):
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, tensors[name], i)
        return np.concatenate([weight for _, weight in made])

    return layer, method, load, Reload(layer)


RELOADED = [
    ("nvfp4", "modelopt", "fp4", "fp4", (64, 64, 64), 192, ()),
    ("nvfp4", "modelopt", "16bit", "fp4", (64, 64, 64), 192, ("input_scale",)),
    ("nvfp4", "compressed-tensors", "16bit", "auto", (64, 64, 64), 192, ()),
    ("mxfp4", "compressed-tensors", "16bit", "auto", (64, 64, 64), 192, ()),
    ("fp8_tensor", "modelopt", "fp8_static", "auto", (64, 64, 64), 192, ()),
    ("fp8_channel", "modelopt", "fp8", "auto", (64, 64, 64), 192, ()),
    ("fp8_block", "deepseek", "fp8", "auto", (128, 128, 64), 384, ()),
    ("fp8_block", "deepseek", "fp8", "auto", (64, 64, 64), 384, ()),  # decoded: parts share a block
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "style", "stored_for", "activations", "parts", "k", "without"), RELOADED)
def test_reloaded_weights(fmt, style, stored_for, activations, parts, k, without, vllm, device):
    """Check that after a reload the layer keeps its tensors and its form, and computes with the new weights."""
    scheme = LayerScheme(fmt, style, stored_for)
    layer, method, load, reload = reloadable(vllm, scheme, parts, k, activations, device)
    load(*without)
    method.process_weights_after_loading(layer)
    form, pointers = method._form, {name: each.data_ptr() for name, each in layer.named_parameters()}
    bound = BOUNDS["fp8" if fmt.startswith("fp8") else "fp4" if stored_for == "fp4" else "16bit"]
    for _ in range(2):
        weight = reload(layer, method, functools.partial(load, *without))
        assert method._form == form and {n: p.data_ptr() for n, p in layer.named_parameters()} == pointers
        check_values(layer, method, weight, k, device, bound)


def test_reloads_without_a_tensor(vllm):
    scheme = LayerScheme("nvfp4", "modelopt", "fp4")
    for missing, message in (
        ("weight_scale_2", "model.layer: the checkpoint has no weight_scale_2"),
        ("weight_scale", "model.layer: the checkpoint has no weight_scale,"),
        ("input_scale", "model.layer: the reloaded weights have no input scale"),
    ):
        layer, method, load, reload = reloadable(vllm, scheme, (64, 64), 192, "fp4", "cpu")
        load()
        method.process_weights_after_loading(layer)
        with pytest.raises(ValueError, match=message):
            reload(layer, method, lambda load=load, missing=missing: load(missing))
        layer, method, load, reload = reloadable(vllm, scheme, (64, 64), 192, "fp4", "cpu")
        load("input_scale")  # the reloaded file contains an input scale, but the layer keeps its form
        method.process_weights_after_loading(layer)
        reload(layer, method, load)
        assert method._form.activations == "16bit"


@pytest.mark.parametrize("fmt", ["mxfp4", "fp8_block"])
def test_loaders_do_not_keep_the_layer(fmt, vllm):
    """Check that the loaders' functions, which vLLM keeps, do not keep the memory of a deleted layer alive."""
    scheme = LayerScheme(fmt, "compressed-tensors", "16bit" if fmt == "mxfp4" else "fp8")
    layer, method, load, reload = reloadable(vllm, scheme, (64, 64), 192, "auto", "cpu")
    kept = [attributes["weight_loader"] for *_, attributes in reload.made.values()]
    assert all(each.__self__ is layer for each in kept)
    functions, alive = [each.__func__ for each in kept], weakref.ref(layer)
    del layer, method, load, reload, kept
    gc.collect()
    assert alive() is None and functions


SHARED = [
    ("fp8_block", "deepseek", (240,), 256, 2, False), ("fp8_block", "modelopt", (128, 72), 256, 2, False),
    ("fp8_block", "compressed-tensors", (64, 64, 40), 192, 1, False), ("fp8_block", "deepseek", (200,), 96, 4, True),
    ("nvfp4", "modelopt", (64,), 24, 2, True), ("nvfp4", "compressed-tensors", (64,), 20, 4, True),
    ("mxfp4", "compressed-tensors", (64,), 48, 2, True),
]  # fmt: skip
"""Format, style, rows of the parts and columns of a rank, number of ranks, and whether ranks divide K."""


@pytest.mark.parametrize(("fmt", "style", "parts", "k", "ranks", "divides_k"), SHARED)
def test_blocks_that_ranks_share(fmt, style, parts, k, ranks, divides_k, vllm):
    """Check that each rank decodes its part of the weight with the scales of all blocks that overlap this part."""
    scheme = LayerScheme(fmt, style, "fp8" if fmt == "fp8_block" else "16bit")
    sizes = (k * ranks, sum(parts)) if divides_k else (k, sum(parts) * ranks)
    made = [stored_layer(scheme, rows if divides_k else rows * ranks, sizes[0]) for rows in parts]
    for rank in range(ranks):

        def load_part(param, tensor, i, rank=rank):
            if isinstance(param, vllm_stub.PerTensorScaleParameter):
                param.data[i] = tensor.reshape(())
                return
            own = param.data[sum(parts[:i]) : sum(parts[: i + 1])]
            if divides_k:
                tensor = tensor.narrow(1, rank * param.shape[1], param.shape[1])
            else:
                tensor = tensor.narrow(0, rank * parts[i], parts[i])
            assert own.shape == tensor.shape  # as vLLM asserts
            own.copy_(tensor)

        layer = vllm_stub.LinearBase()
        layer.input_size = sizes[0]
        method = vllm._linear.CuteLinearMethod(
            scheme, "model.layer", "auto", prepare.Preparation(vllm._prepare.serving), vllm_stub.OwnMethod
        )
        method.create_weights(layer, k, parts, *sizes, torch.bfloat16, weight_loader=load_part)
        assert not method.preparation.forms
        for i, (tensors, _) in enumerate(made):
            for name, tensor in tensors.items():
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, tensor, i)
        method.process_weights_after_loading(layer)
        want = [
            weight[:, rank * k : (rank + 1) * k] if divides_k else weight[rank * rows : (rank + 1) * rows]
            for (_, weight), rows in zip(made, parts, strict=True)
        ]
        assert torch.equal(layer.weight, torch.from_numpy(np.concatenate(want)).float().bfloat16())
        x = torch.randn(3, k).bfloat16()
        assert torch.equal(method.apply(layer, x), nn.functional.linear(x, layer.weight))


def test_blocks_that_no_rank_shares(vllm):
    """Check a rank whose last blocks of rows and of columns are partial, and not continued by another rank."""
    scheme = LayerScheme("fp8_block", "deepseek", "fp8")
    layer, method, weight = loaded(vllm, scheme, (256, 64), 192)
    check_values(layer, method, weight, 192, "cpu", BOUNDS["fp8"])
    assert [*method.preparation.forms] == [method._form] and prepare.jobs_of([method._form], 64, "sm_90a")


def test_block_scales_of_a_padded_head(vllm):
    """Check an output head whose loader expects one scale row per token of the vocabulary and zeroes the padding."""
    scheme = LayerScheme("fp8_block", "compressed-tensors", "fp8")
    head, (stored, weight) = vllm_stub.ParallelLMHead(), stored_layer(scheme, 200, 128)
    head.org_vocab_size = 200
    method = vllm._linear.CuteLinearMethod(
        scheme, "lm_head", "auto", prepare.Preparation(vllm._prepare.serving), vllm_stub.OwnMethod
    )

    def loader(param, tensor):
        assert len(tensor) == 200
        param.data[:200], param.data[200:] = tensor, torch.zeros(()).to(tensor.dtype)

    method.create_weights(head, 128, [256], 128, 256, torch.bfloat16, weight_loader=loader)
    for name, tensor in stored.items():
        getattr(head, name).weight_loader(getattr(head, name), tensor)
    method.process_weights_after_loading(head)
    want = torch.from_numpy(weight).float().bfloat16()
    assert torch.equal(head.weight[:200], want) and not head.weight[200:].any()


def test_codes_that_share_a_byte_are_left_to_vllm(vllm):
    layer = vllm_stub.LinearBase()
    layer.input_size, layer.quant_method = 48, None
    method = vllm._linear.CuteLinearMethod(
        LayerScheme("nvfp4", "modelopt", "16bit"),
        "x",
        "auto",
        prepare.Preparation(vllm._prepare.serving),
        vllm_stub.OwnMethod,
    )
    method.create_weights(layer, 3, [64], 48, 64, torch.bfloat16, weight_loader=None)
    assert isinstance(layer.quant_method, vllm_stub.OwnMethod) and layer.weight.shape == (64, 3)
    assert not method.preparation.forms


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_fp8_activations_on_every_gpu(arch, vllm, monkeypatch):
    monkeypatch.setattr(linear, "arch_of", lambda device: arch)
    for fmt in ("nvfp4", "mxfp4"):
        scheme = LayerScheme(fmt, "compressed-tensors", "16bit")
        layer, method, weight = loaded(vllm, scheme, (64, 64, 64), 192, activations="fp8")
        check_values(layer, method, weight, 192, "cpu", BOUNDS["fp8"])
        (form,) = method.preparation.forms
        assert form == method._form and form.activations == "fp8"
        assert prepare.jobs_of([form], 64, arch)


@pytest.mark.parametrize("has_input_scale", [False, True])
@pytest.mark.parametrize("stored_for", ["16bit", "fp4"])
def test_prepared_form_is_the_loaded_one(stored_for, has_input_scale, vllm):
    """Check that input scales in a checkpoint, even in ModelOpt's weight-only checkpoints, enable FP4 activations."""
    scheme = LayerScheme("nvfp4", "modelopt", stored_for)
    layer, preparation = vllm_stub.LinearBase(), prepare.Preparation(vllm._prepare.serving)
    layer.input_size = 64
    method = vllm._linear.CuteLinearMethod(scheme, "x", "fp4", preparation, vllm_stub.OwnMethod)
    method.create_weights(layer, 64, [64], 64, 64, torch.bfloat16, weight_loader=None)
    assert [form.activations for form in preparation.forms] == [stored_for]
    tensors, _ = stored_layer(scheme, 64, 64)
    if not has_input_scale:
        del tensors["input_scale"]
    load(layer, [tensors], (64,))
    method.process_weights_after_loading(layer)
    assert method._form in preparation.forms
    assert method._form.activations == ("fp4" if has_input_scale else "16bit")


def test_a_checkpoint_without_a_scale(vllm):
    scheme = LayerScheme("nvfp4", "modelopt", "fp4")
    layer = vllm_stub.LinearBase()
    method = vllm._linear.CuteLinearMethod(
        scheme, "model.q", "auto", prepare.Preparation(vllm._prepare.serving), vllm_stub.OwnMethod
    )
    layer.input_size = 64
    method.create_weights(layer, 64, [64, 64], 64, 128, torch.bfloat16, weight_loader=None)
    tensors, _ = stored_layer(scheme, 64, 64)
    load(layer, [tensors, {**tensors, "weight_scale_2": torch.tensor(torch.nan)}], (64, 64))
    with pytest.raises(
        ValueError, match=r"model\.q: the checkpoint has no weight_scale_2, or not for every merged layer"
    ):
        method.process_weights_after_loading(layer)


def test_tied_output_head(vllm):
    """Check that a tied head gets the embedding's weight and method, and keeps no separate tensor."""
    head, embedding = vllm_stub.ParallelLMHead(), nn.Module()
    method = vllm._linear.CuteLinearMethod(
        LayerScheme("nvfp4", "modelopt", "fp4"),
        "lm_head",
        "auto",
        prepare.Preparation(vllm._prepare.serving),
        vllm_stub.OwnMethod,
    )
    method.create_weights(head, 64, [128], 64, 128, torch.bfloat16, weight_loader=None)
    embedding.weight = nn.Parameter(torch.randn(128, 64))
    embedding.quant_method = vllm_stub.UnquantizedLinearMethod()
    assert method.tie_weights(head, embedding) is head
    assert head.weight is embedding.weight and head.quant_method is embedding.quant_method
    assert [*dict(head.named_parameters())] == ["weight"]


# Kernels that are prepared before calls


@pytest.mark.parametrize(
    ("own", "adds"),
    [({}, True), ({"skip_bias_add": True}, False), ({"input_is_parallel": True, "tp_rank": 0}, True),
     ({"input_is_parallel": True, "tp_rank": 1}, False), ({"tp_rank": 1}, True), ({"has_bias": False}, False)],
)  # fmt: skip
def test_prepared_layers_with_a_bias(own, adds, vllm):
    """Check that a layer whose K is divided among ranks adds its bias on the first rank only."""
    layer, preparation = vllm_stub.LinearBase(), prepare.Preparation(vllm._prepare.serving)
    vars(layer).update({"input_size": 64, "has_bias": True, **own})
    method = vllm._linear.CuteLinearMethod(
        LayerScheme("mxfp4", "compressed-tensors", "16bit"), "x", "auto", preparation, vllm_stub.OwnMethod
    )
    for _ in range(2):
        method.create_weights(layer, 64, [8, 8], 64, 16, torch.bfloat16, weight_loader=None)
    assert [(form.has_bias, form.n, form.k, form.parts) for form in preparation.forms] == [(adds, 16, 64, 2)]


def on_meta(vllm, form: Any) -> Any:
    """Return an object with the tensors of a layer on the meta device."""
    cls: Any = SCHEMES[form.scheme]
    parts = None if form.parts == 1 else (form.n // form.parts,) * form.parts
    module = cls(
        form.k, form.n, parts=parts, activations=form.activations, has_input_scale=form.has_input_scale, device="meta"
    )
    return SimpleNamespace(**gemms.tensors_of(module))


FORMS = [
    ("nvfp4", "16bit", 1, False), ("nvfp4", "16bit", 2, True), ("nvfp4", "fp4", 2, True), ("nvfp4", "fp8", 1, False),
    ("mxfp4", "16bit", 1, False), ("mxfp4", "fp4", 2, False), ("mxfp4", "fp8", 1, False),
    ("fp8_block", "fp8", 1, False), ("fp8_tensor", "fp8", 1, True), ("fp8_tensor", "fp8", 2, False),
    ("fp8_channel", "fp8", 1, False),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "activations", "parts", "has_input_scale"), FORMS)
def test_prepared_kernels_are_those_of_the_calls(scheme, activations, parts, has_input_scale, vllm):
    """Check that calls with any number of rows need only kernels that were compiled in advance."""
    arch, most = ARCHS["sm_90a"], 600
    for has_bias, dtype in ((False, torch.bfloat16), (True, torch.float16)):
        form = gemms.Form(scheme, activations, 1024, 512, parts, has_input_scale, dtype, has_bias)
        assert form.reason_unsupported is None
        jobs = prepare.jobs_of([form], most, arch.name)
        digest = {
            kernel.digest for job in jobs for kernel in registry.kernels_of(job.op, arch.name, **dict(job.properties))
        }
        assert len(jobs) <= len(digest)  # each call needs a kernel that no other call needs
        gemm, layer = invariant.gemm_of(form), on_meta(vllm, form)
        bias = torch.zeros(1024, dtype=dtype, device="meta") if has_bias else None
        for m in (1, 2, 7, 16, 31, 64, 100, 129, 500, most):
            with Recorded() as recorded:
                result = gemm(layer, torch.empty(m, 512, dtype=dtype, device="meta"), bias)
            assert result.shape == (m, 1024) and result.dtype == dtype
            assert recorded.calls
            for op, args, kwargs in recorded.calls:
                needed = {kernel.digest for kernel in registry.OPS[op].kernels(arch, *args, **kwargs)}
                assert needed <= digest, (op, m)


def test_captured_sizes_are_called(vllm):
    form = gemms.Form("nvfp4", "16bit", 256, 128, 1, False, torch.bfloat16, False)
    jobs = prepare.jobs_of([form], 2048, "sm_90a", [1, 2, 4, 8, 16, 24])
    assert [dict(job.properties)["m"] for job in jobs] == [1, 8, 16, 24]


@pytest.mark.slow
def test_kernels_are_compiled_ahead(vllm, monkeypatch, tmp_path):
    """Check that the kernels of all forms reach the pool of processes, and then the cache on disk."""
    monkeypatch.setattr(settings, "CACHE_DIR", tmp_path)
    monkeypatch.setenv("TORCH_CUTE_OPS_CACHE_DIR", str(tmp_path))  # for the processes
    monkeypatch.setattr(compiler, "_compiled", {})  # kernels in memory are not compiled again
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    arch = ARCHS["sm_90a"]
    forms = [
        gemms.Form(scheme, "fp8", 128, 128, 1, False, torch.bfloat16, False) for scheme in ("fp8_block", "fp8_channel")
    ]
    kernels = set(prepare.kernels_of(prepare.jobs_of(forms, 8, arch.name), arch.name))
    assert len(kernels) >= FEWEST_KERNELS and not any(is_kept(each, arch) for each in kernels)
    compile_ahead(kernels, arch)
    assert all(is_kept(each, arch) for each in kernels)


@pytest.mark.parametrize(
    ("gpus", "ranks", "engines", "sharing", "first"),
    [(8, 2, 1, 2, 1), (8, 4, 2, 8, 3), (2, 64, 1, 2, 1), (8, 1, 0, 1, 0)],
)
def test_each_rank_prepares_its_kernels(gpus, ranks, engines, sharing, first, vllm, monkeypatch):
    """Check that each rank, even on a second node, compiles kernels for its GPU, with a share of the processors."""
    compiled, warm, known = [], [], registry.kernels_of
    device, seen = torch.device("cuda", first), set()

    def kernels_of(op, where, **properties):
        seen.add(where)
        return known(op, "sm_90a", **properties)

    monkeypatch.setattr(prepare.registry, "kernels_of", kernels_of)
    monkeypatch.setattr(prepare.registry, "warmup", lambda op, **properties: warm.append((op, properties["m"])))
    monkeypatch.setattr(prepare, "arch_of_device", lambda index: (ARCHS["sm_90a"], index))
    monkeypatch.setattr(
        prepare, "compile_ahead", lambda kernels, arch, ranks: compiled.append(([*kernels], arch, ranks))
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 9)
    vllm_stub.VLLM_CONFIG[0] = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2]),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=128),
        parallel_config=SimpleNamespace(local_world_size=ranks, data_parallel_size_local=engines),
    )
    forms = [gemms.Form("nvfp4", "16bit", n, 512, 1, False, torch.bfloat16, False) for n in (1024, 512)]
    preparation = prepare.Preparation(vllm._prepare.serving)
    preparation.add(forms[0])
    for _ in range(2):
        preparation.run(torch.device("cpu"))
        preparation.run(device)
    ((kernels, arch, used),) = compiled
    assert seen == {device} and arch == (ARCHS["sm_90a"], first) and used == Ranks(sharing, first)
    jobs = prepare.jobs_of(forms[:1], 128, device)
    needed = list(prepare.kernels_of(jobs, device))
    assert kernels == needed and len(set(needed)) >= 4
    called = [*jobs, *prepare.jobs_of(forms[:1], 128, device, [1, 2])]
    assert warm == [(job.op, dict(job.properties)["m"]) for job in called]
    preparation.add(forms[1])  # a layer with a new form
    preparation.run(device)
    needed = prepare.kernels_of(prepare.jobs_of(forms[1:], 128, device), device)
    assert len(compiled) == 2 and set(compiled[1][0]) == set(needed)


# Norms


def test_norms(vllm, device):
    """Check that registered norms match vLLM's ops up to a rounding, and update the residual in place."""
    norms = importlib.import_module(f"{vllm_stub.OURS}._norms")
    ops = vllm_stub.IR_OPS
    for op in (ops.rms_norm, ops.fused_add_rms_norm):
        op.impls.pop(norms.PROVIDER, None)
    for _ in range(2):
        norms.register()
    plain, fused = (op.impls[norms.PROVIDER] for op in (ops.rms_norm, ops.fused_add_rms_norm))
    assert (plain.inplace, fused.inplace) == (False, True)
    x, residual = (torch.randn(5, 96, device=device).bfloat16() for _ in range(2))
    weight = torch.rand(96, device=device).bfloat16()
    assert plain.supports_args(x, weight, 1e-5) and fused.supports_args(x, residual, weight, 1e-5)
    assert plain.supports_args(x, None, 1e-5) and fused.supports_args(x, residual, None, 1e-5)
    assert not plain.supports_args(x, weight, 1e-5, 48) and not plain.supports_args(x, None, 1e-5, 48)
    assert not plain.supports_args(x, weight.half(), 1e-5)
    assert not fused.supports_args(x, residual.float(), weight, 1e-5)

    def normed(rows: np.ndarray, gain: torch.Tensor | None) -> np.ndarray:
        factor = 1.0 if gain is None else gain.double().cpu().numpy()
        return rows / np.sqrt((rows**2).mean(1, keepdims=True) + 1e-5) * factor

    given = x.double().cpu().numpy()
    for gain in (weight, None):
        np.testing.assert_allclose(plain.function(x, gain, 1e-5).double().cpu(), normed(given, gain), rtol=2**-8)
        old = residual.clone()
        summed = (x.double() + old.double()).bfloat16()
        got, updated = fused.function(x, old, gain, 1e-5)
        assert updated is old and torch.equal(old, summed)
        np.testing.assert_allclose(got.double().cpu(), normed(summed.double().cpu().numpy(), gain), rtol=2**-8)


@pytest.mark.gpu
def test_nothing_is_compiled_after_loading(vllm, monkeypatch, tmp_path):
    """Check that after loading, calls with sizes that vLLM captures compile nothing."""
    vllm_stub.VLLM_CONFIG[0] = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 16]),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        parallel_config=SimpleNamespace(local_world_size=1, data_parallel_size_local=1),
    )
    layer, method, _ = loaded(vllm, LayerScheme("nvfp4", "modelopt", "16bit"), (64,), 320, device="cuda")
    x = torch.randn(2, 320, device="cuda").bfloat16()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = method.apply(layer, x)
    graph.replay()
    with torch.no_grad():
        assert torch.equal(y, method.apply(layer, x))


# Entry point


def test_entry_point(vllm):
    """Check that the entry point in the package's metadata is ``register``."""
    project = Path(torch_cute_ops.__file__).parents[1] / "pyproject.toml"
    line = next(line for line in project.read_text().splitlines() if line.startswith("torch_cute_ops = "))
    module, _, name = line.split('"')[1].partition(":")
    assert getattr(importlib.import_module(module), name) is vllm.root.register


def test_without_vllm(monkeypatch):
    vllm_stub.forget()
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    with pytest.raises(ModuleNotFoundError, match=r"needs vllm.model_executor as in vLLM 0.32"):
        importlib.import_module(vllm_stub.OURS).register()
    vllm_stub.forget()
