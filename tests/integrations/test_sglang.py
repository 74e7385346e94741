"""SGLang's quantisation methods, with stubs of SGLang."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import sglang_stub
from support.engine_layers import installed, stored_layer
from test_vllm import DEEPSEEK, INT4, LAYERS, NVFP4, compressed, load
from torch import nn

import torch_cute_ops
from torch_cute_ops.checkpoint.spec import LayerScheme
from torch_cute_ops.integrations._engines.prepare import Serving


@pytest.fixture
def sglang(monkeypatch):
    """Replace SGLang by stubs, and return the integration's modules by name."""
    monkeypatch.setattr(sglang_stub, "SERVER", [None])
    with installed(sglang_stub, ("_config", "_checkpoints", "_linear", "_prepare"), monkeypatch) as modules:
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


@pytest.mark.parametrize("config", [None, INT4, {**NVFP4, "quant_algo": "FP8_PB_WO"}, {"quant_method": "mxfp4"}])
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
