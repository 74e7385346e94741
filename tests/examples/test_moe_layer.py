"""The expert layer in NVFP4."""

import importlib
import re
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from support import spec
from support.example_scripts import EXAMPLES, mixed, printed, rows_of_layers, run_main


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
        results.append(mixed(token, scores, chosen, lambda e: (gates[e], ups[e], downs[:, e])))
    return torch.stack(results)


def in_nvfp4(weight: torch.Tensor) -> torch.Tensor:
    """What the numbers of ``weight`` are in NVFP4. Many bf16 numbers are half-way between two of its numbers, so the
    factor has to be right to the bit: rounded once."""
    factor = (np.float32(2688) / weight.float().abs().max().numpy()).item()
    quantised = spec.quantise(weight.float().numpy(), 16, factor)
    return torch.from_numpy(spec.dequantise(quantised.codes, quantised.scales, factor))


@pytest.mark.parametrize("activations", ["fp4", "bf16"])
def test_moe_layer(moe_layer: ModuleType, capsys: pytest.CaptureFixture, activations: str) -> None:
    sizes = ["--experts", "10", "--intermediate", "64"]
    columns = r"(0\.\d{4}) +(0\.\d{4}) +(0\.\d{5})"
    out, rows = rows_of_layers(moe_layer, capsys, columns, "--activations", activations, *sizes)
    before, after = 3 * 10 * 64 * 128 * 2, 3 * 10 * 64 * 128 * 9 // 16
    assert f"{before:,} bytes in bf16, {after:,} as codes and scales: 3.56 times fewer" in out
    for cosine, error, fc2_error in rows:
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
    """The result is that of float64 on the same weights, rounded to NVFP4."""
    layer, x = small_layer(moe_layer)
    in_fp4 = moe_layer.NVFP4Layer(layer, torch.randn(64, 96).bfloat16(), activations)
    router, *others = layer.weights
    decoded = [in_nvfp4(weight) for weight in others]
    error = moe_layer.relative_error(in_fp4(x).double(), expert_by_expert((router, *decoded), x, 3))
    # Activations in NVFP4 cost as much again.
    assert error < (0.02 if activations == "bf16" else 0.3)
    assert moe_layer.relative_error(in_fp4(x).double(), expert_by_expert(layer.weights, x, 3)) > 0.1


@pytest.mark.parametrize("activations", ["fp4", "bf16"])
def test_a_wrong_second_gemm_fails(
    moe_layer: ModuleType, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, activations: str
) -> None:
    """A second GEMM whose factors belong to other experts."""
    name = "moe_fc2_fp4" if activations == "fp4" else "moe_fc2_fp4_weight_only"
    right = getattr(moe_layer.torch_cute_ops, name)

    def wrong(*args, **kwargs) -> torch.Tensor:
        *others, alpha = args
        return right(*others, alpha.roll(1, dims=1), **kwargs)

    monkeypatch.setattr(moe_layer.torch_cute_ops, name, wrong)
    sizes = ["--tokens", "6", "--hidden", "128", "--experts", "10", "--intermediate", "64"]
    _, last = run_main(moe_layer, capsys, "--activations", activations, *sizes, status=1)
    assert last.startswith("FAILURE: 6 tokens: ") and "from float64, more than 0.00390625" in last


@pytest.mark.slow
def test_moe_layer_as_a_script() -> None:
    command = [sys.executable, EXAMPLES / "moe_layer.py", "--tokens", "2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert list(printed(re.sub(r"\n\n", "\n", run.stdout)))[-1] == "SUCCESS:"
