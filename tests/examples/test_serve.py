"""Tests of examples/serve.py."""

import importlib
import importlib.util
import re
from types import ModuleType

import pytest
import torch
from support.example_scripts import run_main

transformers = pytest.importorskip("transformers")

SMALL = ("--requests", "3", "--batch", "2", "--prompt", "9", "--new", "3")


@pytest.fixture
def script(quickstart: ModuleType) -> ModuleType:
    return importlib.import_module("serve")


def served(script: ModuleType, capsys: pytest.CaptureFixture, *arguments: str, status: int = 0) -> tuple[str, str]:
    try:
        return run_main(script, capsys, *SMALL, *arguments, status=status)
    except SystemExit as error:
        if "needs psutil" in str(error):  # some versions of transformers need psutil on a CPU
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8_block"])
def test_serve(script, capsys, scheme) -> None:
    """Serve more requests than fit into a batch, and check that every request gets all its tokens."""
    out, last = served(script, capsys, "--scheme", scheme)
    assert last == "SUCCESS: every check passed"
    assert re.search(r"3 requests, 9 new tokens", out)


def test_a_checkpoint(script, capsys, tmp_path) -> None:
    """Serve a saved model, and compare its size with the original's."""
    options = script.parse([*SMALL])
    model = script.random_model(options, {"activations": "auto", "device": torch.device("cpu")})
    save = importlib.import_module("torch_cute_ops.checkpoint").save
    save(model, tmp_path, "modelopt", config=model.config.to_dict())
    out, last = served(script, capsys, "--model", str(tmp_path))
    assert last == "SUCCESS: every check passed"
    assert f"{script.bytes_of(model):,} bytes" in out


def test_random_weights_of_a_given_config(script, capsys, tmp_path) -> None:
    config = transformers.Qwen3Config(
        hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=96, pad_token_id=0,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    out, last = served(script, capsys, "--config", str(tmp_path / "config.json"))
    assert last == "SUCCESS: every check passed"
    # A weight takes 4.5 bits per element, the embedding and lm_head 16. The remaining bytes are norms and the factors
    # of merged layers.
    weights, embeddings = 128 * (4 + 2 + 2 + 4) * 32 + 3 * 128 * 192, 2 * 96 * 128
    size = int(re.search(r"config\.json, ([\d,]+) bytes", out)[1].replace(",", ""))
    assert 0 < size - (3 * weights * 0.5625 + 2 * embeddings) < 0.05 * size
    model = script.random_model(script.parse(["--config", str(tmp_path / "config.json")]), {"device": "cpu"})
    assert type(model).__name__ == "Qwen3ForCausalLM" and len(model.model.layers) == 3


def test_a_wrong_token_is_found(script, capsys, monkeypatch) -> None:
    """Check that the script fails if the first served token is replaced by the least likely token."""
    real = script.shortfall

    def of_others(model, prompt, output):
        ids = torch.tensor([prompt + output], device=model.device)
        worst = model(ids).logits[0, len(prompt) - 1 : -1].argmin(1).tolist()
        return real(model, prompt, worst[:1] + output[1:])

    monkeypatch.setattr(script, "shortfall", of_others)
    _, last = served(script, capsys, status=1)
    assert last.startswith("FAILURE: a token is ")


@pytest.mark.parametrize("has_psutil", [False, True])
def test_memory_that_transformers_does_not_know(has_psutil, script, capsys, monkeypatch) -> None:
    """Check two errors: without psutil, transformers cannot tell the memory of a CPU; with psutil, the memory is too
    small."""

    def generate_batch(*_: object, **__: object) -> None:
        raise MemoryError("Memory footprint 100 is more than available memory 0")

    def find_spec(name: str, *rest: object) -> object:
        return real(name, *rest) if name != "psutil" else has_psutil or None

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate_batch", generate_batch)
    monkeypatch.setattr(script, "pick_device", lambda: (torch.device("cpu"), "reference"))
    raised, message = (MemoryError, "footprint") if has_psutil else (SystemExit, "needs psutil.* available memory 0")
    with pytest.raises(raised, match=message):
        script.main([*SMALL])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--requests", "0"], "'0': expected an integer, 1 or more"),
        (["--config", "typo.json"], "--config: file typo.json does not exist"),
        (["--config", __file__, "--size", "8b"], "not allowed with argument --config"),
    ],
)
def test_options_that_are_wrong(options, message, script, capsys) -> None:
    with pytest.raises(SystemExit):
        script.main(options)
    assert message in capsys.readouterr().err
