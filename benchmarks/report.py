"""Write the results of a benchmark as Markdown tables and as JSON files."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch_cute_ops.runtime import files

from . import environment
from .case import Case, Mark, Row

LABELS = {
    "ours": "ours",
    "wgmma": "wgmma",
    "mma_sync": "mma_sync",
    "cublas": "cublas",
    "humming": "humming",
    "humming_w4a8": "humming W4A8",
    "humming_w4a16": "humming W4A16",
    "marlin": "Marlin",
    "quack": "QuACK",
    "plain": "without row scales",
    "inductor": "Inductor",
    "cublas_bf16": "cuBLAS bf16",
    "fill": "fill",
    "deep_gemm": "DeepGEMM",
    "torch": "torch",
    "vllm": "vLLM",
    "copy": "copy",
}


def label(name: str) -> str:
    """Return the label that tables and pictures show for a variant."""
    return LABELS.get(name, name)


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. Columns of words are left-aligned, and columns of numbers are right-aligned."""
    columns = []
    for title, *cells in zip(header, *body, strict=True):
        width = max(map(len, (title, *cells)))
        words = any(cell[:1].isalpha() for cell in cells)
        rule = "-" * width if words else "-" * (width - 1) + ":"
        columns.append([cell.ljust(width) if words else cell.rjust(width) for cell in (title, rule, *cells)])
    return "\n".join("| " + " | ".join(line) + " |" for line in zip(*columns, strict=True))


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` significant digits and thousands separators; format None as an en dash."""
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
    """Sort rows by their sizes: by the last size first, and by the first size, M, last. Rows of equal sizes keep their
    order."""
    return sorted(rows, key=lambda row: tuple(reversed(list(row["sizes"].values()))))


def grouped(
    rows: Sequence[Mapping[str, Any]], title: Callable[[Mapping[str, Any]], str]
) -> dict[str, list[Mapping[str, Any]]]:
    """Group rows by panel title. Panels appear in the order of their first rows."""
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault(title(row), []).append(row)
    return panels


def variant_names(rows: Sequence[Row]) -> list[str]:
    """Return the names of all variants in the order of `LABELS`. Names that `LABELS` does not contain are our backends.
    They follow "ours"."""
    names = dict.fromkeys(name for row in rows for name in row["variants"])
    return sorted(names, key=lambda name: list(LABELS).index(name) if name in LABELS else 0.5)


def multiplies(rows: Sequence[Row]) -> bool:
    """Check whether the rows contain rates in TFLOP/s, which only the rows of GEMMs do."""
    return any(row.get("flops") for row in rows)


def case_name(row: Row) -> str:
    """Return the name of the case that a row of results belongs to, in the format of `str(case)`."""
    return str(Case(row["sizes"], choices=row["choices"]))


def choices_of(rows: Sequence[Row]) -> list[str]:
    """Return the names of all choices that at least one row contains."""
    return list(dict.fromkeys(name for row in rows for name in row["choices"]))


def results_table(rows: Sequence[Row]) -> str:
    """Return a table with one line per case. A line gives the time of every variant in µs, the 20th and 80th
    percentiles of our time, and each peer's time divided by ours. It also gives our bandwidth, or for a GEMM our rate,
    and the fraction of the ceiling."""
    names = variant_names(rows)
    sizes = list(rows[0]["sizes"]) if rows else []
    choices = choices_of(rows)
    peers = [name for name in names if name not in ("ours", "copy")]
    header = [*sizes, *(name.replace("_", " ") for name in choices)]
    header += [*(f"{label(n)} µs" for n in names), "p20–p80", "TB/s", "of copy", "of peak"]
    header += ["of read", "TFLOP/s", "of bf16"] if multiplies(rows) else []
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
        if multiplies(rows):
            cells += [fraction(ours["of_read"]), number(ours["tflops"]), fraction(ours["of_bf16"])]
        cells += [f"{variants[n]['us'] / ours['us']:.2f}" if n in variants else "–" for n in peers]
        wrong = number(ours["mismatch"], 2)
        body.append([*cells, wrong if row["correct"] is not False else f"{wrong} WRONG"])
    return table(header, body)


def rates_table(rows: Sequence[Row]) -> str:
    """Return a table with one line per case of a GEMM. A line gives the rate of every variant in TFLOP/s, and in
    brackets this rate divided by cuBLAS's rate."""
    names = [name for name in variant_names(rows) if name != "copy"]
    choices = choices_of(rows)
    body = []
    for row in ordered(rows):
        cells = [f"{value:,}" for value in row["sizes"].values()]
        cells += [row["choices"].get(name, "–") for name in choices]
        for name in names:
            rates = row["variants"].get(name)
            cells.append(f"{number(rates['tflops'])} ({fraction(rates['of_bf16'])})" if rates else "–")
        body.append(cells)
    return table([*rows[0]["sizes"], *choices, *map(label, names)], body)


def wrong_results(rows: Sequence[Row]) -> list[str]:
    """Return one line for each variant, except ours, that computed a wrong result. The line gives the largest fraction
    of wrong elements, and the cases."""
    lines = []
    for name in variant_names(rows):
        wrong = [row for row in rows if name != "ours" and row["variants"].get(name, {}).get("correct") is False]
        if wrong:
            most = max(row["variants"][name]["mismatch"] for row in wrong)
            where = "; ".join(map(case_name, wrong[:4]))
            more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            lines.append(f"{label(name)}: up to {most:.1%} of the elements differ, at {where}{more}")
    return lines


def marks_table(marks: Sequence[Mark]) -> str:
    """Return a table with one line per target: the target, the measured value, and whether the target is reached."""
    return table(["mark", "target", "measured", ""], [[mark.name, *judged(mark)] for mark in marks])


def judged(mark: Mark) -> tuple[str, str, str]:
    """Return three cells of a table: the target, the measured value, and a word that says whether the target is
    reached."""
    words = {True: "reached", False: "MISSED", None: "not measured"}
    return mark.goal, number(mark.value) + (mark.unit if mark.value is not None else ""), words[mark.passed]


METHOD = """\
Each time is the median time of one call. Calls are replayed from CUDA graphs with a cold L2, and variants are timed in
turns (`benchmarks/measure.py`). TB/s is the number of bytes that a variant must move, computed by a formula for each
variant, divided by the variant's time. `of copy` is our bandwidth divided by the bandwidth of an elementwise copy that
moves the same number of bytes, timed in the same rounds. `of peak` is our bandwidth divided by the bandwidth of a 2 GiB
copy, {peak:.2f} TB/s. {rates}`wrong` is the largest fraction of output elements that differ from the result of eager
torch, or – if the case is too large to check. Our op runs with its defaults, which include programmatic dependent
launch. {about} {star}"""

RATES = """\
`of read` is our bandwidth divided by the bandwidth of reading 4 GiB, {read} TB/s. `of bf16` is our rate divided by the
rate of cuBLAS with bfloat16 matrices of 8,192 × 8,192, {bf16} TFLOP/s. """

STAR = "* the buffer sets of this case are together smaller than 3 × L2 (at least {least:.1f} ×), so L2 is partly warm."


def markdown(result: dict[str, Any], marks: Sequence[Mark]) -> str:
    """Return the Markdown report of one op."""
    rows = result["rows"]
    least = min((row["rotation_over_l2"] for row in rows), default=3.0)
    star = STAR.format(least=least) if least < 2.999 else ""
    settings = ", ".join(f"{name} {value}" for name, value in result["settings"].items())
    absent = sorted(
        {f"{label(n)}: {why}" for row in rows for n, why in row["absent"].items() if "not compiled" not in why}
    )
    failed = [f"{case}: {why}" for case, why in result["failed"].items()]
    rates = ""
    if multiplies(rows):
        read, bf16 = number(result.get("peak_read_tbps")), number(result.get("bf16_tflops"))
        rates = RATES.format(read=read, bf16=bf16)
    about = result.get("about", "")
    method = METHOD.format(peak=result["peak_copy_tbps"], rates=rates, about=about, star=star)
    method = textwrap.fill(" ".join(method.split()), 120, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(
        part
        for part in (
            f"# {result['op']} ({result['sizes']})",
            environment.headline(result["environment"]),
            f"{settings[:1].upper()}{settings[1:]}.",
            method,
            results_table(rows) if rows else "No case was measured.",
            "\n".join(f"- {line}" for line in [*result["notes"], *absent, *wrong_results(rows), *failed]),
            f"TFLOP/s, and the fraction of cuBLAS's bfloat16 rate:\n\n{rates_table(rows)}" if rates else "",
            f"## Marks\n\n{marks_table(marks)}" if marks else "",
        )
        if part
    )


def write_json(result: dict[str, Any], marks: Sequence[Mark], path: Path) -> None:
    """Write the result to a JSON file. The file is replaced as a whole, so that an aborted run leaves a complete
    file."""
    text = json.dumps({**result, "marks": [asdict(mark) for mark in marks]}, indent=1, ensure_ascii=False)
    files.replace(path, f"{text}\n".encode())
