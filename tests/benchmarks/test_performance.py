"""The result files, and the document of measured against target."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import __main__ as cli
from benchmarks import compare, host, model, ops, performance, report, targets

RESULTS = sorted(performance.RESULTS.glob("*.json"))
by_result = pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def judged_anew(path):
    """The marks of a result file by today's targets."""
    return next(marks for name, _, _, marks in performance.measured(path.parent) if name == path.stem)


# --- files that were written before -----------------------------------------------------------------


@by_result
def test_a_result_file_shows_the_same_numbers_as_when_it_was_written(path):
    """Its rows, as they are rendered today, stand in the Markdown file that was written with it."""
    result, text = read(path), path.with_suffix(".md").read_text(encoding="utf-8")
    if path.stem == "host":
        times = {name: host.HostTime(**time) for name, time in result["times"].items()}
        table = host.markdown(result, host.marks(times, result["first_calls"])).split("\n\n")[3]
    elif path.stem in performance.LAYERS:
        table = performance.LAYERS[path.stem].markdown(result)
    elif path.stem == "model":
        table = model.markdown(result)
    else:
        table = report.results_table(result["rows"])
        assert report.markdown(result, judged_anew(path)).count(table) == 1
    assert table in text


@by_result
def test_marks_have_the_values_that_were_written(path):
    written = {mark["name"]: mark["value"] for mark in read(path)["marks"]}
    anew = {mark.name: mark.value for mark in judged_anew(path)}
    same = written.keys() & anew.keys()
    assert same or not written, "no mark has the name that it had"
    assert {name: anew[name] for name in same} == {name: written[name] for name in same}


@by_result
def test_a_result_is_as_fast_as_itself(path):
    text, marked = compare.compared(path.stem, read(path), read(path), compare.TOLERANCE)
    result = read(path)
    if path.stem == "host":
        count = len(set(result["times"]) - set(host.NOT_OURS))
    elif path.stem in (*performance.LAYERS, "model"):
        count = sum(len(set(row["variants"]) - {"bf16", "humming"}) for row in result["rows"])
    else:
        count = len(result["rows"])
    assert marked == 0 and f"\n{count} cases, geometric mean 1.000, 0 marked." in text


# --- the document ----------------------------------------------------------------------------------


def test_the_document_is_in_step_with_the_results():
    """If this fails: python -m benchmarks performance."""
    assert performance.DOCUMENT.read_text(encoding="utf-8") == performance.document()


def test_what_is_missed_has_notes():
    for name, notes, _, marks in performance.measured(performance.RESULTS):
        for which in {mark.notes or notes for mark in marks if mark.passed is False}:
            assert (performance.ROOT / "docs" / "notes" / f"{which}.md").is_file(), name


@pytest.mark.parametrize("op", ops.names())
def test_notes_are_those_of_a_kernel_family(op):
    assert (performance.ROOT / "torch_cute_ops" / "kernels" / ops.load(op).family / "kernel.py").is_file()


def test_the_document_follows_results_and_targets(tmp_path, monkeypatch):
    for name in ("moe_route.json", "host.json"):
        (tmp_path / name).write_bytes((performance.RESULTS / name).read_bytes())
    result = read(tmp_path / "moe_route.json")
    decode = max(row["variants"]["ours"]["us"] for row in result["rows"] if row["sizes"]["M"] <= 64)
    monkeypatch.setattr(targets, "MOE_DECODE_US", decode + 1)
    output = tmp_path / "performance.md"
    assert cli.main(["performance", "--results", str(tmp_path), "--output", str(output)]) == 0
    text = output.read_text(encoding="utf-8")
    cells = [cell.strip() for cell in re.search(r"^\| moe_route .*$", text, re.MULTILINE).group().split("|")[1:-1]]
    assert cells == [
        *("moe_route", "decode, M ≤ 64: time", f"≤ {decode + 1:g} µs", f"{report.number(decode)} µs", "reached", "")
    ]
    host_marks = read(tmp_path / "host.json")["marks"]
    reached = sum(mark["passed"] for mark in host_marks) + 1
    assert f"{reached} of {len(host_marks) + 1} targets are reached" in " ".join(text.split())
    monkeypatch.setattr(targets, "MOE_DECODE_US", 1.0)
    missed = r"^\| moe_route .*\| MISSED +\| \[moe_route\]\(notes/moe_route\.md\)"
    assert re.search(missed, performance.document(Path(tmp_path)), re.MULTILINE)
