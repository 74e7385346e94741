"""Rough models of the time that kernels take. The models suffice to rank backends and tactics, but not to predict a
time."""

from collections.abc import Iterable

import torch

from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.runtime.arch import ARCHS, CLOCK_HZ, Arch

MEMORY_EFFICIENCY = 0.888
"""Bandwidth of a copy, divided by the peak of the data sheet. Measured: 4.26 of 4.8 TB/s on an H200, 3.02 of 3.35 TB/s
on an H100."""
TENSOR_CORE_EFFICIENCY = 0.8
"""Rate of a good large GEMM, divided by the peak of the data sheet. Measured on H200s with random data: 700 to 830 of
919 TFLOP/s."""
CLUSTER_PLACES = {1: 1.0, 2: 1.0, 3: 0.89, 4: 0.91}
"""Fraction of a GPU's CTA slots that clusters can use, keyed by the number of CTAs of a cluster. It is below 1 because
the number of SMs of a GPC is not always a multiple of the cluster size.

Measured on an H100 and an H200: 39 clusters of 3 CTAs run at the same time, 30 clusters of 4, 22 of 5, 18 of 6, and 14
of 8."""
LARGE_CLUSTER_PLACES = 0.85
"""Fraction of a GPU's CTA slots that clusters of more than four CTAs can use."""
LAUNCH_SECONDS = 2e-6
"""Time in seconds of a launch of an empty kernel."""


def usual_targets(arch: Arch) -> tuple[Target, ...]:
    """Return one target for each known GPU of an architecture."""
    return tuple(Target(torch.device("cuda"), arch, gpu.sms, bandwidth=gpu.bandwidth) for gpu in arch.gpus)


def smallest_tile(tiles: Iterable[int], m: int) -> int:
    """Return the smallest tile size that fits ``m`` rows, or the largest size if none fits. ``tiles`` must be
    ascending."""
    sizes = tuple(tiles)
    return next((rows for rows in sizes if rows >= m), sizes[-1])


def places(slots: int, cluster: int) -> int:
    """Return the number of CTAs that run at the same time in clusters of ``cluster`` CTAs, on a GPU on which ``slots``
    CTAs without clusters run at the same time."""
    share = CLUSTER_PLACES.get(cluster, LARGE_CLUSTER_PLACES)
    return max(1, int(share * slots / cluster)) * cluster


def memory_seconds(size: int, kernels: int, target: Target) -> float:
    """Return the time in seconds in which ``kernels`` successive kernels together move ``size`` bytes."""
    return kernels * LAUNCH_SECONDS + size / bytes_per_second(target)


def bytes_per_second(target: Target) -> float:
    """Return the DRAM bandwidth that a copy reaches, in bytes read or written per second."""
    return MEMORY_EFFICIENCY * (target.bandwidth or _arch(target).peak_bandwidth(target.sms))


def tensor_core_seconds(flops: int, target: Target, sms: int | None = None) -> float:
    """Return the time in seconds of ``flops`` operations on the tensor cores of ``sms`` SMs, or of all SMs if None."""
    rate = _arch(target).flops_per_clock * (sms or target.sms) * CLOCK_HZ
    return flops / (rate * TENSOR_CORE_EFFICIENCY)


def fp4_tensor_core_seconds(flops: int, target: Target, sms: int | None = None) -> float:
    """Return the time in seconds of ``flops`` operations on two FP4 operands. For tensor cores without FP4, their
    16-bit rate is assumed."""
    arch = _arch(target)
    return tensor_core_seconds(flops, target, sms) * arch.flops_per_clock / (arch.fp4_flops_per_clock or 1.0)


def weight_seconds(weights: int, clocks: float) -> float:
    """Return the time in seconds in which one SM decodes ``weights`` elements, at ``clocks`` clocks per element."""
    return weights * clocks / CLOCK_HZ


def overlapped(*seconds: float, order: float) -> float:
    """Return the total time of tasks that overlap imperfectly: the ``order``-norm of their times."""
    total = 0.0
    for part in seconds:  # a generator expression would take twice as long as this loop
        total += part**order
    return float(total ** (1 / order))


def _arch(target: Target) -> Arch:
    """Return the target's architecture, or the slowest architecture if no kernel supports the target."""
    return target.arch or min(ARCHS.values(), key=lambda arch: arch.peak_bandwidth(1))
