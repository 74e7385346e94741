"""What plans need to know of GPU architectures."""

import ctypes
import functools
import math
from typing import Any, Final, NamedTuple

import torch

KIB: Final = 1024


class Gpu(NamedTuple):
    """A kind of GPU.

    Attributes:
        sms: streaming multiprocessors.
        bandwidth: peak of its DRAM, bytes a second.
    """

    sms: int
    bandwidth: float


class Arch(NamedTuple):
    """One architecture, as the DSL and ptxas name it.

    Attributes:
        name: compile target, such as ``"sm_90a"``.
        smem_per_cta: shared memory that one CTA may use, bytes (CUDA C++ Programming Guide, "Compute Capabilities").
        smem_per_sm: shared memory of one SM, bytes.
        threads_per_sm: resident threads of one SM.
        tensor_memory: bytes of an SM's tensor memory, which ``tcgen05`` accumulates in; 0 where there is none.
        has_wgmma: whether there are Hopper's warpgroup MMA instructions.
        has_tcgen05: whether there are data-center Blackwell's MMA instructions.
        has_block_scaled_mma: whether ``mma.sync`` takes block scales.
        has_e2m1_cvt: whether ``cvt.rn.satfinite.e2m1x2.f32`` exists.
        gpus: its GPUs, by data sheet; the first stands for all where there is none to ask.
        flops_per_clock: dense rate of the tensor cores with 16-bit operands, for each SM and clock, by data sheet.
        fp4_flops_per_clock: the same with FP4 operands; 0 where tensor cores do not take them.
        has_run: whether kernels have run, and been timed, on such a GPU; elsewhere in an emulator of PTX alone, and
            what they cost is by data sheet.
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
        """Peak of the DRAM of a GPU with ``sms`` SMs whose driver has ``reported`` so many bytes a second, or nothing.

        That of the nearest of ``gpus`` with as many SMs, so that all of a kind are planned for alike, and as ahead of
        time. If none has as many, as with a part of a GPU, what was reported, or else a share of the first one's.
        """
        listed = [gpu.bandwidth for gpu in self.gpus if gpu.sms == sms]
        if reported is None:
            return listed[0] if listed else self.gpus[0].bandwidth * sms / self.gpus[0].sms
        return min(listed, key=lambda bandwidth: abs(math.log(bandwidth / reported)), default=reported)


CLOCK_HZ: Final = 1.7e9
"""SM clock under load that rates refer to. (An H200 runs its tensor cores at 1.5 to 1.98 GHz.)"""
MEMORY_CLOCK_RATE: Final = 36
GLOBAL_MEMORY_BUS_WIDTH: Final = 37
"""Attributes of a device, as the CUDA driver API numbers them."""


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
        # Of MMAs with 64 elements of k; sm_103a has some with 96, which are half as fast again.
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
        _data_center("sm_100a", has_wgmma=False, gpus=(Gpu(148, 8.0e12),), flops_per_clock=8192.0),
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
    """The architecture of that name.

    Raises:
        ValueError: if kernels are compiled for none of that name.
    """
    arch = ARCHS.get(name)
    if arch is None:
        raise ValueError(f"{name!r} is no architecture; they are {', '.join(ARCHS)}")
    return arch


def arch_name(index: int) -> str:
    """What the architecture of CUDA device ``index`` is called, whether or not kernels support it."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}a"


@functools.cache
def arch_of_device(index: int) -> Arch:
    """The architecture of CUDA device ``index``.

    Raises:
        RuntimeError: if no kernel supports it.
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
    """Streaming multiprocessors of CUDA device ``index``."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def reported_bandwidth(index: int) -> float | None:
    """Peak bandwidth of CUDA device ``index``, in bytes a second, by its driver; ``None`` if that does not say."""
    torch.cuda.init()
    driver, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), index)

    def attribute(number: int) -> int:
        value = ctypes.c_int()  # 0 where the driver does not know the attribute
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    # Bits move at both edges of the clock, which is in kHz.
    return 2 * 1e3 * attribute(MEMORY_CLOCK_RATE) * attribute(GLOBAL_MEMORY_BUS_WIDTH) / 8 or None
