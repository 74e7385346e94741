"""What a compiled kernel uses: registers, spills, stack, shared memory; found on any machine, without a GPU."""

import contextlib
import io
import re
from dataclasses import dataclass
from typing import Any

from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import Kernel, trace_and_compile


@dataclass(frozen=True)
class Resources:
    """Of one device kernel, as ptxas reports them.

    Attributes:
        registers: of a thread.
        stack_bytes: local memory of a thread, spilled registers included.
        spill_bytes: written to and read from local memory because registers ran out.
        smem_bytes: shared memory of a CTA.
    """

    registers: int
    stack_bytes: int
    spill_bytes: int
    smem_bytes: int


def compile_for(kernel: Kernel, arch: Arch) -> tuple[Any, Resources]:
    """Compile ``kernel`` for ``arch`` and read ptxas's remarks.

    They come from the DSL's option ``remarks{ptx}``, which runs ``ptxas -v`` and writes to ``sys.stderr``.

    Raises:
        RuntimeError: if there are no remarks on exactly one device kernel.
    """
    remarks = io.StringIO()
    with contextlib.redirect_stderr(remarks):
        compiled = trace_and_compile(kernel, arch, "remarks{ptx}")
    return compiled, parse(remarks.getvalue())


def parse(remarks: str) -> Resources:
    """The figures in the output of ``ptxas -v`` for one device kernel.

    Raises:
        RuntimeError: if they are not there once.
    """
    # With spills, they come as part of a longer message, which is wrapped.
    remarks = " ".join(remarks.split())
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", remarks)
    used = re.findall(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", remarks)
    if len(spills) != 1 or len(used) != 1:
        raise RuntimeError(f"expected ptxas's remarks on one kernel, got: {remarks!r}")
    stack, stores, loads = map(int, spills[0])
    return Resources(int(used[0][0]), stack, stores + loads, int(used[0][1] or 0))
