"""What a GPU can do, roughly: enough to rank backends and tactics, not to predict a time."""

from collections.abc import Iterable

import torch

from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.runtime.arch import ARCHS, CLOCK_HZ, Arch

MEMORY_EFFICIENCY = 0.888
"""Share of the peak bandwidth, by data sheet, that a copy reaches: 4.26 of 4.8 TB/s on an H200, 3.02 of 3.35 on an H100
(measured)."""
TENSOR_CORE_EFFICIENCY = 0.8
"""Share of the peak rate that a good large GEMM reaches: 700 to 830 TFLOP/s of 919, random data (measured on H200s)."""
CLUSTER_PLACES = {1: 1.0, 2: 1.0, 3: 0.89, 4: 0.91}
"""Share of the CTA slots that clusters can use, by their CTAs, because GPCs are no multiples of them: on an H100 and an
H200 39, 30, 22, 18 and 14 clusters of 3, 4, 5, 6 and 8 CTAs run at once (measured)."""
LARGE_CLUSTER_PLACES = 0.85
"""The same of larger clusters."""
LAUNCH_SECONDS = 2e-6
"""Launch overhead of an empty kernel."""


def usual_targets(arch: Arch) -> tuple[Target, ...]:
    """The GPUs of an architecture, where there is none to ask."""
    return tuple(Target(torch.device("cuda"), arch, gpu.sms, bandwidth=gpu.bandwidth) for gpu in arch.gpus)


def smallest_tile(tiles: Iterable[int], m: int) -> int:
    """The least of ``tiles``, in ascending order, that has ``m`` rows, or the largest: a wider one only costs."""
    sizes = tuple(tiles)
    return next((rows for rows in sizes if rows >= m), sizes[-1])


def places(slots: int, cluster: int) -> int:
    """CTAs in clusters of ``cluster`` that run at once, where ``slots`` would without clusters."""
    share = CLUSTER_PLACES.get(cluster, LARGE_CLUSTER_PLACES)
    return max(1, int(share * slots / cluster)) * cluster


def memory_seconds(size: int, kernels: int, target: Target) -> float:
    """Time to move ``size`` bytes with ``kernels`` kernels, one after the other."""
    return kernels * LAUNCH_SECONDS + size / bytes_per_second(target)


def bytes_per_second(target: Target) -> float:
    """Memory bandwidth, reads and writes together."""
    return MEMORY_EFFICIENCY * (target.bandwidth or _arch(target).peak_bandwidth(target.sms))


def tensor_core_seconds(flops: int, target: Target, sms: int | None = None) -> float:
    """Time for ``flops`` operations on the tensor cores of ``sms`` SMs; ``None``: all."""
    rate = _arch(target).flops_per_clock * (sms or target.sms) * CLOCK_HZ
    return flops / (rate * TENSOR_CORE_EFFICIENCY)


def fp4_tensor_core_seconds(flops: int, target: Target, sms: int | None = None) -> float:
    """The same, with both operands in FP4, where tensor cores take them."""
    arch = _arch(target)
    return tensor_core_seconds(flops, target, sms) * arch.flops_per_clock / (arch.fp4_flops_per_clock or 1.0)


def weight_seconds(weights: int, clocks: float) -> float:
    """Time for one SM to decode ``weights`` at so many clocks each."""
    return weights * clocks / CLOCK_HZ


def overlapped(*seconds: float, order: float) -> float:
    """Time of parts that overlap, though not perfectly: their ``order``-norm."""
    return float(sum(part**order for part in seconds) ** (1 / order))


def _arch(target: Target) -> Arch:
    """The target's architecture; the slowest one where no kernel of ours supports it."""
    return target.arch or min(ARCHS.values(), key=lambda arch: arch.peak_bandwidth(1))
