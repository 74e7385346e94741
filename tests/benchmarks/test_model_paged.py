"""Test the benchmark of decode steps with a paged cache."""

import argparse
import functools
import json

import pytest
import torch
from support.fake_device import FakeDevice
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("transformers")

from benchmarks import layer, llama, model_paged, performance, timeline

CPU = torch.device("cpu")
WIDTHS = layer.Widths(hidden=256, qkv=512, attention=256, intermediate=320)  # two query heads, one key head
SMALL = llama.Size(WIDTHS, 4, 64, ())
W4A16 = "nvfp4/16bit"
BATCH, CONTEXT = 3, 32


@pytest.fixture(autouse=True)
def registered():
    llama.register_unmasked()


def step_of(way, is_compiled=False):
    model = model_paged.build(SMALL, W4A16, 2, BATCH, CPU)
    return model_paged.Step(model, model_paged.Pages(BATCH, CONTEXT, CPU), way, is_compiled)


@torch.no_grad()
@pytest.mark.parametrize("way", model_paged.WAYS)
def test_a_step(way, monkeypatch):
    """Compare logits and caches with the model of transformers and a static cache with the same keys and values."""
    monkeypatch.setattr(torch, "compile", lambda **_: lambda function: function)
    step, model = step_of(way), model_paged.build(SMALL, W4A16, 2, BATCH, CPU)
    context = llama.Context(model.config, BATCH, CONTEXT, CPU)
    before = []
    for block, each in zip(step.blocks, context.cache.layers, strict=True):
        for cache, static in ((block.key_cache, each.keys), (block.value_cache, each.values)):
            assert cache.shape == (BATCH * CONTEXT // 16, 16, 1, 128) and 0.9 < cache.float().std() < 1.1
            static.copy_(cache.view(BATCH, CONTEXT, 1, 128).transpose(1, 2))
            before.append(cache.clone())
    expected = llama.DecodeStep(model, context, BATCH)
    ids = torch.tensor([[7], [30], [51]])
    step.ids.copy_(ids)
    expected.ids.copy_(ids)
    got, want = step(), expected()
    assert got.shape == want.shape == (BATCH, 1, 64)
    assert torch.nn.functional.cosine_similarity(got.double(), want.double(), -1).min() > 0.9995
    assert step.ids.tolist() == got[:, -1].argmax(-1, keepdim=True).tolist()
    for block, each in zip(step.blocks, context.cache.layers, strict=True):
        for cache, static in ((block.key_cache, each.keys), (block.value_cache, each.values)):
            changed = (cache != before.pop(0)).flatten(2).any(2).view(BATCH, CONTEXT)
            assert changed.nonzero().tolist() == [[i, CONTEXT - 1] for i in range(BATCH)]
            torch.testing.assert_close(cache.view(BATCH, CONTEXT, 128), static[:, 0], rtol=2**-5, atol=2**-5)


@torch.no_grad()
def test_compiled_steps(monkeypatch):
    """Check that both ways compile to one graph each, and that their results agree."""
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    steps = {way: step_of(way, is_compiled=True) for way in model_paged.WAYS}
    results = model_paged.compared(steps)
    assert model_paged.is_right(results) and results["cosine"] > 0.9999 and counter.frame_count == 2
    for step in steps.values():
        step()
    assert counter.frame_count == 2
    steps["fused"].blocks[0].value_cache.add_(1)
    assert not model_paged.is_right(model_paged.compared(steps))


def test_pages():
    pages = model_paged.Pages(2, 48, CPU)
    assert pages.slots.tolist() == [47, 95] and pages.positions.tolist() == [47, 47]
    with pytest.raises(ValueError, match=r"^a context of 40 tokens is not a multiple of 16"):
        model_paged.Pages(2, 40, CPU)


def test_kernels_per_layer():
    names = {2: ["head", "gemm", "rope", "gemm", "rope"], 4: ["head", *["gemm", "rope"] * 4, "copy"]}
    assert model_paged.kernels_per_layer(names) == {"gemm": 1, "rope": 1, "copy": 0.5}


def recorded(replay):
    replay()
    return [timeline.Kernel(name, 0, 1) for name in ("gemm", "rope")]


def test_a_run(monkeypatch, tmp_path, capsys):
    """Check times extrapolated to four layers. With the op, a step takes 10 µs with one layer and 16 µs with two
    layers; without the op, it takes 11 µs and 19 µs."""
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function or (lambda each: each))
    monkeypatch.setattr(model_paged.environment, "collect", lambda device: {"gpu": "made up"})
    monkeypatch.setattr(model_paged.environment, "headline", lambda found: found["gpu"])
    monkeypatch.setattr(model_paged, "FEW", (1, 2))
    monkeypatch.setattr(llama, "MODELS", {"8B": SMALL})
    monkeypatch.setattr(llama, "CONTEXT", CONTEXT)
    options = argparse.Namespace(
        models=["8B"], precisions=[W4A16], batch=[1], context=CONTEXT, eager=False, output=tmp_path
    )
    backend = FakeDevice([10.0, 11.0, 16.0, 19.0])
    assert model_paged.measure_models(options, CPU, backend, recorded) == 0
    (row,) = json.loads((tmp_path / "model_paged.json").read_text())["rows"]
    assert row["variants"] == {
        "fused": {"us": pytest.approx(28), "by_layers": {"1": 10.0, "2": 16.0}},
        "separate": {"us": pytest.approx(35), "by_layers": {"1": 11.0, "2": 19.0}},
    }
    assert not row["absent"] and row["kernels"] == {"fused": {}, "separate": {}}
    ((name, _, gpu, (mark,)),) = performance.measured(tmp_path)
    assert (name, gpu, mark.goal, mark.passed) == ("model_paged", "made up", "≤ 0.96", True)
    assert mark.value == pytest.approx(0.8)
    body = [line for line in (tmp_path / "model_paged.md").read_text().splitlines() if line[:1] == "|"]
    cells = [cell.strip() for cell in body[2].strip("|").split("|")]
    assert cells[:1] + cells[2:8] == ["8B", "0.02800", "0.03500", "0.800", "2.00", "0", "0"]
    assert (tmp_path / "model_paged.md").read_text().strip() in capsys.readouterr().out
    options.eager = True
    assert model_paged.measure_models(options, CPU, FakeDevice([10.0, 11.0, 16.0, 19.0]), None) == 0
    result = json.loads((tmp_path / "model_paged.json").read_text())
    assert result["marks"] == [] and result["rows"][0]["variants"] == row["variants"]


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert model_paged.main([]) == 2
