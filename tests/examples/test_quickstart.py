"""Tests of the quickstart: its output, its failures, and the models that it reads."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from support.example_scripts import EXAMPLES, printed, rounded
from support.interpreters import forked


def expected_snr(x: torch.Tensor, weight: torch.Tensor, fmt: str) -> float:
    """Compute the SNR in dB of NVFP4 and MXFP4 after an RMSNorm, in NumPy, from the definitions of the formats."""
    v, w = x.double().numpy(), weight.double().numpy()
    norm = v / np.sqrt((v**2).mean(-1, keepdims=True) + 1e-6) * w
    error = rounded(norm, fmt) - norm
    return 10 * np.log10((norm**2).sum() / (error**2).sum())


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_synthetic(quickstart: ModuleType, hidden_states: ModuleType, capsys: pytest.CaptureFixture, fmt: str) -> None:
    status = quickstart.main(["--rows", "33", "--hidden", "576", "--seed", "3", "--format", fmt])
    lines = printed(capsys.readouterr().out)
    assert status == 0
    assert lines["SUCCESS:"] == "every check passed"
    assert lines["compiled"].endswith("bit for bit the eager result")
    assert "a CUDA graph needs a GPU" in lines["captured"] or lines["captured"].endswith("bit for bit the eager result")
    assert lines["device"].startswith("CPU") is not torch.cuda.is_available()

    x, weight, _ = hidden_states.synthetic(33, 576, 3)
    snr = float(re.match(r"[\d.]+", lines["SNR"]).group())
    assert snr == pytest.approx(expected_snr(x.bfloat16(), weight.bfloat16(), fmt), abs=0.02)


@pytest.mark.slow
def test_as_a_script() -> None:
    command = [sys.executable, EXAMPLES / "quickstart.py", "--rows", "16", "--hidden", "256", "--layout", "linear"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    lines = printed(run.stdout)
    assert list(lines)[-1] == "SUCCESS:"
    assert lines["bytes"].startswith(f"{16 * 256 * 2:,} as bfloat16, {16 * 128 + 16 * 16:,} as codes and scales")


def one_byte_off(y: torch.Tensor, scale: torch.Tensor) -> None:
    y[0, 0] ^= 0x09  # change the sign and the last bit of element 0


def few_codes_off(y: torch.Tensor, scale: torch.Tensor) -> None:
    y.view(-1)[::200] ^= 1


def scales_off(y: torch.Tensor, scale: torch.Tensor) -> None:
    scale.view(torch.uint8).add_(1)


def a_nan_scale(y: torch.Tensor, scale: torch.Tensor) -> None:
    scale.view(torch.uint8)[0, 0] = 0x7F


def all_zero(y: torch.Tensor, scale: torch.Tensor) -> None:
    y.zero_()


@pytest.mark.parametrize(
    ("corrupt", "complaint"),
    [
        (one_byte_off, "e2m1 steps from float64's"),
        (few_codes_off, "of the elements or scales are float64's"),
        (scales_off, "only 0.000% of the elements or scales"),
        (a_nan_scale, "SNR nan dB is below"),
        (all_zero, "SNR 0.00 dB is below"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_wrong_results_are_noticed(quickstart: ModuleType, hidden_states: ModuleType, corrupt, complaint: str) -> None:
    fmt = quickstart.FORMATS["nvfp4"]
    x, weight, _ = hidden_states.synthetic(64, 512, 0)
    exact = quickstart.norm_float64(x, weight)
    y, scale = torch.ops.cute.rmsnorm_fp4quant(x, weight, scale_layout="linear")
    assert quickstart.compare_with_float64(y, scale, exact, None, fmt, "linear") == []
    corrupt(y, scale)
    assert complaint in "; ".join(quickstart.compare_with_float64(y, scale, exact, None, fmt, "linear"))


def test_a_wrong_op_fails(
    quickstart: ModuleType, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch.ops.cute.rmsnorm_fp4quant.default

    def wrong(x: torch.Tensor, weight: torch.Tensor, global_scale: torch.Tensor, eps: float, **kwargs) -> tuple:
        return right(x * 1.5, weight.roll(1), global_scale, eps, **kwargs)

    wrong.default = right
    monkeypatch.setattr(torch.ops.cute, "rmsnorm_fp4quant", wrong)
    monkeypatch.setattr(quickstart, "compiled", lambda quantize, x: lambda: quantize(x))
    assert quickstart.main(["--rows", "16", "--hidden", "256"]) == 1
    lines = printed(capsys.readouterr().out)
    assert list(lines)[-1] == "FAILURE:"
    assert "of the elements or scales are float64's" in lines["FAILURE:"]
    assert "differs" not in lines["FAILURE:"]


def test_a_wrong_compiled_result_fails(
    quickstart: ModuleType, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(quantize, x):
        return lambda: quantize(x.flip(0))

    monkeypatch.setattr(quickstart, "compiled", compiled)
    assert quickstart.main(["--rows", "16", "--hidden", "256"]) == 1
    lines = printed(capsys.readouterr().out)
    assert lines["compiled"].endswith("NOT the eager result")
    assert lines["FAILURE:"] == "compiled differs from eager"


@pytest.mark.slow
def test_no_compiler_is_reported(tmp_path: Path) -> None:
    """Check the message if no C++ compiler is found, for a graph with more operations than the op."""
    program = f"""
import os, sys, torch
sys.path.insert(0, {str(EXAMPLES)!r})
for name in ("CXX", "CC"):
    os.environ.pop(name, None)
import quickstart
print(quickstart.compiled(lambda x: (x.sin() + 1, x), torch.ones(8)))
"""
    run = forked(program, PATH=str(tmp_path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("torch.compile finds no C++ compiler here")


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """Write a file with the tensors of a small decoder's first layer, and return its path."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    torch.manual_seed(0)
    tensors = {
        "lm_head.weight": torch.randn(300, 64),
        "model.embed_tokens.weight": torch.randn(200, 64),
        "model.layers.0.input_layernorm.weight": torch.rand(64) + 0.5,
        "model.layers.0.self_attn.q_norm.weight": torch.rand(16) + 0.5,
        "model.layers.0.self_attn.q_proj.weight": torch.randint(0, 9, (900, 64), dtype=torch.uint8),
        "model.layers.0.self_attn.q_proj.bias": torch.randn(64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize(
    ("arguments", "rows", "hidden", "source"),
    [
        ([], 200, 64, "rows of model.embed_tokens.weight, norm weight model.layers.0.input_layernorm.weight"),
        (["--rows", "50"], 50, 64, "rows of model.embed_tokens.weight,"),
        (["--tensor", "lm_head.weight"], 300, 64, "rows of lm_head.weight, norm weight model.layers.0.input_layernorm"),
        (
            ["--weight", "model.layers.0.self_attn.q_proj.bias"],
            200,
            64,
            "norm weight model.layers.0.self_attn.q_proj.bias",
        ),
    ],
    ids=["default", "rows", "tensor", "weight"],
)
def test_model_file(
    quickstart: ModuleType,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    model_file: Path,
    arguments: list[str],
    rows: int,
    hidden: int,
    source: str,
) -> None:
    monkeypatch.setattr(quickstart, "compiled", lambda quantize, x: "not compiled in this test")
    assert quickstart.main(["--model", str(model_file), *arguments]) == 0
    lines = printed(capsys.readouterr().out)
    assert lines["input"].startswith(f"{rows} x {hidden} bfloat16")
    assert source in lines["input"]
    assert lines["compiled"] == "skipped: not compiled in this test"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--weight", "nothing"], "has no fitting norm weight"),
        (["--tensor", "nothing"], "has no fitting norm weight"),
        (["--weight", "model.layers.0.self_attn.q_norm.weight"], "has no matrix with the 16 columns"),
    ],
)
def test_model_file_without_fitting_tensors(
    quickstart: ModuleType, model_file: Path, arguments: list[str], complaint: str
) -> None:
    with pytest.raises(SystemExit, match=complaint):
        quickstart.main(["--model", str(model_file), *arguments])


def test_missing_extra_is_reported(quickstart: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(SystemExit, match="--model needs the module safetensors: install the extra `examples`"):
        quickstart.main(["--model", "model.safetensors"])


def test_missing_file_is_reported(quickstart: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    with pytest.raises(SystemExit, match="No such file"):
        quickstart.main(["--model", str(tmp_path / "no.safetensors")])


@pytest.mark.usefixtures("minilm_modules")
def test_minilm(
    quickstart: ModuleType, hidden_states: ModuleType, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    assert quickstart.main(["--model", "minilm"]) == 0
    lines = printed(capsys.readouterr().out)
    assert lines["input"].startswith("252 x 384 bfloat16: all-MiniLM-L6-v2")
    assert float(re.match(r"[\d.]+", lines["SNR"]).group()) > 20

    text = tmp_path / "text.txt"
    text.write_text("Hello, world!\n\nA second paragraph.\n", encoding="utf-8")
    x, weight, _ = hidden_states.load(quickstart.parse(["--model", "minilm", "--text", str(text)]))
    assert x.shape == (6 + 6, 384)  # tokens: [CLS] hello , world ! [SEP], and [CLS] a second paragraph . [SEP]
    assert weight.shape == (384,)
