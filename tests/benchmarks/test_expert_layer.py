"""Test the results and tables of `python -m benchmarks expert_layer` for each way to compute an expert layer."""

import argparse
import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import torch_cute_ops
from benchmarks import __main__ as cli
from benchmarks import compare, expert_layer, expert_ways, layers, performance, report
from benchmarks import measure as measurements
from benchmarks.expert_ways import DEEPSEEK, GPT_OSS
from torch_cute_ops.nn.experts import SwiGLU

CPU = torch.device("cpu")
SMALL = {
    DEEPSEEK: expert_ways.Model(8, 128, 128, 2, "nvfp4", {"scoring": "sigmoid", "scaling_factor": 2.5}, has_fp8=True),
    GPT_OSS: expert_ways.Model(8, 192, 192, 2, "mxfp4", swiglu=SwiGLU(1.702, 1.0, 0.5), has_bias=True),
}
BIASED = "NVFP4 with biases"
LAYERS = {**SMALL, BIASED: replace(SMALL[DEEPSEEK], has_bias=True, has_fp8=False)}
WAYS = [
    (name, way) for name, model in LAYERS.items() for way in expert_ways.ways_of(model, "uniform", 1, expert_ways.WAYS)
]
LEAST = {"few": {"nvfp4": 0.98, "mxfp4": 0.96}, "few-bf16": 0.9999, "many": 0.998, "many-fp8": 0.998, "bf16": 0.9999}


def pairs(model, row):
    """Route one token with these logits: return its experts and their weights in float64."""
    best = sorted(range(len(row)), key=lambda e: -row[e])[: model.topk]
    if model.scoring:
        scores = [1 / (1 + math.exp(-row[e])) for e in best]
        return [(e, 2.5 * score / sum(scores)) for e, score in zip(best, scores, strict=True)]
    powers = [math.exp(row[e]) for e in best]
    return [(e, power / sum(powers)) for e, power in zip(best, powers, strict=True)]


def by_pairs(model, experts, x, logits):
    """Compute the layer in float64 from the decoded weights, one (token, expert) pair at a time."""
    gate_up, down = (weight.double() for weight in experts.dequantize())
    width = down.shape[-1]
    biases = [
        torch.zeros(()).expand(8, n) if linear.bias is None else linear.bias.view(8, n)
        for linear, n in ((experts.gate_up_proj, 2 * width), (experts.down_proj, model.hidden))
    ]
    alpha, beta, limit, _ = model.swiglu
    limit = math.inf if limit is None else limit
    total = torch.zeros(x.shape, dtype=torch.float64)
    for m, (token, row) in enumerate(zip(x.double(), logits.tolist(), strict=True)):
        for e, weight in pairs(model, row):
            both = gate_up[e] @ token + biases[0][e].double()
            gate, up = both[:width].clamp(max=limit), both[width:].clamp(-limit, limit)
            total[m] += weight * (down[e] @ (gate * torch.sigmoid(alpha * gate) * (up + beta)) + biases[1][e].double())
    return total


@torch.no_grad()
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_way(name, way):
    model = LAYERS[name]
    one = expert_ways.Prepared(model, CPU).way(way, 1)
    x, logits, _ = expert_ways.draw(model, "uniform", 9, 4, CPU)
    want = by_pairs(model, one.experts, x, logits)
    least = LEAST[way][model.scheme] if way == "few" else LEAST[way]
    got = one(x, logits)
    assert got.dtype == torch.bfloat16 and F.cosine_similarity(got.double().flatten(), want.flatten(), 0) > least
    assert (got - want).norm() < 0.3 * want.norm()
    torch.testing.assert_close(
        expert_ways.Decoded(model, one.experts)(x, logits).double(), want, rtol=0, atol=want.abs().max() * 0.02
    )


def test_models():
    """Check the models' published sizes, and the bytes of their weights: 4 bits per element and a scale per 16 or 32
    elements."""
    deepseek, gpt_oss = (expert_ways.MODELS[name] for name in (DEEPSEEK, GPT_OSS))
    assert (deepseek.intermediate, gpt_oss.intermediate) == (256, 2880)
    assert expert_ways.expert_bytes(deepseek, "nvfp4") == 3 * 256 * 7168 * 9 // 16
    assert expert_ways.expert_bytes(deepseek, "fp8_block") == 3 * 256 * 7168 + 3 * 2 * 56 * 4
    assert expert_ways.expert_bytes(gpt_oss, "mxfp4") == 3 * 2880 * 2880 * 17 // 32
    assert expert_ways.WAYS["bf16"].expert_bytes(gpt_oss) == 3 * 2880 * 2880 * 2
    assert expert_ways.WAYS["many-fp8"].expert_bytes(deepseek) == expert_ways.expert_bytes(deepseek, "fp8_block")
    held = expert_ways.random_experts(SMALL[DEEPSEEK], "nvfp4", CPU, 0)
    stored = sum(each.weight.nbytes + each.weight_scale.nbytes for each in (held.gate_up_proj, held.down_proj))
    assert stored == 8 * expert_ways.expert_bytes(SMALL[DEEPSEEK], "nvfp4")


@pytest.mark.parametrize("routing", expert_ways.ROUTINGS)
def test_routing(routing):
    """Check how often each expert is chosen, that a token gets the right number of experts, and that two draws
    differ."""
    model = expert_ways.Model(64, 64, 64, 8, "nvfp4")
    draws = [expert_ways.draw(model, routing, 200, seed, CPU) for seed in range(3)]
    most = []
    for _, logits, used in draws:
        chosen = (torch_cute_ops.moe_route_dense(logits, 8) != 0).nonzero()[:, 1].tolist()
        counts = Counter(chosen)
        assert sum(counts.values()) == 1600 and len(counts) == used
        (expert, count), (_, second) = counts.most_common(2)
        most.append(expert)
        # An expert gets 25 of 200 tokens on average. With Zipf's law, the most popular expert gets nearly all tokens.
        assert {"uniform": count < 60, "zipf": 120 < count < 200, "hot": count == 200}[routing]
        assert second < 60 or routing == "zipf"
    assert len(set(most)) > 1
    again = expert_ways.draw(model, routing, 200, 2, CPU)
    assert torch.equal(again.x, draws[2].x) and not torch.equal(draws[0].x, draws[1].x)


def options(tmp_path, **changed):
    given = {"models": [DEEPSEEK], "tokens": [1, 64], "routing": ["uniform"], "ways": list(expert_ways.WAYS)}
    return argparse.Namespace(**given | changed, output=tmp_path, no_plot=True)


@pytest.fixture
def small(monkeypatch):
    """Replace the models by small ones, and shorten the measurements."""
    monkeypatch.setattr(expert_layer, "MODELS", SMALL)
    monkeypatch.setattr(expert_layer, "ceilings", lambda *_: measurements.Ceilings(2.0))
    monkeypatch.setattr(expert_layer.environment, "collect", lambda device: {"gpu": "made up"})
    monkeypatch.setattr(expert_layer.environment, "headline", lambda found: found["gpu"])
    monkeypatch.setattr(expert_layer, "Settings", lambda budget_ms: measurements.Settings(graph_ms=0.01, budget_ms=0.1))


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_results(small, fake_backend, tmp_path, capsys):
    """Check the number of tokens from which the implementation `many` is faster than `few`. With 1 token, `many` takes
    8 µs and `few` 4 µs; with 64 tokens (16 per expert), `many` takes 16 µs and `few` 32 µs."""
    backend = fake_backend([4.0, 6.0, 8.0, 10.0, 9.0, 32.0, 30.0, 16.0, 20.0, 50.0])
    assert expert_layer.measure_models(options(tmp_path), CPU, backend, l2_bytes=100_000) == 0
    result = json.loads((tmp_path / "expert_layer.json").read_text())
    one, many = result["rows"]
    assert {name: each["us"] for name, each in many["variants"].items()} == pytest.approx(
        {"few": 32, "few-bf16": 30, "many": 16, "many-fp8": 20, "bf16": 50}
    )
    own = 3 * 128 * 128 * 9 // 16
    assert (one["experts"], one["bytes"], one["rows_of_expert"]) == (2, 2 * own, 0.25)
    assert one["variants"]["few"]["floor"] == pytest.approx(2 * own / 2e6)
    assert many["variants"]["bf16"]["floor"] == pytest.approx(8 * 3 * 128 * 128 * 2 / 2e6)
    assert many["variants"]["many-fp8"]["floor"] == pytest.approx(8 * 3 * (128 * 128 + 4) / 2e6)
    assert not one["cosine"] and not one["absent"]
    assert many["cosine"].keys() == set(expert_ways.WAYS) and all(0.97 < each < 1 for each in many["cosine"].values())

    text = (tmp_path / "expert_layer.md").read_text()
    table = [cells(line) for line in text.splitlines() if line[:1] == "|"]
    assert table[0] == ["tokens", "experts", "floor", "few", "few-bf16", "many", "many-fp8", "bf16"]
    floor = report.number(2 * own / 2e6)
    assert table[2] == ["1", "2.0", floor, "4.00", "6.00", "8.00", "10.0", "9.00"] and table[4][:3] == [
        "cosine",
        "",
        "",
    ]
    assert f"## {DEEPSEEK}, nvfp4, uniform" in text
    assert "`few` and `many` cross at 2 tokens of an expert; `few-bf16`" in text and "few_tokens` says 16." in text
    printed = capsys.readouterr().out
    assert f"{DEEPSEEK}, uniform, M = 64: few 32.0, few-bf16 30.0, many 16.0, many-fp8 20.0, bf16 50.0 µs" in printed
    assert text in printed and "| MISSED" not in printed.split("M = 1: time")[1].splitlines()[0]

    ((name, notes, gpu, marks),) = performance.measured(tmp_path)
    assert (name, notes, gpu) == ("expert_layer", "fp4_gated_experts", "made up")
    reached = {mark.name: (mark.value, mark.passed) for mark in marks}
    assert reached[f"{DEEPSEEK}, M = 64: time"] == (pytest.approx(16), True)
    assert reached[f"{DEEPSEEK}, M = 8: time"] == (None, None)
    assert reached[f"{DEEPSEEK}, M ≤ 64: many over many-fp8"] == (pytest.approx(0.8), False)

    slower = json.loads((tmp_path / "expert_layer.json").read_text())
    slower["rows"][1]["variants"]["many"]["us"] *= 1.5
    text, count = compare.compared("expert_layer", result, slower, 0.02)
    assert count == 1 and "8 cases" in text
    (line,) = (line for line in text.splitlines() if "SLOWER" in line)
    assert cells(line) == [f"many, {DEEPSEEK}, uniform, M=64", "16.0", "24.0", "1.500", "1.000", "SLOWER"]


def row(m, experts, times, routing="uniform", model=DEEPSEEK, cosine=()):
    """Return a row of a result file, for experts of 1 MB each."""
    variants = {name: {"us": us} for name, us in times.items()}
    own = {"rows": m, "experts": experts, "bytes": experts * 1e6, "rows_of_expert": m * 8 / 256}
    return {"model": model, "routing": routing, **own, "variants": variants, "cosine": dict(cosine), "absent": {}}


def test_the_time_of_the_same_bytes():
    uniform = {1: (8e6, 20.0), 8: (56e6, 68.0), 512: (256e6, 300.0), 1024: (256e6, 500.0)}
    assert expert_layer.same_bytes_us(uniform, 8, 32e6) == pytest.approx(44)  # between the times of 1 and 8 tokens
    assert expert_layer.same_bytes_us(uniform, 8, 8e6) == pytest.approx(20)
    assert expert_layer.same_bytes_us(uniform, 8, 56e6) == pytest.approx(68)
    assert expert_layer.same_bytes_us(uniform, 1, 8e6) == pytest.approx(20)
    # By interpolation, a call with fewer than 1,024 tokens takes 151 µs to read 128 MB. The time of 1,024 tokens,
    # scaled to 128 MB, is longer, so it is the result.
    assert expert_layer.same_bytes_us(uniform, 1024, 128e6) == pytest.approx(250)
    assert expert_layer.same_bytes_us(uniform, 512, 128e6) == pytest.approx(68 + 232 * 72 / 200)


def test_command(monkeypatch, tmp_path, capsys):
    """Check that the command line's options reach the measurement, and that the command reports a missing GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["expert_layer"]) == 2
    assert "benchmarks expert_layer needs a CUDA GPU" in capsys.readouterr().err
    seen = []
    monkeypatch.setattr(layers, "on_gpu", lambda command, measure, given: seen.append((command, measure, given)) or 0)
    expert_layer.main(["--models", GPT_OSS, "--tokens", "1", "8", "--ways", "few", "many", "--output", str(tmp_path)])
    ((command, measure, given),) = seen
    assert (command, measure) == ("expert_layer", expert_layer.measure_models)
    assert (given.models, given.tokens, given.ways) == ([GPT_OSS], [1, 8], ["few", "many"])
    assert given.routing == ["uniform", "zipf", "hot"] and given.output == tmp_path and not given.no_plot
