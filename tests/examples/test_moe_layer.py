"""Tests of examples/moe_layer.py."""

import importlib
import re
from types import ModuleType

import numpy as np
import pytest
import torch
from support import spec
from support.example_scripts import EXAMPLES, printed, rows_of_layers, run_main
from support.interpreters import forked

from torch_cute_ops.nn import experts as layers

CPU = torch.device("cpu")
MODELS = ("deepseek-v3", "gpt-oss")
by_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture
def moe_layer(quickstart: ModuleType) -> ModuleType:
    return importlib.import_module("moe_layer")


def small_layer(moe_layer: ModuleType, name: str, tokens: int = 5) -> tuple[tuple, tuple, torch.Tensor]:
    """Return a model with 3 experts per token, the weights of 8 experts of width 64, and random tokens."""
    model = moe_layer.MODELS[name]._replace(top=3)
    return model, moe_layer.random_weights(model, 128, 8, 64, CPU), torch.randn(tokens, 128).bfloat16()


def expert_by_expert(model: tuple, weights: tuple, x: torch.Tensor) -> torch.Tensor:
    """Compute the layer in float64, one token and one expert at a time."""
    router, up, down, up_bias, down_bias, shared_up, shared_down = (
        None if weight is None else weight.double() for weight in weights
    )
    alpha, beta, limit = model.swiglu

    def expert(token, of_both, of_down, bias=0.0, second_bias=0.0):
        gate, value = (of_both @ token + bias).chunk(2)
        if limit is not None:
            gate, value = gate.clamp(max=limit), value.clamp(min=-limit, max=limit)
        return of_down @ (gate / (1 + (-alpha * gate).exp()) * (value + beta)) + second_bias

    results = []
    for token in x.double():
        logits = router @ token
        chosen = sorted(range(len(router)), key=lambda e: -logits[e])[: model.top]
        scores = 1 / (1 + (-logits).exp()) if "scoring" in model.scoring else logits.exp()
        share = scores * model.scoring.get("scaling_factor", 1.0) / sum(scores[e] for e in chosen)
        biases = [(0.0, 0.0) if up_bias is None else (up_bias[e], down_bias[e]) for e in range(len(router))]
        result = sum(share[e] * expert(token, up[e], down[e], *biases[e]) for e in chosen)
        results.append(result if shared_up is None else result + expert(token, shared_up, shared_down))
    return torch.stack(results)


def quantised(model: tuple, weights: tuple) -> tuple:
    """Return the weights rounded to their format. In NVFP4, gate and up of an expert share a global scale, and each
    layer of a shared expert has a separate global scale. A global scale must be rounded only once, because many bf16
    numbers lie half-way between two NVFP4 numbers."""

    def in_fp4(weight, parts):
        if weight is None:
            return None
        rows = weight.float().flatten(0, -2).numpy().reshape(parts, -1, weight.shape[-1])
        results = []
        for part in rows:
            factor = (np.float32(2688) / np.abs(part).max()).item() if model.block_size == 16 else None
            found = spec.quantise(part, model.block_size, factor)
            results.append(spec.dequantise(found.codes, found.scales, factor))
        return torch.from_numpy(np.stack(results)).view(weight.shape)

    parts = {"up": len(weights.up), "down": len(weights.down), "shared_up": 2, "shared_down": 1}
    return weights._replace(**{name: in_fp4(getattr(weights, name), count) for name, count in parts.items()})


@pytest.mark.parametrize("activations", ["fp4", "bf16"])
@by_model
def test_moe_layer(moe_layer: ModuleType, capsys: pytest.CaptureFixture, name: str, activations: str) -> None:
    sizes = ["--experts", "10", "--intermediate", "128"]
    fmt, bits = {"deepseek-v3": ("nvfp4", 4.5), "gpt-oss": ("mxfp4", 4.25)}[name]
    columns = rf"{activations if activations == 'bf16' else fmt} +(\d\.\d{{5}}) +(0\.\d{{5}})(?: +[\d.]+ +[\d.]+)?$"
    out, rows = rows_of_layers(moe_layer, capsys, columns, "--model", name, "--activations", activations, *sizes)
    elements = 3 * 10 * 128 * 128
    assert f"{2 * elements:,} bytes in bf16, {int(elements * bits / 8):,} as codes and scales" in out
    for cosine, error in rows:
        assert (0.9998 if activations == "bf16" else 0.94) < float(cosine) <= 1
        assert 0.0005 < float(error) < (0.014 if activations == "bf16" else 0.26)


@by_model
def test_many_tokens(moe_layer: ModuleType, capsys: pytest.CaptureFixture, name: str) -> None:
    """Check the largest number of tokens that the example treats as few: 20 with 8 of 10 experts per token, or 40 with
    4 of 10 experts per token."""
    few = {"deepseek-v3": 20, "gpt-oss": 40}[name]
    sizes = ["--tokens", str(few), str(few + 1), "--hidden", "128", "--experts", "10", "--intermediate", "64"]
    out, last = run_main(moe_layer, capsys, "--model", name, *sizes)
    assert last == "SUCCESS: every check passed"
    found = dict(re.findall(r"^ +(\d+) +(\w+) ", out, re.MULTILINE))
    assert found == {str(few): {"deepseek-v3": "nvfp4", "gpt-oss": "mxfp4"}[name], str(few + 1): "fp8"}


def test_as_many_experts_as_columns_of_the_shared_expert(moe_layer: ModuleType, capsys: pytest.CaptureFixture) -> None:
    """Check that the shared expert's layers are not taken for a router, as with the default sizes on a GPU."""
    sizes = ["--tokens", "2", "--hidden", "128", "--experts", "64", "--top", "4", "--intermediate", "64"]
    _, last = run_main(moe_layer, capsys, "--model", "deepseek-v3", *sizes)
    assert last == "SUCCESS: every check passed"


@by_model
def test_no_tokens(moe_layer: ModuleType, capsys: pytest.CaptureFixture, name: str) -> None:
    sizes = ["--tokens", "0", "2", "--hidden", "128", "--experts", "10", "--intermediate", "64"]
    out, last = run_main(moe_layer, capsys, "--model", name, *sizes)
    assert last == "SUCCESS: every check passed"
    assert re.search(r"^ +0 +\w+ +1\.00000 +0\.00000$", out, re.MULTILINE)


@by_model
def test_wide_experts_have_no_few_tokens(moe_layer: ModuleType, capsys: pytest.CaptureFixture, name: str) -> None:
    sizes = ["--tokens", "1", "--hidden", "64", "--experts", "2", "--top", "1", "--intermediate", "1088"]
    out, last = run_main(moe_layer, capsys, "--model", name, *sizes)
    assert last == "SUCCESS: every check passed" and re.search(r"^ +1 +fp8 ", out, re.MULTILINE)


@by_model
def test_the_layer_in_bf16(moe_layer: ModuleType, name: str) -> None:
    model, weights, x = small_layer(moe_layer, name)
    layer = moe_layer.BF16Layer(model, weights)
    assert moe_layer.relative_error(layer(x).double(), expert_by_expert(model, weights, x)) < 0.02
    assert torch.equal(layer.route(x).count_nonzero(1), torch.full((5,), 3))


@pytest.mark.parametrize(("activations", "tokens", "most"), [("bf16", 5, 0.014), ("fp4", 5, 0.26), ("bf16", 60, 0.06)])
@by_model
def test_the_layer_in_fp4(moe_layer: ModuleType, name: str, activations: str, tokens: int, most: float) -> None:
    """Compare the FP4 layer with a float64 computation on weights rounded to its format. A bf16 layer with the FP4
    layer's decoded weights must be close to this computation, too."""
    model, weights, x = small_layer(moe_layer, name, tokens)
    layer = moe_layer.fp4_layer(model, weights, torch.randn(64, 128).bfloat16(), activations)
    assert (moe_layer.activations_of(layer, tokens) == "fp8") == (tokens == 60)
    want = expert_by_expert(model, quantised(model, weights), x)
    assert moe_layer.relative_error(layer(x).double(), want) < most
    assert (
        moe_layer.relative_error(moe_layer.BF16Layer(model, moe_layer.decoded(layer, weights))(x).double(), want) < 0.02
    )
    assert moe_layer.relative_error(want, expert_by_expert(model, weights, x)) > 0.05


@pytest.mark.parametrize("op", ["moe_fc1_fp4", "moe_fc2_fp4"])
def test_a_wrong_gemm_fails(
    moe_layer: ModuleType, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """Check that the script fails if a GEMM gets the weights of other experts."""
    right = getattr(layers, op)

    def wrong(a, w, *args, **kwargs) -> torch.Tensor:
        rows = w.mT
        rolled = rows.roll(1, 0) if w.dim() == 3 else rows.unflatten(1, (10, -1)).roll(1, 1).flatten(1)
        return right(a, rolled.mT, *args, **kwargs)

    monkeypatch.setattr(layers, op, wrong)
    sizes = ["--tokens", "6", "--hidden", "128", "--experts", "10", "--intermediate", "64"]
    _, last = run_main(moe_layer, capsys, *sizes, status=1)
    assert last.startswith("FAILURE: 6 tokens: error ") and last.endswith("is above 0.2")


@pytest.mark.slow
def test_moe_layer_as_a_script() -> None:
    program = f"import runpy; runpy.run_path({str(EXAMPLES / 'moe_layer.py')!r}, run_name='__main__')"
    run = forked(f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); {program}", arguments=["--tokens", "2"])
    assert run.returncode == 0, run.stderr
    assert list(printed(re.sub(r"\n\n", "\n", run.stdout)))[-1] == "SUCCESS:"
