"""Results of `python -m benchmarks vllm`: rows, targets, report and picture."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import environment, layer, report, targets
from ..case import Mark, at_least, at_most
from .backends import OURS, PEERS
from .engine import Plan
from .kernels import listed
from .outputs import step_seconds
from .processes import Outcome

NOTES = layer.NOTES
OURS_FIRST = "ours"
UNITS = {"decode": ("ms", 1e3), "prefill": ("ms", 1e3), "requests": ("s", 1e6), "start": ("s", 1e6)}
"""Unit of the times in tables, and the unit's length in µs, keyed by part."""
Row = Mapping[str, Any]
"""Times of one measurement: "model", "part", "case", "tokens" (number of tokens that are computed in this time, or
None), "variants" (times in µs by backend) and "absent" (reasons by backend)."""


def times(outcome: Outcome, plan: Plan) -> Iterator[tuple[str, str, int | None, dict[str, Any]]]:
    """Yield part, case, number of tokens and time of each measurement of a process."""
    for each in outcome.of("decode"):
        batch, long, short = each["batch"], each["long"], each["short"]
        time = {"us": step_seconds(long, short, plan.new) * 1e6, "long_s": long, "short_s": short}
        yield "decode", f"decode step, batch {batch}", batch, time
    for each in outcome.of("prefill"):
        tokens, seconds = each["tokens"], each["seconds"]
        yield "prefill", f"prefill, {tokens:,} tokens", tokens, _median(seconds)
    for each in outcome.of("requests"):
        count, at_once = each["count"], plan.options["max_num_seqs"]
        case = f"{count} requests, {plan.request_prompt} in, {plan.request_new} out, {at_once} at once"
        yield "requests", case, count * plan.request_new, _median(each["seconds"])


def _median(seconds: Sequence[float]) -> dict[str, Any]:
    return {"us": statistics.median(seconds) * 1e6, "seconds": list(seconds)}


def add(
    result: dict[str, Any], part: str, case: str, tokens: int | None, backend: str, time: Mapping[str, Any]
) -> None:
    """Add a backend's time to the row of a case. The first time of a case creates the row."""
    for row in result["rows"]:
        if row["case"] == case:
            row["variants"][backend] = dict(time)
            return
    row = {"model": result["model"], "part": part, "case": case, "tokens": tokens}
    result["rows"].append({**row, "variants": {backend: dict(time)}, "absent": {}})


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Sort rows by part. Rows of a part keep their order."""
    return sorted(rows, key=lambda row: list(UNITS).index(row["part"]))


def names_of(rows: Sequence[Row]) -> list[str]:
    """Return the backends that were timed. This package's backends come first."""
    found = {name for row in rows for name in row["variants"]}
    return [name for name in (*OURS, *PEERS) if name in found]


def ratio(row: Row, peer: str, ours: str = OURS_FIRST) -> float | None:
    """Return the time of a peer divided by our time, or None if one of them was not measured."""
    us = {name: each["us"] for name, each in row["variants"].items()}
    return us[peer] / us[ours] if peer in us and ours in us else None


# Targets


def marks(rows: Sequence[Row]) -> list[Mark]:
    """Return the targets with the measured values. Only the random 8B model has targets."""
    found = []
    for row in ordered(rows):
        if row["model"] == "8b":
            found += list(_marks_of(row))
    return found


def _marks_of(row: Row) -> Iterator[Mark]:
    case, part = row["case"], row["part"]
    if part == "decode":
        for ours, peers in targets.VLLM_DECODE.items():
            for peer, goals in peers.items():
                if row["tokens"] in goals:
                    yield at_least(f"{case}: {peer} / {ours}", ratio(row, peer, ours), goals[row["tokens"]])
    elif part == "prefill":
        for ours, goal in targets.VLLM_PREFILL.items():
            if row["tokens"] == targets.VLLM_PREFILL_TOKENS:
                yield at_least(f"{case}: bf16 / {ours}", ratio(row, "bf16", ours), goal)
    elif part == "requests":
        yield at_least(f"{case}: marlin / ours", ratio(row, "marlin"), targets.VLLM_REQUESTS)
    elif "cold" in case:
        us = {name: each["us"] for name, each in row["variants"].items()}
        later = (us["ours"] - us["marlin"]) / 1e6 if {"ours", "marlin"} <= us.keys() else None
        yield at_most(f"{case}: ours − marlin", later, targets.VLLM_COLD_SECONDS, " s")
    else:
        slower = ratio(row, "marlin")
        yield at_most(f"{case}: ours / marlin", None if slower is None else 1 / slower, targets.VLLM_WARM)


# Report

TEXT = """\
vLLM {vllm} with its default compilation and CUDA graphs, without prefix caching; {weights}{options}. Each backend runs
in its own process, alone on the GPU. Times are medians of {repeat}. A decode step is the time of {prompt} input
and {new} output tokens, less the time of the same input and one output token, divided by {steps}. A prefill is an
answer with one token. All requests are sent at once. A start is the time of `vllm.LLM(…)`, without the import of vLLM;
the files were read before. With cold caches, every cache on disk is empty; with warm caches, the same start ran before.
`ours` is this package; `ours_norms` also uses its norms, `ours_fp8` FP8 activations, `ours_fp4` FP4 activations;
`vllm` is vLLM's own choice."""
WEIGHTS = {True: "random NVFP4 weights", False: "the checkpoint's weights"}
AGREEMENT = """\
Before anything was timed, each backend answered the same prompts ({steps} tokens). Answers are compared with the
answers of `{reference}`, up to the first different token. `wrong` counts answers whose first different token is less
likely by more than {gap:g} in the reference{gaps}. The last columns are differences of the log probabilities of the
likeliest tokens. Times of a backend are left out if more than 1 % of its answers are wrong."""


def markdown(result: Mapping[str, Any]) -> str:
    """Return the report: tables of times, ratios, agreement and targets."""
    rows, plan = ordered(result["rows"]), result["settings"]
    versions = result["environment"]
    others = [
        f"{name} {versions[name]}" for name in ("vllm", "transformers", "flashinfer-python") if versions.get(name)
    ]
    text = TEXT.format(
        vllm=versions.get("vllm"),
        weights=WEIGHTS[result["is_random"]],
        options=f"; further arguments {json.dumps(plan['options'])}" if plan["options"] else "",
        repeat=plan["repeat"],
        prompt=plan["prompt"],
        new=plan["new"],
        steps=plan["new"] - 1,
    )
    parts = [
        f"# {result['model']} served by vLLM",
        " · ".join([environment.headline(versions), *others]),
        _filled(text),
    ]
    if rows:
        parts.append(table(rows))
    held = [[name, f"{gib:.2f}"] for name, gib in result["weights_gib"].items() if gib is not None]
    if held:
        parts.append(report.table(["backend", "weights in memory, GiB"], held))
    used = [
        [name, kind, listed(layers)]
        for name, kinds in result.get("kernels", {}).items()  # older files have no kernels
        for kind, layers in kinds.items()
        if layers and name not in result["absent"]
    ]
    if used:
        parts.append(report.table(["backend", "layers", "kernels of quantised layers"], used))
    if result["agreement"]:
        reference = result["reference"]
        gap = result["compared"]["gap"]
        gaps = {name: each.get("gap", gap) for name, each in result["agreement"].items()}
        others = ", ".join(f"`{name}`: {each:g}" for name, each in gaps.items() if each != gap)
        about = AGREEMENT.format(reference=reference, gaps=f" ({others})" if others else "", **result["compared"])
        body = [
            [
                name,
                f"{each['equal']} of {each['answers']}",
                str(each["wrong"]),
                f"{each['mean']:.4f}",
                f"{each['largest']:.3f}",
            ]
            for name, each in result["agreement"].items()
        ]
        header = ["backend", "equal answers", "wrong", "mean difference", "largest"]
        parts.append(f"## Agreement\n\n{_filled(about)}\n\n{report.table(header, body)}")
    notes = [f"- {name}: {count} kernels compiled after the start" for name, count in result["late_kernels"].items()]
    notes += [f"- {name}: {why}" for name, why in (result["absent"] | result["failed"]).items()]
    if notes:
        parts.append("\n".join(notes))
    for batch, each in result["profiles"].items():
        parts.append(f"## Kernels, batch {batch}\n\n{profile_table(each)}")
    judged = marks(rows)
    if judged:
        parts.append(f"## Marks\n\n{report.marks_table(judged)}")
    return "\n\n".join(parts)


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def table(rows: Sequence[Row]) -> str:
    """Return a table with a line per case: the time of each backend, and each peer's time divided by ours."""
    names = names_of(rows)
    peers = [name for name in names if name not in OURS]
    ours = next((name for name in names if name in OURS), OURS_FIRST)
    body = []
    for row in rows:
        unit, us = UNITS[row["part"]]
        found = row["variants"]
        cells = [report.number(found[name]["us"] / us if name in found else None) for name in names]
        ratios = [ratio(row, peer, ours) for peer in peers]
        rate = row["tokens"] / found[ours]["us"] * 1e6 if row["tokens"] and ours in found else None
        body.append(
            [
                row["case"],
                unit,
                *cells,
                *("–" if each is None else f"{each:.2f}" for each in ratios),
                "–" if rate is None else f"{rate:,.0f}",
            ]
        )
    ratio_names = [f"{report.label(peer)} / {report.label(ours)}" for peer in peers]
    header = ["what", "unit", *map(report.label, names), *ratio_names, f"{report.label(ours)} tokens/s"]
    return report.table(header, body)


def profile_table(kernels: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return a table of the kernels with the largest sums of times.

    Args:
        kernels: (launches, µs) by kernel, by backend.
    """
    body = [
        [name, kernel, f"{count:,}", report.number(us)]
        for name, found in kernels.items()
        for kernel, (count, us) in found.items()
    ]
    return report.table(["backend", "kernel", "launches", "µs in all"], body)


def picture(rows: Sequence[Row], path: Path) -> None:
    """Draw the time of a decode step against the batch size, and the other cases as bars: each backend's time divided
    by our time."""
    from matplotlib import pyplot

    from ..plot import COLOURS, MARKERS

    rows, names = ordered(rows), names_of(rows)
    ours = next((name for name in names if name in OURS), OURS_FIRST)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    steps = [row for row in rows if row["part"] == "decode"]
    for i, name in enumerate(names):
        style = {"color": COLOURS.get(name, f"C{i}"), "marker": MARKERS.get(name) or "d", "label": report.label(name)}
        points = [(row["tokens"], row["variants"][name]["us"] / 1e3) for row in steps if name in row["variants"]]
        if points:
            left.plot(*zip(*points, strict=True), markersize=5, linewidth=1.8, **style)
    left.set_xscale("log", base=2)
    left.set_xticks([row["tokens"] for row in steps], [f"{row['tokens']:,}" for row in steps])
    left.minorticks_off()
    left.set_xlabel("batch size")
    left.set_ylabel("ms")
    left.set_ylim(bottom=0)
    left.set_title("Decode step", fontsize=10, loc="left")
    others = [row for row in rows if row["part"] != "decode" and ours in row["variants"]]
    height = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        bars = [(line - i * height, ratio(row, name, ours)) for line, row in enumerate(reversed(others))]
        drawn = [(place, value) for place, value in bars if value is not None]
        if drawn:
            places, values = zip(*drawn, strict=True)
            right.barh(places, values, height, color=COLOURS.get(name, f"C{i}"), label=report.label(name))
    right.set_yticks(
        [line - 0.4 + height / 2 for line in range(len(others))], [row["case"] for row in reversed(others)]
    )
    right.axvline(1, color="#444444", linewidth=1)
    right.set_xlabel(f"time / time of {report.label(ours)}")
    right.set_title(f"Other times over {report.label(ours)} (above 1: ours is faster)", fontsize=10, loc="left")
    for axis in (left, right):
        axis.grid(alpha=0.25)
    left.legend(fontsize=9, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
