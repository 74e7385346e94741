"""Test the benchmark of a decoder layer that is divided among GPUs, on two CPU ranks."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.fake_device import FakeDevice
from support.ranks import run_ranks

from benchmarks import layer, layer_tp, performance
from benchmarks.measure import Settings

CPU = torch.device("cpu")
WHOLE = layer.Widths(hidden=128, qkv=640, attention=512, intermediate=384)
EXACT = {"W4A16": 0.9999, "W4A4": 0.97}


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + layer.EPS) * weight.double()


def summed(x):
    dist.all_reduce(x)
    return x


def expected(one, x, total):
    """Compute the partial sums and the residual of a rank's shard in float64, with the decoded weights."""
    weights = {name: linear.dequantize().double() for name, linear in one.linears.items()}
    total = total.double() + summed(x.double())
    qkv = norm(total, one.norms[0]) @ weights["qkv"].t()
    o = qkv.flatten()[: len(x) * 256].view(len(x), 256) @ weights["o"].t()
    total = total + summed(o)
    gate, up = (norm(total, one.norms[1]) @ weights["gate_up"].t()).chunk(2, -1)
    return (F.silu(gate) * up) @ weights["down"].t(), total


@torch.no_grad()
def check_layers(rank):
    own = layer_tp.shard(WHOLE, 2)
    for label, least in EXACT.items():
        chain = layer_tp.make_chain(layer_tp.PRECISIONS[label], own, 2, CPU)
        for rows in (1, 5):
            inputs = layer_tp.Inputs(rows, 128, CPU, None)
            out = torch.full((2, rows, 128), torch.nan, dtype=torch.bfloat16)
            written = layer_tp.adding_up(chain, layer_tp.nccl, o=out[0], down=out[1])
            for one in (chain[0], layer_tp.adding_up(chain, layer_tp.nccl)[0], written[0]):
                residual = inputs.residual.clone()
                got = one(inputs.x.clone(), residual)
                for a, b in zip((got, residual), expected(one, inputs.x, inputs.residual), strict=True):
                    assert F.cosine_similarity(a.double().flatten(), b.flatten(), 0) > least, (label, rows)
            assert got.data_ptr() == out[1].data_ptr() and out.isfinite().all()
    assert chain[1].following is chain[0] and layer_tp.agreed(rank) == [0, 1]
    first, other = layer_tp.agreed(chain[0].linears["o"].weight.sum().item())
    assert first != other


def test_layers():
    """Compare one rank's layers, with sums by our op and by an all-reduce, with a float64 computation."""
    run_ranks(2, check_layers)


def measure(rank, path):
    """Measure with stand-ins for symmetric memory and for torch's one-shot all-reduce."""
    layer_tp.symmetric_memory = lambda rows, hidden, _: torch.empty(3, rows, hidden, dtype=torch.bfloat16)
    layer_tp.one_shot = lambda x: layer_tp.nccl(x.clone())
    backend, settings = FakeDevice([150.0, 240.0, 180.0]), Settings(graph_ms=0.01, budget_ms=0.1)
    rows = layer_tp.measure_ranks(WHOLE, (1, 64), ("W4A4", "W4A16"), CPU, backend, 100_000, settings)
    if rank == 0:
        environment = {"gpu": "made up", "torch": "2", "cuda": "13", "date": ""}
        layer_tp.save({"ranks": 2, "environment": environment, "rows": rows}, path)


def test_results(tmp_path):
    """Check a whole run on two ranks, in which graphs take 150, 240 and 180 µs."""
    run_ranks(2, measure, tmp_path)
    result = json.loads((tmp_path / "layer_tp_2.json").read_text())
    same = {"differ": 0.0, "cosine": pytest.approx(1.0), "ranks_equal": True}
    for row in result["rows"]:
        assert row["sums_equal"] and layer_tp.is_right(row) and not row["absent"]
        assert row["results"] == {"fused": same, "separate": same, "one_shot": same}
        times = {way: each["us"] * row["layers"] for way, each in row["variants"].items()}
        assert times == pytest.approx({"fused": 150.0, "separate": 240.0, "one_shot": 180.0})
    assert [(row["precision"], row["rows"]) for row in result["rows"]] == [
        *(("W4A4", 1), ("W4A4", 64), ("W4A16", 1), ("W4A16", 64))
    ]
    ((_, notes, _, marks),) = performance.measured(tmp_path)
    assert notes == "all_reduce" and [mark.value for mark in marks] == pytest.approx([1.6, 1.6])
    assert [mark.name for mark in marks] == [f"70B, 2 GPUs, W4A4, {rows} rows: NCCL / ours" for rows in (1, 64)]
    body = [line for line in (tmp_path / "layer_tp_2.md").read_text().splitlines() if line.startswith("|")]
    cells = [cell.strip() for cell in body[2].strip("|").split("|")]
    assert cells[:2] == ["W4A4", "1"] and cells[5:] == ["1.600", "1.200", "0.00%", "equal"]


@torch.no_grad()
def compare(rank):
    """Compare the way `one_shot`, first with wrong sums on both ranks, then with an error on one rank."""

    def fails(x):
        if rank == 1:
            raise RuntimeError("no peer access")
        return x

    chain = layer_tp.make_chain(layer_tp.DividedW4A16, layer_tp.shard(WHOLE, 2), 2, CPU)
    inputs = layer_tp.Inputs(3, 128, CPU, torch.empty(3, 3, 128, dtype=torch.bfloat16))
    for sum_up, error in ((torch.clone, {}), (fails, {"one_shot": "RuntimeError: no peer access"})):
        layer_tp.one_shot = sum_up
        results, absent = layer_tp.compared(layer_tp.runs_of(chain, inputs), inputs)
        assert absent == error and results["fused"]["differ"] == 0
        if not error:
            wrong = results["one_shot"]
            assert wrong["differ"] > 0.9 and wrong["cosine"] < 0.9 and not wrong["ranks_equal"]


def test_ways_that_differ():
    run_ranks(2, compare)


def test_widths():
    own = layer_tp.shard(layer.MODELS["70B"], 2)
    assert own.shapes == {"qkv": (5120, 8192), "o": (8192, 4096), "gate_up": (28672, 8192), "down": (8192, 14336)}
    with pytest.raises(ValueError, match=r"^3 ranks cannot divide Widths"):
        layer_tp.shard(layer.MODELS["70B"], 3)


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ({}, True),
        ({"sums_equal": False}, False),
        ({"sums_equal": False, "ranks": 4}, True),
        ({"results": {"fused": {"cosine": 0.5, "ranks_equal": True}}}, False),
        ({"results": {"fused": {"cosine": 1.0, "ranks_equal": False}}}, False),
    ],
)
def test_wrong_results(change, right):
    row = {"ranks": 2, "sums_equal": True, "results": {"fused": {"cosine": 0.999, "ranks_equal": True}}}
    assert layer_tp.is_right(row | change) is right


def test_without_gpus():
    assert layer_tp.main(["--ranks", "8"]) == 2
