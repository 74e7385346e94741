"""Marks, tables, JSON and the plot, from rows made by hand."""

import json

import pytest

from benchmarks import host, ops, report
from benchmarks.case import at_least, at_most

# --- marks ----------------------------------------------------------------------------------------


def row(m, h, **us):
    """A row with the given times, µs; every variant moves as many bytes as the copy."""
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


def other(made, name="H", **choices):
    """`made` with other choices, and its row length called `name`."""
    m, width = made["sizes"].values()
    sizes = {"M": m, name: width}
    return {**made, "sizes": sizes, "choices": choices, "panel": f"{name} = {width}, {' '.join(choices.values())}"}


ROWS = [row(1, 7168, ours=3.0, quack=2.5, copy=2.0), row(32768, 2048, ours=50.0, copy=40.0)]


def test_marks():
    made = [
        row(32768, 2048, ours=10.0, copy=9.5),
        row(131072, 2048, ours=40.0, copy=36.0),
        row(1, 2048, ours=3.0, copy=1.0),  # small: no mark
        row(1, 7168, ours=3.0, quack=2.5, copy=2.0),
        row(128, 7168, ours=3.3, quack=3.0, copy=2.0),
        row(16384, 8192, ours=100.0, quack=140.0, inductor=937.0, copy=90.0),
    ]
    marks = {mark.name: mark for mark in ops.load("rmsnorm_fp4quant").marks(made)}
    assert len(marks) == 8
    assert marks["H=2048, M·H ≥ 2^26: of copy"].value == pytest.approx(0.9)
    assert marks["H=2048, M·H ≥ 2^26: of copy"].passed is False
    assert marks["H=4096, M·H ≥ 2^26: of copy"].passed is None
    assert marks["decode, M ≤ 128, H=7168: time over QuACK's rmsnorm"].value == pytest.approx(1.2)
    assert marks["16384×8192: faster than Inductor"].passed is True
    assert not any("QuACK" in mark.name for mark in ops.load("fp4_quantize").marks(made))


@pytest.mark.parametrize("op", ["add_rmsnorm_fp4quant", "add_rmsnorm_fp4quant_with_norm", "silu_mul_fp4quant"])
def test_marks_of_the_fp4_family(op):
    name = ops.load(op).width
    made = [
        row(2048, 32768, ours=10.0, inductor=12.0, copy=9.3),
        row(4, 7168, ours=3.0, quack=2.4, copy=2.0),
        row(128, 7168, ours=3.3, quack=3.0, copy=2.0),
        row(9363, 7168, ours=70.0, quack=50.0, copy=69.0),
    ]
    marks = {mark.name: mark for mark in ops.load(op).marks([other(each, name) for each in made])}
    assert marks[f"{name}=32768, M·{name} ≥ 2^26: of copy"].passed is True
    decode = "decode, M ≤ 128, H=7168: time over QuACK's rmsnorm with residual"
    assert len(marks) == 6 + (op == "add_rmsnorm_fp4quant") == 6 + (decode in marks)
    if decode in marks:
        assert (marks[decode].value, marks[decode].goal) == (pytest.approx(1.25), "≤ 1.2 ×")
        assert marks[decode].passed is False


@pytest.mark.parametrize("op", ["rmsnorm_fp8quant", "add_rmsnorm_fp8quant", "silu_mul_fp8quant"])
def test_marks_of_the_fp8_family(op):
    name = ops.load(op).width
    column = {"granularity": "block128", "scale_layout": "column"}
    made = [
        other(row(9363, 7168, ours=10.0, copy=9.5), name, granularity="token"),
        other(row(9363, 7168, ours=10.0, inductor=19.0, copy=9.0), name, granularity="block128", scale_layout="row"),
        other(row(9363, 7168, ours=10.0, inductor=19.0, copy=9.3), name, **column),
        other(row(16384, 8192, ours=10.0, inductor=21.0, copy=9.0), name, granularity="token"),
        other(row(1, 7168, ours=2.0, quack=1.0, inductor=2.0, copy=1.0), name, granularity="token"),
        other(row(32, 7168, ours=2.1, inductor=2.0, copy=1.0), name, granularity="token"),
    ]
    marks = {mark.name: (mark.goal, mark.value, mark.passed) for mark in ops.load(op).marks(made)}
    large = f"{name}=7168, M·{name} ≥ 2^26: of copy"
    faster = "faster than Inductor"
    assert len(marks) == 6 + 4 + 4
    assert marks[large] == ("≥ 0.92", pytest.approx(0.95), True)
    assert marks[f"block128 row, {large}"] == ("≥ 0.92", pytest.approx(0.9), False)
    assert marks[f"block128 column, {large}"] == ("≥ 0.92", pytest.approx(0.93), True)
    assert marks[f"tensor, {large}"] == ("≥ 0.92", None, None)
    assert marks[f"16384×8192: {faster}"] == ("≥ 2 ×", pytest.approx(2.1), True)
    assert marks[f"32768×2048: {faster}"] == ("≥ 2 ×", None, None)
    assert marks[f"block128 row, 9363×7168: {faster}"] == ("≥ 2 ×", pytest.approx(1.9), False)
    assert marks[f"1×7168: {faster}"] == ("≥ 1 ×", 1.0, True)
    assert marks[f"32×7168: {faster}"][2] is False


def test_host_marks():
    times = {host.OP: 8.0, host.RMS_NORM: 6.4, host.FUNCTION_OUT: 6.0, host.RAW: 3.4}
    first = [{"first_call_s": 3.5}, {"first_call_s": 0.1}]
    marks = host.marks({name: host.HostTime(us, us) for name, us in times.items()}, first)
    assert [mark.passed for mark in marks] == [True, False, False]
    assert [mark.passed for mark in host.marks({}, [])] == [None, None, None]


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


CHOSEN = [
    other(ROWS[0], granularity="token"),
    other(ROWS[0], granularity="block128", scale_layout="column"),
    other(ROWS[1], granularity="token"),
]


def test_the_table_shows_choices():
    lines = [[cell.strip() for cell in line.split("|")[1:5]] for line in report.results_table(CHOSEN).splitlines()]
    assert lines[0] == ["M", "H", "granularity", "scale layout"]
    assert lines[2:] == [
        ["32,768", "2,048", "token", "–"],
        ["1*", "7,168", "token", "–"],
        ["1*", "7,168", "block128", "column"],
    ]


def test_numbers():
    written = [report.number(x) for x in (None, 0.0, 2.345678, 42.0, 123.45, 12345.6, 0.00012)]
    assert written == ["–", "0", "2.35", "42.0", "123", "12,346", "1.2e-04"]


def test_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib comes with the bench extra")
    from benchmarks.plot import plot

    for some in (ROWS[:1], ROWS, CHOSEN):
        plot(whole_result(some), tmp_path / "op.png")
        assert (tmp_path / "op.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
