"""``tools/first_run.py``: every step runs even if an earlier step fails, and the archive contains all output."""

import json
import sys
import tarfile
from pathlib import Path

import pytest
from support.programs import TOOLS, program_of

SAY = [sys.executable, "-c"]


@pytest.fixture
def program(monkeypatch, tmp_path):
    module = program_of("first_run")
    monkeypatch.setattr(
        module,
        "steps",
        lambda folder: {
            "absent": [str(tmp_path / "no-such-program")],
            "wrong": [*SAY, "print('it broke'); raise SystemExit(3)"],
            "right": [*SAY, f"open({str(folder / 'result.txt')!r}, 'w').write('measured')"],
        },
    )
    return module


def call(program, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["first_run.py", *arguments])
    with pytest.raises(SystemExit) as left:
        program.main()
    return left.value.code


def test_all_steps(program, monkeypatch, tmp_path, capsys):
    assert call(program, monkeypatch, "--output", str(tmp_path / "x")) == "failed: absent, wrong"
    assert "right: done after" in capsys.readouterr().out
    with tarfile.open(tmp_path / "x.tar.gz") as packed:
        names = {name: packed.extractfile(f"x/{name}").read().decode() for name in ("wrong.log", "result.txt")}
        steps = json.loads(packed.extractfile("x/steps.json").read())
    assert names == {"wrong.log": "it broke\n", "result.txt": "measured"}
    assert [step["status"] == 0 for step in steps.values()] == [False, False, True] and steps["wrong"]["status"] == 3
    assert "no-such-program" in steps["absent"]["status"]


def test_commands_exist():
    """Check that the programs that the steps run exist, and that they accept the options that the steps pass."""
    steps = program_of("first_run").steps(Path("x"))
    root = TOOLS.parent
    assert (root / steps["sanitizer"][1]).is_file() and "--logs" in (root / steps["sanitizer"][1]).read_text()
    from benchmarks.__main__ import parse

    options = parse(steps["benchmarks"][3:])
    assert options.sizes == "marks" and options.no_plot and options.output == Path("x/results")
    conftest = (root / "tests" / "conftest.py").read_text()
    assert any(argument.startswith("--gpu-record=") for argument in steps["suite"]) and '"--gpu-record"' in conftest
