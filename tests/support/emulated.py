"""What tests of emulated kernels share: poison, comparison by bits, orders of threads, and edits of PTX."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ptx_emulator import Machine
from support.kernel_grid import BF16, FP16, FP32

CPU = torch.device("cpu")
POISON = 0xEE
HOPPER, BLACKWELL, CONSUMER = "sm_90a", "sm_100a", "sm_120a"
WAIT = r"mbarrier\.try_wait\S*\s+(\w+),"
PASSED = r"setp.eq.u32 \1, 0, 0;"
"""In place of a wait: it is over."""
KERNEL_WAIT = r"griddepcontrol\.wait"
WEIGHT = ("b", "b_scale")
INPUTS = ("a", "a_scale", "alpha", "bias")
"""Arguments of a GEMM, by what ``static_weight`` says about them."""


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """What no kernel writes."""
    return torch.full((*shape, dtype.itemsize), POISON, dtype=torch.uint8).view(dtype).squeeze(-1)


def is_static(run: Any) -> Any:
    """A run of a case, a named tuple of which it is a field, with a static weight."""
    return run._replace(case=replace(run.case, static_weight=True))


def written_late(given: Any, names: Sequence[str]) -> tuple[Any, dict[int, torch.Tensor]]:
    """Arguments of which those of some names are poison, and for ``run_kernel`` what the kernel before writes there."""
    written = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    stale = {}
    for name, tensor in written.items():
        stale[name] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        stale[name].untyped_storage().fill_(POISON)
    return given._replace(**stale), {given._fields.index(name): tensor for name, tensor in written.items()}


def check_static_weight(execute: Callable[..., Any], run: Any) -> None:
    """Nothing but a static weight is read before the wait, its scales behind it: the kernel before may still write
    them. ``execute`` runs a kernel, with arguments that are written ``late``: the result, and what it should be."""
    got, want = execute(is_static(run), late=("b_scale", *INPUTS))
    assert torch.equal(got, want)


def check_read_ahead(execute: Callable[..., Any], run: Any) -> None:
    """A weight is read before the wait only if it is static."""
    got, want = execute(run, late=(*WEIGHT, *INPUTS))
    assert torch.equal(got, want)
    got, want = execute(is_static(run), late=("b",))
    assert not torch.equal(got, want)


def check_in_orders(execute: Callable[..., Any], run: Any, orders: int, edit: Any = None) -> None:
    """A run gives what it should in each of some orders of its threads. ``execute`` runs a kernel, of which the PTX is
    edited: the result, and what it should be."""
    for seed in range(orders):
        got, want = execute(run._replace(seed=seed), edit)
        assert torch.equal(got, want)


def to_prefetch(case: Any) -> torch.Tensor | None:
    """What a case brings into L2, if it does: more than one request, of which the last is a part of one."""
    return poisoned(5, 1040, dtype=torch.uint8) if case.prefetches else None


def check_prefetched(machines: Sequence[Machine], matrix: torch.Tensor | None) -> None:
    """The CTAs of the last launch have asked for each byte of the matrix once, and for nothing else."""
    pieces = sorted(machines[-1].prefetched)
    ends = [address + size for address, size in pieces]
    assert [address for address, _ in pieces[1:]] == ends[:-1]
    assert sum(size for _, size in pieces) == (0 if matrix is None else matrix.numel())
    if matrix is not None:
        held = machines[-1].global_memory.contents(pieces[0][0], matrix.numel())
        assert (held == matrix.flatten().numpy()).all()


def equal(name: str, got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    """Bit for bit; but any NaN of the input dtypes is as good as another."""
    if want is not None:
        if want.dtype in (BF16, FP16, FP32):
            got, want = (t.masked_fill(t.isnan(), torch.nan) for t in (got, want))
        got, want = (t.contiguous().view(torch.uint8).reshape(-1) for t in (got, want))
        where = (got != want).nonzero()[:5].flatten().tolist()
        assert not where, f"{name} differs, first in bytes {where}"


def changed(pattern: str, number: int | None = 0, to: str = "") -> Any:
    """An edit of PTX: one of the instructions that match becomes another, or goes; with ``None``, all of them. ``to``
    may name groups of the pattern."""

    def edit(ptx: str) -> str:
        matches = list(re.finditer(rf"{pattern}[^;]*;", ptx))
        if not matches:
            raise LookupError(pattern)  # which a test of an edit does not take for what the edit broke
        for match in reversed(matches if number is None else [matches[number]]):
            ptx = ptx[: match.start()] + match.expand(to) + ptx[match.end() :]
        return ptx

    return edit


def told_twice(ptx: str) -> str:
    """An edit of PTX: both arrivals of a warp are at its own CTA's barrier."""
    return re.sub(r"mapa\.shared::cluster\.u32 there, (%r\d+), %r\d+;", r"mov.b32 there, \1;", ptx)
