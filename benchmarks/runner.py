"""One op from its cases to rows: warm up, check, measure, and put numbers beside the copy ceilings."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .case import Benchmark, Case, Row, Tensors, Variant, mismatch
from .measure import Backend, Plan, Settings, copy, copy_sets, measure, plan

CHECKED_ELEMENTS = 2**27
"""Cases up to this many elements (first two sizes multiplied) are checked against the composition before timing."""


def warm_up(benchmark: Benchmark, cases: Sequence[Case], device: torch.device) -> None:
    """Run our op once for each set of static facts, so that our kernels are compiled before a peer is imported (QuACK
    patches the DSL they are compiled with) and outside of any timing. What fails here fails again, and is reported,
    when its case runs."""
    for smallest in {str(s): s for s in map(benchmark.smallest, cases)}.values():
        with contextlib.suppress(Exception):
            benchmark.ours(smallest, [benchmark.make_set(smallest, device)]).call(0)


def describe(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def collect_variants(
    benchmark: Benchmark, case: Case, sets: Sequence[Tensors], with_peers: bool
) -> tuple[dict[str, Variant], dict[str, str]]:
    """The variants that exist for this case, and the reason for each peer that does not. A peer that fails on its first
    call is absent too: it must not end the run."""
    variants, absent = {"ours": benchmark.ours(case, sets)}, {}
    for name in benchmark.peers if with_peers else ():
        peer = benchmark.peer(name, case, sets)
        if not isinstance(peer, str):
            try:
                peer.call(0)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                peer = f"failed ({describe(error)})"
        if isinstance(peer, str):
            absent[name] = peer
        else:
            variants[name] = peer
    return variants, absent


def check(benchmark: Benchmark, case: Case, sets: Sequence[Tensors], variants: dict[str, Variant]) -> dict[str, float]:
    """Largest fraction of wrong output elements of each variant that computes the op, against the eager composition;
    empty where the case is too large to check. Before each call set 0 is as it was made, poisoned outputs included."""
    dimensions = list(case.sizes.values())
    if dimensions[0] * dimensions[1] > CHECKED_ELEMENTS:
        return {}
    made = {name: tensor.clone() for name, tensor in sets[0].items()}
    expected, wrong = benchmark.expected(case, sets[0]), {}
    for variant_name, variant in variants.items():
        if variant.checked:
            wrong[variant_name] = mismatch(variant.call(0), expected)
            for name, tensor in made.items():
                sets[0][name].copy_(tensor)
    return wrong


def run_case(
    benchmark: Benchmark,
    case: Case,
    *,
    device: torch.device,
    backend: Backend,
    settings: Settings,
    l2_bytes: int,
    peak_tbps: float,
    with_peers: bool = True,
) -> Row:
    """Measure one case. Times in µs, bandwidth in TB/s by formula, fractions of the two copy bandwidths."""
    size = benchmark.bytes_moved(case)
    how = plan(size, 2 + (len(benchmark.peers) if with_peers else 0), l2_bytes, settings)
    sets = [benchmark.make_set(case, device) for _ in range(how.n_sets)]
    variants, absent = collect_variants(benchmark, case, sets, with_peers)
    wrong = check(benchmark, case, sets, variants)
    copies = copy_sets(size, how.n_sets, device)
    copied = 2 * copies[0][0].nbytes
    variants["copy"] = Variant(lambda i: copy(*copies[i]), copied, checked=False)
    timings = measure({name: v.call for name, v in variants.items()}, how.n_sets, how.calls, how.rounds, backend)
    measured: dict[str, dict[str, Any]] = {}
    copy_tbps = copied / timings["copy"].us * 1e-6
    for name, variant in variants.items():
        tbps = variant.bytes / timings[name].us * 1e-6
        measured[name] = {
            **timings[name].as_dict(),
            "bytes": variant.bytes,
            "tbps": tbps,
            "of_copy": tbps / copy_tbps,
            "of_peak": tbps / peak_tbps,
            "note": variant.note,
            "mismatch": wrong.get(name),
        }
    return _row(benchmark, case, how, size, measured, absent, wrong)


def _row(
    benchmark: Benchmark,
    case: Case,
    how: Plan,
    size: int,
    measured: dict[str, dict[str, Any]],
    absent: dict[str, str],
    wrong: dict[str, float],
) -> Row:
    return {
        "sizes": dict(case.sizes),
        "choices": dict(case.choices),
        "panel": benchmark.panel(case),
        "bytes": size,
        "n_sets": how.n_sets,
        "rotation_over_l2": how.rotation_over_l2,
        "correct": wrong["ours"] <= benchmark.tolerance if "ours" in wrong else None,
        "variants": measured,
        "absent": absent,
    }


def run(
    benchmark: Benchmark,
    cases: Sequence[Case],
    *,
    device: torch.device,
    backend: Backend,
    settings: Settings,
    l2_bytes: int,
    peak_tbps: float,
    with_peers: bool = True,
    after_case: Callable[[Case, list[Row], str], None] = lambda case, rows, error: None,
) -> list[Row]:
    """Measure all cases; `after_case(case, rows so far, error)` follows each, with the reason where it failed. One
    case that fails does not end the run."""
    rows: list[Row] = []
    warm_up(benchmark, cases, device)
    for case in cases:
        error = ""
        try:
            row = run_case(
                benchmark,
                case,
                device=device,
                backend=backend,
                settings=settings,
                l2_bytes=l2_bytes,
                peak_tbps=peak_tbps,
                with_peers=with_peers,
            )
            rows.append(row)
        except torch.OutOfMemoryError:
            error = "skipped: the GPU has too little free memory for this size"
        except Exception as failure:
            traceback.print_exc()
            error = f"failed: {describe(failure)}"
        if device.type == "cuda":
            torch.cuda.empty_cache()
        after_case(case, rows, error)
    return rows
