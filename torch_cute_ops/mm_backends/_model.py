"""What a GPU can do, roughly: enough to rank backends and tactics, not to predict a time."""

from collections.abc import Iterable

import torch

from torch_cute_ops.mm_backends._base import Target
from torch_cute_ops.runtime.arch import Arch

CLOCK_HZ = 1.7e9
"""Of SMs under load. (An H200 runs tensor cores at 1.5 to 1.98 GHz.)"""
BYTES_PER_CLOCK = {"sm_90a": 19.0, "sm_100a": 30.0, "sm_103a": 30.0, "sm_120a": 5.5, "sm_121a": 3.5}
"""Of memory, for each SM and clock: 4.26 TB/s of copy on an H200 with 132 SMs (measured); others by data sheet."""
FLOPS_PER_CLOCK = {"sm_90a": 4096.0, "sm_100a": 8192.0, "sm_103a": 8192.0, "sm_120a": 1024.0, "sm_121a": 1024.0}
"""Of tensor cores with 16-bit operands, dense, for each SM and clock, by data sheet."""
TENSOR_CORE_EFFICIENCY = 0.8
"""Of a good large product: 700 to 830 TFLOP/s on H200s, on random data (measured), of 919 at the clock above."""
SMS = {
    "sm_90a": (132, 114, 78),
    "sm_100a": (148,),
    "sm_103a": (148,),
    "sm_120a": (188, 170, 110, 84, 70),
    "sm_121a": (48,),
}
"""SMs of each architecture's GPUs, by data sheet."""
CLUSTER_PLACES = 0.88
"""Of the places for CTAs that clusters of more than two can have: groups of SMs are no multiples of them (measured on
an H200)."""
LAUNCH_SECONDS = 2e-6
"""Start and end of a kernel, with nothing to do in between."""


def usual_targets(arch: Arch) -> tuple[Target, ...]:
    """The GPUs of an architecture, where there is none to ask."""
    return tuple(Target(torch.device("cuda"), arch, sms) for sms in SMS[arch.name])


def smallest_tile(tiles: Iterable[int], m: int) -> int:
    """The least of ``tiles``, in ascending order, that has ``m`` rows, or the largest: a wider one only costs."""
    sizes = tuple(tiles)
    return next((rows for rows in sizes if rows >= m), sizes[-1])


def places(slots: int, cluster: int) -> int:
    """CTAs in clusters of ``cluster`` that run at once, where ``slots`` would without clusters."""
    return max(1, int((CLUSTER_PLACES if cluster > 2 else 1.0) * slots / cluster)) * cluster


def memory_seconds(size: int, kernels: int, target: Target) -> float:
    """Time to move ``size`` bytes with ``kernels`` kernels, one after the other."""
    return kernels * LAUNCH_SECONDS + size / bytes_per_second(target)


def bytes_per_second(target: Target) -> float:
    """Of memory, read and written together."""
    return _rate(BYTES_PER_CLOCK, target) * target.sms * CLOCK_HZ


def tensor_core_seconds(flops: int, target: Target, sms: int | None = None) -> float:
    """Time for ``flops`` operations on the tensor cores of so many SMs; ``None``: of all."""
    rate = _rate(FLOPS_PER_CLOCK, target) * (sms or target.sms) * CLOCK_HZ
    return flops / (rate * TENSOR_CORE_EFFICIENCY)


def weight_seconds(weights: int, clocks: float) -> float:
    """Time of an SM to decode ``weights`` at so many clocks each."""
    return weights * clocks / CLOCK_HZ


def overlapped(*seconds: float, order: float) -> float:
    """Time of parts that run side by side and hinder each other a little: their norm of that order."""
    return float(sum(part**order for part in seconds) ** (1 / order))


def _rate(rates: dict[str, float], target: Target) -> float:
    return rates[target.arch.name] if target.arch is not None else min(rates.values())
