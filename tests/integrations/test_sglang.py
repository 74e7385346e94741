"""SGLang's quantisation methods, with stubs of SGLang."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import sglang_stub
from support.engine_experts import BOUNDS, GPT_OSS, TOPK, E, Stored, check, routed
from support.engine_layers import installed, stored_layer
from test_vllm import DEEPSEEK, INT4, LAYERS, NVFP4, compressed, load
from test_vllm_experts import CHECKPOINTS
from torch import nn

import torch_cute_ops
from torch_cute_ops.checkpoint.spec import LayerScheme
from torch_cute_ops.integrations._engines.prepare import Serving
from torch_cute_ops.nn.experts import SwiGLU


@pytest.fixture
def sglang(monkeypatch):
    """Replace SGLang by stubs, and return the integration's modules by name."""
    monkeypatch.setattr(sglang_stub, "SERVER", [None])
    with installed(sglang_stub, ("_config", "_checkpoints", "_experts", "_linear", "_prepare"), monkeypatch) as modules:
        yield modules


def test_register(sglang):
    """Check that our methods are registered before SGLang's methods, one of which overrides the user's choice, and that
    a second call of ``register``, as SGLang makes in each process, changes nothing."""
    methods, choices = sglang_stub.QUANTIZATION_METHODS, sglang_stub.QUANTIZATION_CHOICES
    methods["modelopt_fp4"] = sglang_stub.ModelOptFp4Config
    try:
        for _ in range(2):
            sglang.root.register()
        names = [*sglang.root.METHODS.values()]
        assert [*methods] == [*names, "modelopt_fp4"] and choices == ["modelopt_fp4", *names]
        assert [sglang._linear.CuteLinearMethod.__name__] == sglang_stub.WEIGHT_LOADER_V2_SUPPORTED
        given = {**NVFP4, "quant_method": "modelopt_fp4"}
        for user in (*names, "modelopt_fp4"):
            overrides = (cls.override_quantization_method(given, user) for cls in methods.values())
            assert next(each for each in overrides if each) == user
    finally:
        methods.clear()
        choices[1:] = []
        sglang_stub.WEIGHT_LOADER_V2_SUPPORTED.clear()


@pytest.mark.parametrize("config", [None, INT4, {**NVFP4, "quant_algo": "FP8_PB_WO"}])
def test_other_checkpoints_are_left_to_sglang(config, sglang):
    cls = sglang._config.CONFIGS[0]
    assert cls.override_quantization_method(config, cls.name) is None


NOT_READ = ("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
"""Algorithms of ModelOpt that SGLang's configuration does not read."""


@pytest.mark.parametrize(
    ("config", "prefix", "scheme"),
    [each for each in LAYERS if not each[0].get("transform_config") and each[0].get("quant_algo") not in NOT_READ],
)
def test_method_of_a_layer(config, prefix, scheme, sglang):
    made = sglang._config.CONFIGS[1].from_config(config)
    method = made.get_quant_method(sglang_stub.LinearBase(), prefix)
    if scheme is None:
        assert isinstance(method, sglang_stub.OwnMethod)
    else:
        assert isinstance(method, sglang._linear.CuteLinearMethod)
        assert (method.scheme, method.prefix, method.activations) == (scheme, prefix, "fp4")
    assert isinstance(made.get_quant_method(nn.Module(), prefix), sglang_stub.OwnMethod)  # attention, experts
    for name in ("model.layers.0.self_attn.kv_b_proj", "wo_a"):  # SGLang's models read these weights
        assert isinstance(made.get_quant_method(sglang_stub.LinearBase(), name), sglang_stub.OwnMethod)


def test_refused_checkpoints(sglang):
    """Check that checkpoints with online transforms are refused, because SGLang's linear layers do not compute them."""
    cls, config = sglang._config.CONFIGS[0], compressed("nvfp4", transform_config={"config_groups": {"R4": {}}})
    assert cls.override_quantization_method(config, cls.name) == cls.name
    with pytest.raises(ValueError, match="the checkpoint has a transform_config"):
        cls.from_config(config)
    cls.from_config(compressed("nvfp4", transform_config={}))  # as compressed-tensors writes it


@pytest.mark.parametrize(
    ("config", "scheme", "parts"),
    [(NVFP4, LayerScheme("nvfp4", "modelopt", "fp4"), (64, 64)),
     (compressed("mxfp4"), LayerScheme("mxfp4", "compressed-tensors", "16bit"), (64, 64)),
     (DEEPSEEK, LayerScheme("fp8_block", "deepseek", "fp8"), (128, 64))],
)  # fmt: skip
def test_values(config, scheme, parts, sglang, device):
    made = sglang._config.CONFIGS[0].from_config(config)
    layer = sglang_stub.LinearBase()
    layer.input_size = 256
    method = made.get_quant_method(layer, "model.layer")
    stored = [stored_layer(scheme, rows, 256) for rows in parts]
    with torch.device(device):
        method.create_weights(layer, 256, [*parts], 256, sum(parts), torch.bfloat16, weight_loader=None)
    load(layer, [tensors for tensors, _ in stored], parts)
    method.process_weights_after_loading(layer)
    x = torch.randn(3, 256, device=device).bfloat16()
    with torch.no_grad():
        got = method.apply(layer, x).double().cpu().numpy()
    want = x.double().cpu().numpy() @ np.concatenate([weight for _, weight in stored]).T
    for span in (slice(0, parts[0]), slice(parts[0], None)):
        bound = 0.05 if scheme.format == "fp8_block" else 2**-7
        assert np.linalg.norm(got[:, span] - want[:, span]) < bound * np.linalg.norm(want[:, span])


# Experts


def experts_of(hidden: int, width: int, ranks: int = 1, rank: int = 0, **settings: Any) -> sglang_stub.FusedMoE:
    """Return a layer of experts without weights."""
    given = {
        "num_experts": E, "num_local_experts": E, "hidden_size": hidden, "top_k": TOPK, "params_dtype": torch.bfloat16,
        "intermediate_size_per_partition": width // ranks, "activation": "silu", "is_gated": True, "no_combine": False,
        "apply_router_weight_on_input": False, "routed_scaling_factor": None, "gemm1_alpha": None, "gemm1_beta": None,
        "gemm1_clamp_limit": None, "swiglu_limit": None, "gate_up_interleaved": True, **settings,
    }  # fmt: skip
    return sglang_stub.FusedMoE(SimpleNamespace(**given), ranks, rank)


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        each
        for each in CHECKPOINTS
        if not {"transform_config", "store_dtype"} & each[0].keys() and each[0].get("quant_algo") not in NOT_READ
    ],
)
def test_method_of_experts(config, scheme, sglang):
    sglang_stub.SERVER[0] = sglang_stub.server(2048, [], 1)
    made = sglang._config.CONFIGS[1].from_config(config)
    layer = experts_of(128, 128, gemm1_alpha=1.702 if scheme is GPT_OSS else None)
    layer.with_bias = scheme is GPT_OSS
    method = made.get_quant_method(layer, "a")
    if scheme is None:
        assert isinstance(method, sglang_stub.OwnMethod)
    else:
        assert isinstance(method, sglang._experts.CuteExpertsMethod)
        assert (method.scheme, method.prefix, method.activations) == (scheme, "a", "fp4")
        assert method.preparation is made.preparation


@pytest.mark.parametrize(
    ("server", "settings", "reason"),
    [
        ({"deterministic": True}, {}, "depend on the batch"),
        ({"runner": "triton"}, {}, "--moe-runner-backend is triton"),
        ({"attn_dp_size": 2}, {}, "data parallelism"),
        ({"enable_lora": True}, {}, "LoRA"),
        ({}, {"activation": "relu2"}, "activation function is relu2"),
        ({}, {"ranks": 2, "width": 48}, "share a block"),
    ],
)
def test_experts_left_to_sglang(server, settings, reason, sglang, caplog):
    sglang_stub.SERVER[0] = sglang_stub.server(2048, [], 1, **server)
    made = sglang._config.CONFIGS[0].from_config(NVFP4)
    layer = experts_of(128, **{"width": 64, **settings})
    assert isinstance(made.get_quant_method(layer, "a"), sglang_stub.OwnMethod)
    (said,) = caplog.messages
    assert said.startswith("a: ") and reason in said


@pytest.mark.parametrize(
    ("config", "width"),
    [(NVFP4, 64), (NVFP4, 48), (compressed("mxfp4"), 96), (compressed("fp8_channel"), 40), (DEEPSEEK, 128)],
)
def test_values_of_experts(config, width, sglang, device):
    """Check experts whose widths are padded with zeros, and experts that two ranks divide."""
    sglang_stub.SERVER[0] = sglang_stub.server(2048, [], 1)
    made, factor = sglang._config.CONFIGS[0].from_config(config), 2.5
    stored, ranks = None, 2 if width == 64 else 1
    layers = []
    for rank in range(ranks):
        layer = experts_of(128, width, ranks, rank, routed_scaling_factor=factor)
        method = made.get_quant_method(layer, "a")
        stored = stored or Stored(method.scheme, 128, width)
        with torch.device(device):
            method.create_weights(layer, E, 128, width // ranks, torch.bfloat16, weight_loader=layer.weight_loader)
        stored.load(layer)
        method.process_weights_after_loading(layer)
        layers.append((method, layer))
    assert stored is not None
    for count in (3, 40):
        is_few = layers[0][0].form.is_few(count)
        x, ids, factors = routed(count, 128, device)
        if not is_few:  # FP8 represents powers of two exactly
            x = x.sign() * torch.exp2(torch.randint_like(x, -2, 4))
        topk = SimpleNamespace(topk_weights=factors, topk_ids=ids)
        with torch.no_grad():
            given = SimpleNamespace(hidden_states=x, topk_output=topk)
            parts = [method.apply(layer, given).hidden_states for method, layer in layers]
        got = sum(part.double() for part in parts)
        check(stored, x, ids, factors * factor, got, SwiGLU(), BOUNDS["16bit" if is_few else "fp8"])


def test_memory_for_few_tokens_is_logged_once(sglang, caplog):
    caplog.set_level("INFO")
    sglang_stub.SERVER[0] = sglang_stub.server(2048, [], 1)
    made = sglang._config.CONFIGS[0].from_config(NVFP4)
    for _ in range(2):
        layer = experts_of(128, 64)
        method = made.get_quant_method(layer, "a")
        method.create_weights(layer, E, 128, 64, torch.bfloat16, weight_loader=layer.weight_loader)
        Stored(method.scheme, 128, 64).load(layer)
        method.process_weights_after_loading(layer)
    assert [each for each in caplog.messages if "MiB" in each] == [
        "each layer of 4 experts stores a second copy of its down layers for calls with few tokens, 0.0 MiB"
    ]


def test_warnings_are_shown_once(sglang, caplog):
    for _ in range(2):
        sglang._linear.warn("x: the weight is decoded")
    assert [record.message for record in caplog.records] == ["x: the weight is decoded"]


def test_prepared_rows(sglang):
    """Check the largest number of rows for which kernels are compiled: a prefill (a chunk, a batch, or the longest
    prompt), plus decode steps that share its batch, or a larger decode step."""
    assert sglang._prepare.serving() is None
    sglang_stub.SERVER[0] = sglang_stub.server(2048, [1, 8], 4)
    assert sglang._prepare.serving() == Serving(2048, (1, 8), 4)
    for chunk, own, most in (
        (-1, {}, 4096), (-1, {"context_length": 8192}, 8192),
        (-1, {"model_config": SimpleNamespace(context_len=5000)}, 5000),
        (2048, {"max_running_requests": 100, "enable_mixed_chunk": True}, 2148),
        (2048, {"max_running_requests": 1000, "speculative_num_draft_tokens": 4}, 4000),
        (2048, {"enable_dynamic_chunking": True, "pp_size": 2}, 4096),
        (8192, {"enable_dynamic_chunking": True, "pp_size": 2}, 10240),
    ):  # fmt: skip
        sglang_stub.SERVER[0] = sglang_stub.server(chunk, [], 1, **own)
        assert sglang._prepare.serving() == Serving(most, (), 1)


def test_entry_point(sglang):
    """Check that the entry point in the package's metadata is ``register``."""
    lines = (Path(torch_cute_ops.__file__).parents[1] / "pyproject.toml").read_text().splitlines()
    at = lines.index('[project.entry-points."sglang.srt.plugins"]')
    module, _, name = lines[at + 1].split('"')[1].partition(":")
    assert getattr(importlib.import_module(module), name) is sglang.root.register


def test_without_sglang(monkeypatch):
    sglang_stub.forget()
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sglang", types.ModuleType("sglang"))
    with pytest.raises(ModuleNotFoundError, match=r"needs sglang.srt as in SGLang 0.5.23"):
        importlib.import_module(sglang_stub.OURS).register()
    sglang_stub.forget()
