"""Test the timing and table of ``python -m benchmarks tactics``."""

import json

import pytest
from support.gemm_problems import HOPPER, fp8_problem

from benchmarks import tactics
from torch_cute_ops.gemm import tune
from torch_cute_ops.runtime.tuner import Candidate

FAST, SLOW, WRONG, HOPELESS = (Candidate("wgmma", (16, 128, splits)) for splits in (1, 2, 3, 4))
ESTIMATES = {SLOW: 2e-6, FAST: 3e-6, WRONG: 2.5e-6, HOPELESS: 9e-6, Candidate("reference", ()): float("inf")}


class FakeBench:
    """Simulated measurement with given times, in which one candidate's result is wrong."""

    freed = False

    def check(self, candidate):
        return "2 of 8 elements are off" if candidate == WRONG else None

    def time(self, candidates):
        assert WRONG not in candidates
        return {candidate: {SLOW: 6e-6, FAST: 4e-6}[candidate] for candidate in candidates}

    def free(self):
        self.freed = True


@pytest.fixture
def bench(monkeypatch):
    bench = FakeBench()
    monkeypatch.setattr(tune, "estimates", lambda problem, m, target: ESTIMATES)
    monkeypatch.setattr(tune, "bench_of", lambda problem, m, target: bench)
    return bench


def test_the_fastest_comes_first(bench):
    """Check that the fastest tactic is listed first, that tactics with slow estimates are left out, and that wrong
    tactics get no time."""
    rows = tactics.timed(fp8_problem(), 8, HOPPER, within=4.0)
    assert [(row.candidate, row.seconds, row.wrong) for row in rows] == [
        (FAST, 4e-6, None),
        (SLOW, 6e-6, None),
        (WRONG, None, "2 of 8 elements are off"),
    ]
    assert bench.freed


def test_the_table(bench):
    """Check that the table marks the tactic with the smallest estimate as the cost model's choice."""
    text = tactics.markdown(tactics.timed(fp8_problem(), 8, HOPPER, within=4.0))
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]] == [
        ["wgmma 16 × 128 × 1", "4.00", "1.000", "3.00"],
        ["**wgmma 16 × 128 × 2**", "6.00", "1.500", "2.00"],
        ["wgmma 16 × 128 × 3", "2 of 8 elements are off", "–", "2.50"],
    ]


def test_a_gpu_is_needed(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert tactics.main(["mm_fp8_block", "--n", "4096", "--k", "4096", "--m", "1"]) == 2
    assert "python -m benchmarks tactics needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, capsys):
    """Check that every tactic of a small GEMM gives a correct result and gets a time."""
    path = tmp_path / "tactics.json"
    assert tactics.main([*["mm_fp8_block", "--n", "256", "--k", "256", "--m", "8", "--json"], str(path)]) == 0
    table = capsys.readouterr().out
    assert "mm_fp8_block n=256 k=256 m=8" in table and "**" in table
    (call,) = json.loads(path.read_text())["calls"]
    assert len(call["tactics"]) > 1
    for each in call["tactics"]:
        assert each["wrong"] is None and 1e-6 < each["seconds"] < 1e-3 and each["estimate"] > 0
