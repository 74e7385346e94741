"""Tests of ``chunks``: all cases of an item run, each case draws its own data, and failures name their cases."""

import os
import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import random
import pytest
from support.chunks import each_case

cases = [pytest.param("op", i, id=f"op-{i}") for i in range(5)]
by_chunk = each_case(("op", "number"), cases, lambda op, number: f"{op}-{number // 3 * 3}")


class Counter:
    def __init__(self):
        self.count = 0

    def anew(self):
        self.count = 0


@pytest.fixture(params=["one", "other"])
def counter(request):
    return Counter()


@by_chunk
def test_cases(op, number, counter):
    counter.count += 1
    assert counter.count == 1
    print("drew", op, number, random.random())
    if number == 4:
        pytest.skip("no such case")
    assert number not in (0, 2), f"is {number}\\nand more"


@by_chunk
def test_skips(op, number):
    if number > 2:
        pytest.skip("too large")


@by_chunk
def test_misses_an_error(op, number):
    with pytest.raises(ValueError):
        number != 1 or int("x")


def test_without_cases():
    pass
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Return a function that runs pytest on ``TESTS`` with our conftest and the given options."""
    tests = Path(__file__).parents[1]
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("TEST_SEED", os.environ.get("TEST_SEED", ""))  # the inner pytest changes it
    (pytester.path / "conftest.py").write_text((tests / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers = gpu\n  slow\n  timing\n")
    pytester.makepyfile(test_it=TESTS)
    return lambda *options: pytester.runpytest_inprocess("-rs", *options)


def drawn(result):
    return dict(re.findall(r"^drew (op \d) (\S+)$", result.stdout.str(), re.M))


def test_all_cases_run_and_failures_are_named(run):
    result = run("--seed", "7", "-k", "test_cases and one")
    result.assert_outcomes(failed=1, passed=1, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: 2 of 3 cases failed; one alone: --sample NAME, with the --seed below",
            "E * op-0: AssertionError: is 0",
            "E * op-2: AssertionError: is 2",
        ]
    )
    assert {"op 0", "op 1", "op 2"} <= drawn(result).keys()


def test_a_sample_alone_draws_the_same(run):
    """Check that a case draws the same data alone and in its chunk, and that alone it raises its original error."""
    together = drawn(run("--seed", "7", "-k", "test_cases and one"))
    result = run("--seed", "7", "--sample", "op-2", "-k", "test_cases and one")
    result.assert_outcomes(failed=1, deselected=result.parseoutcomes()["deselected"])
    assert drawn(result) == {"op 2": together["op 2"]} and "cases failed" not in result.stdout.str()
    assert len(set(together.values())) == len(together) >= 3
    assert not set(drawn(run("--seed", "8", "-k", "test_cases and one")).values()) & set(together.values())


def test_a_chunk_is_skipped_if_all_its_cases_are(run):
    result = run("-k", "test_skips")
    result.assert_outcomes(passed=1, skipped=1, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(["SKIPPED * too large"])


def test_an_error_that_is_missed_fails(run):
    """Check that failures raised by pytest itself, such as a missing exception, are reported, although their classes
    are not subclasses of Exception."""
    result = run("-k", "misses")
    result.assert_outcomes(failed=2, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(["E * op-0: Failed: DID NOT RAISE *", "E * op-2: Failed: DID NOT RAISE *"])
    assert "op-1:" not in result.stdout.str()
