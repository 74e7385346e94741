"""Test the measuring loops: plans, percentiles, and the number and order of runs."""

import pytest

from benchmarks import host, measure
from benchmarks.measure import Settings

L2 = 60 * 2**20


def test_a_plan_is_cold_and_whole():
    for bytes_per_call in (7_000, 32_704, 10**6, 10**8, 6 * 10**9):
        plan = measure.plan(bytes_per_call, 4, L2, Settings())
        assert plan.calls % plan.n_sets == 0 and plan.n_sets >= 2 and 7 <= plan.rounds <= 25
        cold = plan.n_sets * bytes_per_call >= 3 * L2
        assert cold == (plan.rotation_over_l2 >= 3) and (cold or plan.n_sets == Settings().max_sets)
        assert plan.calls * max(2e-6, bytes_per_call / 4e12) >= 2e-3
    assert measure.plan(6 * 10**9, 4, L2, Settings()).n_sets == 2


def test_percentiles():
    assert measure.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert measure.percentile([1.0, 2.0], 0.2) == pytest.approx(1.2)
    assert measure.percentile([5.0], 0.8) == 5.0


def test_variants_take_turns_and_every_set_is_used(fake_backend):
    used = {"a": [], "b": []}
    backend = fake_backend([3.0, 5.0])
    timings = measure.measure({name: used[name].append for name in used}, 4, 8, 3, backend)
    assert (timings["a"].us, timings["b"].us, timings["b"].p20, timings["b"].rounds) == (3.0, 5.0, 5.0, 3)
    assert "".join(backend.log) == "ABABABAB|"
    assert used == {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}
    with pytest.raises(ValueError, match="multiple of n_sets"):
        measure.measure({}, 4, 6, 1, backend)


def test_host_loop_takes_turns_and_counts():
    counts = {"a": 0, "b": 0}

    def count(name):
        counts[name] += 1

    times = host.measure_host({n: lambda n=n: count(n) for n in counts}, lambda: None, rounds=3, chunks=5, chunk=10)
    assert counts == {"a": 160, "b": 160}  # 10 runs to warm up, then 3 · 5 · 10 timed runs
    assert all(0 < t.us <= t.worst_round < 1e3 for t in times.values())
