"""How time is taken: L2-cold, replayed from CUDA graphs, variants interleaved, medians with their spread.

Method.
- Buffer sets. Every variant works through ``n_sets`` independent sets of tensors in turn, weights included, so that
  their bytes together are at least 3 × L2 before a set comes up again; at least 2 sets. A tiny problem needs thousands
  of sets, and gets up to ``max_sets`` of them: where that is not enough the plan says so (``rotation_over_l2`` below
  3). The other way, a flush between calls, would have to be timed and subtracted, which drowns a 2 µs kernel. In a
  served model a decode step finds its activations warm and its weights cold; here all of it is cold.
- Graphs. For each variant one CUDA graph holds a whole number of passes over the sets, and lasts about ``graph_ms`` or
  more, so that launching the graph is a small part. Time of a call = time between two events around a replay / calls.
- Rounds. Replays of all variants are queued A, B, C, A, B, C, … without a host synchronisation, so that clocks, heat
  and other tenants touch all variants alike. Reported: the median over rounds, and the 20th and 80th percentile.
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
    """The knobs of the method.

    Attributes:
        l2_factor: bytes of all sets together, over the L2 size, from which a set counts as cold.
        max_sets: most sets (graph nodes) of a tiny problem.
        graph_ms: least duration that one graph aims at, in ms, estimated from bytes at ``assumed_tbps`` and 2 µs a
            call.
        budget_ms: GPU time of a case that the number of rounds aims at, in ms, by the same estimate.
        assumed_tbps: bandwidth of that estimate, in TB/s.
        min_rounds, max_rounds: limits of the number of rounds.
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
    """How often what runs: sets, calls a graph (a multiple of the sets), rounds, and sets' bytes over L2."""

    n_sets: int
    calls: int
    rounds: int
    rotation_over_l2: float


@dataclass(frozen=True)
class Timing:
    """Time of one call in µs: median, 20th and 80th percentile over ``rounds`` replays of ``calls`` calls."""

    us: float
    p20: float
    p80: float
    rounds: int
    calls: int

    def as_dict(self) -> dict[str, float | int]:
        """By name."""
        return asdict(self)


class Backend(Protocol):
    """What ``measure`` needs of a device: ``CudaGraphs``, or a stand-in with a made-up clock in the tests."""

    def capture(self, call: Call, n_sets: int, calls: int) -> Replay:
        """What runs ``calls`` calls over the sets in turn."""

    def mark(self) -> Any:
        """A point in time, in the order of the queued work."""

    def elapsed_us(self, start: Any, end: Any) -> float:
        """The time between two of them, in µs."""

    def synchronize(self) -> None:
        """Wait for the queued work."""


class CudaGraphs:
    """CUDA graphs and events on the current device and stream."""

    def capture(self, call: Call, n_sets: int, calls: int) -> Replay:
        """Warm ``call`` up (compile, load), then capture ``calls`` calls over the sets in turn.

        The returned object owns what the calls returned, so outputs that a variant allocates stay apart, one per set.
        """
        for i in range(min(n_sets, 3)):
            call(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        kept: list[Any] = [None] * n_sets
        # What other threads do meanwhile is no part of it, and does not end it.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for k in range(calls):
                kept[k % n_sets] = call(k % n_sets)

        def replay(keep_alive: list[Any] = kept) -> None:
            graph.replay()

        return replay

    def mark(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """The time between two events, in µs."""
        return start.elapsed_time(end) * 1e3

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        torch.cuda.synchronize()


def plan(bytes_per_call: int, n_variants: int, l2_bytes: int, settings: Settings, call_ms: float | None = None) -> Plan:
    """Sets, calls and rounds for a case.

    Args:
        bytes_per_call: that a call moves, and its set takes.
        n_variants: how many are timed side by side.
        l2_bytes: size of the L2 cache.
        settings: the knobs.
        call_ms: the duration of a call, about, in ms; ``None``: what its bytes take.
    """
    n_sets = math.ceil(settings.l2_factor * l2_bytes / max(bytes_per_call, 1))
    n_sets = max(2, min(n_sets, settings.max_sets))
    call_ms = max(2e-3, bytes_per_call / settings.assumed_tbps * 1e-9, call_ms or 0.0)
    calls = n_sets * max(1, math.ceil(settings.graph_ms / (n_sets * call_ms)))
    rounds = int(settings.budget_ms / (calls * call_ms * max(n_variants, 1)))
    rounds = max(settings.min_rounds, min(rounds, settings.max_rounds))
    return Plan(n_sets, calls, rounds, n_sets * bytes_per_call / max(l2_bytes, 1))


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value at ``fraction`` (0 to 1) of the sorted values, interpolated linearly."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def measure(
    variants: Mapping[Name, Call], n_sets: int, calls: int, rounds: int, backend: Backend
) -> dict[Name, Timing]:
    """Time every variant; the time of one call of each, in µs.

    Args:
        variants: ``variants[name](i)`` must queue its work on buffer set i of ``n_sets``, on the current stream.
        n_sets: how many sets there are.
        calls: that a replay makes, a multiple of ``n_sets``.
        rounds: replays of each variant.
        backend: of the device.

    Raises:
        ValueError: if ``calls`` is no such multiple.
    """
    if calls % n_sets:
        raise ValueError(f"calls ({calls}) must be a multiple of n_sets ({n_sets}), or some sets are used more often")
    replays = {name: backend.capture(call, n_sets, calls) for name, call in variants.items()}
    for replay in replays.values():
        replay()  # uploads the graph, and gives the device work while the timed replays are queued
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
