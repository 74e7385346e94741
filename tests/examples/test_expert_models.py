"""Tests of examples/expert_models.py."""

import importlib
import re
from types import ModuleType

import pytest
from support.example_scripts import run_main

pytest.importorskip("transformers")

SMALL = ("--layers", "2", "--tokens", "2", "--batches", "1", "2")


@pytest.fixture
def script(quickstart: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    script = importlib.import_module("expert_models")
    # small sizes on a GPU, too
    monkeypatch.setattr(script, "LARGE", dict.fromkeys(script.LARGE, script.SMALL))
    return script


@pytest.mark.parametrize(("model", "scheme"), [("deepseek-v3", "fp8_block"), ("gpt-oss", "mxfp4")])
def test_models(script, capsys, model, scheme) -> None:
    out, last = run_main(script, capsys, "--model", model, *SMALL)
    assert last == "SUCCESS: every check passed"
    assert re.search(rf"model +{model}, 2 layers, 8 experts, [\d,]+ bytes, {scheme}", out)
    assert len(re.findall(r"^ +[12] +[\d,.]+$", out, re.MULTILINE)) == 2


def test_failure(script, capsys, monkeypatch) -> None:
    monkeypatch.setattr(script, "LEAST_COSINE", 2.0)
    _, last = run_main(script, capsys, *SMALL, status=1)
    assert re.match(r"FAILURE: a cosine of 0\.99\d+ is below 2\.0", last)
