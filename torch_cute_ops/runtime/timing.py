"""Timing method: cold L2, replayed CUDA graphs, interleaved variants, medians with percentiles.

- Buffer sets. Each variant cycles through ``n_sets`` independent sets of tensors, including weights. Together the sets
  occupy at least 3 × L2; at least 2 sets are used. A tiny problem would need thousands of sets; it gets at most
  ``max_sets``, and the plan's ``rotation_over_l2`` is then below 3. The alternative would be to flush L2 between calls
  and to subtract the flush's time, but this time varies by more than the duration of a 2 µs kernel. In a served model,
  the activations of a decode step are in L2 and the weights are not; here, no operand is in L2.
- Graphs. For each variant, one CUDA graph contains a whole number of passes over the sets. The graph lasts about
  ``graph_ms`` or longer, so that launching it costs little. The time of a call is the time between two events around a
  replay, divided by the number of calls.
- Rounds. Replays of the variants are queued A, B, C, A, B, C, … without host synchronisation, so that clocks, heat and
  other users of the GPU affect all variants alike. The result is the median over the rounds, with the 20th and 80th
  percentile.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch

Call = Callable[[int], Any]
Replay = Callable[[], None]
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Settings:
    """Parameters of the timing method.

    Attributes:
        l2_factor: required total size of all sets, as a multiple of the L2 size.
        max_sets: maximum number of buffer sets, and so of kernel nodes per pass of a graph.
        graph_ms: intended minimum duration of a graph, ms, estimated from ``assumed_tbps`` and 2 µs per call.
        budget_ms: intended GPU time of a case, ms, by the same estimate; determines the number of rounds.
        assumed_tbps: bandwidth that the estimate assumes, TB/s.
        min_rounds: minimum number of rounds.
        max_rounds: maximum number of rounds.
    """

    l2_factor: float = 3.0
    max_sets: int = 16384
    graph_ms: float = 2.0
    budget_ms: float = 200.0
    assumed_tbps: float = 4.0
    min_rounds: int = 7
    max_rounds: int = 25


@dataclass(frozen=True)
class Plan:
    """Numbers of buffer sets, of calls per graph (a multiple of the sets) and of rounds; and the total size of the sets
    as a multiple of the L2 size."""

    n_sets: int
    calls: int
    rounds: int
    rotation_over_l2: float


@dataclass(frozen=True)
class Timing:
    """Time of one call, µs: median, 20th and 80th percentile over ``rounds`` replays of ``calls`` calls."""

    us: float
    p20: float
    p80: float
    rounds: int
    calls: int

    def as_dict(self) -> dict[str, float | int]:
        """Return the fields as a dict."""
        return asdict(self)


class Backend(Protocol):
    """Device interface that ``measure`` needs: ``CudaGraphs``, or in tests a substitute with a simulated clock."""

    def capture(self, call: Call, n_sets: int, calls: int) -> Replay:
        """Return a function that replays ``calls`` calls, cycling through the sets."""

    def mark(self) -> Any:
        """Record a point in time, in the order of the queued work."""

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Return the time between two marks, µs."""

    def synchronize(self) -> None:
        """Wait for the queued work."""


class CudaGraphs:
    """CUDA graphs and events on the current device and stream."""

    def capture(self, call: Call, n_sets: int, calls: int) -> Replay:
        """Run ``call`` once to compile and load it, then capture ``calls`` calls that cycle through the sets in a CUDA
        graph.

        The returned function keeps the calls' results alive, so that each set gets its own outputs.
        """
        for i in range(min(n_sets, 3)):
            call(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        kept: list[Any] = [None] * n_sets
        # thread_local: CUDA calls of other threads neither join the capture nor invalidate it.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for k in range(calls):
                kept[k % n_sets] = call(k % n_sets)

        def replay(keep_alive: list[Any] = kept) -> None:
            graph.replay()

        return replay

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the time between two events, µs."""
        return start.elapsed_time(end) * 1e3

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        torch.cuda.synchronize()


def plan(bytes_per_call: int, n_variants: int, l2_bytes: int, settings: Settings, call_ms: float | None = None) -> Plan:
    """Choose the numbers of buffer sets, calls and rounds with which a case is timed.

    Args:
        bytes_per_call: bytes that a call moves; also the size of a set.
        n_variants: number of variants that are timed together.
        l2_bytes: size of the L2 cache, bytes.
        settings: parameters of the method.
        call_ms: estimated duration of a call, ms, or None to estimate it from ``bytes_per_call``.
    """
    n_sets = math.ceil(settings.l2_factor * l2_bytes / max(bytes_per_call, 1))
    n_sets = max(2, min(n_sets, settings.max_sets))
    call_ms = max(2e-3, bytes_per_call / settings.assumed_tbps * 1e-9, call_ms or 0.0)
    calls = n_sets * max(1, math.ceil(settings.graph_ms / (n_sets * call_ms)))
    rounds = int(settings.budget_ms / (calls * call_ms * max(n_variants, 1)))
    rounds = max(settings.min_rounds, min(rounds, settings.max_rounds))
    return Plan(n_sets, calls, rounds, n_sets * bytes_per_call / max(l2_bytes, 1))


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the value at ``fraction`` (0 to 1) of the sorted values, interpolated linearly."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def measure(
    variants: Mapping[Name, Call], n_sets: int, calls: int, rounds: int, backend: Backend
) -> dict[Name, Timing]:
    """Time all variants once in each round.

    Args:
        variants: functions by name. ``variants[name](i)`` queues work on buffer set i of ``n_sets``, on the current
            stream.
        n_sets: number of sets.
        calls: number of calls of a replay, a multiple of ``n_sets``.
        rounds: number of timed replays of each variant.
        backend: device interface.

    Returns:
        Time of one call of each variant, µs.

    Raises:
        ValueError: if ``calls`` is not a multiple of ``n_sets``.
    """
    if calls % n_sets:
        raise ValueError(f"calls ({calls}) must be a multiple of n_sets ({n_sets}), to use sets equally often")
    replays = {name: backend.capture(call, n_sets, calls) for name, call in variants.items()}
    for replay in replays.values():
        replay()  # not timed: uploads the graph, and keeps the device busy while the timed replays are queued
    marks: dict[Name, list[tuple[Any, Any]]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            start = backend.mark()
            replay()
            marks[name].append((start, backend.mark()))
    backend.synchronize()
    timings = {}
    for name, pairs in marks.items():
        times = [backend.elapsed_us(start, end) / calls for start, end in pairs]
        timings[name] = Timing(percentile(times, 0.5), percentile(times, 0.2), percentile(times, 0.8), rounds, calls)
    return timings
