"""When each kernel of a captured chain starts and ends, as the profiler sees it: gaps, and what overlaps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.autograd import DeviceType

from . import report
from .measure import Replay

NAME_LENGTH = 48
_OURS = re.compile(r"torch_cute_opskernels(\w+?)kernel[A-Z]")
"""The DSL's names of our kernels hold the module that they are from, without its dots."""


class Kernel(NamedTuple):
    """A kernel, or a copy, that ran; µs."""

    name: str
    start: float
    end: float


def recorded(replay: Replay) -> list[Kernel]:
    """What runs on the GPU in a replay, in the order of the starts."""
    replay()  # uploads the graph
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    ran = [
        Kernel(short(event.name), event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == DeviceType.CUDA
    ]
    return sorted(ran, key=lambda kernel: kernel.start)


def short(name: str) -> str:
    """The family of one of our kernels; of others the name without arguments."""
    ours = _OURS.search(name)
    return ours[1] if ours else re.sub(r"[<(].*", "", name.removeprefix("void "))[:NAME_LENGTH]


def one_of(kernels: Sequence[Kernel], repeats: int) -> list[Kernel]:
    """The kernels of one repetition in the middle of a chain of ``repeats``, which are alike, behind the one before it.

    Times count from its first start; so the end of the kernel before is at or below 0, or above it where the two
    overlap.

    Raises:
        ValueError: if the repetitions do not have equally many kernels, at least one.
    """
    each, rest = divmod(len(kernels), repeats)
    if rest or not each or repeats < 2:
        raise ValueError(f"{len(kernels)} kernels are not those of {repeats} equal layers")
    first = repeats // 2 * each
    zero = kernels[first].start
    return [Kernel(kernel.name, kernel.start - zero, kernel.end - zero) for kernel in kernels[first - 1 : first + each]]


def table(kernels: Sequence[Kernel]) -> str:
    """A line for each kernel but the first, which is the one before them: start, end, and how long after the latest end
    before it the kernel starts; less than 0 where the two overlap."""
    body, latest = [], kernels[0].end
    for kernel in kernels[1:]:
        body.append([kernel.name, *(f"{us:.2f}" for us in (kernel.start, kernel.end, kernel.start - latest))])
        latest = max(latest, kernel.end)
    return report.table(["kernel", "start µs", "end µs", "gap µs"], body)
