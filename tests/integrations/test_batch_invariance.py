"""Linear layers of engines whose results do not depend on the batch."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from support import sglang_stub, vllm_stub
from support.engine_layers import Recorded, installed, stored_layer
from test_vllm import BOUNDS, NVFP4, load, on_meta
from test_vllm import FORMS as GEMMS
from test_vllm_experts import layer_of

from torch_cute_ops import registry
from torch_cute_ops.checkpoint.spec import LayerScheme
from torch_cute_ops.integrations._engines import gemms, invariant, prepare
from torch_cute_ops.runtime.arch import ARCHS

ROWS = (1, 2, 64, 128, 129, 300)


@pytest.fixture
def vllm(monkeypatch):
    """Replace vLLM by stubs, and return the integration's modules by name."""
    monkeypatch.setattr(vllm_stub, "VLLM_CONFIG", [None])
    with installed(vllm_stub, ("_config", "_checkpoints", "_linear", "_prepare"), monkeypatch) as modules:
        yield modules


@pytest.mark.parametrize(("scheme", "activations", "parts", "has_input_scale"), GEMMS)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_one_tactic(scheme, activations, parts, has_input_scale, arch, vllm):
    """Check that GEMMs always get 128 rows and a named backend, and only need kernels that were compiled in advance."""
    form = gemms.Form(scheme, activations, 1024, 512, parts, has_input_scale, torch.bfloat16, False)
    backend = invariant.backend_of(form, arch)
    usual = {"sm_90a": ("wgmma", "wgmma_ss"), "sm_100a": ("tcgen05", "mma_sync"), "sm_120a": ("mma_sync",)}
    assert backend in usual[arch]
    form = gemms.Form(scheme, activations, 1024, 512, parts, has_input_scale, torch.bfloat16, False, backend)
    jobs = prepare.jobs_of([form], 600, arch)
    prepared = {kernel.digest for job in jobs for kernel in registry.kernels_of(job.op, arch, **dict(job.properties))}
    layer, used = on_meta(vllm, form), []
    names = [name for name in invariant.NAMES if hasattr(layer, name)]
    assert {*vars(layer)} <= {*invariant.NAMES}
    for m in ROWS:
        with Recorded() as recorded:
            y = invariant.mm_fixed_rows(
                torch.empty(m, 512, dtype=torch.bfloat16, device="meta"), [getattr(layer, name) for name in names],
                ",".join(names), None, scheme, activations, has_input_scale, backend,
            )  # fmt: skip
        assert y.shape == (m, 1024) and y.dtype == torch.bfloat16
        called = Counter(op for op, _, _ in recorded.calls)
        assert set(called.values()) == {-(-m // 128)}
        for op, args, kwargs in recorded.calls:
            named = [each for each in (*args, *kwargs.values()) if isinstance(each, str)]
            assert args[0].shape[0] == 128 and (not op.startswith("mm") or backend in named)
        used.append(
            {k.digest for op, args, kw in recorded.calls for k in registry.OPS[op].kernels(ARCHS[arch], *args, **kw)}
        )
    assert all(each == prepared for each in used)


def test_gpus_without_such_a_backend(monkeypatch):
    form = gemms.Form("fp8_channel", "fp8", 1024, 512, 1, False, torch.bfloat16, False)
    monkeypatch.setattr(invariant, "BACKENDS", ("wgmma",))
    with pytest.raises(ValueError, match="no kernel of mm_fp8 for sm_120a gives each row the same result"):
        invariant.backend_of(form, "sm_120a")
    assert invariant.backend_of(form, None) == "reference"


LAYERS = [
    ("nvfp4", "modelopt", "fp4", "auto", (64, 64, 64), 192, True),
    ("nvfp4", "modelopt", "fp4", "fp4", (64, 64, 64), 192, False),
    ("nvfp4", "compressed-tensors", "16bit", "fp8", (64, 64, 64), 192, False),
    ("mxfp4", "compressed-tensors", "16bit", "auto", (64, 64, 64), 192, False),
    ("fp8_tensor", "modelopt", "fp8_static", "auto", (64, 64, 64), 192, False),
    ("fp8_channel", "modelopt", "fp8", "auto", (64, 64, 64), 192, True),
    ("fp8_block", "deepseek", "fp8", "auto", (128, 128, 64), 384, False),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "style", "stored_for", "activations", "parts", "k", "bias"), LAYERS)
def test_rows_do_not_depend_on_their_batch(fmt, style, stored_for, activations, parts, k, bias, vllm, device):
    """Check that each row of a batch gives the same bits as the row alone, wherever it is in the batch."""
    scheme = LayerScheme(fmt, style, stored_for)
    made = [stored_layer(scheme, rows, k) for rows in parts]
    layer = vllm_stub.LinearBase()
    layer.input_size, layer.has_bias = k, bias
    given = torch.randn(sum(parts), device=device).bfloat16() if bias else None
    method = vllm._linear.CuteLinearMethod(
        scheme, "a", activations, prepare.Preparation(vllm._prepare.serving), vllm_stub.OwnMethod, is_invariant=True
    )
    with torch.device(device):
        method.create_weights(layer, k, list(parts), k, sum(parts), torch.bfloat16, weight_loader=None)
    load(layer, [tensors for tensors, _ in made], parts)
    method.process_weights_after_loading(layer)
    assert method._form.is_invariant and [*method.preparation.forms] == [method._form]
    x = torch.randn(300, k, device=device).bfloat16()
    with torch.no_grad():
        whole = method.apply(layer, x, given)
        for m in ROWS:
            assert torch.equal(method.apply(layer, x[:m], given), whole[:m])
        for row in (0, 77, 127, 128, 299):
            assert torch.equal(method.apply(layer, x[row], given), whole[row])
        assert method.apply(layer, x[:0], given).shape == (0, sum(parts))
    weight = np.concatenate([each for _, each in made])
    want = x.double().cpu().numpy() @ weight.T + (0 if given is None else given.double().cpu().numpy())
    chosen = "fp8" if fmt.startswith("fp8") or activations == "fp8" else "fp4" if activations == "fp4" else "16bit"
    assert np.linalg.norm(whole.double().cpu().numpy() - want) < BOUNDS[chosen] * np.linalg.norm(want)

    torch.compiler.reset()
    compiled = torch.compile(lambda x: method.apply(layer, x, given), fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        for m in (300, 5, 130):
            assert torch.equal(compiled(x[:m]), whole[:m])


def test_decoded_layers(vllm):
    """Check that weights whose sizes no kernel supports are decoded. vLLM's method for 16-bit weights then makes
    results independent of the batch."""
    layer = vllm_stub.LinearBase()
    scheme, layer.input_size = LayerScheme("mxfp4", "compressed-tensors", "16bit"), 64
    method = vllm._linear.CuteLinearMethod(
        scheme, "a", "auto", prepare.Preparation(vllm._prepare.serving), vllm_stub.OwnMethod, is_invariant=True
    )
    method.create_weights(layer, 64, [63], 64, 63, torch.bfloat16, weight_loader=None)
    load(layer, [stored_layer(scheme, 63, 64)[0]], (63,))
    method.process_weights_after_loading(layer)
    assert isinstance(method._decoded, vllm_stub.UnquantizedLinearMethod)


def test_vllm_chooses_it(vllm, monkeypatch):
    """Check that linear layers honour VLLM_BATCH_INVARIANT, and that experts are left to vLLM with a warning."""
    made, said = vllm._config.CONFIGS[0].from_config(NVFP4), []
    experts = importlib.import_module(f"{vllm_stub.OURS}._experts")
    monkeypatch.setattr(vllm._checkpoints.logger, "warning_once", lambda text, *args: said.append(text % args))
    for is_invariant in (False, True):
        monkeypatch.setattr(vllm._checkpoints.envs, "VLLM_BATCH_INVARIANT", is_invariant)
        assert made.get_quant_method(vllm_stub.LinearBase(), "a")._is_invariant == is_invariant
        method = made.get_quant_method(layer_of(), "b")
        assert isinstance(method, vllm_stub.OwnMethod if is_invariant else experts.CuteExpertsMethod)
    assert said == ["b: their results depend on the batch; vLLM's own method computes these experts"]


def test_sglang_chooses_it(monkeypatch):
    def method(deterministic: bool) -> Any:
        monkeypatch.setattr(sglang_stub, "SERVER", [sglang_stub.server(2048, [], 1, deterministic=deterministic)])
        with installed(sglang_stub, ("_config", "_checkpoints", "_prepare"), monkeypatch) as modules:
            return modules._config.CONFIGS[0].from_config(NVFP4).get_quant_method(sglang_stub.LinearBase(), "a")

    assert [method(each)._is_invariant for each in (False, True)] == [False, True]
