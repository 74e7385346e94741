"""Record with the profiler when each kernel of a captured graph starts and ends, to find gaps and overlaps."""

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
"""Pattern of our kernels' names, in which the DSL writes the module's name without dots."""


class Kernel(NamedTuple):
    """A kernel or copy that ran, with its start and end in µs."""

    name: str
    start: float
    end: float


def recorded(replay: Replay) -> list[Kernel]:
    """Replay a graph under the profiler, and return its kernels and copies in the order in which they started."""
    replay()  # the first replay uploads the graph, so it is not recorded
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
    """Shorten a kernel's name: for our kernels to the kernel family, for other kernels to the name without
    arguments."""
    ours = _OURS.search(name)
    return ours[1] if ours else re.sub(r"[<(].*", "", name.removeprefix("void "))[:NAME_LENGTH]


def one_of(kernels: Sequence[Kernel], repeats: int) -> list[Kernel]:
    """Return the kernels of one layer from the middle of ``repeats`` equal layers, and the kernel before them.

    The first element is the last kernel of the previous layer. Times count from the start of the chosen layer's first
    kernel. If the first element ends after time 0, the two kernels overlap.

    Raises:
        ValueError: if the kernels do not divide into ``repeats`` equal groups of at least one, or ``repeats`` is 1.
    """
    each, rest = divmod(len(kernels), repeats)
    if rest or not each or repeats < 2:
        raise ValueError(f"{len(kernels)} kernels do not divide into {repeats} equal layers")
    first = repeats // 2 * each
    zero = kernels[first].start
    return [Kernel(kernel.name, kernel.start - zero, kernel.end - zero) for kernel in kernels[first - 1 : first + each]]


def table(kernels: Sequence[Kernel]) -> str:
    """Return a table with the start, the end and the gap of each kernel in ``kernels``, the result of ``one_of``. The
    first kernel is left out, because it belongs to the previous layer.

    The gap is the time from the end of all earlier kernels to the start of the kernel. The gap is negative if the
    kernel overlaps an earlier kernel.
    """
    body, latest = [], kernels[0].end
    for kernel in kernels[1:]:
        body.append([kernel.name, *(f"{us:.2f}" for us in (kernel.start, kernel.end, kernel.start - latest))])
        latest = max(latest, kernel.end)
    return report.table(["kernel", "start µs", "end µs", "gap µs"], body)
