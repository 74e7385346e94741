"""`python -m benchmarks tactics`: measure every tactic of a GEMM, and print the time next to the cost model's estimate.

The constants of the cost model in `torch_cute_ops.gemm.backends` are fitted to these times. Calls are named as for
`python -m torch_cute_ops tune`, for example `mm_fp8_block --n 4096 --k 14336 --m 1 16 64`. As in tuning, operands are
random, L2 is cold, and calls are replayed from a CUDA graph. In the packed layout, rows belong to random experts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_cute_ops.cli.jobs import UsageError, add_jobs, read_gemm_jobs
from torch_cute_ops.gemm import tune
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.gemm.select import target_of
from torch_cute_ops.runtime.tuner import HOPELESS, Candidate

from . import environment, layers, report
from .gemms import problem_of
from .measure import Backend


class Timed(NamedTuple):
    """A tactic with its estimated and measured time in seconds, or the reason why the measured time is missing."""

    candidate: Candidate
    estimate: float
    seconds: float | None
    wrong: str | None = None


def timed(problem: GemmProblem, m: int, target: Target, within: float) -> list[Timed]:
    """Time the tactics of a call with `m` rows. Return them fastest first, followed by the tactics with wrong
    results."""
    m = bucket(m)
    estimates = tune.estimates(problem, m, target)
    least = min(estimates.values())
    promising = [candidate for candidate, seconds in estimates.items() if seconds <= within * least]
    bench = tune.bench_of(problem, m, target)
    try:
        wrong = {candidate: bench.check(candidate) for candidate in promising}
        right = [candidate for candidate in promising if wrong[candidate] is None]
        seconds = bench.time(right) if right else {}
    finally:
        bench.free()
    rows = [Timed(one, estimates[one], seconds.get(one), wrong[one]) for one in promising]
    return sorted(rows, key=lambda row: math.inf if row.seconds is None else row.seconds)


def markdown(rows: Sequence[Timed]) -> str:
    """Return a table of tactics, in which the tactic that the cost model chooses is bold."""
    least = min(row.estimate for row in rows)
    fastest = min((row.seconds for row in rows if row.seconds is not None), default=None)
    body = []
    for row in rows:
        name = f"{row.candidate.backend} {' × '.join(map(str, row.candidate.tactic))}".rstrip()
        times = [row.wrong or "–", "–"]
        if row.seconds is not None and fastest is not None:
            times = [report.number(1e6 * row.seconds), report.fraction(row.seconds / fastest)]
        body.append([f"**{name}**" if row.estimate == least else name, *times, report.number(1e6 * row.estimate)])
    return report.table(["tactic", "µs", "of fastest", "estimate µs"], body)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks tactics", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_jobs(parser)
    parser.add_argument(
        "--within", type=float, default=HOPELESS, help="time tactics estimated at up to this multiple of the fastest"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="a file for the numbers")
    options = parser.parse_args(arguments)
    try:
        options.jobs = read_gemm_jobs(options)
    except UsageError as error:
        parser.error(str(error))
    return layers.on_gpu("tactics", measure_tactics, options)


def measure_tactics(options: argparse.Namespace, device: torch.device, backend: Backend, l2_bytes: int) -> int:
    """Measure, print a table per call, and write the numbers."""
    collected = environment.collect(device)
    print(environment.headline(collected), flush=True)
    result: dict[str, Any] = {"environment": collected, "calls": []}
    for job in options.jobs:
        given: Mapping[str, Any] = dict(job.properties)
        rows = timed(problem_of(job.op, **given), given.get("m", 1), target_of(device), options.within)
        print(f"\n{job}\n\n{markdown(rows)}", flush=True)
        tactics = [{**row._asdict(), "candidate": list(row.candidate)} for row in rows]
        result["calls"].append({"op": job.op, "properties": {k: str(v) for k, v in given.items()}, "tactics": tactics})
    if options.json is not None:
        report.write_json(result, [], options.json)
    return 0
