"""Facts about GPU architectures that plans are made from."""

import functools
from typing import Final, NamedTuple

import torch

KIB: Final = 1024


class Arch(NamedTuple):
    """One architecture, as the DSL and ptxas name it.

    Attributes:
        name: compile target, such as ``"sm_90a"``.
        smem_per_cta: shared memory that one CTA may use, bytes (CUDA C++ Programming Guide, "Compute Capabilities").
        smem_per_sm: shared memory of one SM, bytes.
        threads_per_sm: resident threads of one SM.
        has_e2m1_cvt: whether ``cvt.rn.satfinite.e2m1x2.f32`` exists.
    """

    name: str
    smem_per_cta: int
    smem_per_sm: int
    threads_per_sm: int
    has_e2m1_cvt: bool


_DATA_CENTER: Final = (227 * KIB, 228 * KIB, 2048)
_DESKTOP: Final = (99 * KIB, 100 * KIB, 1536)

ARCHS: Final = {
    arch.name: arch
    for arch in (
        Arch("sm_90a", *_DATA_CENTER, has_e2m1_cvt=False),
        Arch("sm_100a", *_DATA_CENTER, has_e2m1_cvt=True),
        Arch("sm_103a", *_DATA_CENTER, has_e2m1_cvt=True),
        Arch("sm_120a", *_DESKTOP, has_e2m1_cvt=True),
        Arch("sm_121a", *_DESKTOP, has_e2m1_cvt=True),
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
