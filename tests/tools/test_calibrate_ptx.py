"""Test ``tools/calibrate_ptx.py`` with our own kernels, so that no checkout of CUTLASS is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.programs import TOOLS

from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.select import BACKENDS
from torch_cute_ops.runtime.arch import ARCHS


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(TOOLS)
    import calibrate_ptx

    return calibrate_ptx


def run(tool: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["calibrate_ptx.py", *arguments])
    tool.main()


def test_one_case(tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare the emulator with the reference on one case, and check that a wrong result is reported."""
    run(tool, monkeypatch, "--only", "FP8 by FP8, 32")
    (row, last) = capsys.readouterr().out.splitlines()
    assert row.split()[0] == "sm_90a" and row.endswith("s  exact") and last == "all 1 problems are right"
    monkeypatch.setattr(tool, "by_emulator", lambda case, seed: torch.zeros(case.m, case.problem.n))
    with pytest.raises(SystemExit, match="1 of 1 problems are wrong"):
        run(tool, monkeypatch, "--only", "FP8 by FP8, 32")
    with pytest.raises(SystemExit, match="no case to run has 'nothing'"):
        run(tool, monkeypatch, "--only", "nothing")


def test_cases_are_tactics(tool: Any) -> None:
    """Check that the cases cover every family of wgmma kernels, with tactics that their backends offer."""
    for case in tool.OWN_CASES:
        (backend,) = (one for one in BACKENDS if one.name == case.backend and one.handles(case.problem))
        target = Target(torch.device("cuda"), ARCHS[tool.ARCH], 132)
        assert backend.reason_unsupported(case.problem, target) is None
        assert case.tactic in backend.tactics(case.problem, case.m, target), case.name
    kinds = {(case.backend, case.problem.a.is_fp8, case.problem.b.is_fp4) for case in tool.OWN_CASES}
    assert kinds == {("wgmma", False, True), ("wgmma", True, False), ("wgmma_ss", True, True), ("routed", False, True)}


def test_peers_have_exact_problems(tool: Any) -> None:
    """Check that the problems of other projects' kernels fit their buffers, and that results are not all equal."""
    names = [(case.package, case.arch, case.name) for case in tool.PEER_CASES]
    assert len(set(names)) == len(names)
    for case in tool.PEER_CASES:
        given = case.problem(case.sizes)
        assert len(given.buffers) == len(case.types), case.name
        out = given.buffers[-1]
        assert out.shape == given.expected.shape and out.dtype == given.expected.dtype
        assert len(np.unique(given.expected)) > 20 and (out != given.expected).mean() > 0.5


PEER = "FP8 with fp32 scales 128x128"


@pytest.mark.parametrize(
    ("fails", "result"),
    [
        ({}, "exact (strict)"),
        ({"strict": "Race"}, "exact (standard)"),
        ({"strict": "Race", "standard": "Race"}, "exact (lenient)"),
        ({"strict": "Race", "standard": "Race", "lenient": "bits"}, "100.0% of elements differ"),
    ],
)
def test_a_peer_runs_in_the_strictest_mode(
    tool: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    fails: dict[str, str],
    result: str,
) -> None:
    """Check that a fault leads to the next mode, and that a wrong result in the last mode is reported."""

    def emulate(compiled: Any, given: Any, seed: int | None, mode: str) -> Any:
        if fails.get(mode) == "Race":
            raise tool.EmulationError(f"write of shared memory offset 0x40 in {mode}; CTA 0")
        return tool.Emulated(given.expected ^ (mode in fails), 1.0)

    monkeypatch.setattr(tool, "emulate", emulate)
    monkeypatch.setattr(tool, "compile_peer", lambda folder, case: None)
    arguments = ("--peers", str(tmp_path), "--only", PEER)
    if "lenient" in fails:
        with pytest.raises(SystemExit, match="1 of 1 problems are wrong"):
            run(tool, monkeypatch, *arguments)
    else:
        run(tool, monkeypatch, *arguments)
    row, *_ = capsys.readouterr().out.splitlines()
    assert result in row and "flashinfer" in row


def test_a_peer_that_waits_for_ever(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Check that a kernel with a known fault must have this fault."""

    def emulate(compiled: Any, given: Any, seed: int | None) -> Any:
        raise tool.Deadlock("no thread can run")

    (case,) = (one for one in tool.PEER_CASES if one.hangs)
    monkeypatch.setattr(tool, "compile_peer", lambda folder, case: None)
    monkeypatch.setattr(tool, "emulate", emulate)
    run(tool, monkeypatch, "--peers", str(tmp_path), "--only", case.name)
    assert "waits for ever" in capsys.readouterr().out
    monkeypatch.setattr(tool, "emulate", lambda compiled, given, seed: tool.Emulated(given.expected, 1.0))
    with pytest.raises(SystemExit, match="1 of 1 problems are wrong"):
        run(tool, monkeypatch, "--peers", str(tmp_path), "--only", case.name)


def test_the_page_lists_faults_without_addresses(tool: Any) -> None:
    fault = "Race: write of shared memory offset 0x810, which thread 16 of CTA 0 read unordered"
    rows = [tool.Row(name, "sm_120a", "1×1×1", "exact, lenient", 1.0, True, fault) for name in ("one", "two")]
    lines = tool.page(rows, "Kernels.", "command", None, " here").splitlines()
    assert lines[0] == "# Calibration of the PTX emulator here"
    want = "| Race: write of shared memory offset …, which thread … of CTA … read unordered | 2 | one |"
    assert lines[-1] == want


def test_a_package_is_imported_without_its_init(tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check that ``module_of`` imports a kernel's module and what it imports, but no ``__init__`` above it."""
    from peer_kernels import module_of

    folder = tmp_path / "some_peer" / "inner"
    folder.mkdir(parents=True)
    for one in (folder.parent, folder):
        (one / "__init__.py").write_text("raise RuntimeError('host code')")
    (folder / "kernel.py").write_text("from .helper import VALUE")
    (folder / "helper.py").write_text("VALUE = 3")
    assert module_of(tmp_path, "some_peer.inner.kernel").VALUE == 3
    for name in [one for one in sys.modules if one.startswith("some_peer")]:
        monkeypatch.delitem(sys.modules, name)


def test_peers_run_alone(tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(tool, monkeypatch, str(tmp_path), "--peers", str(tmp_path))
