"""Check that CONTRIBUTING lists every file that a new op or backend needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.example_scripts import ROOT
from support.gemm_problems import HOPPER, fp4_problem
from support.interpreters import variables_of

import torch_cute_ops
from torch_cute_ops.gemm import select
from torch_cute_ops.registry import OPS

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
OLD, NEW = "fp8_quantize", "fp8_quantize_again"
EXPORTS = {
    "torch_cute_ops/__init__.py": (
        (f"from torch_cute_ops.ops.{OLD} import {OLD}\n", f"from torch_cute_ops.ops.{NEW} import {NEW}\n"),
        (f'    "{OLD}",\n', f'    "{NEW}",\n'),
    ),
    "README.md": ((f"| `{OLD}`", f"| `{NEW}` | the same |\n"),),
    "CHANGELOG.md": ((f"- `{OLD}`", f"- `{NEW}`: the same.\n"),),
}
"""Lines to insert into existing files: (text of the line before, new line), keyed by file."""


@pytest.mark.slow
def test_an_op_is_the_files_of_the_table(tmp_path: Path) -> None:
    """Copy the project, add a renamed ``fp8_quantize`` by following CONTRIBUTING's table, and run the tests of the new
    op."""
    # Copy the bytecode too, so that it need not be compiled: it is valid for sources of equal size and date.
    for folder in ("torch_cute_ops", "tests", "benchmarks", "docs", "examples", "tools", "ptx_emulator"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("results"))
    (tmp_path / "benchmarks" / "results").symlink_to(ROOT / "benchmarks" / "results")  # documents show its pictures
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, tmp_path / name)
    paths = re.findall(r"`([\w/.<>]+)`", "".join(re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE)))
    assert len(paths) == 9
    for path in paths:
        if "<op>" in path:
            old, new = (tmp_path / path.replace("<op>", name) for name in (OLD, NEW))
            new.write_text(re.sub(rf"\b{OLD}\b", NEW, old.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            insert(tmp_path / path, EXPORTS[path])
    documents = ("tests/docs/test_documents.py", "tests/test_package.py")
    of_op = f"({NEW} and not compile)"
    of_documents = "((test_documents.py or test_package.py) and (op or readme) and not (figures or blocks))"
    # in one run, because imports and collection take most of the time
    paths = ("tests/conformance", "tests/docs/test_op_examples.py", "tests/testing", *documents)
    outcome = pytest_in(tmp_path, *paths, "-k", f"{of_op} or {of_documents}")
    assert re.search(r"\d{3,} passed", outcome) and "failed" not in outcome, outcome[-3000:]
    assert all(f"\n{path} ." in outcome for path in documents), outcome


def insert(path: Path, lines: tuple[tuple[str, str], ...]) -> None:
    text = path.read_text(encoding="utf-8")
    for before, new in lines:
        begin = text.index(before)
        end = text.index("\n", begin) + 1
        text = text[:end] + new + text[end:]
    path.write_text(text, encoding="utf-8")


def pytest_in(folder: Path, *arguments: str) -> str:
    environment = variables_of(PYTHONPATH=os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n0", "--assert=plain", *arguments]
    ran = subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return ran.stdout


def test_a_backend_is_a_class_and_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete the backend class in CONTRIBUTING with a launcher, register it, and check that a call finds it by its
    name."""
    (source,) = re.findall(r"```python\n(.*?class Mine.*?)```", TEXT, re.DOTALL)
    defined: dict[str, type] = {}
    exec(source, defined)
    calls = []

    class Working(defined["Mine"]):  # type: ignore[misc, name-defined]
        def reason_unsupported(self, problem: object, target: object) -> None:
            return None

        def launcher(self, problem: object, tactic: object, target: object) -> object:
            return lambda operands, out: calls.append(out)

    problem = fp4_problem()
    assert "mine" not in select.reasons(problem, HOPPER)
    monkeypatch.setattr(select, "BACKENDS", [*select.BACKENDS, Working()])
    assert select.reasons(problem, HOPPER)["mine"] is None
    choice = select.choose(problem, 96, HOPPER, "mine")
    assert (choice.backend.name, choice.tactic) == ("mine", (64,))
    assert torch_cute_ops.backends("mm_fp4", n=256, k=256, device="cpu")["mine"] is None
    assert "mine" not in torch_cute_ops.backends("mm_fp8_block", n=256, k=256, device="cpu")
    weight, scale = torch_cute_ops.fp4_quantize(torch.randn(256, 256))
    # On a CPU, the reference runs instead of the backend.
    torch_cute_ops.mm_fp4(weight[:8], weight.t(), scale[:1], scale, backend="mine")
    launcher = OPS["mm_fp4"].path._choose(problem, 8, HOPPER, "mine").backend.launcher(problem, (64,), HOPPER)
    launcher(None, "out")
    assert calls == ["out"]
