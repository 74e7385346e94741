"""Tests of examples/minilm_nvfp4.py."""

import importlib
import itertools
import math
import re
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from support.example_scripts import rounded, run_main

import torch_cute_ops.nn


@pytest.fixture
def minilm_nvfp4(quickstart: ModuleType) -> ModuleType:
    return importlib.import_module("minilm_nvfp4")


@pytest.fixture
def bert() -> dict[str, torch.Tensor]:
    """Return the tensors of a small BERT with two layers of two heads, and tensors that such files contain but the
    example ignores."""
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
    """Compute BERT's encoder and the mean of its outputs for a sentence without padding, in NumPy and float64."""
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


@pytest.mark.parametrize("activations", ["16bit", "fp4"])
def test_decoded_layer(minilm_nvfp4: ModuleType, device: torch.device, activations: str) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 40).to(device)
    x = torch.randn(2, 3, 96, device=device).bfloat16()
    amax = x.abs().max().float() if activations == "fp4" else None
    layer = minilm_nvfp4.NVFP4Linear.from_float(linear, activations=activations, input_amax=amax)
    rows = x.double().cpu().reshape(6, 96).numpy()
    weight, bias = (tensor.detach().double().cpu().numpy() for tensor in (linear.weight, linear.bias))
    want = (rounded(rows) if activations == "fp4" else rows) @ rounded(weight).T + bias

    with torch.no_grad():
        got, decoded = layer(x), minilm_nvfp4.decoded(layer, x)
    assert (got.dtype, got.shape) == (torch.bfloat16, (2, 3, 40))
    for result, limit in ((got, 2.0**-8), (decoded, 2.0**-20)):  # rounded to bf16, not rounded
        error = result.double().cpu().reshape(6, 40).numpy() - want
        assert np.sqrt((error**2).sum() / (want**2).sum()) < limit
    exact = rows @ weight.T + bias
    # Encoding the weight in NVFP4 changes the result by more than 5 %, which the limits above would detect.
    assert np.sqrt(((want - exact) ** 2).sum() / (exact**2).sum()) > 0.05


@pytest.mark.parametrize("activations", ["16bit", "fp4"])
def test_minilm_layers_are_checked(
    minilm_nvfp4: ModuleType, bert: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, activations: str
) -> None:
    ids, mask = padded(SHORT_TEXTS)
    with torch.no_grad():
        model = minilm_nvfp4.MiniLM(bert)
        in_fp4 = minilm_nvfp4.quantized(model, activations, lambda model: model(ids, mask))
        embeddings, errors = minilm_nvfp4.run_checked(in_fp4, ids, mask)
        assert embeddings.shape == (3, 64)
        assert len(errors) == 12
        assert max(errors.values()) < minilm_nvfp4.MAX_LAYER_ERROR

        op = "mm_fp4" if activations == "fp4" else "mm_fp4_weight_only"
        right = getattr(torch_cute_ops.nn.fp4_linear, op)

        def wrong(a: torch.Tensor, b: torch.Tensor, *args, **kwargs) -> torch.Tensor:
            y = right(a, b, *args, **kwargs)
            y[:, 0] *= 1 if len(b) == 32 else 2  # double column 0 only in layers whose input is wide
            return y

        monkeypatch.setattr(torch_cute_ops.nn.fp4_linear, op, wrong)
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


def test_minilm_minimums(minilm_nvfp4: ModuleType, capsys: pytest.CaptureFixture) -> None:
    cosine, tau, nearest = torch.full((16,), 0.98), torch.full((16,), 0.9), torch.ones(16, dtype=torch.bool)
    minimums = minilm_nvfp4.MINIMUMS["16bit"]
    good = minilm_nvfp4.Comparison(cosine, tau, nearest)
    assert minilm_nvfp4.report(good, good, minimums) == []

    worst, few = cosine.clone(), nearest.clone()
    worst[3], few[:3] = 0.94, False
    problems = minilm_nvfp4.report(minilm_nvfp4.Comparison(worst, tau - 0.1, few), good, minimums)
    assert problems == ["worst cosine 0.94 is below 0.95", "mean tau 0.8 is below 0.82", "nearest 13 is below 14"]
    worst[3] = math.nan
    problems = minilm_nvfp4.report(minilm_nvfp4.Comparison(worst, tau, nearest), good, minimums)
    assert problems == ["mean cosine nan is below 0.97", "worst cosine nan is below 0.95"]


def test_missing_model_is_reported(minilm_nvfp4: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SystemExit, match="the module tokenizers is missing: install the extra `examples`"):
        minilm_nvfp4.main([])


@pytest.mark.usefixtures("minilm_modules")
@pytest.mark.parametrize("activations", ["16bit", "fp4"])
def test_minilm_nvfp4(minilm_nvfp4: ModuleType, capsys: pytest.CaptureFixture, activations: str) -> None:
    out, last = run_main(minilm_nvfp4, capsys, "--activations", activations)
    assert last == "SUCCESS: every check passed"
    rows = re.findall(r"^\S.*  (0\.\d{5}) +(0\.\d{5}) +(0\.\d{3})  (?:same|other)$", out, re.MULTILINE)
    assert len(rows) == 16
    without, cosine, _ = np.array(rows, dtype=float).T
    assert without.min() > 0.9998
    assert float(re.search(r"^mean cosine +NVFP4 (\S+)", out, re.MULTILINE)[1]) == pytest.approx(
        cosine.mean(), abs=2e-5
    )


@pytest.mark.usefixtures("minilm_modules")
def test_minilm_embeddings(minilm_nvfp4: ModuleType, hidden_states: ModuleType) -> None:
    """Compare the model's embeddings with sentence-transformers', and the NVFP4 model's with the decoded model's."""
    tensors, tokenizer = hidden_states.minilm_model()
    ids, mask = minilm_nvfp4.encode(tokenizer, minilm_nvfp4.SENTENCES)
    with torch.no_grad():
        model = minilm_nvfp4.MiniLM(tensors)
        want = model(ids, mask)
        # result of SentenceTransformer.encode in sentence-transformers 6.2.0
        assert want[0, :4].tolist() == pytest.approx([0.106208, -0.027678, -0.035568, 0.121281], abs=1e-5)
        assert (want[0] @ want[1:4].t()).tolist() == pytest.approx([0.65475, 0.00656, 0.02764], abs=1e-5)

        ours = minilm_nvfp4.compare(minilm_nvfp4.quantized(model)(ids, mask), want)
        for linear in minilm_nvfp4.modules(model, torch.nn.Linear).values():
            linear.weight.copy_(torch.from_numpy(rounded(linear.weight.double().numpy())))
        plain = minilm_nvfp4.compare(model(ids, mask), want)
    torch.testing.assert_close(ours.cosine, plain.cosine, rtol=0, atol=2e-3)
    assert plain.cosine.max() < 0.99
