"""Measure registers, spills, stack, shared memory and tensor-core instructions of compiled kernels without a GPU."""

import contextlib
import io
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import Kernel, trace_and_compile
from torch_cute_ops.testing.machine_code import tensor_core_instructions


@dataclass(frozen=True)
class Resources:
    """Resources of one device kernel, as ptxas reports them.

    Attributes:
        registers: registers per thread.
        stack_bytes: bytes of local memory per thread, including the space for spilled registers.
        spill_bytes: bytes written to and read from local memory for lack of registers.
        smem_bytes: bytes of shared memory per CTA.
    """

    registers: int
    stack_bytes: int
    spill_bytes: int
    smem_bytes: int


class Build(NamedTuple):
    """Result of a compilation.

    Attributes:
        compiled: compiled function.
        resources: resources of each device kernel that the function launches.
        instructions: number of tensor-core instructions in the machine code of all these kernels, keyed by name.
    """

    compiled: Any
    resources: list[Resources]
    instructions: Counter[str]


def compile_for(kernel: Kernel, arch: Arch) -> Build:
    """Compile ``kernel`` for ``arch``, parse ptxas's remarks on each kernel that it launches, and count the tensor-core
    instructions.

    The DSL's option ``remarks{ptx}`` runs ``ptxas -v`` and writes its output to ``sys.stderr``. With this option the
    DSL also looks up the source line of each operation, which takes a third of the time. This function disables the
    look-up.

    Raises:
        RuntimeError: if ptxas printed no remarks, or reports that warpgroup MMAs do not overlap.
    """
    from cutlass._mlir_helpers import op

    remarks = io.StringIO()
    no_lines = mock.patch.object(op, "_get_caller_frame_info", lambda: None, create=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(remarks), no_lines:
        compiled: Any = trace_and_compile(kernel, arch, f"remarks{{ptx}} --keep-cubin --dump-dir={folder}")
        cubin: bytes = compiled.artifacts.CUBIN
    return Build(compiled, parse(remarks.getvalue()), tensor_core_instructions(cubin))


def parse(remarks: str) -> list[Resources]:
    """Parse the output of ``ptxas -v`` for the resources of each device kernel.

    Raises:
        RuntimeError: if the text lists no resources, or if ptxas reports that warpgroup MMAs do not overlap.
    """
    # If registers spill, the DSL wraps the lines of ptxas's output, so join them first.
    remarks = " ".join(remarks.split())
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", remarks)
    used = re.findall(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", remarks)
    if not used or len(spills) != len(used):
        raise RuntimeError(f"expected ptxas's remarks on kernels, got: {remarks!r}")
    if "wgmma.mma_async instructions are serialized" in remarks:
        raise RuntimeError(f"ptxas does not overlap warpgroup MMAs: {remarks!r}")
    return [
        Resources(int(registers), int(stack), int(stores) + int(loads), int(smem or 0))
        for (stack, stores, loads), (registers, smem) in zip(spills, used, strict=True)
    ]
