"""Helpers for tests that run kernels in the emulator: poisoned tensors, bitwise comparison, orders of threads, and
edits of PTX."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ptx_emulator import Machine
from ptx_emulator.adapter import run_kernel
from support.kernel_grid import BF16, FP16, FP32
from torch_cute_ops.runtime.arch import ARCHS

CPU = torch.device("cpu")
POISON = 0xEE
HOPPER, BLACKWELL, CONSUMER = "sm_90a", "sm_100a", "sm_120a"
WAIT = r"mbarrier\.try_wait\S*\s+(\w+),"
PASSED = r"setp.eq.u32 \1, 0, 0;"
"""Replacement for a wait instruction that makes the wait return at once."""
KERNEL_WAIT = r"griddepcontrol\.wait"
WEIGHT = ("b", "b_scale")
INPUTS = ("a", "a_scale", "alpha", "bias")
"""Arguments of a GEMM that the previous launch may write even if ``static_weight`` is set."""


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor filled with bytes that no kernel writes, so that unwritten elements are detected."""
    return torch.full((*shape, dtype.itemsize), POISON, dtype=torch.uint8).view(dtype).squeeze(-1)


def is_static(run: Any) -> Any:
    """Return a copy of ``run`` (a named tuple with the field ``case``) whose weight is static."""
    return run._replace(case=replace(run.case, static_weight=True))


def written_late(given: Any, names: Sequence[str]) -> tuple[Any, dict[int, torch.Tensor]]:
    """Replace the named arguments by poison. Return all arguments, and the values that the previous kernel writes over
    the poison.

    The values are keyed by argument index, for ``run_kernel``.
    """
    written = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    stale = {}
    for name, tensor in written.items():
        stale[name] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        stale[name].untyped_storage().fill_(POISON)
    return given._replace(**stale), {given._fields.index(name): tensor for name, tensor in written.items()}


def run_strictly(case: Any, given: Any, late: Sequence[str] | None, **how: Any) -> None:
    """Run a case's kernel with the emulator's strictest checks.

    Args:
        late: names of the arguments that a simulated previous kernel writes at the last moment, or None for no previous
            kernel.
        how: further arguments of ``run_kernel``.
    """
    given, before = (given, None) if late is None else written_late(given, late)
    how = {"max_steps": 200_000, "strict": True, "scoped": True, **how}
    run_kernel(case.kernel, ARCHS[case.arch], *given, written_before=before, **how)


def check_static_weight(execute: Callable[..., Any], run: Any) -> None:
    """Check that a kernel reads a static weight, but no other argument, before it waits for the previous kernel.

    ``execute`` runs the kernel after a simulated previous kernel, which writes the arguments in ``late`` at the last
    moment. ``execute`` returns the result and the expected result.
    """
    got, want = execute(is_static(run), late=("b_scale", *INPUTS))
    assert torch.equal(got, want)


def check_read_ahead(execute: Callable[..., Any], run: Any) -> None:
    """Check that a kernel reads the weight before it waits for the previous kernel if the weight is static, and only
    after this wait if it is not static."""
    got, want = execute(run, late=(*WEIGHT, *INPUTS))
    assert torch.equal(got, want)
    got, want = execute(is_static(run), late=("b",))
    assert not torch.equal(got, want)


def check_in_orders(execute: Callable[..., Any], run: Any, orders: int, edit: Any = None) -> None:
    """Check that a kernel gives the expected result in ``orders`` different orders of its threads.

    ``execute`` runs the kernel, whose PTX is first changed by ``edit``, and returns the result and the expected result.
    """
    for seed in range(orders):
        got, want = execute(run._replace(seed=seed), edit)
        assert torch.equal(got, want)


def to_prefetch(case: Any) -> torch.Tensor | None:
    """Return a matrix to prefetch if the case prefetches, or None. The matrix needs several requests; the last request
    is not full."""
    return poisoned(5, 1040, dtype=torch.uint8) if case.prefetches else None


def check_prefetched(machines: Sequence[Machine], matrix: torch.Tensor | None) -> None:
    """Check that the CTAs of the last launch together prefetched each byte of the matrix once, and nothing else."""
    requests = sorted(machines[-1].prefetched)
    ends = [address + size for address, size in requests]
    assert [address for address, _ in requests[1:]] == ends[:-1]
    assert sum(size for _, size in requests) == (0 if matrix is None else matrix.numel())
    if matrix is not None:
        held = machines[-1].global_memory.contents(requests[0][0], matrix.numel())
        assert (held == matrix.flatten().numpy()).all()


def equal(name: str, got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    """Check that two tensors are bitwise equal, where all NaNs of a 16-bit or 32-bit dtype count as equal."""
    if want is not None:
        if want.dtype in (BF16, FP16, FP32):
            got, want = (t.masked_fill(t.isnan(), torch.nan) for t in (got, want))
        got, want = (t.contiguous().view(torch.uint8).reshape(-1) for t in (got, want))
        where = (got != want).nonzero()[:5].flatten().tolist()
        assert not where, f"{name} differs, first in bytes {where}"


def changed(pattern: str, number: int | None = 0, to: str = "") -> Any:
    """Return a function that edits PTX: it replaces, or removes, an instruction that matches ``pattern``.

    Args:
        pattern: regular expression for the beginning of the instruction.
        number: index among the matching instructions, or None for all.
        to: replacement, which may refer to groups of the pattern; empty to remove the instruction.
    """

    def edit(ptx: str) -> str:
        matches = list(re.finditer(rf"{pattern}[^;]*;", ptx))
        if not matches:
            raise LookupError(pattern)  # tests of edits expect other exceptions, so that this exception makes them fail
        for match in reversed(matches if number is None else [matches[number]]):
            ptx = ptx[: match.start()] + match.expand(to) + ptx[match.end() :]
        return ptx

    return edit


ACQUIRE = r"fence\.acquire\.sync_restrict"
RELEASE = r"@p fence\.release\.sync_restrict"
"""Patterns of the fences that order accesses to shared memory between CTAs of a cluster."""


def told_twice(ptx: str) -> str:
    """Edit PTX so that a warp arrives twice at its own CTA's barrier, instead of once at this barrier and once at the
    barrier of the other CTA."""
    return re.sub(r"mapa\.shared::cluster\.u32 there, (%r\d+), %r\d+;", r"mov.b32 there, \1;", ptx)
