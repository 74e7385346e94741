"""Test ``tools/calibrate_ptx.py`` with our own kernels, so that no checkout of CUTLASS is needed."""

from __future__ import annotations

import sys
from typing import Any

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
