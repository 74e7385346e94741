"""What plans need to know of GPU architectures."""

import functools
from typing import Any, Final, NamedTuple

import torch

KIB: Final = 1024


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
        sm_counts: SMs of its GPUs, the largest first, by data sheet.
        memory_bytes_per_clock: DRAM bandwidth for each SM and clock of ``CLOCK_HZ``, bytes read and written.
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
    sm_counts: tuple[int, ...]
    memory_bytes_per_clock: float
    flops_per_clock: float
    fp4_flops_per_clock: float
    has_run: bool = False


CLOCK_HZ: Final = 1.7e9
"""SM clock under load that rates refer to. (An H200 runs its tensor cores at 1.5 to 1.98 GHz.)"""


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
        # 4.26 TB/s of copy on an H200 with 132 SMs (measured); the other bandwidths are by data sheet.
        _data_center(
            "sm_90a",
            has_wgmma=True,
            sm_counts=(132, 114, 78),
            memory_bytes_per_clock=19.0,
            flops_per_clock=4096.0,
            has_run=True,
        ),
        _data_center("sm_100a", has_wgmma=False, sm_counts=(148,), memory_bytes_per_clock=30.0, flops_per_clock=8192.0),
        _data_center("sm_103a", has_wgmma=False, sm_counts=(148,), memory_bytes_per_clock=30.0, flops_per_clock=8192.0),
        _desktop("sm_120a", sm_counts=(188, 170, 110, 84, 70), memory_bytes_per_clock=5.5),
        _desktop("sm_121a", sm_counts=(48,), memory_bytes_per_clock=3.5),
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
