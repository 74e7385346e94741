"""Functions that time calls with ``torch_cute_ops.runtime.timing``, and functions that measure the ceilings: the
largest bandwidth and the largest rate of the GPU, which results are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_cute_ops.runtime.timing import (
    Backend,
    Call,
    CudaGraphs,
    Plan,
    Replay,
    Settings,
    Timing,
    measure,
    percentile,
    plan,
)

__all__ = [
    "AsTheyAre",
    "Backend",
    "Call",
    "Ceilings",
    "CudaGraphs",
    "Plan",
    "Replay",
    "Settings",
    "Timing",
    "ceilings",
    "copy",
    "copy_sets",
    "measure",
    "measure_what_captures",
    "peak_bf16_tflops",
    "peak_copy_tbps",
    "peak_read_tbps",
    "percentile",
    "plan",
]


@dataclass(frozen=True)
class Ceilings:
    """Largest rates of the GPU, measured in this run. A rate is None if it was not measured."""

    copy_tbps: float
    """Rate of a large copy, reads and writes, in TB/s."""
    read_tbps: float | None = None
    """Rate of reads only, in TB/s."""
    bf16_tflops: float | None = None
    """Rate of a large bfloat16 GEMM by cuBLAS, in TFLOP/s."""


@dataclass(frozen=True)
class AsTheyAre:
    """Timing backend that calls functions without capturing a graph, because the functions replay a graph themselves,
    or are to be timed eagerly."""

    backend: Backend

    def capture(self, call: Call, n_sets: int, calls: int) -> Replay:
        return call  # type: ignore[return-value]

    def mark(self) -> Any:
        return self.backend.mark()

    def elapsed_us(self, start: Any, end: Any) -> float:
        return self.backend.elapsed_us(start, end)

    def synchronize(self) -> None:
        self.backend.synchronize()


def measure_what_captures(
    variants: Mapping[str, Call],
    n_sets: int,
    calls: int,
    rounds: int,
    backend: Backend,
    lost: Callable[[str, Exception], None],
) -> dict[str, Timing]:
    """Measure the variants that a CUDA graph can capture. For every other variant, call `lost` with the variant's name
    and the exception. `lost` may raise."""
    replays: dict[str, Any] = {}
    for name, call in variants.items():
        try:
            replays[name] = backend.capture(call, n_sets, calls)
        except Exception as error:
            lost(name, error)
    return measure(replays, n_sets, calls, rounds, AsTheyAre(backend))


def copy_sets(bytes_moved: int, n_sets: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs (source, destination) of tensors. Copying a pair reads and writes `bytes_moved` bytes in total.
    Source values are random."""
    words = max(1, bytes_moved // 8)
    return [
        (
            torch.randint(-(2**31), 2**31, (words,), dtype=torch.int32, device=device),
            torch.empty(words, dtype=torch.int32, device=device),
        )
        for _ in range(n_sets)
    ]


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy with an elementwise kernel, whose bandwidth is the ceiling for row-wise ops.

    `target.copy_(source)` is a memcpy, which the driver runs at 4.1 or 2.7 TB/s depending on the size. (H200, driver
    580: 85,983,232 bytes take 42.1 µs, 85,985,280 bytes 63.9 µs; this kernel takes 42.5 µs for both.)
    """
    torch.add(source, 1, out=target)


def peak_copy_tbps(backend: Backend, device: torch.device, gib: int = 2, rounds: int = 11) -> float:
    """Measure an elementwise copy of `gib` GiB, and return its bandwidth in TB/s. Reads and writes both count."""
    [(source, target)] = copy_sets(gib * 2**31, 1, device)
    timing = measure({"copy": lambda _: copy(source, target)}, 1, 5, rounds, backend)["copy"]
    return 2 * source.nbytes / timing.us * 1e-6


def peak_read_tbps(backend: Backend, device: torch.device, mib: int = 4096, rounds: int = 11) -> float:
    """Measure the read bandwidth in TB/s with a sum and with a matrix-vector product, and return the larger of the
    two."""
    words = torch.ones(mib * 2**18, dtype=torch.float32, device=device)
    matrix = words.view(torch.bfloat16).view(-1, 2**15)
    vector = torch.ones(2**15, dtype=torch.bfloat16, device=device)
    calls = {"sum": lambda _: words.sum(), "mv": lambda _: matrix @ vector}
    timings = measure_what_captures(calls, 1, 5, rounds, backend, lambda name, error: None)
    return words.nbytes / min(timing.us for timing in timings.values()) * 1e-6


def peak_bf16_tflops(backend: Backend, device: torch.device, size: int = 8192, rounds: int = 11) -> float:
    """Measure a GEMM of square random bfloat16 matrices by cuBLAS, and return its rate in TFLOP/s."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in "ab")
    out = torch.empty_like(a)
    timing = measure({"mm": lambda _: torch.mm(a, b.t(), out=out)}, 1, 5, rounds, backend)["mm"]
    return 2 * size**3 / timing.us * 1e-6


def ceilings(backend: Backend, device: torch.device) -> Ceilings:
    """Measure all ceilings. If a measurement that only GEMMs need fails, its ceiling is None."""
    copy_tbps = peak_copy_tbps(backend, device)
    others: list[float | None] = []
    for peak in (peak_read_tbps, peak_bf16_tflops):
        try:
            others.append(peak(backend, device))
        except Exception:  # for example, out of memory
            others.append(None)
    return Ceilings(copy_tbps, *others)
