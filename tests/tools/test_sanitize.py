"""``tools/sanitize.py``, tested with a script instead of compute-sanitizer."""

import os
import sys

import pytest
from support.programs import program_of

SANITIZER = """#!/bin/sh
# Skip the options, each with a value, and run the command after them with the tool in its environment.
TOOL=$2
while [ "${1#--}" != "$1" ]; do shift 2; done
TOOL=$TOOL exec "$@"
"""
TESTS = """
import os

def test_found(): assert os.environ.get("TOOL") != "racecheck"
def test_right(): assert os.environ.get("TOOL") in (None, "racecheck")
"""


@pytest.fixture(scope="session")
def program():
    return program_of("sanitize")


def test_each_test_runs_under_a_tool(program, monkeypatch, tmp_path, capsys):
    """Check that each test runs without and with the tool, that its last line is printed and its output stored, and
    that a failure of the tool fails the run."""
    (tmp_path / "compute-sanitizer").write_text(SANITIZER)
    (tmp_path / "compute-sanitizer").chmod(0o755)
    (tmp_path / "test_two.py").write_text(TESTS)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    arguments = ["--tests", "test_two.py", "--tools", "racecheck", "--logs", str(tmp_path / "logs")]
    monkeypatch.setattr(sys, "argv", ["sanitize.py", *arguments])
    with pytest.raises(SystemExit, match="1 runs failed"):
        program.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    runs = [(name, tool) for tool in ("alone", "racecheck") for name in ("found", "right")]
    assert [line[:2] for line in lines] == [[f"test_two.py::test_{name}", tool] for name, tool in runs]
    assert ["1 failed" in " ".join(line) for line in lines] == [run == ("found", "racecheck") for run in runs]
    logs = {f"test_two.py-test_{name}.{tool}.log" for name, tool in runs}
    assert {path.name for path in (tmp_path / "logs").iterdir()} == logs


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--parts", "3"], ["rmsnorm 1/3", "rmsnorm 2/3", "rmsnorm 3/3"]),
        (["--parts", "60", "--take", "7", "33"], ["rmsnorm 7/60", "rmsnorm 33/60"]),
    ],
)
def test_parts_of_an_op(program, monkeypatch, tmp_path, capsys, options, parts):
    """Check which parts of an op's samples run, each in a process that gets its part as an argument."""
    monkeypatch.setattr(program, "TOOLS", {})
    ran = []
    monkeypatch.setattr(program, "sanitize", lambda run, tool, logs: (ran.append(run), (run.name, True))[1])
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "rmsnorm", *options, "--logs", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 0 and capsys.readouterr().out.splitlines() == parts
    assert sorted(run.command[-1] for run in ran) == sorted(part.split()[1] for part in parts)


@pytest.mark.parametrize("take", ["0", "5"])
def test_a_part_out_of_range(program, monkeypatch, capsys, take):
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "rmsnorm", "--parts", "4", "--take", take])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2 and f"--take is {take}; expected numbers from 1 to 4" in capsys.readouterr().err


def hazard(kind, *accesses):
    lines = (f"=========     {access} Thread ({thread}, 0, 0) at kernel+0x10" for access, thread in accesses)
    return "\n".join(
        (f"========= Error: Potential {kind} hazard detected at __shared__ 0x4 in block (1, 0, 0) :", *lines)
    )


@pytest.mark.parametrize(
    ("hazards", "by_lane_0"),
    [
        ([hazard("RAW", ("Write", 33), ("Read", 64)), hazard("WAR", ("Read", 31), ("Write", 96))], 0),
        ([hazard("RAW", ("Write", 64), ("Read", 33)), hazard("WAR", ("Write", 7), ("Read", 5))], 1),
        ([hazard("WAR", ("Write", 32), ("Read", 65)), hazard("WAR", ("Write", 7), ("Read", 96))], 1),
        ([hazard("WAW", ("Write", 1), ("Write", 34)), hazard("WAW", ("Write", 2), ("Write", 0))], 1),
    ],
)
def test_hazards_after_an_access_by_lane_0_count(program, hazards, by_lane_0):
    """Check that hazards are attributed to a removed warp barrier only if lane 0 made none of the earlier accesses."""
    pair = (
        "========= Error: Race reported between Write access at kernel+0x10\n=========     and Read access [2 hazards]"
    )
    report = "\n".join((*hazards, pair, "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)"))
    line, passed = program.judge_hazards(report)
    assert (line, passed) == (f"2 hazards, {by_lane_0} of them after an access by lane 0", not by_lane_0)


def test_hazards_that_are_not_listed_count(program):
    """Check that a report fails if its summary counts more hazards than it lists."""
    report = hazard("RAW", ("Write", 33), ("Read", 64)) + "\n========= RACECHECK SUMMARY: 3 hazards displayed"
    assert not program.judge_hazards(report)[1]
    assert not program.judge_hazards("========= RACECHECK SUMMARY: 1 hazard displayed")[1]
