"""Measure the host time of one call in µs: the CPU time that Python, the dispatcher and the launch take. Tensors are so
small that the GPU is mostly idle.

Method: tensors are small (M = 1, H = 1,536, bfloat16, NVFP4; GEMMs: N = 256, K = 1,536, and 4 experts). A chunk of
calls is timed with the host clock. Between chunks the GPU is synchronised, outside of the timing, so the launch queue
never fills. Rounds alternate between the variants. For each round, the median over its chunks is computed. The reported
time is the smallest median of all rounds, because larger medians are caused by other work on the machine. Garbage
collection is off. Every time includes the loop and the call of a lambda. The entry "empty lambda" gives the time of the
loop and of a lambda that does nothing.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

import torch_cute_ops
from torch_cute_ops.registry import OPS
from torch_cute_ops.testing import raw_call

from . import environment, report, targets
from .case import Mark, at_most
from .rows import DTYPE, EPS

ROWS, WIDTH, COLUMNS, EXPERTS = 1, 1536, 256, 4
GEMMS: dict[str, dict[str, Any]] = {
    "mm_fp4": {"alpha": "one"},
    "mm_fp4_weight_only": {"alpha": "one"},
    "mm_fp8": {},
    "mm_fp8_block": {},
    "grouped_mm_fp8": {"experts": EXPERTS, "counts": False},
    "moe_fc1_fp4": {"experts": EXPERTS},
}
"""GEMM ops to time, with the static properties of their calls."""
OP = "op, functional"
FUNCTION = "function"
FUNCTION_OUT = "function, out="
OP_OUT = "op .out"
ADD_OP = "add_rmsnorm op, functional"
ADD_FUNCTION_OUT = "add_rmsnorm function, out="
RMS_NORM = "F.rms_norm"
MM = "torch.mm, out="
RAW = "raw TVM-FFI call"
QUACK = "QuACK rmsnorm"
EMPTY, NEW_TENSOR = "empty lambda", "torch.empty"
NOT_OURS = (EMPTY, NEW_TENSOR, RMS_NORM, MM, RAW, QUACK)
"""Names of the calls that our calls are compared with. The raw call launches our kernel directly through TVM-FFI."""
CACHES = ("TORCH_CUTE_OPS_CACHE_DIR", "XDG_CACHE_HOME", "CUTE_DSL_CACHE_DIR", "CUDA_CACHE_PATH")
"""Environment variables that name folders of compiled kernels: our cache, its default location, and the caches of the
DSL and of the driver."""


@dataclass(frozen=True)
class HostTime:
    """Time of a call in µs. The median over the chunks of a round is taken first, then the minimum and the maximum over
    the rounds."""

    us: float
    worst_round: float


def measure_host(
    calls: Mapping[str, Callable[[], Any]],
    synchronize: Callable[[], None],
    rounds: int = 9,
    chunks: int = 20,
    chunk: int = 100,
) -> dict[str, HostTime]:
    """Time callables without arguments on the host. Each one is called `rounds` × `chunks` × `chunk` times."""
    for call in calls.values():
        for _ in range(chunk):
            call()
    synchronize()
    medians: dict[str, list[float]] = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in calls.items():
                times = []
                for _ in range(chunks):
                    start = time.perf_counter_ns()
                    for _ in range(chunk):
                        call()
                    times.append((time.perf_counter_ns() - start) / chunk * 1e-3)
                    synchronize()
                medians[name].append(statistics.median(times))
    finally:
        if collecting:
            gc.enable()
    return {name: HostTime(min(values), max(values)) for name, values in medians.items()}


def calls(device: torch.device, with_peers: bool = True) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Return the calls to time by name, and the reason for each missing call. Each of our calls runs once before a peer
    is imported, because a peer may change the DSL."""
    op, function = torch.ops.cute.rmsnorm_fp4quant, torch_cute_ops.rmsnorm_fp4quant
    add_op, add_function = torch.ops.cute.add_rmsnorm_fp4quant, torch_cute_ops.add_rmsnorm_fp4quant
    op_out, rms_norm = op.out, torch.nn.functional.rms_norm
    x = torch.randn(ROWS, WIDTH, dtype=DTYPE, device=device)
    residual = torch.randn_like(x)
    w = torch.randn(WIDTH, dtype=DTYPE, device=device)
    out = y, scale = function(x, w)
    shape, absent = (WIDTH,), {}
    timed: dict[str, Callable[[], Any]] = {
        EMPTY: lambda: None,
        NEW_TENSOR: lambda: torch.empty(ROWS, WIDTH, dtype=DTYPE, device=device),
        RMS_NORM: lambda: rms_norm(x, shape, w, EPS),
        OP: lambda: op(x, w, None, EPS, 16, None, "128x4"),
        "op, functional, defaults": lambda: op(x, w),
        OP_OUT: lambda: op_out(x, w, None, EPS, 16, None, "128x4", y=y, scale=scale),
        FUNCTION: lambda: function(x, w, None, EPS, 16, None, "128x4"),
        FUNCTION_OUT: lambda: function(x, w, None, EPS, 16, None, "128x4", out=out),
        ADD_OP: lambda: add_op(x, residual, w, None, EPS, 16, None, "128x4"),
        ADD_FUNCTION_OUT: lambda: add_function(x, residual, w, None, EPS, 16, None, "128x4", out=out),
    }
    timed |= gemm_calls(device)
    for call in timed.values():
        call()
    if device.type == "cuda":
        timed[RAW] = raw_call("rmsnorm_fp4quant", x, w, None, EPS, 16, None, "128x4", out=out)
    else:
        absent[RAW] = "compiled functions exist only on a GPU"
    if with_peers:
        try:
            from quack.rmsnorm import rmsnorm
        except Exception as error:  # a peer that cannot be imported is reported as missing
            absent[QUACK] = f"{type(error).__name__}: {error}"
        else:
            timed[QUACK] = lambda: rmsnorm(x, w, eps=EPS)
    return timed, absent


def gemm_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return the calls of all GEMMs in `GEMMS` by name, and a call of `torch.mm` with bfloat16 matrices."""
    x = torch.randn(ROWS, WIDTH, dtype=DTYPE, device=device)
    w = torch.randn(COLUMNS, WIDTH, dtype=DTYPE, device=device).t()
    out = torch.empty(ROWS, COLUMNS, dtype=DTYPE, device=device)
    timed: dict[str, Callable[[], Any]] = {MM: lambda: torch.mm(x, w, out=out)}
    for name, properties in GEMMS.items():
        timed |= calls_of_gemm(name, {"m": ROWS, "n": COLUMNS, "k": WIDTH, **properties}, device)
    return timed


def calls_of_gemm(name: str, properties: Mapping[str, Any], device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return two calls of a GEMM by name: the op, and the Python function with `out`. All operands are zero, and no
    expert owns any row."""
    spec = OPS[name]
    arguments = spec.path.example(**properties, device=device)
    given = (arguments.get(parameter) for parameter in spec.signature.names)
    tensors = tuple(takewhile(lambda value: isinstance(value, torch.Tensor), given))
    op, function = getattr(torch.ops.cute, name), spec.function
    out = op(*tensors)
    return {
        f"{name} op, functional": lambda: op(*tensors),
        f"{name} function, out=": lambda: function(*tensors, out=out),
    }


def first_calls() -> list[dict[str, float]]:
    """Measure in fresh processes how many seconds the import, the start of CUDA and the first call take. The first
    process starts with empty caches, the second with a filled disk cache. See `first_call.py`."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, **{name: os.path.join(folder, name.lower()) for name in CACHES}}
        command, results = [sys.executable, "-m", "benchmarks.first_call"], []
        for _ in range(2):
            root = Path(__file__).parent.parent
            done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=root, timeout=300)
            if done.returncode:
                raise RuntimeError(f"benchmarks.first_call failed: {(done.stderr.splitlines() or ['no output'])[-1]}")
            results.append(json.loads(done.stdout.splitlines()[-1]))
    return results


def marks(times: Mapping[str, HostTime], first: list[dict[str, float]]) -> list[Mark]:
    """Return the targets for host times with the measured values."""

    def us(name: str) -> float | None:
        return times[name].us if name in times else None

    op, norm, function, raw = us(OP), us(RMS_NORM), us(FUNCTION_OUT), us(RAW)
    over_raw = function - raw if function and raw else None
    return [
        at_most("functional op / F.rms_norm", op / norm if op and norm else None, targets.OVER_RMS_NORM, " ×"),
        at_most("function with out= over the raw call", over_raw, targets.OVER_RAW_CALL_US, " µs"),
        *(
            at_most(f"first call, {caches}", first[i]["first_call_s"] if first else None, goal, " s")
            for i, (caches, goal) in enumerate(
                (("empty caches", targets.FIRST_CALL_S), ("filled disk cache", targets.FIRST_CALL_WARM_S))
            )
        ),
    ]


def markdown(result: dict[str, Any], judged: list[Mark]) -> str:
    """Return the Markdown report of host times. `judged` contains the targets with the measured values."""
    body = [[name, report.number(t["us"]), report.number(t["worst_round"])] for name, t in result["times"].items()]
    seconds = ("import_s", "cuda_start_s", "first_call_s")
    first = [
        [cache, *(f"{run[key]:.2f}" for key in seconds), f"{run['second_call_us']:.0f}"]
        for cache, run in zip(("empty", "warm"), result["first_calls"], strict=False)
    ]
    absent = "\n".join(f"- {name}: not measured ({why})" for name, why in result["absent"].items())
    parts = [
        "# Host cost of a call",
        environment.headline(result["environment"]),
        str(__doc__).split("\n\n", 1)[1].strip(),
        report.table(["call", "µs", "worst round"], body),
        absent,
        "First call in a fresh process, seconds:",
        report.table(["disk cache", "imports", "CUDA start", "first call", "second call µs"], first) if first else "–",
        "## Marks",
        report.marks_table(judged),
    ]
    return "\n\n".join(part for part in parts if part)


def main(output: Path, device: torch.device, with_peers: bool = True) -> None:
    """Measure the host times, print the report, and write `host.json` and `host.md`."""
    timed, absent = calls(device, with_peers)
    times = measure_host(timed, torch.cuda.synchronize)
    try:
        first = first_calls()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        first, absent["first call"] = [], str(error)
    result = {
        "environment": environment.collect(device),
        "rows": ROWS,
        "width": WIDTH,
        "times": {name: asdict(value) for name, value in times.items()},
        "absent": absent,
        "first_calls": first,
    }
    judged = marks(times, first)
    report.write_json(result, judged, output / "host.json")
    text = markdown(result, judged)
    (output / "host.md").write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
