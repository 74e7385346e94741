"""Tables for people and JSON for programs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import environment
from .case import Mark, Row

LABELS = {"ours": "ours", "quack": "QuACK", "inductor": "Inductor", "copy": "copy"}


def label(name: str) -> str:
    """A variant's name as people read it."""
    return LABELS.get(name, name)


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up: to the left where a column holds words, else to the right."""
    columns = []
    for title, *cells in zip(header, *body, strict=True):
        width = max(map(len, (title, *cells)))
        words = any(cell[:1].isalpha() for cell in cells)
        rule = "-" * width if words else "-" * (width - 1) + ":"
        columns.append([cell.ljust(width) if words else cell.rjust(width) for cell in (title, rule, *cells)])
    return "\n".join("| " + " | ".join(line) + " |" for line in zip(*columns, strict=True))


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits, thousands apart; an en dash for nothing."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def fraction(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Rows by the last sizes, then by M, those of one size as they were measured."""
    return sorted(rows, key=lambda row: tuple(reversed(list(row["sizes"].values()))))


def variant_names(rows: Sequence[Row]) -> list[str]:
    """Every variant that some row has, in the order of `LABELS`, others last."""
    names = dict.fromkeys(name for row in rows for name in row["variants"])
    return sorted(names, key=lambda name: list(LABELS).index(name) if name in LABELS else len(LABELS))


def results_table(rows: Sequence[Row]) -> str:
    """One line a case: µs of every variant (p20–p80 of ours), TB/s and fractions of ours, ratios to the peers."""
    names = variant_names(rows)
    sizes = list(rows[0]["sizes"]) if rows else []
    choices = list(dict.fromkeys(name for row in rows for name in row["choices"]))
    peers = [name for name in names if name not in ("ours", "copy")]
    header = [*sizes, *(name.replace("_", " ") for name in choices)]
    header += [*(f"{label(n)} µs" for n in names), "p20–p80", "TB/s", "of copy", "of peak"]
    header += [f"{label(n)} / ours" for n in peers] + ["wrong"]
    body = []
    for row in ordered(rows):
        variants, ours = row["variants"], row["variants"]["ours"]
        cells = [f"{value:,}" for value in row["sizes"].values()]
        cells[0] += "" if row["rotation_over_l2"] >= 2.999 else "*"
        cells += [row["choices"].get(name, "–") for name in choices]
        cells += [number(variants[n]["us"]) if n in variants else "–" for n in names]
        cells += [f"{number(ours['p20'])}–{number(ours['p80'])}", f"{ours['tbps']:.2f}"]
        cells += [fraction(ours["of_copy"]), fraction(ours["of_peak"])]
        cells += [f"{variants[n]['us'] / ours['us']:.2f}" if n in variants else "–" for n in peers]
        wrong = number(ours["mismatch"], 2)
        body.append([*cells, wrong if row["correct"] is not False else f"{wrong} WRONG"])
    return table(header, body)


def marks_table(marks: Sequence[Mark]) -> str:
    """One line a mark: goal, measured value, reached or missed."""
    words = {True: "reached", False: "MISSED", None: "not measured"}
    digits = [
        (mark.name, mark.goal, number(mark.value) + (mark.unit if mark.value is not None else "")) for mark in marks
    ]
    return table(
        ["mark", "goal", "measured", ""],
        [[*cells, words[mark.passed]] for cells, mark in zip(digits, marks, strict=True)],
    )


METHOD = """\
Times are medians of one call, replayed from CUDA graphs, L2-cold, variants interleaved (`benchmarks/measure.py`). TB/s:
bytes by formula over time; every variant by its own formula (QuACK writes bfloat16 and does not quantise). `of copy`:
bandwidth over that of an elementwise copy moving as many bytes as ours, in the same rounds; `of peak`: over that of a
2 GiB copy, {peak:.2f} TB/s. `wrong`: the largest fraction of output elements that differ from the eager torch
composition, – where the case is too large to check. Ours runs with its defaults, programmatic dependent launch
included. Inductor: a compile for the very shape, or one per row length with symbolic rows (in the JSON file, per row:
"static", "dynamic"). {star}"""

STAR = "* the sets of this case together are smaller than 3 × L2 ({least:.1f} × at the least), so it is partly warm."


def markdown(result: dict[str, Any], marks: Sequence[Mark]) -> str:
    """The report of one op."""
    rows = result["rows"]
    least = min((row["rotation_over_l2"] for row in rows), default=3.0)
    star = STAR.format(least=least) if least < 2.999 else ""
    facts = ", ".join(f"{name} {value}" for name, value in result["settings"].items())
    absent = sorted(
        {f"{label(n)}: {why}" for row in rows for n, why in row["absent"].items() if "not compiled" not in why}
    )
    failed = [f"{case}: {why}" for case, why in result["failed"].items()]
    return "\n\n".join(
        part
        for part in (
            f"# {result['op']} ({result['sizes']})",
            environment.headline(result["environment"]),
            f"{facts[:1].upper()}{facts[1:]}.",
            METHOD.format(peak=result["peak_copy_tbps"], star=star).strip(),
            results_table(rows) if rows else "No case was measured.",
            "\n".join(f"- {line}" for line in [*result["notes"], *absent, *failed]),
            "## Marks",
            marks_table(marks),
        )
        if part
    )


def write_json(result: dict[str, Any], marks: Sequence[Mark], path: Path) -> None:
    """Write the result, atomically, so that a run cut short leaves the last whole file."""
    temporary = path.with_suffix(".json.part")
    text = json.dumps({**result, "marks": [asdict(mark) for mark in marks]}, indent=1, ensure_ascii=False)
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)
