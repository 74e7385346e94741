"""Test the output and exit status of `python -m benchmarks compare`."""

import json

import pytest

from benchmarks import __main__ as cli
from benchmarks import compare, host


def row(m, us, others, correct=True, **choices):
    """Return a result row of mm_fp4, in which "ours" and "wgmma" are our variants."""
    variants = {name: {"us": value} for name, value in {"ours": us, "wgmma": us, **others}.items()}
    return {"sizes": {"M": m, "N": 64, "K": 128}, "choices": choices, "variants": variants, "correct": correct}


def folder(path, **results):
    """Write a folder with these result files, as a benchmark run does."""
    path.mkdir()
    for name, result in results.items():
        (path / f"{name}.json").write_text(json.dumps(result))
    return path


def host_result(**times):
    return {"times": {name: {"us": us, "worst_round": us} for name, us in times.items()}, "rows": 1}


@pytest.fixture
def old(tmp_path):
    rows = [
        row(1, 10.0, {"copy": 4.0, "cublas_bf16": 20.0}),
        row(16, 10.0, {"copy": 4.0}),
        row(64, 10.0, {"copy": 4.0}),
        row(256, 10.0, {"copy": 4.0}),
    ]
    timed = host_result(**{host.OP: 8.0, host.RMS_NORM: 6.0, "mm_fp4 op, functional": 9.0})
    return folder(tmp_path / "old", mm_fp4={"op": "mm_fp4", "rows": rows}, host=timed, moe_route={})


def lines(out):
    """Parse the printed table: return the cells of each row, keyed by case."""
    cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|"))
    return {first: rest for first, *rest in cells}


def test_each_case_before_and_after(old, tmp_path, capsys):
    rows = [
        row(1, 9.0, {"copy": 4.4, "cublas_bf16": 20.0}),
        row(16, 10.2, {}),
        row(64, 10.3, {"copy": 4.0}),
        row(1024, 10.0, {"copy": 4.0}),
    ]
    timed = host_result(**{host.OP: 8.0, host.RMS_NORM: 6.3, "mm_fp4 op, functional": 9.1})
    new = folder(tmp_path / "new", mm_fp4={"op": "mm_fp4", "rows": rows}, host=timed, fp8_quantize={})
    assert cli.main(["compare", str(old), str(new)]) == 1
    out = capsys.readouterr().out
    got = lines(out)
    assert got["M=1 N=64 K=128"] == ["10.0", "9.00", "0.900", "1.050", ""]
    assert got["M=16 N=64 K=128"] == ["10.0", "10.2", "1.020", "–", ""]
    assert got["M=64 N=64 K=128"] == ["10.0", "10.3", "1.030", "1.000", "SLOWER"]
    assert got[host.OP] == ["8.00", "8.00", "1.000", "1.050", ""]
    assert got["mm_fp4 op, functional"] == ["9.00", "9.10", "1.011", "1.050", ""]
    assert host.RMS_NORM not in got
    assert "3 cases, geometric mean 0.982, 1 marked." in out
    assert "Only in OLD: M=256 N=64 K=128." in out and "Only in NEW: M=1024 N=64 K=128." in out
    assert "Only in OLD: moe_route." in out and "Only in NEW: fp8_quantize." in out
    assert out.rstrip().endswith("1 cases are slower by more than 2.0%, or wrong.")


def test_a_wrong_result_is_marked_however_fast(old, tmp_path, capsys):
    new = folder(tmp_path / "new", mm_fp4={"op": "mm_fp4", "rows": [row(64, 5.0, {}, correct=False)]})
    assert compare.main([str(old), str(new)]) == 1
    assert lines(capsys.readouterr().out)["M=64 N=64 K=128"][-1] == "WRONG"


def test_nothing_in_common_is_an_error(tmp_path, capsys):
    old, new = folder(tmp_path / "old", mm_fp4={}), folder(tmp_path / "new", host={})
    assert compare.main([str(old), str(new)]) == compare.NOTHING_TO_COMPARE
    assert "no result file of the same name" in capsys.readouterr().err
