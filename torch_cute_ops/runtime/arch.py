"""GPU architectures and their capabilities, from which kernels are planned."""

import ctypes
import functools
import math
from typing import Any, Final, NamedTuple

import torch

KIB: Final = 1024


class Gpu(NamedTuple):
    """GPU model.

    Attributes:
        sms: number of streaming multiprocessors.
        bandwidth: peak DRAM bandwidth, bytes per second.
    """

    sms: int
    bandwidth: float


class Arch(NamedTuple):
    """GPU architecture.

    Attributes:
        name: compile target of the DSL and of ptxas, such as ``"sm_90a"``.
        smem_per_cta: shared memory available to one CTA, bytes (CUDA C++ Programming Guide, "Compute Capabilities").
        smem_per_sm: shared memory of one SM, bytes.
        threads_per_sm: maximum number of resident threads of one SM.
        tensor_memory: tensor memory of one SM, which ``tcgen05`` accumulates in, bytes; 0 if none.
        has_wgmma: True if Hopper's warpgroup MMA instructions exist.
        has_tcgen05: True if data-center Blackwell's MMA instructions exist.
        has_block_scaled_mma: True if ``mma.sync`` takes block scales.
        has_e2m1_cvt: True if ``cvt.rn.satfinite.e2m1x2.f32`` exists.
        gpus: models with this architecture, from data sheets. If no GPU is present, kernels are planned for the first
            model.
        flops_per_clock: dense tensor-core rate for 16-bit operands, FLOP per SM and clock, from data sheets.
        fp4_flops_per_clock: dense tensor-core rate for FP4 operands, FLOP per SM and clock; 0 if unsupported.
        has_run: True if our kernels have run and been timed on a GPU of this architecture. If False, they have run in a
            PTX emulator only, and cost models use data sheets.
    """

    name: str
    smem_per_cta: int
    smem_per_sm: int
    threads_per_sm: int
    tensor_memory: int
    has_wgmma: bool
    has_tcgen05: bool
    has_block_scaled_mma: bool
    has_e2m1_cvt: bool
    gpus: tuple[Gpu, ...]
    flops_per_clock: float
    fp4_flops_per_clock: float
    has_run: bool = False

    def peak_bandwidth(self, sms: int, reported: float | None = None) -> float:
        """Estimate the peak DRAM bandwidth of a GPU, bytes per second.

        Of the models in ``gpus`` with ``sms`` SMs, select the model whose bandwidth is nearest to ``reported``, and
        return the model's bandwidth. So all GPUs of a model get the same plans, at run time and ahead of time. If no
        model has ``sms`` SMs (for example, on a MIG slice), return ``reported``. If ``reported`` is None, return the
        first model's bandwidth per SM times ``sms``.

        Args:
            sms: number of SMs of the GPU.
            reported: bandwidth that the driver reports, bytes per second, or None.
        """
        listed = [gpu.bandwidth for gpu in self.gpus if gpu.sms == sms]
        if reported is None:
            return listed[0] if listed else self.gpus[0].bandwidth * sms / self.gpus[0].sms
        return min(listed, key=lambda bandwidth: abs(math.log(bandwidth / reported)), default=reported)


CLOCK_HZ: Final = 1.7e9
"""Assumed SM clock under load. (An H200 runs its tensor cores at 1.5 to 1.98 GHz.)"""
MEMORY_CLOCK_RATE: Final = 36
GLOBAL_MEMORY_BUS_WIDTH: Final = 37
"""Device attributes, CUdevice_attribute of the CUDA driver API."""


def _data_center(name: str, **capabilities: Any) -> Arch:
    blackwell = not capabilities["has_wgmma"]
    return Arch(
        name,
        smem_per_cta=227 * KIB,
        smem_per_sm=228 * KIB,
        threads_per_sm=2048,
        tensor_memory=256 * KIB if blackwell else 0,
        has_tcgen05=blackwell,
        has_block_scaled_mma=False,
        has_e2m1_cvt=blackwell,
        # Rate for MMAs with K = 64. On sm_103a, MMAs with K = 96 are 1.5 times as fast.
        fp4_flops_per_clock=32768.0 if blackwell else 0.0,
        **capabilities,
    )


def _desktop(name: str, **capabilities: Any) -> Arch:
    return Arch(
        name,
        smem_per_cta=99 * KIB,
        smem_per_sm=100 * KIB,
        threads_per_sm=1536,
        tensor_memory=0,
        has_wgmma=False,
        has_tcgen05=False,
        has_block_scaled_mma=True,
        has_e2m1_cvt=True,
        flops_per_clock=1024.0,
        fp4_flops_per_clock=4096.0,
        **capabilities,
    )


ARCHS: Final = {
    arch.name: arch
    for arch in (
        _data_center(
            "sm_90a",
            has_wgmma=True,
            # H200; H100 NVL and GH200; H100 SXM; H100 PCIe; H20
            gpus=(Gpu(132, 4.8e12), Gpu(132, 4.0e12), Gpu(132, 3.35e12), Gpu(114, 2.04e12), Gpu(78, 4.0e12)),
            flops_per_clock=4096.0,
            has_run=True,
        ),
        # B200: its memory has a peak of 7.67 TB/s (pytorch/ao#4002); data sheets round it to 8.
        _data_center("sm_100a", has_wgmma=False, gpus=(Gpu(148, 7.67e12),), flops_per_clock=8192.0),
        # B300
        _data_center("sm_103a", has_wgmma=False, gpus=(Gpu(148, 8.0e12),), flops_per_clock=8192.0),
        # RTX PRO 6000; RTX 5090; RTX PRO 5000; RTX 5080; RTX 5070 Ti
        _desktop(
            "sm_120a",
            gpus=(Gpu(188, 1.79e12), Gpu(170, 1.79e12), Gpu(110, 1.34e12), Gpu(84, 0.96e12), Gpu(70, 0.90e12)),
        ),
        _desktop("sm_121a", gpus=(Gpu(48, 0.273e12),)),
    )
}


def arch_named(name: str) -> Arch:
    """Return the architecture with this name, such as ``"sm_90a"``.

    Raises:
        ValueError: if kernels cannot be compiled for an architecture with this name.
    """
    arch = ARCHS.get(name)
    if arch is None:
        raise ValueError(f"{name!r} is no architecture; use one of {', '.join(ARCHS)}")
    return arch


def arch_name(index: int) -> str:
    """Return the architecture name of CUDA device ``index``. Kernels may not support this architecture."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}a"


@functools.cache
def arch_of_device(index: int) -> Arch:
    """Return the architecture of CUDA device ``index``.

    Raises:
        RuntimeError: if no kernel supports the device.
    """
    arch = ARCHS.get(arch_name(index))
    if arch is None:
        major, minor = torch.cuda.get_device_capability(index)
        raise RuntimeError(
            f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor}; "
            f"the kernels of torch_cute_ops support {', '.join(ARCHS)}"
        )
    return arch


@functools.cache
def sm_count(index: int) -> int:
    """Return the number of streaming multiprocessors of CUDA device ``index``."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def reported_bandwidth(index: int) -> float | None:
    """Return the peak DRAM bandwidth, in bytes per second, that the driver reports for CUDA device ``index``, or None
    if it reports none."""
    torch.cuda.init()
    driver, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), index)

    def attribute(number: int) -> int:
        value = ctypes.c_int()  # stays 0 if the driver does not know the attribute
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    # Double data rate; the clock is in kHz and the bus width in bits.
    return 2 * 1e3 * attribute(MEMORY_CLOCK_RATE) * attribute(GLOBAL_MEMORY_BUS_WIDTH) / 8 or None
