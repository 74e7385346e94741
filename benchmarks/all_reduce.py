"""`python -m benchmarks all_reduce`: one launch that sums over ranks, adds the residual, normalises and quantises to
FP4, compared with NCCL's all-reduce followed by our op. One process per GPU; all calls are in CUDA graphs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from torch_cute_ops import add_rmsnorm_fp4quant, all_reduce_add_rmsnorm_fp4quant

from . import environment, report, targets
from .case import Mark, at_most
from .measure import CudaGraphs, measure
from .ranks import joined, start

RESULTS: Final = Path(__file__).parent / "results"
NOTES: Final = "all_reduce"
"""Name of the file of notes on these ops."""
HIDDEN: Final = 8192
ROWS: Final = (1, 8, 64, 256, 1024)
SETS, CALLS, ROUNDS = 4, 20, 31
"""Number of buffer sets that calls use in turn, number of calls in a graph, and number of timed replays per graph."""

ABOUT = """\
{ranks} GPUs, {hidden:,} bfloat16 columns, NVFP4 with 128x4 scales; medians of {rounds} replays of a graph of {calls}
calls, on rank 0. `separate` is NCCL's all-reduce and add_rmsnorm_fp4quant. `quantise` is add_rmsnorm_fp4quant
alone, without any exchange. `one_shot` is torch's one-shot all-reduce over symmetric memory and
add_rmsnorm_fp4quant."""


def variants(rows: int, device: torch.device) -> dict[str, Callable[[int], Any]]:
    """Return the functions to time, each with its own buffers. Call them on all ranks."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)

    def random() -> list[torch.Tensor]:
        return [torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device=device) for _ in range(SETS)]

    inputs, residuals = random(), random()
    # In-place sums would grow from call to call, so use numbers that cancel over the ranks.
    cancelling = [each if dist.get_rank() == 0 else -each for each in random()]
    for each in cancelling:
        dist.broadcast(each, 0)
        if dist.get_rank() == 1:
            each.neg_()
        elif dist.get_rank() > 1:
            each.zero_()

    def ours(i: int) -> Any:
        return all_reduce_add_rmsnorm_fp4quant(inputs[i], residuals[i], weight, name)

    def separate(i: int) -> Any:
        dist.all_reduce(cancelling[i])
        return add_rmsnorm_fp4quant(cancelling[i], residuals[i], weight)

    def quantise(i: int) -> Any:
        return add_rmsnorm_fp4quant(inputs[i], residuals[i], weight)

    found: dict[str, Callable[[int], Any]] = {"ours": ours, "separate": separate, "quantise": quantise}
    shared = symmetric.empty((SETS, rows, HIDDEN), dtype=torch.bfloat16, device=device)
    symmetric.rendezvous(shared, name)
    shared.normal_()

    def one_shot(i: int) -> Any:
        total = torch.ops.symm_mem.one_shot_all_reduce(shared[i], "sum", name)
        return add_rmsnorm_fp4quant(total, residuals[i], weight)

    found["one_shot"] = one_shot
    for call in list(found):
        try:
            for i in range(SETS):
                found[call](i)
            torch.cuda.synchronize()
        except RuntimeError as error:
            if call in ("ours", "separate"):
                raise
            print(f"  {call} cannot be measured: {error}", file=sys.stderr)
            del found[call]
    return found


def run(rank: int, ranks: int, port: int, output: Path) -> None:
    """Measure all sizes in the process of one rank. Rank 0 prints and writes the results."""
    import torch.distributed as dist

    with joined(rank, ranks, port) as device:
        measured = []
        for rows in ROWS:
            timings = measure(variants(rows, device), SETS, CALLS, ROUNDS, CudaGraphs())
            torch.cuda.synchronize()
            dist.barrier()
            measured.append({"M": rows, "us": {name: timing.us for name, timing in timings.items()}})
        if rank == 0:
            result = {"ranks": ranks, "hidden": HIDDEN, "environment": environment.collect(device), "rows": measured}
            output.mkdir(parents=True, exist_ok=True)
            file = output / f"all_reduce_{ranks}.json"
            report.write_json(result, marks(measured), file)
            file.with_suffix(".md").write_text(f"{markdown(result)}\n", encoding="utf-8")
            print(markdown(result))


def marks(measured: Sequence[dict[str, Any]]) -> list[Mark]:
    """Return the targets, with the measured ratios to NCCL and our op."""
    return [
        at_most(f"{row['M']:,} rows, over NCCL", ratio(row), targets.ALL_REDUCE_OVER_NCCL[row["M"]], notes="all_reduce")
        for row in measured
        if row["M"] in targets.ALL_REDUCE_OVER_NCCL
    ]


def ratio(row: dict[str, Any]) -> float:
    """Return our time divided by the time of NCCL's all-reduce and our op."""
    quotient: float = row["us"]["ours"] / row["us"]["separate"]
    return quotient


def markdown(result: Mapping[str, Any]) -> str:
    """Return the report in Markdown."""
    about = ABOUT.format(ranks=result["ranks"], hidden=result["hidden"], rounds=ROUNDS, calls=CALLS)
    title = f"# Sums over {result['ranks']} GPUs"
    return "\n\n".join([title, environment.headline(result["environment"]), about, tables(result["rows"])])


def tables(measured: Sequence[dict[str, Any]]) -> str:
    """Return the table of times. Ratios are our times divided by the times of `separate`."""
    body = []
    for row in measured:
        us = row["us"]
        most = targets.ALL_REDUCE_OVER_NCCL.get(row["M"])
        mark = "–" if most is None else f"{'met' if ratio(row) <= most else 'missed'}, ≤ {most}"
        times = [report.number(us.get(name)) for name in ("ours", "separate", "quantise", "one_shot")]
        body.append([f"{row['M']:,}", *times, report.fraction(ratio(row)), mark])
    header = ("rows", "ours µs", "separate µs", "quantise µs", "one_shot µs", "ours / separate", "mark")
    return report.table(header, body)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks all_reduce", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="number of GPUs, 2 to 8 (default 2)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the file written")
    options = parser.parse_args(arguments)
    return start("all_reduce", run, options.ranks, options.output)
