"""A functional emulator of PTX: kernels of the DSL run on a CPU, thread for thread.

``run_kernel`` compiles a kernel, evaluates its host function and executes every launch. ``Machine`` executes one launch
of a PTX program. See ``machine`` for what is modelled and which errors are found. With ``CUTE_DSL_LINEINFO=1`` in the
environment an error names the kernel's source line too; compiling then takes a third longer.
"""

from ptx_emulator.launch import compile_ptx, run_kernel
from ptx_emulator.layout import GlobalMemory, Launch
from ptx_emulator.machine import Machine
from ptx_emulator.memory import Deadlock, EmulationError, Misaligned, OutOfBounds, Race, Uninitialised
from ptx_emulator.parser import parse

__all__ = [
    "Deadlock",
    "EmulationError",
    "GlobalMemory",
    "Launch",
    "Machine",
    "Misaligned",
    "OutOfBounds",
    "Race",
    "Uninitialised",
    "compile_ptx",
    "parse",
    "run_kernel",
]
