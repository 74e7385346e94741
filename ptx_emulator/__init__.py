"""Emulator of PTX for sm_90a and Blackwell. The emulator runs all threads of a kernel on a CPU, and finds races.

``Machine`` executes one launch of a parsed PTX program. The docstring of ``machine`` lists the faults that it finds.
``host`` evaluates the host function of a kernel that CuTe DSL compiled. ``adapter`` runs kernels of torch_cute_ops, and
is the only file that imports torch_cute_ops. ``python -m ptx_emulator FILE`` runs a PTX file.
"""

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
    "parse",
]
