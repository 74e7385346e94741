"""`python -m benchmarks compare OLD NEW`: the times of two folders of results, case by case."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import host, layer, ops, report
from .case import Row
from .engines.backends import PEERS

NOT_OURS = {*layer.NOT_OURS, *PEERS}
"""Labels of times that do not run our code, in results of whole layers and models."""
TOLERANCE = 0.02
"""A case is reported as slower if its time increases by more than this fraction."""
NOTHING_TO_COMPARE = 2

ABOUT = """\
Times of this package's ops in µs, before and after, and the ratio of the time after to the time before. "others" is the
median of this ratio over calls whose code did not change: peers and the copy, or torch's own calls on the host. The
ratio therefore shows how much the machine changed."""


@dataclass(frozen=True)
class Times:
    """Measured times of one case, in one of the two result folders."""

    ours: float
    others: Mapping[str, float]
    """Times of variants that do not run our code, by name."""
    is_right: bool = True


@dataclass(frozen=True)
class Line:
    """Times of one case before and after a change."""

    case: str
    before: Times
    after: Times

    @property
    def ratio(self) -> float:
        return self.after.ours / self.before.ours

    @property
    def others(self) -> float | None:
        """Return each peer's new time divided by its old time, as the median over the peers that both results
        contain."""
        both = self.before.others.keys() & self.after.others.keys()
        return statistics.median(self.after.others[x] / self.before.others[x] for x in both) if both else None

    def verdict(self, tolerance: float) -> str:
        """Return the reason why a person should check the case, such as a longer time, or "" if there is none."""
        if not self.after.is_right:
            return "WRONG"
        return "SLOWER" if self.ratio > 1 + tolerance else ""


def cases_of(result: Mapping[str, Any]) -> dict[str, Times]:
    """Return the cases of a result file by name."""
    if "times" in result:  # only host.json contains "times"
        times = {name: time["us"] for name, time in result["times"].items()}
        others = {name: us for name, us in times.items() if name in host.NOT_OURS}
        return {name: Times(us, others) for name, us in times.items() if name not in host.NOT_OURS}
    if "op" not in result:  # true for layer.json, expert_layer.json, model.json and vllm.json
        return chain_cases(result["rows"])
    return {report.case_name(row): times_of(row, ops.load(result["op"]).ways) for row in result["rows"]}


def chain_cases(rows: Sequence[Mapping[str, Any]]) -> dict[str, Times]:
    """Return the times of whole layers and models: one case for each precision or implementation that runs our code.
    Peers such as bf16 are left out."""

    def name(label: str, row: Mapping[str, Any]) -> str:
        size = row["case"] if "case" in row else f"M={row['rows']}"
        return ", ".join((label, row["model"], *filter(None, (row.get("routing"),)), size))

    return {
        name(label, row): Times(
            each["us"], {name: other["us"] for name, other in row["variants"].items() if name in NOT_OURS}
        )
        for row in rows
        for label, each in row["variants"].items()
        if label not in NOT_OURS
    }


def times_of(row: Row, ways: Sequence[str]) -> Times:
    """Return the times in one row of results. `ways` names the variants that run our code, except "ours"."""
    variants = row["variants"]
    others = {name: variants[name]["us"] for name in variants if name not in ("ours", *ways)}
    return Times(variants["ours"]["us"], others, row["correct"] is not False)


def read(folder: Path) -> dict[str, Any]:
    """Read the JSON result files of a folder, and return their contents by file name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def compared(name: str, old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> tuple[str, int]:
    """Compare two results of one op. Return the report, and the number of cases that a person should check."""
    before, after = cases_of(old), cases_of(new)
    lines = [Line(case, before[case], after[case]) for case in before if case in after]
    body = [
        [
            line.case,
            report.number(line.before.ours),
            report.number(line.after.ours),
            f"{line.ratio:.3f}",
            report.fraction(line.others),
            line.verdict(tolerance),
        ]
        for line in lines
    ]
    marked = sum(bool(line.verdict(tolerance)) for line in lines)
    parts = [f"## {name}"]
    if lines:
        mean = statistics.geometric_mean(line.ratio for line in lines)
        parts.append(report.table(["case", "before", "after", "ratio", "others", ""], body))
        parts.append(f"{len(lines)} cases, geometric mean {mean:.3f}, {marked} marked.")
    for where, cases in (("OLD", before.keys() - after.keys()), ("NEW", after.keys() - before.keys())):
        if cases:
            parts.append(f"Only in {where}: {'; '.join(sorted(cases))}.")
    return "\n\n".join(parts), marked


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=__doc__)
    parser.add_argument("old", type=Path, metavar="OLD", help="folder of the results before")
    parser.add_argument("new", type=Path, metavar="NEW", help="folder of the results after")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="mark cases that are slower by more (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    old, new = read(options.old), read(options.new)
    both = [name for name in old if name in new]
    if not both:
        print(f"{options.old} and {options.new} have no result file of the same name.", file=sys.stderr)
        return NOTHING_TO_COMPARE
    print(f"# {options.old} and {options.new}\n\n{ABOUT}")
    every = 0
    for name in both:
        text, marked = compared(name, old[name], new[name], options.tolerance)
        every += marked
        print(f"\n{text}")
    for where, names in (("OLD", old.keys() - new.keys()), ("NEW", new.keys() - old.keys())):
        if names:
            print(f"\nOnly in {where}: {', '.join(sorted(names))}.")
    print(f"\n{every} cases are slower by more than {options.tolerance:.1%}, or wrong.")
    return 1 if every else 0
