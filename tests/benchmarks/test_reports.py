"""Test the comparison with targets, tables, JSON and the plot, with rows made by hand."""

import json

from benchmarks import host, ops, report
from benchmarks.case import at_least, at_most

# --- marks ----------------------------------------------------------------------------------------


def row(m, h, **us):
    """Return a result row with the given times in µs. Every variant moves as many bytes as the copy."""
    variants = {
        name: {
            "us": value,
            "p20": value,
            "p80": value,
            "tbps": m * h * 2.5625 / value * 1e-6,
            "of_copy": us["copy"] / value,
            "of_peak": 0.5,
            "mismatch": None,
        }
        for name, value in us.items()
    }
    return {
        "sizes": {"M": m, "H": h},
        "choices": {},
        "panel": f"H = {h}",
        "bytes": int(m * h * 2.5625),
        "rotation_over_l2": 1.8 if m == 1 else 3.1,
        "variants": variants,
        "absent": {},
        "correct": None,
    }


ROWS = [row(1, 7168, ours=3.0, quack=2.5, copy=2.0), row(32768, 2048, ours=50.0, copy=40.0)]


def test_host_marks():
    times = {host.OP: 8.0, host.RMS_NORM: 6.4, host.FUNCTION_OUT: 6.0, host.RAW: 3.4}
    first = [{"first_call_s": 3.5}, {"first_call_s": 0.1}]
    marks = host.marks({name: host.HostTime(us, us) for name, us in times.items()}, first)
    assert [mark.passed for mark in marks] == [True, False, False, True]
    assert [mark.passed for mark in host.marks({}, [])] == [None] * 4


# --- reports --------------------------------------------------------------------------------------


def whole_result(result_rows, op="rmsnorm_fp4quant"):
    environment = {"gpu": "a GPU", "torch": "2", "cuda": "13", "date": "2026-01-01", "triton": None}
    return {
        "op": op,
        "sizes": "quick",
        "settings": {"dtype": "bfloat16"},
        "environment": environment,
        "peak_copy_tbps": 4.3,
        "notes": [],
        "failed": {"M=9 H=16": "skipped: no memory"},
        "rows": report.ordered(result_rows),
    }


def test_report_files(tmp_path):
    result = whole_result(ROWS)
    marks = [*ops.load("rmsnorm_fp4quant").marks(ROWS), at_least("a", 0.5, 0.9), at_most("b", 0.5, 0.9, " s")]
    report.write_json(result, marks, tmp_path / "op.json")
    read = json.loads((tmp_path / "op.json").read_text())
    assert read["rows"] == json.loads(json.dumps(result["rows"])) and read["marks"][-1]["passed"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["op.json"]
    text = report.markdown(result, marks)
    assert "MISSED" in text and "reached" in text and "not measured" in text and "skipped: no memory" in text
    lines = report.results_table(result["rows"]).splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    assert "| 32,768 | 2,048 |" in lines[2] and "0.800" in lines[2] and "|     1* | 7,168 |" in lines[3]


def test_numbers():
    written = [report.number(x) for x in (None, 0.0, 2.345678, 42.0, 123.45, 12345.6, 0.00012)]
    assert written == ["–", "0", "2.35", "42.0", "123", "12,346", "1.2e-04"]
