"""``tools/sanitize.py``, with a program in place of compute-sanitizer."""

import os
import sys

import pytest

from support.programs import program_of

SANITIZER = """#!/bin/sh
# Options have a value each. What follows them runs, and knows the tool.
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
    """After it has run alone; the last line of each is reported, and the whole kept; a tool's failure is one."""
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


@pytest.mark.parametrize("more", [["mm_fp4"], ["--only", "wgmma"]], ids=["op", "backend"])
def test_either_tests_or_samples(program, monkeypatch, capsys, more):
    monkeypatch.setattr(sys, "argv", ["sanitize.py", *more, "--tests", "test_two.py"])
    with pytest.raises(SystemExit):
        program.main()
    assert "--tests goes with neither ops nor --only" in capsys.readouterr().err


def test_parts_of_ops(program):
    """Each has a name, and so a log, of its own."""
    runs = program.runs_of_ops(["mm_fp4", "rmsnorm"], 2, "wgmma")
    assert [run.name for run in runs] == [f"{op}.wgmma {i}/2" for op in ("mm_fp4", "rmsnorm") for i in (1, 2)]
    assert [run.command[2:] for run in runs[:2]] == [("mm_fp4", "--part", f"{i}/2", "--only", "wgmma") for i in (1, 2)]
