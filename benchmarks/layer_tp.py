"""`python -m benchmarks layer_tp`: time of a decoder layer that is divided among several GPUs, by the way in which the
ranks' partial sums are added up.

The layer is the layer of `python -m benchmarks layer`, without attention. Each rank stores its rows of qkv and of gate
and up, and its columns of o and down. The results of o and down are therefore partial sums. The norm after o, and the
norm at the start of the next layer, need the sums over all ranks:

fused     one launch adds up, adds the residual, normalises and quantises: `all_reduce_add_rmsnorm_fp4quant` in W4A4,
          `all_reduce_add_rmsnorm` in W4A16
separate  NCCL's all-reduce, then `add_rmsnorm_fp4quant` or `add_rmsnorm`
one_shot  torch's one-shot all-reduce of symmetric memory, into which o and down write their results, then
          `add_rmsnorm_fp4quant` or `add_rmsnorm`

All other calls are the same in the three variants. The graph contains several layers with distinct weights, one after
the other, so that L2 contains almost none of the weights that a layer reads. There is one process per GPU; times are
from rank 0.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

import torch_cute_ops as ops
from torch_cute_ops.collecting import CollectKernels
from torch_cute_ops.runtime.compile_pool import EarlyPool

from . import environment, layer, layers, report, targets
from .case import Mark, at_least
from .measure import Backend, CudaGraphs, Settings, measure_what_captures, plan
from .ranks import joined, start
from .runner import ASSUMED_TFLOPS, describe

NOTES = "all_reduce"
MODEL = "70B"
ROWS = (1, 8, 64, 256)
FUSED, SEPARATE, ONE_SHOT = WAYS = ("fused", "separate", "one_shot")
PARTIAL = ("o", "down")
"""Linear layers whose results are partial sums."""
MARKED = "W4A4"
"""Precision to which the targets apply."""


class Divided(layer.Layer):
    """One rank's shard of a decoder layer. The input and the result of a call are the rank's partial sums.

    Attributes:
        sum_norm: op that adds up the partial sums of all ranks, adds the residual and normalises.
        group: name of the process group.
        sum_up: function that returns the sum over the ranks of its argument, or None if `sum_norm` adds up.
        out: tensors that o and down write their results to, by name; empty if they allocate their results.
    """

    sum_norm: ClassVar[Callable[..., Any]]
    group: str = ""
    sum_up: Callable[[Tensor], Tensor] | None = None
    out: Mapping[str, Tensor] = {}

    def normed(self, x: Tensor, residual: Tensor, which: int) -> Any:
        if self.sum_up is not None:
            return super().normed(self.sum_up(x), residual, which)
        return self.sum_norm(x, residual, self.norms[which], self.group, eps=layer.EPS)

    def product(self, op: Callable[..., Tensor], name: str, **given: Any) -> Tensor:
        if name in self.out:
            given["out"] = self.out[name]
        return super().product(op, name, **given)


class DividedW4A4(Divided, layer.W4A4):
    """Shard of a layer with NVFP4 weights and activations."""

    sum_norm = staticmethod(ops.all_reduce_add_rmsnorm_fp4quant)


class DividedW4A16(Divided, layer.W4A16):
    """Shard of a layer with NVFP4 weights and bf16 activations. The op `silu_mul` computes the gate of several rows, so
    that the ranks need no compiler."""

    sum_norm = staticmethod(ops.all_reduce_add_rmsnorm)

    def gated(self, rows: Tensor) -> Any:
        return ops.silu_mul(rows)


PRECISIONS: dict[str, type[Divided]] = {"W4A4": DividedW4A4, "W4A16": DividedW4A16}


def shard(widths: layer.Widths, ranks: int) -> layer.Widths:
    """Return the widths of one rank's shard of a layer.

    Raises:
        ValueError: if the ranks cannot divide a width equally.
    """
    divided = replace(
        widths,
        qkv=widths.qkv // ranks,
        attention=widths.attention // ranks,
        intermediate=widths.intermediate // ranks,
    )
    if widths.qkv % ranks or widths.attention % ranks or widths.intermediate % ranks:
        raise ValueError(f"{ranks} ranks cannot divide {widths} equally")
    return divided


def make_chain(cls: type[Divided], widths: layer.Widths, count: int, device: torch.device) -> list[Divided]:
    """Return `count` shards of distinct layers. The last layer is followed by the first layer. The weights of linear
    layers differ from rank to rank; the weights of norms are equal."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    chain = [cls(widths, device, 1000 * rank + seed, inductor=False) for seed in range(count)]
    for i, each in enumerate(chain):
        each.group, each.following = group.group_name, chain[(i + 1) % count]
        for norm in each.norms:
            dist.broadcast(norm, 0)
    return chain


def adding_up(chain: Sequence[Divided], sum_up: Callable[[Tensor], Tensor], **out: Tensor) -> list[Divided]:
    """Return layers with the weights of `chain`. They add up partial sums by `sum_up` before each norm, and their
    projections o and down write to the tensors in `out`."""
    copies = [copy.copy(each) for each in chain]
    for each in copies:
        each.sum_up, each.out = sum_up, out
    return copies


def nccl(x: Tensor) -> Tensor:
    """Add up `x` over all ranks, in place, by the all-reduce of the process group."""
    dist.all_reduce(x)
    return x


def one_shot(x: Tensor) -> Tensor:
    """Add up `x`, in symmetric memory, over all ranks by torch's one-shot all-reduce."""
    group = dist.group.WORLD
    assert group is not None
    total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group.group_name)
    return total


class Inputs:
    """Input of the first layer, and the residual.

    Attributes:
        x: (M, hidden) bfloat16, this rank's partial sums; they differ from rank to rank.
        residual: (M, hidden) bfloat16, equal on all ranks.
        shared: (3, M, hidden) bfloat16 in symmetric memory, or None if there is no symmetric memory.
    """

    def __init__(self, rows: int, hidden: int, device: torch.device, shared: Tensor | None) -> None:
        made = torch.Generator(device).manual_seed(dist.get_rank())  # processes may start with equal seeds
        self.x, self.residual = (
            torch.randn(rows, hidden, dtype=layer.DTYPE, device=device, generator=made) for _ in range(2)
        )
        dist.broadcast(self.residual, 0)
        self.shared = None if shared is None else shared[:, :rows]


def symmetric_memory(rows: int, hidden: int, device: torch.device) -> Tensor | None:
    """Return (3, rows, hidden) bfloat16 in symmetric memory, or None on a CPU. All ranks call this function."""
    if device.type != "cuda":
        return None
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD
    assert group is not None
    shared = symmetric.empty((3, rows, hidden), dtype=layer.DTYPE, device=device)
    symmetric.rendezvous(shared, group.group_name)
    return shared


Run = Callable[[Tensor, int], Tensor]
"""Function `f(residual, passes)` that calls all layers, one after the other, `passes` times. It updates the residual,
and returns the partial sums of the last layer."""


def runs_of(chain: Sequence[Divided], inputs: Inputs) -> dict[str, Run]:
    """Return the functions to time, by way. Each function first copies the input, because NCCL sums in place."""

    def run_of(own: Sequence[Divided], first: Callable[[], Tensor]) -> Run:
        def run(residual: Tensor, passes: int) -> Tensor:
            x = first()
            for _ in range(passes):
                for each in own:
                    x = each(x, residual)
            return x

        return run

    found = {FUSED: run_of(chain, inputs.x.clone), SEPARATE: run_of(adding_up(chain, nccl), inputs.x.clone)}
    if inputs.shared is not None:
        first, *out = inputs.shared
        copies = adding_up(chain, one_shot, **dict(zip(PARTIAL, out, strict=True)))
        found[ONE_SHOT] = run_of(copies, lambda: first.copy_(inputs.x))
    return found


def compile_kernels(chain: Sequence[Divided], inputs: Sequence[Inputs]) -> None:
    """Compile the kernels of all ways in parallel processes, without launching or exchanging anything. This only saves
    time: a call compiles a kernel that is missing."""
    alone = adding_up(chain, lambda x: x)
    with EarlyPool() as pool:
        with CollectKernels(found=pool.expect) as collected:
            for each in inputs:
                for one in (chain[0], alone[0]):
                    one(each.x.clone(), each.residual.clone())
        for arch, kernels in collected.kernels.items():
            pool.compile_ahead(kernels, arch)


def agreed(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def compared(runs: Mapping[str, Run], inputs: Inputs) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Call all layers once in each way, and compare the results with the results of `separate`.

    Returns:
        Two dicts keyed by way. The first contains comparisons of the last partial sums and the residual: the fraction
        of elements that differ, the smallest cosine similarity, and whether the residuals of all ranks are equal. The
        second contains the errors of ways that raised one.
    """
    results, absent = {}, {}
    for way, run in runs.items():
        residual, error = inputs.residual.clone(), ""
        try:
            x = run(residual, 1).clone()
            if residual.is_cuda:
                torch.cuda.synchronize()
        except RuntimeError as raised:
            if way != ONE_SHOT:
                raise
            error = describe(raised)
        if errors := [each for each in agreed(error) if each]:
            absent[way] = errors[0]
        else:
            results[way] = (x, residual)
    found = {}
    for way, (x, residual) in results.items():
        pairs = list(zip((x, residual), results[SEPARATE], strict=True))
        first = residual.clone()
        dist.broadcast(first, 0)
        different = [int((a != b).sum()) for a, b in pairs]
        own = {
            "differ": sum(different) / (x.numel() + residual.numel()),
            "cosine": min(layers.cosine(a, b) for a, b in pairs),
            "ranks_equal": torch.equal(first, residual),
        }
        every = agreed(own)
        found[way] = {
            "differ": max(each["differ"] for each in every),
            "cosine": min(each["cosine"] for each in every),
            "ranks_equal": all(each["ranks_equal"] for each in every),
        }
    return found, absent


def sums_equal(inputs: Inputs) -> bool:
    """Check that our op's sum over the ranks equals the sum by the process group's all-reduce, bit for bit. With two
    ranks they must be equal, because each sum is a single rounded addition."""
    group = dist.group.WORLD
    assert group is not None
    ours, weight = torch.zeros_like(inputs.x), torch.ones_like(inputs.x[0])
    ops.all_reduce_add_rmsnorm(inputs.x.clone(), ours, weight, group.group_name)
    return all(agreed(torch.equal(ours, nccl(inputs.x.clone()))))


@torch.no_grad()
def measure_ranks(
    widths: layer.Widths,
    rows: Sequence[int],
    labels: Sequence[str],
    device: torch.device,
    backend: Backend,
    l2_bytes: int,
    settings: Settings,
) -> list[dict[str, Any]]:
    """Measure a layer of these widths, divided among all ranks of the default group. All ranks call this function.

    Returns:
        Rows of the result file: the times of rank 0 in µs per layer by way, comparisons of the ways' results, and the
        reason for each missing way.
    """
    ranks = dist.get_world_size()
    own, found = shard(widths, ranks), []
    shared = symmetric_memory(max(rows), widths.hidden, device)
    for label in labels:
        cls = PRECISIONS[label]
        moved = round(own.weights * cls.element_bytes)
        count = plan(moved, len(WAYS), l2_bytes, settings).n_sets
        chain = make_chain(cls, own, count, device)
        every = [Inputs(each, widths.hidden, device, shared) for each in rows]
        compile_kernels(chain, every)
        for m, inputs in zip(rows, every, strict=True):
            how = plan(moved, len(WAYS), l2_bytes, settings, call_ms=2 * m * own.weights / ASSUMED_TFLOPS * 1e-9)
            runs = runs_of(chain, inputs)
            equal = sums_equal(inputs)
            results, absent = compared(runs, inputs)
            timings = timed(
                {way: runs[way] for way in results}, inputs, how.calls // count, how.rounds, backend, absent
            )
            variants = {way: {name: us / how.calls for name, us in timing.items()} for way, timing in timings.items()}
            row = {"model": MODEL, "ranks": ranks, "rows": m, "case": f"{label}, {m:,} rows", "precision": label}
            row |= {"layers": how.calls, "rounds": how.rounds, "sums_equal": equal, "results": results}
            found.append({**row, "variants": variants, "absent": absent})
            if dist.get_rank() == 0:
                print(layers.progress(f"{MODEL}, {row['case']}, {ranks} GPUs", variants), flush=True)
    return found


def timed(
    runs: Mapping[str, Run], inputs: Inputs, passes: int, rounds: int, backend: Backend, absent: dict[str, str]
) -> dict[str, dict[str, float]]:
    """Return the median and the 20th and 80th percentile of the times of a graph, in µs, by way. Add the error of each
    way that cannot be captured to `absent`."""

    def call_of(run: Run) -> Callable[[int], Tensor]:
        residual = inputs.residual.clone()
        return lambda _: run(residual, passes)

    calls = {way: call_of(run) for way, run in runs.items()}
    backend.synchronize()
    dist.barrier()
    timings = measure_what_captures(
        calls, 1, 1, rounds, backend, lambda way, error: absent.update({way: describe(error)})
    )
    backend.synchronize()
    dist.barrier()
    return {way: {"us": each.us, "p20": each.p20, "p80": each.p80} for way, each in timings.items()}


# The report


def speedup(row: Mapping[str, Any], way: str = SEPARATE) -> float | None:
    """Return the time of `way` divided by the time of `fused`, or None if one of the times is missing."""
    times = row["variants"]
    return times[way]["us"] / times[FUSED]["us"] if way in times and FUSED in times else None


def marks(rows: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Return the targets for layers on two GPUs with the measured values."""
    return [
        at_least(
            f"{row['model']}, {row['ranks']} GPUs, {row['case']}: NCCL / ours",
            speedup(row),
            targets.LAYER_TP_OVER_NCCL[row["rows"]],
        )
        for row in rows
        if row["ranks"] == 2 and row["precision"] == MARKED and row["rows"] in targets.LAYER_TP_OVER_NCCL
    ]


ABOUT = """\
A layer of Llama 3 70B (hidden 8,192, intermediate 28,672, 64 query and 8 key-value heads) with NVFP4 weights, divided
among {ranks} GPUs, without attention: o reads the first elements of the result of qkv. µs a layer on rank 0, medians of
replays of a CUDA graph of several layers with distinct weights. `fused` adds up the partial sums in the launch of the
norm, `separate` by NCCL's all-reduce, and `one_shot` by torch's one-shot all-reduce of symmetric memory. `differ` is
the largest fraction of elements in the results of `fused` and `one_shot` that differ from the results of `separate`,
after one call of each layer. `sums` is "equal" if the sum of `all_reduce_add_rmsnorm` equals NCCL's sum bit for bit,
and all ranks get the same residual in `fused`."""


def markdown(result: Mapping[str, Any]) -> str:
    """Return the report in Markdown."""
    ranks, rows = result["ranks"], result["rows"]
    body = []
    for row in rows:
        times = [report.number(row["variants"].get(way, {}).get("us")) for way in WAYS]
        ratios = [speedup(row, way) for way in (SEPARATE, ONE_SHOT)]
        differ = [each["differ"] for way, each in row["results"].items() if way != SEPARATE]
        same = "equal" if row["sums_equal"] and row["results"][FUSED]["ranks_equal"] else "DIFFER"
        cells = [row["precision"], f"{row['rows']:,}", *times, *map(report.fraction, ratios)]
        body.append([*cells, f"{max(differ, default=0.0):.2%}", same])
    header = ["precision", "rows", *(f"{way} µs" for way in WAYS), "separate / fused", "one_shot / fused"]
    parts = [
        f"# A decoder layer on {ranks} GPUs",
        environment.headline(result["environment"]),
        ABOUT.format(ranks=ranks),
        report.table([*header, "differ", "sums"], body),
        *sorted({f"{way}: {why}" for row in rows for way, why in row["absent"].items()}),
    ]
    if judged := marks(rows):
        parts.append(f"## Marks\n\n{report.marks_table(judged)}")
    return "\n\n".join(parts)


def is_right(row: Mapping[str, Any]) -> bool:
    """Check a row: with two ranks the sums must be equal, the residuals of all ranks must be equal, and the cosine
    similarity must be at least 0.99 (not 1, because another rounding of a sum may change codes)."""
    results = row["results"]
    sums = row["sums_equal"] or row["ranks"] > 2
    return sums and results[FUSED]["ranks_equal"] and results[FUSED]["cosine"] >= 0.99


def run(rank: int, ranks: int, port: int, options: argparse.Namespace) -> None:
    """Measure in the process of one rank. Rank 0 prints and writes the results."""
    with joined(rank, ranks, port) as device:
        settings = Settings()
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        widths = layer.MODELS[MODEL]
        given = (options.rows, options.precisions, device, CudaGraphs(), l2_bytes, settings)
        rows = measure_ranks(widths, *given)
        if rank == 0:
            result = {"ranks": ranks, "environment": environment.collect(device), "method": asdict(settings)}
            save({**result, "rows": rows}, options.output)


def file_of(ranks: int, output: Path) -> Path:
    """Return the path of the result file."""
    return output / f"layer_tp_{ranks}.json"


def save(result: dict[str, Any], output: Path) -> None:
    """Print the results, and write them to the result file and to a Markdown file next to it."""
    output.mkdir(parents=True, exist_ok=True)
    file = file_of(result["ranks"], output)
    report.write_json(result, marks(result["rows"]), file)
    file.with_suffix(".md").write_text(f"{markdown(result)}\n", encoding="utf-8")
    print(f"\n{markdown(result)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks layer_tp", description=" ".join((__doc__ or "").split("\n\n")[0].split())
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of GPUs, 2 to 8 (default 2)")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), metavar="M")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), metavar="PRECISION")
    parser.add_argument("--output", type=Path, default=layers.RESULTS, help="folder of the files written")
    options = parser.parse_args(arguments)
    status = start("layer_tp", run, options.ranks, options)
    if status:
        return status
    rows = json.loads(file_of(options.ranks, options.output).read_text(encoding="utf-8"))["rows"]
    wrong = [row["case"] for row in rows if not is_right(row)]
    if wrong:
        print(f"the results of `fused` are wrong: {'; '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0
