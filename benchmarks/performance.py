"""`python -m benchmarks performance`: write every target with its measured value to `docs/performance.md`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import all_reduce, expert_layer, host, layer, layer_tp, model, model_paged, ops, report
from .case import Mark
from .engines import results as engines

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "performance.md"
HOST_NOTES = "call_path"
"""Name of the file of notes on the host cost of a call."""
LAYERS: dict[str, Any] = {
    "all_reduce_2": all_reduce,
    "expert_layer": expert_layer,
    "layer": layer,
    "layer_tp_2": layer_tp,
    "model_paged": model_paged,
    "vllm": engines,
}
"""Modules of the benchmarks that measure more than one op, except `host` and `model`, by name of the result file."""

TEXT = """\
# Performance against targets

Measured on {gpus}: {reached} of {judged} targets are reached. All targets are for an H200. If a target is missed, the
table links to notes, which explain the limit and the changes that we tried. "Of copy" is the op's bandwidth divided by
the bandwidth of an elementwise copy of the same number of bytes, and "A over B" is A divided by B. `few` and `many` are
the two implementations of an expert layer, for few and for many tokens; `many-fp8` is `many` with FP8 weights.

`benchmarks/results/*.md` contain the times of all sizes and describe the method of measurement. The files in
`benchmarks/results/h100/` contain results of an H100, which has seven tenths of the H200's memory bandwidth.
`benchmarks/results/per_token/layer.md` contains the times of layers with FP4 weights and per-token scales, and
`benchmarks/results/per_token_few_rows/layer.md` later times for up to 256 rows. Whole models (`model`) were measured
before the latest improvements of FP4 layers. `python -m benchmarks performance` writes this file from
`benchmarks/results/*.json` and `benchmarks/targets.py`.

{summary}

{sections}
"""


def measured(results: Path) -> list[tuple[str, str, str, list[Mark]]]:
    """Return the op, the name of the op's notes, the GPU and the targets for each result file. Measured values are
    compared with the current targets, not with the targets at the time of the measurement."""
    found = []
    for path in sorted(results.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if path.stem == "host":
            times = {name: host.HostTime(**time) for name, time in result["times"].items()}
            notes, marks = HOST_NOTES, host.marks(times, result["first_calls"])
        elif path.stem in LAYERS:
            notes, marks = LAYERS[path.stem].NOTES, LAYERS[path.stem].marks(result["rows"])
        elif path.stem == "model":
            notes, marks = model.NOTES, model.marks(result)
        else:
            benchmark = ops.load(path.stem)
            notes, marks = benchmark.family, benchmark.marks(result["rows"])
        found.append((path.stem, notes, result["environment"]["gpu"], marks))
    return found


def document(results: Path = RESULTS) -> str:
    """Return the text of `docs/performance.md`."""
    files = measured(results)
    summary, sections, every = [], [], []
    for name, notes, _, marks in files:
        body = []
        for mark in marks:
            target, value, verdict = report.judged(mark)
            which = mark.notes or notes
            why = f"[{which}](notes/{which}.md)" if mark.passed is False else ""
            body.append([mark.name, target, value, verdict, why])
        plot = f"![{name}: times and bandwidths](../benchmarks/results/{name}.png)\n\n"
        text = plot if (results / f"{name}.png").exists() else ""
        table = report.table(["what", "target", "measured", "", "notes"], body) if body else "There are no targets."
        sections.append(f"## {name}\n\n{text}{table}")
        judged = [mark.passed for mark in marks if mark.passed is not None]
        every += judged
        summary.append([name, f"{sum(judged)} of {len(judged)}"])
    return TEXT.format(
        gpus=" and ".join(sorted({gpu for _, _, gpu, _ in files})),
        reached=sum(every),
        judged=len(every),
        summary=report.table(["op or benchmark", "targets reached"], summary),
        sections="\n\n".join(sections),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks performance", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--output", type=Path, default=DOCUMENT, help="the file to write")
    options = parser.parse_args(arguments)
    options.output.write_text(document(options.results), encoding="utf-8")
    return 0
