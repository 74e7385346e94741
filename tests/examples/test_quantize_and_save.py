"""Tests of examples/quantize_and_save.py."""

import importlib
import json
import re
from types import ModuleType

import pytest
import torch
from support.example_scripts import run_main

pytest.importorskip("safetensors")

SMALL = ("--layers", "1", "--hidden", "256", "--tokens", "4")


@pytest.fixture
def script(quickstart: ModuleType) -> ModuleType:
    return importlib.import_module("quantize_and_save")


@pytest.mark.parametrize(
    ("scheme", "activations", "styles"),
    [
        ("nvfp4", "auto", ["modelopt", "compressed-tensors"]),
        ("mxfp4", "fp4", ["compressed-tensors"]),
        ("fp8_block", "fp8", ["compressed-tensors"]),
    ],
)
def test_quantize_and_save(script, capsys, tmp_path, scheme, activations, styles) -> None:
    options = ("--scheme", scheme, "--activations", activations, "--out", str(tmp_path))
    out, last = run_main(script, capsys, *SMALL, *options)
    assert last == "SUCCESS: every check passed"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(styles)
    for style in styles:
        config = json.loads((tmp_path / style / "config.json").read_text())
        assert config["model_type"] == "example" and config["quantization_config"]["quant_method"] == style
    before, after = (
        int(each.replace(",", "")) for each in re.search(r"([\d,]+) bytes in bf16, ([\d,]+)", out).groups()
    )
    model = script.Model(1, 256).bfloat16()
    weights = sum(each.weight.numel() for each in model.layers.modules() if type(each) is torch.nn.Linear)
    bits = {"nvfp4": 4.5, "mxfp4": 4.25, "fp8_block": 8 + 32 / 128**2}[scheme]
    assert before == script.bytes_of(model)
    # The remaining bytes are one global scale per layer. At this size, scales have no padding.
    assert 0 <= after - (before - 2 * weights + weights * bits / 8) <= 64


def test_merged_layers_compute_the_same(script) -> None:
    """Compare the results of merged and separate layers in bf16."""
    model, merged = script.Model(2, 128), script.Model(2, 128, is_merged=True)
    tensors = model.state_dict()
    for i in range(2):
        for name, parts in (("qkv", "qkv"), ("gate_up", ("gate", "up"))):
            rows = [tensors.pop(f"layers.{i}.{part}_proj.weight") for part in parts]
            tensors[f"layers.{i}.{name}_proj.weight"] = torch.cat(rows)
    merged.load_state_dict(tensors)
    ids = torch.randint(512, (2, 5))
    assert torch.allclose(merged(ids), model(ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limit", ["MAX_ERROR", "MAX_DIFFERENCE"])
def test_failure(script, capsys, monkeypatch, limit) -> None:
    monkeypatch.setattr(script, limit, {"16bit": -1.0} if limit == "MAX_ERROR" else -1.0)
    _, last = run_main(script, capsys, *SMALL, status=1)
    assert re.match(r"FAILURE: (the logits are|modelopt is) 0\.\d+ from", last)
