"""Digests of the PTX of all kernels that tests compile."""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from support import kernel_grid
from support.kernel_grid import KernelCase
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.compiler import trace_and_compile


def every_checked_case() -> list[KernelCase]:
    """Return all cases of the compile test and the emulator tests, without repetition."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
    import test_compile_kernels as compiled

    fp8_fp4 = (*compiled.FP8_FP4_RUNS, *compiled.FP8_FP4_MMA, *compiled.FP8_FP4_TCGEN05)
    fp8 = (*compiled.FP8_RUNS, *compiled.FP8_TCGEN05, *compiled.MXFP8_TCGEN05, *fp8_fp4)
    emulated = [run.case for run in (*compiled.FP4, *compiled.GATED, *fp8)]
    cases = (*kernel_grid.covering_cases(), *compiled.other_cases(every=False), *emulated)
    return list({case.id: case for case in cases}.values())


def digest_of(case: KernelCase) -> str:
    """Compile a case's kernel and return the digest of its PTX."""
    from cutlass._mlir_helpers import op

    # Skip the DSL's look-up of each operation's source line, which takes a third of the time.
    no_lines = mock.patch.object(op, "_get_caller_frame_info", lambda: None, create=True)
    with tempfile.TemporaryDirectory() as folder, no_lines:
        options = f"--keep-ptx --dump-dir={folder}"
        compiled: Any = trace_and_compile(case.kernel, ARCHS[case.arch], options)
        return masked_digest(compiled.artifacts.PTX)


def masked_digest(ptx: str) -> str:
    """Return the digest of PTX without symbol names, because these contain names of modules and classes."""
    names: dict[str, str] = {}
    ptx = re.sub(r"\bkernel_cutlass_\w+", lambda found: names.setdefault(found[0], f"KERNEL_{len(names)}"), ptx)
    return hashlib.sha256(ptx.encode()).hexdigest()[:24]
