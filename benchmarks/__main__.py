"""`python -m benchmarks <op> … | host | all`: measure on the GPU, print a table, write JSON, Markdown and a plot.
`layer` measures the ops of a decoder layer in one captured graph, `expert_layer` measures routed expert layers, `model`
measures whole models as they are served, `model_paged` measures decode steps with a paged cache, and `vllm` measures a
model in vLLM. `tactics` measures every tactic of a GEMM, and prints each time next to the cost model's prediction.
`all_reduce` measures the op that sums rows over several GPUs, and `layer_tp` a decoder layer with this op.

Five commands need no GPU. `compare OLD NEW` compares two folders of results. `performance` writes docs/performance.md.
`plots` draws pictures of result files. `blackwell` prints estimated times of the tcgen05 FP4 GEMM on a B200.
`distributed` prints estimated bytes and times of a layer on eight H200s.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")  # otherwise eager baselines would use torch's CuTe norm

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from . import (
    all_reduce,
    blackwell,
    compare,
    distributed,
    environment,
    expert_layer,
    host,
    layer,
    layer_tp,
    model,
    model_paged,
    ops,
    performance,
    plots,
    report,
    tactics,
)
from .case import Benchmark, Case, Row
from .engines import command as engines
from .measure import Ceilings, CudaGraphs, Settings, ceilings
from .runner import run, warm_up

NO_GPU = 2
COMMANDS = {
    "all_reduce": all_reduce.main,
    "blackwell": blackwell.main,
    "compare": compare.main,
    "distributed": distributed.main,
    "expert_layer": expert_layer.main,
    "layer": layer.main,
    "layer_tp": layer_tp.main,
    "model": model.main,
    "model_paged": model_paged.main,
    "performance": performance.main,
    "plots": plots.main,
    "tactics": tactics.main,
    "vllm": engines.main,
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = ops.names()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    every = [*names, "host", "all"]
    parser.add_argument("what", nargs="+", choices=every, metavar="op", help=", ".join(every))
    parser.add_argument(
        "--sizes",
        choices=("marks", "quick", "full"),
        default="quick",
        help="sizes with targets only; these and a few more (default); or the full grid",
    )
    parser.add_argument("--output", type=Path, default=performance.RESULTS, help="folder of the files written")
    parser.add_argument("--no-peers", action="store_true", help="measure only our ops and the copy")
    parser.add_argument("--no-plot", action="store_true", help="write no PNG")
    parsed = parser.parse_args(arguments)
    parsed.what = [*names, "host"] if "all" in parsed.what else list(dict.fromkeys(parsed.what))
    return parsed


def progress(case: Case, row: Row | None, error: str) -> str:
    """Return the progress line to print after a case: its times, or the error."""
    if row is None:
        return f"  {case}: {error}"
    times = ", ".join(f"{report.label(name)} {report.number(v['us'])}" for name, v in row["variants"].items())
    ours = row["variants"]["ours"]
    rate = f", {report.number(ours['tflops'])} TFLOP/s" if row["flops"] else ""
    return f"  {case}: {times} µs; {ours['of_copy']:.3f} of copy{rate}"


def run_op(benchmark: Benchmark, options: argparse.Namespace, device: torch.device, peaks: Ceilings) -> bool:
    """Measure an op, and print and write its report.

    Returns:
        True if every case ran and every checked output was correct.
    """
    settings, started = Settings(), time.perf_counter()
    result: dict[str, Any] = {
        "op": benchmark.op,
        "sizes": options.sizes,
        "settings": dict(benchmark.settings),
        "method": asdict(settings),
        "environment": environment.collect(device),
        "peak_copy_tbps": peaks.copy_tbps,
        "peak_read_tbps": peaks.read_tbps,
        "bf16_tflops": peaks.bf16_tflops,
        "about": benchmark.about,
        "notes": list(benchmark.notes),
        "failed": {},
        "rows": [],
    }
    path = options.output / f"{benchmark.op}.json"
    print(f"{benchmark.op} ({options.sizes})", flush=True)

    def after_case(case: Case, rows: list[Row], error: str) -> None:
        if error:
            result["failed"][str(case)] = error
        result["rows"] = report.ordered(rows)
        report.write_json(result, benchmark.marks(rows), path)
        print(progress(case, None if error else rows[-1], error), flush=True)

    rows = run(
        benchmark,
        benchmark.cases(options.sizes),
        device=device,
        backend=CudaGraphs(),
        settings=settings,
        l2_bytes=torch.cuda.get_device_properties(device).L2_cache_size,
        ceilings=peaks,
        with_peers=not options.no_peers,
        after_case=after_case,
    )
    text = report.markdown(result, benchmark.marks(rows))
    path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\n{time.perf_counter() - started:.0f} s in all\n", flush=True)
    if rows and not options.no_plot:
        from .plot import plot

        plot(result, path.with_suffix(".png"), benchmark.of_copy)
    return not result["failed"] and all(row["correct"] is not False for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in COMMANDS:
        return COMMANDS[arguments[0]](arguments[1:])
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("python -m benchmarks needs a CUDA GPU, and torch sees none here.", file=sys.stderr)
        return NO_GPU
    options.output.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda", torch.cuda.current_device())
    names, good = [name for name in options.what if name != "host"], True
    if names:
        peaks = ceilings(CudaGraphs(), device)
        torch.cuda.empty_cache()
        others = f"read {report.number(peaks.read_tbps)} TB/s, cuBLAS bf16 {report.number(peaks.bf16_tflops)} TFLOP/s"
        print(environment.headline(environment.collect(device)))
        print(f"peak copy {peaks.copy_tbps:.2f} TB/s, {others}", flush=True)
        benchmarks = [ops.load(name) for name in names]
        # Compile all our kernels before a peer is imported, because importing QuACK changes the DSL.
        for benchmark in benchmarks:
            warm_up(benchmark, benchmark.cases(options.sizes), device)
        if "host" in options.what:
            with contextlib.suppress(Exception):  # host.main below repeats the call and reports the error
                host.calls(device, with_peers=False)
        for benchmark in benchmarks:
            good &= run_op(benchmark, options, device, peaks)
    if "host" in options.what:
        host.main(options.output, device, with_peers=not options.no_peers)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
