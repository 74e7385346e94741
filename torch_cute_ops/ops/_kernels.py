"""The compiled kernels of an op that has one kernel for each kind of call."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch

from torch_cute_ops.runtime.arch import Arch, arch_of_device, sm_count
from torch_cute_ops.runtime.capture import forbid_in_capture
from torch_cute_ops.runtime.compiler import Wanted, compile_kernel

Facts = TypeVar("Facts", bound=tuple[Any, ...])
Value = TypeVar("Value")

MOST_USUAL: Final = 4096
"""Calls that an op remembers as usual, some 1 KB each."""
_lock = threading.Lock()


class Launcher(NamedTuple):
    """A compiled kernel, and what a call of it needs.

    Attributes:
        function: the compiled kernel.
        config: what it was compiled for.
        sms: multiprocessors of the device.
        device: where the tensors of its calls are.
    """

    function: Callable[..., None]
    config: Any
    sms: int
    device: torch.device


@dataclass
class Kernels(Generic[Facts]):
    """Launchers by the facts of a call: a ``NamedTuple`` with the keywords of ``warmup``, ``device`` among them.

    Attributes:
        op: the op's name.
        wanted: the kernel for these facts on an architecture.
        found: those that are there. Calls look for theirs here, with a plain tuple.
    """

    op: str
    wanted: Callable[[Facts, Arch], Wanted]
    found: dict[tuple[Any, ...], Launcher]

    def get(self, facts: Facts, device: torch.device) -> Launcher:
        """The launcher for these facts, made if it is not there.

        Raises:
            RuntimeError: if it is not, and a CUDA graph is being captured.
        """
        launcher = self.found.get(facts)
        if launcher is None:
            index = device.index
            shown = ", ".join(f"{name}={value!r}" for name, value in facts._asdict().items())  # type: ignore[attr-defined]
            forbid_in_capture(self.op, str(facts), f"torch_cute_ops.warmup({self.op!r}, {shown})")
            arch = arch_of_device(index)
            kernel = self.wanted(facts, arch)
            launcher = Launcher(compile_kernel(kernel, arch), kernel.config, sm_count(index), device)
            self.found[facts] = launcher
        return launcher


def keep_usual(usual: dict[tuple[Any, ...], Value], facts: tuple[Any, ...], value: Value) -> None:
    """Keep what a call with these facts needs; of ``MOST_USUAL`` the oldest goes. Other threads may do the same."""
    with _lock:
        if len(usual) >= MOST_USUAL:
            del usual[next(iter(usual))]
        usual[facts] = value


def are_int32(*tensors: torch.Tensor | None) -> bool:
    """Whether those that there are hold int32: compiled functions take uint32 too."""
    for tensor in tensors:  # noqa: SIM110 (a generator takes twice as long)
        if tensor is not None and tensor.dtype is not torch.int32:
            return False
    return True


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that is contiguous and starts at a multiple of 16 bytes."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def readable_rows(rows: torch.Tensor) -> torch.Tensor:
    """The matrix, or a contiguous copy where its rows do not each start at a multiple of 16 bytes."""
    step = rows.stride(0) * rows.element_size() if rows.shape[0] > 1 else 0
    if (rows.stride(1) == 1 or rows.shape[1] == 1) and rows.data_ptr() % 16 == 0 and step % 16 == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)
