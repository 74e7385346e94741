"""Measure the cases of one op: warm up, check, time, and compare with the ceilings."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .case import Benchmark, Case, Row, Tensors, Variant
from .measure import Backend, Ceilings, Plan, Settings, copy, copy_sets, measure_what_captures, plan

ASSUMED_TFLOPS = 600.0
"""Rate in TFLOP/s from which the duration of a GEMM is estimated, to choose the number of runs."""


def warm_up(benchmark: Benchmark, cases: Sequence[Case], device: torch.device) -> None:
    """Compile our kernels before anything is timed: run each implementation of our op once for every kernel.

    Our kernels must be compiled before a peer is imported, because QuACK patches the DSL. Exceptions are ignored here,
    because they occur again, and are reported, when the case runs.
    """
    for smallest in {str(s): s for s in map(benchmark.smallest, cases)}.values():
        with contextlib.suppress(Exception):
            sets = [benchmark.make_set(smallest, device)]
            variants, _ = collect_variants(benchmark, smallest, sets, with_peers=False)
            variants["ours"].call(0)


def describe(error: Exception) -> str:
    """Describe an exception in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def collect_variants(
    benchmark: Benchmark, case: Case, sets: Sequence[Tensors], with_peers: bool
) -> tuple[dict[str, Variant], dict[str, str]]:
    """Return the variants of this case, and the reason for each missing implementation or peer.

    A peer that fails when it is created or on its first call is reported as missing, and the run continues.
    """
    variants, absent = {"ours": benchmark.ours(case, sets)}, {}
    for name in (*benchmark.ways, *(benchmark.peers if with_peers else ())):
        try:
            peer = benchmark.peer(name, case, sets)
            if not isinstance(peer, str):
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
    """Return the largest fraction of wrong elements for each variant that computes the op. If the case is too large to
    check, return an empty dict.

    Before each call, all tensors of buffer set 0 are restored, and its outputs are filled with poison again.
    """
    dimensions = list(case.sizes.values())
    if dimensions[0] * dimensions[1] > benchmark.checked_elements:
        return {}
    made = cloned(sets[0])
    expected, wrong = benchmark.expected(case, sets[0]), {}
    for variant_name, variant in variants.items():
        if variant.checked:
            wrong[variant_name] = benchmark.mismatch(variant.call(0), expected, case)
            restore(sets[0], made)
    return wrong


def cloned(tensors: Tensors) -> Tensors:
    """Return copies of a buffer set's tensors by name."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def restore(tensors: Tensors, made: Tensors) -> None:
    """Overwrite the tensors of a buffer set with their copies in `made`."""
    for name, tensor in made.items():
        tensors[name].copy_(tensor)


def run_case(
    benchmark: Benchmark,
    case: Case,
    *,
    device: torch.device,
    backend: Backend,
    settings: Settings,
    l2_bytes: int,
    ceilings: Ceilings,
    with_peers: bool = True,
) -> Row:
    """Measure one case, and return a row of results. The row contains times in µs, bandwidths in TB/s and rates in
    TFLOP/s, and their fractions of the ceilings. Bandwidths and rates are computed from the formulas for bytes and
    operations."""
    size, flops = benchmark.bytes_moved(case), benchmark.flops(case)
    n_variants = 2 + len(benchmark.ways) + (len(benchmark.peers) if with_peers else 0)
    how = plan(size, n_variants, l2_bytes, settings, call_ms=flops / ASSUMED_TFLOPS * 1e-9)
    sets = [benchmark.make_set(case, device) for _ in range(how.n_sets)]
    made = cloned(sets[0])
    variants, absent = collect_variants(benchmark, case, sets, with_peers)
    restore(sets[0], made)  # `collect_variants` wrote to buffer set 0
    del made
    wrong = check(benchmark, case, sets, variants)
    copies = copy_sets(size, how.n_sets, device)
    copied = 2 * copies[0][0].nbytes
    variants["copy"] = Variant(lambda i: copy(*copies[i]), copied, checked=False)

    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def lost(name: str, error: Exception) -> None:
        if stream is not None:
            torch.cuda.set_stream(stream)  # after a failed capture, the capture's stream is still the current stream
        if name in ("ours", "copy") or isinstance(error, torch.OutOfMemoryError):
            raise error
        absent[name] = f"cannot be captured ({describe(error)})"

    calls = {name: variant.call for name, variant in variants.items()}
    timings = measure_what_captures(calls, how.n_sets, how.calls, how.rounds, backend, lost)
    copy_tbps = copied / timings["copy"].us * 1e-6
    measured: dict[str, dict[str, Any]] = {}
    for name, timing in timings.items():
        variant = variants[name]
        tbps = variant.bytes / timing.us * 1e-6
        measured[name] = {
            **timing.as_dict(),
            "bytes": variant.bytes,
            "tbps": tbps,
            "of_copy": tbps / copy_tbps,
            "of_peak": tbps / ceilings.copy_tbps,
            **(_rates(tbps, flops / timing.us * 1e-6, ceilings) if flops and name != "copy" else {}),
            "note": variant.note,
            "mismatch": wrong.get(name),
            "correct": wrong[name] <= benchmark.tolerance if name in wrong else None,
        }
    return _row(benchmark, case, how, measured, absent)


def _rates(tbps: float, tflops: float, ceilings: Ceilings) -> dict[str, float | None]:
    """Return a GEMM's bandwidth and rate, and each of them as a fraction of its ceiling."""
    return {
        "of_read": tbps / ceilings.read_tbps if ceilings.read_tbps else None,
        "tflops": tflops,
        "of_bf16": tflops / ceilings.bf16_tflops if ceilings.bf16_tflops else None,
    }


def _row(
    benchmark: Benchmark, case: Case, how: Plan, measured: dict[str, dict[str, Any]], absent: dict[str, str]
) -> Row:
    return {
        "sizes": dict(case.sizes),
        "choices": dict(case.choices),
        "panel": benchmark.panel(case),
        "bytes": benchmark.bytes_moved(case),
        "flops": benchmark.flops(case),
        "n_sets": how.n_sets,
        "rotation_over_l2": how.rotation_over_l2,
        "correct": measured["ours"]["correct"],
        "variants": measured,
        "absent": absent,
    }


def run(
    benchmark: Benchmark,
    cases: Sequence[Case],
    *,
    device: torch.device,
    with_peers: bool = True,
    after_case: Callable[[Case, list[Row], str], None] = lambda case, rows, error: None,
    **how: Any,
) -> list[Row]:
    """Measure all cases with `run_case`. If a case fails, continue with the next case.

    `after_case(case, rows so far, error)` is called after each case; `error` is empty if it succeeded.
    """
    rows: list[Row] = []
    warm_up(benchmark, cases, device)
    if with_peers:
        with contextlib.suppress(Exception):
            benchmark.prepare(cases, device)
    for case in cases:
        error = ""
        try:
            rows.append(run_case(benchmark, case, device=device, with_peers=with_peers, **how))
        except torch.OutOfMemoryError:
            error = "skipped: the GPU has too little free memory for this size"
        except Exception as failure:
            traceback.print_exc()
            error = f"failed: {describe(failure)}"
        if device.type == "cuda":
            torch.cuda.empty_cache()
        after_case(case, rows, error)
    return rows
