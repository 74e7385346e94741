"""Test the committed result files, and the document that compares them with the targets."""

import json

import pytest

from benchmarks import host, model, performance, report

RESULTS = sorted(performance.RESULTS.glob("*.json"))
by_result = pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def judged_anew(path):
    """Compare the results in a file with the current targets."""
    return next(marks for name, _, _, marks in performance.measured(path.parent) if name == path.stem)


# --- files that were written before -----------------------------------------------------------------


@by_result
def test_a_result_file_shows_the_same_numbers_as_when_it_was_written(path):
    """Check that a result file, rendered today, gives the rows of the Markdown file that was written with it."""
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
    assert same or not written, "every mark was renamed or removed"
    assert {name: anew[name] for name in same} == {name: written[name] for name in same}


# --- the document ----------------------------------------------------------------------------------


def test_the_document_is_in_step_with_the_results():
    """Check that the committed document equals the document generated from the results. If not, run `python -m
    benchmarks performance`."""
    assert performance.DOCUMENT.read_text(encoding="utf-8") == performance.document()


def test_what_is_missed_has_notes():
    for name, notes, _, marks in performance.measured(performance.RESULTS):
        for which in {mark.notes or notes for mark in marks if mark.passed is False}:
            assert (performance.ROOT / "docs" / "notes" / f"{which}.md").is_file(), name
