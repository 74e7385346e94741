"""Test the report of the benchmark of sums over GPUs, without a GPU."""

from __future__ import annotations

from benchmarks import all_reduce

MEASURED = [
    {"M": 1, "us": {"ours": 5.0, "separate": 10.0, "quantise": 2.0, "one_shot": 8.0}},
    {"M": 8, "us": {"ours": 6.0, "separate": 10.0, "quantise": 2.0}},
    {"M": 64, "us": {"ours": 9.0, "separate": 10.0, "quantise": 2.0}},
]


def test_marks() -> None:
    found = {mark.name: (mark.value, mark.passed) for mark in all_reduce.marks(MEASURED)}
    assert found == {"1 rows, over NCCL": (0.5, True), "64 rows, over NCCL": (0.9, False)}


def test_tables() -> None:
    lines = all_reduce.tables(MEASURED).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert cells == [
        ["1", "5.00", "10.0", "2.00", "8.00", "0.500", "met, ≤ 0.6"],
        ["8", "6.00", "10.0", "2.00", "–", "0.600", "–"],
        ["64", "9.00", "10.0", "2.00", "–", "0.900", "missed, ≤ 0.7"],
    ]


def test_without_gpus() -> None:
    assert all_reduce.main(["--ranks", "8"]) == 2
