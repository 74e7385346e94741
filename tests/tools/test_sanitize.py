"""``tools/sanitize.py``, with a script instead of compute-sanitizer."""

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
    """Run each test alone and under the tool: last lines are reported, outputs kept, and a tool's failure counts."""
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
