"""Run kernels of torch_cute_ops in the emulator. No other file of this package imports torch_cute_ops.

A kernel is an object with a ``config``, an ``arguments()`` method that describes its run-time arguments, and a
``__call__`` that the DSL traces (``torch_cute_ops.runtime.compiler.Kernel``).
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from ptx_emulator import host, parser
from ptx_emulator.host import host_launches
from ptx_emulator.layout import GlobalMemory
from ptx_emulator.machine import Machine
from ptx_emulator.parser import Program, parse_all
from ptx_emulator.tensors import bytes_of, copy_back
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.argspec import Dim, TensorArg
from torch_cute_ops.runtime.compiler import KernelSpec, key_of, trace_and_compile
from torch_cute_ops.testing import resources
from torch_cute_ops.testing.resources import Resources


@dataclass
class Compiled:
    """A compiled kernel.

    Attributes:
        programs: Parsed device programs, keyed by name.
        ptx: Text of the PTX.
        module: MLIR module that contains the host function.
        resources: Registers, spills and shared memory of each program, as ptxas reports them; empty if
            ``CUTE_DSL_LINEINFO`` is set.
        instructions: Number of tensor-core instructions in the machine code, keyed by name; empty if
            ``CUTE_DSL_LINEINFO`` is set.
    """

    programs: dict[str, Program]
    ptx: str
    module: Any
    resources: list[Resources]
    instructions: Counter[str]


_compiled: dict[Any, Compiled] = {}


def compile_ptx(kernel: Any, arch: Arch) -> Compiled:
    """Compile ``kernel`` for ``arch``. The result is cached in this process."""
    cls = type(kernel)
    spec = KernelSpec(f"{cls.__module__}.{cls.__qualname__}", kernel.config)
    key = (key_of(spec, arch), kernel.arguments())  # other packages' kernels may take more arguments
    if key not in _compiled:
        with tempfile.TemporaryDirectory() as folder:

            def keep_ptx(kernel: Any, arch: Arch, options: str = "") -> Any:
                kept = trace_and_compile(kernel, arch, f"{options} --keep-ptx")
                ptx.append(kept.artifacts.PTX)
                return kept

            ptx: list[str] = []
            if os.environ.get("CUTE_DSL_LINEINFO"):  # compile_for would omit the line information
                compiled = keep_ptx(kernel, arch, f"--dump-dir={folder}")
                build = resources.Build(compiled, [], Counter())
            else:
                with mock.patch.object(resources, "trace_and_compile", keep_ptx):
                    build = resources.compile_for(kernel, arch)
        text = ptx[0]
        _compiled[key] = Compiled(
            programs_of(text), text, build.compiled.ir_module, build.resources, build.instructions
        )
    return _compiled[key]


def forget() -> None:
    """Clear the caches of compiled kernels and parsed programs."""
    _compiled.clear()
    programs_of.cache_clear()
    host.forget()
    parser.forget()


@functools.lru_cache(maxsize=2)
def programs_of(ptx: str) -> dict[str, Program]:
    """Parse a PTX text. Return its programs, keyed by name.

    The cache holds only two texts: tests run many edited texts, but run each of them with several seeds in sequence.
    """
    return {program.name: program for program in parse_all(ptx)}


def run_kernel(
    kernel: Any,
    arch: Arch,
    *arguments: Any,
    seed: int | None = 0,
    max_steps: int = 1_000_000,
    strict: bool = False,
    lenient: bool = False,
    edit: Callable[[str], str] | None = None,
    written_before: Mapping[int, torch.Tensor] | None = None,
    held: Collection[int] = (),
    starved: Collection[int] = (),
    scoped: bool = False,
) -> list[Machine]:
    """Execute all launches of a kernel call on CPU tensors. The results are written to the tensors.

    Args:
        kernel: Kernel of torch_cute_ops.
        arch: Architecture to compile for.
        arguments: Tensor, number or None for each entry of ``kernel.arguments()``. The host function computes grid and
            block from them.
        seed: Seed of the order in which warps and copies are executed. With None, warps run in lockstep, and copies are
            executed as late as possible.
        max_steps: Number of executed instructions after which a launch is aborted.
        strict: True if only ``bar.warp.sync`` orders memory within a warp (see ``Machine``).
        lenient: True for kernels of other projects (see ``Machine``).
        edit: Function that changes the PTX before it runs, for tests that inject faults.
        written_before: Tensors, keyed by argument number. The emulator acts as if the previous kernel wrote these
            tensors to the arguments as late as possible (see ``Machine``). The writes of each launch of the kernel also
            reach its next launch as late as possible. With None, each launch starts when the previous launch has ended.
        held: Numbers of the bulk copies of each launch that are executed as late as possible (see ``Machine``).
        starved: Numbers of the warps of each launch that run as late as possible (see ``Machine``).
        scoped: True if the scopes of mbarrier operations limit which memory accesses they order (see ``Machine``).

    Returns:
        Machine of each launch.

    Raises:
        EmulationError: If the emulator finds a fault (see ``ptx_emulator.memory``).
        TypeError, ValueError: If the arguments do not match ``kernel.arguments()``, or a launch has no CTAs.
    """
    compiled = compile_ptx(kernel, arch)
    programs = compiled.programs
    if edit:
        programs = programs_of(edit(compiled.ptx))
        for name, program in programs.items():
            program.decoded = compiled.programs[name].decoded
    memory = GlobalMemory()
    leaves, tensors = _flatten(kernel.arguments(), arguments, memory)
    machines: list[Machine] = []
    accessed = None

    started = memory.copies()
    for number, tensor in (written_before or {}).items():
        address, given = tensors[number]
        if (tensor.shape, tensor.stride(), tensor.dtype) != (given.shape, given.stride(), given.dtype):
            raise TypeError(f"argument {number}: written as {tensor.dtype}{tuple(tensor.shape)}")
        contents, _ = bytes_of(tensor)
        memory.contents(address, len(contents))[:] = contents
    sizes = {name: [param.size for param in program.params] for name, program in programs.items()}
    for name, launch in host_launches(compiled.module, leaves, sizes):
        if 0 in launch.grid:
            raise ValueError(f"{name}: a launch of no CTAs, {launch.grid}, which CUDA refuses")
        # The previous kernel released its dependents only after all kernels before it had ended. So no kernel before
        # the previous kernel can still be running.
        complete = memory.copies()
        late = memory.take_back(started) if launch.overlaps and written_before is not None else None
        machine = Machine(
            programs[name], launch, memory, seed, max_steps, strict, lenient, late, accessed, held, starved, scoped
        )
        machines.append(machine)
        machine.run()
        started, accessed = complete, machine.accessed
    for address, tensor in tensors.values():
        copy_back(memory, address, tensor)
    return machines


def _flatten(
    specs: tuple, arguments: tuple, memory: GlobalMemory
) -> tuple[list[list[Any]], dict[int, tuple[int, torch.Tensor]]]:
    """Convert the arguments to values for the host function: a list of numbers and addresses per argument.

    Also return a dict from the numbers of tensor arguments to (address, tensor).
    """
    if len(specs) != len(arguments):
        raise TypeError(f"{len(arguments)} arguments, not {len(specs)}")
    leaves: list[list[Any]] = []
    tensors = {}
    dims: dict[Dim, int] = {}
    for i, (spec, value) in enumerate(zip(specs, arguments, strict=True)):
        if (spec is None) != (value is None):
            raise TypeError(f"argument {i}: {value} for {spec}")
        if spec is None:
            continue
        if not isinstance(spec, TensorArg):
            leaves.append([value])
            continue
        sizes, strides = tuple(value.shape), tuple(value.stride())
        if len(sizes) != len(spec.shape) or value.dtype.itemsize != _itemsize(spec.dtype):
            raise TypeError(f"argument {i}: {value.dtype}{sizes} for {spec}")
        dynamic = []
        for wanted, found, extent in zip((*spec.shape, *spec.stride), (*sizes, *strides), sizes * 2, strict=True):
            if isinstance(wanted, Dim):
                if found % wanted.divisibility or dims.setdefault(wanted, found) != found:
                    raise ValueError(f"argument {i}: {wanted.name} is {found}, for {spec}")
                dynamic.append(found)
            elif wanted != found and extent > 1:
                raise ValueError(f"argument {i}: sizes {sizes} and strides {strides} for {spec}")
        contents, accessible = bytes_of(value)
        address = memory.allocate(f"argument {i}", contents, spec.align, accessible)
        leaves.append([address, *dynamic])
        tensors[i] = address, value
    return leaves, tensors


def _itemsize(dtype: str) -> int:
    import cutlass

    return getattr(cutlass, dtype).width // 8
