"""Inject faults into the PTX of a kernel: remove or replace one instruction. Tests check that the emulator finds
them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from ptx_emulator import EmulationError
from ptx_emulator.adapter import compile_ptx
from torch_cute_ops.runtime.arch import ARCHS

Edit = Callable[[str], str]


class Fault(NamedTuple):
    """One fault to inject.

    Attributes:
        what: kind of fault, a key of ``TCGEN05`` or ``BLOCK_SCALED_MMA``.
        number: index among the places in the PTX where this kind of fault is possible.
        edit: function that injects the fault into PTX.
    """

    what: str
    number: int
    edit: Edit

    @property
    def id(self) -> str:
        return f"{self.what} {self.number}"


def _more(group: int, by: int) -> str:
    """Return PTX instructions, to be put in braces, that set ``q`` to ``by`` plus the register that a group of the
    pattern matches."""
    return rf".reg .b32 q; add.u32 q, \{group}, {by};"


ARRIVE = r"(?:@p )?mbarrier\.arrive\.(?!expect_tx)[^;]*;"
EXPECT = r"mbarrier\.arrive\.expect_tx\S+ \S+, \[[^\]]*\], %r\d+;"
WAIT = r"(\{\.reg \.pred p; )(AGAIN: mbarrier\.try_wait\S+ p, \[%r\d+\], )(%r\d+);"
DESCRIBED_MMA = r"(tcgen05\.mma\S+ )\[(%r\d+)\], (%rd\d+), (%rd\d+), (%r\d+)((?:, \[%r\d+\], \[%r\d+\])?), p;"
"""MMA with or without scales, whose weight is in shared memory."""
MMA = DESCRIBED_MMA.replace(r"(%rd\d+)", r"(%rd\d+|\[%r\d+\])", 1)
"""MMA whose weight is in shared memory or in tensor memory."""
BLOCK_MMA = r"(tcgen05\.mma\S+ )\[(%r\d+)\], (%rd\d+), (%rd\d+), (%r\d+), \[(%r\d+)\], \[(%r\d+)\], p;"
TENSOR = (
    r"(cp\.async\.bulk\.tensor\.[23]d\.shared\S+ )\[(%r\d+)(\+\d+)?\], "
    r"\[(%rd\d+), \{(%r\d+), (%r\d+)(, %r\d+)?\}\],([^;]*);"
)
BULK = r"(cp\.async\.bulk\.shared\S+ )\[(%r\d+)(\+\d+)?\], \[(%rd\d+)(\+\d+)?\],([^;]*);"
CP = r"(tcgen05\.cp\S+ )\[(%r\d+)\], (%rd\d+);"
LD = r"(tcgen05\.ld\S+ \{[^}]*\}, )\[(%r\d+)\];"
INIT = r"(mbarrier\.init\.shared\.b64 \t\[[^\]]*\], )(%r\d+);"
Q64 = r".reg .b64 q; add.u64 q, "

BARRIERS: dict[str, tuple[str, str]] = {
    "barrier of the CTA left out": (r"bar\.sync[^;]*;", ""),
    "barrier of the warp left out": (r"bar\.warp\.sync[^;]*;", ""),
    "cluster does not arrive": (r"barrier\.cluster\.arrive[^;]*;", ""),
    "cluster does not wait": (r"barrier\.cluster\.wait[^;]*;", ""),
    "kernel before not waited for": (r"griddepcontrol\.wait;", ""),
}
"""(pattern, replacement) of each kind of fault, keyed by its description."""
TCGEN05: dict[str, tuple[str, str]] = {
    **BARRIERS,
    "wait left out": (WAIT, r"\1AGAIN: setp.eq.u32 p, 0, 0;"),
    "wait for the other phase": (WAIT, r"\1.reg .b32 q; xor.b32 q, \3, 1; \2q;"),
    "arrival left out": (ARRIVE, ""),
    "expected bytes left out": (EXPECT, ""),
    "other bytes expected": (
        r"(mbarrier\.arrive\.expect_tx\S+ \S+, \[[^\]]*\], )(%r\d+);",
        rf"{{{_more(2, 16)} \1q;}}",
    ),
    "other count of arrivals": (INIT, rf"{{{_more(2, 1)} \1q;}}"),
    "mbarrier not initialised": (INIT, ""),
    "commit left out": (r"tcgen05\.commit[^;]*;", ""),
    "MMA left out": (MMA, ""),
    "operands exchanged": (DESCRIBED_MMA, r"\1[\2], \4, \3, \5\6, p;"),
    "scales exchanged": (BLOCK_MMA, r"\1[\2], \3, \4, \5, [\7], [\6], p;"),
    "weight's scales a column on": (BLOCK_MMA, r"\1[\2], \3, \4, \5, [\6+1], [\7], p;"),
    "activations' scales a column on": (BLOCK_MMA, r"\1[\2], \3, \4, \5, [\6], [\7+1], p;"),
    "sums a column on": (MMA, r"\1[\2+1], \3, \4, \5\6, p;"),
    "adds where it should not, or not": (MMA, r"{.reg .pred o; not.pred o, p; \1[\2], \3, \4, \5\6, o;}"),
    "weight 32 bytes on": (DESCRIBED_MMA, rf"{{{Q64}\3, 2; \1[\2], q, \4, \5\6, p;}}"),
    "activations 32 bytes on": (MMA, rf"{{{Q64}\4, 2; \1[\2], \3, q, \5\6, p;}}"),
    "other stride of the weight": (DESCRIBED_MMA, rf"{{{Q64}\3, {1 << 32}; \1[\2], q, \4, \5\6, p;}}"),
    "other stride of the activations": (MMA, rf"{{{Q64}\4, {8 << 32}; \1[\2], \3, q, \5\6, p;}}"),
    "other swizzle of the weight": (DESCRIBED_MMA, rf"{{{Q64}\3, {1 << 62}; \1[\2], q, \4, \5\6, p;}}"),
    "other swizzle of the activations": (MMA, rf"{{{Q64}\4, {1 << 62}; \1[\2], \3, q, \5\6, p;}}"),
    "fewer columns of sums": (MMA, rf"{{{_more(5, -(1 << 17))} \1[\2], \3, \4, q\6, p;}}"),
    "other format of scales": (
        BLOCK_MMA,
        rf"{{.reg .b32 q; xor.b32 q, \5, {1 << 23}; \1[\2], \3, \4, q, [\6], [\7], p;}}",
    ),
    "weight negated": (MMA, rf"{{.reg .b32 q; xor.b32 q, \5, {1 << 13}; \1[\2], \3, \4, q\6, p;}}"),
    "copy of scales left out": (CP, ""),
    "scales copied a column on": (CP, r"\1[\2+1], \3;"),
    "scales copied from 16 bytes on": (CP, rf"{{{Q64}\3, 1; \1[\2], q;}}"),
    "other stride of scales": (CP, rf"{{{Q64}\3, {1 << 32}; \1[\2], q;}}"),
    "tensor copy left out": (TENSOR, ""),
    "tensor copy from the next chunk": (TENSOR, rf"{{{_more(5, 128)} \1[\2\3], [\4, {{q, \6\7}}],\8;}}"),
    "tensor copy from the next row": (TENSOR, rf"{{{_more(6, 1)} \1[\2\3], [\4, {{\5, q\7}}],\8;}}"),
    "tensor copy to another place": (TENSOR, rf"{{{_more(2, 1024)} \1[q\3], [\4, {{\5, \6\7}}],\8;}}"),
    "bulk copy left out": (BULK, ""),
    "bulk copy from the next tile": (BULK, rf"{{{Q64}\4, 512; \1[\2\3], [q\5],\6;}}"),
    "bulk copy to the next tile": (BULK, rf"{{{_more(2, 512)} \1[q\3], [\4\5],\6;}}"),
    "fence before left out": (r"tcgen05\.fence::before_thread_sync;", ""),
    "fence after left out": (r"tcgen05\.fence::after_thread_sync;", ""),
    "proxy fence left out": (r"fence\.proxy\.async[^;]*;", ""),
    "wait for loads left out": (r"tcgen05\.wait::ld\.sync\.aligned;", ""),
    "load left out": (r"tcgen05\.ld[^;]*;", ""),
    "load from the next column": (LD, r"\1[\2+1];"),
    "load from another warp's lanes": (LD, rf"{{{_more(2, 32 << 16)} \1[q];}}"),
    "allocation left out": (r"tcgen05\.alloc[^;]*;", ""),
    "allocation kept": (r"tcgen05\.dealloc[^;]*;", ""),
    "scales stored elsewhere": (
        r"(st\.shared\.v4\.b32 \t)\[(%r\d+)(\+\d+)?\]([^;]*;)",
        rf"{{{_more(2, 16)} \1[q\3]\4}}",
    ),
    "sums stored elsewhere": (r"(@p st\.shared\.b32 )\[(%r\d+)\]", r"\1[\2+4]"),
    "totals or results stored elsewhere": (r"(@p st\.global\.v4\.b32 )\[(%rd\d+)\]", r"\1[\2+16]"),
    "totals or results not stored": (r"@p st\.global\.v4\.b32 [^;]*;", ""),
    "totals loaded from elsewhere": (
        r"(@p ld\.global\.v4\.b32 \{[^}]*\}, )\[(%rd\d+)(\+\d+)\];",
        rf"{{{Q64}\2, 16; \1[q\3];}}",
    ),
    "zero stored": (r"(st\.global\.b32 \t\[[^\]]*\], )%r\d+;", r"{.reg .b32 q; mov.b32 q, 0; \1q;}"),
}
FP8_MMA = r"(tcgen05\.mma\S+kind::f8f6f4 )\[(%r\d+)\], (%rd\d+), (%rd\d+), (%r\d+), p;"
FP8_TCGEN05: dict[str, tuple[str, str]] = {
    **TCGEN05,
    "weight in another format": (FP8_MMA, rf"{{{_more(5, 1 << 7)} \1[\2], \3, \4, q, p;}}"),
    "activations in another format": (FP8_MMA, rf"{{{_more(5, 1 << 10)} \1[\2], \3, \4, q, p;}}"),
    "scale stored elsewhere": (
        r"(st\.shared\.[bf]32 \t)\[(%r\d+)(\+\d+)?\]([^;]*;)",
        rf"{{{_more(2, 4)} \1[q\3]\4}}",
    ),
    "scales loaded from elsewhere": (
        r"(ld\.shared\.v4\.[bf]32 \t\{[^}]*\}, )\[(%r\d+)(\+\d+)?\];",
        rf"{{{_more(2, 16)} \1[q\3];}}",
    ),
    "product not added": (r"fma\.rn\.f32 (%f\d+|%r\d+), ([^,;]*), ([^,;]*), ([^,;]*);", r"mov.b32 \1, \4;"),
    "not multiplied by a scale": (r"mul\.rn\.f32 (%f\d+|%r\d+), ([^,;]*), ([^,;]*);", r"mov.b32 \1, \2;"),
}
"""Faults of GEMMs with FP8 activations, whose MMAs may apply block scales."""
F16_MMA = r"(tcgen05\.mma\S+kind::f16 )\[(%r\d+)\], \[(%r\d+)\], (%rd\d+), (%r\d+), p;"
ST = r"(tcgen05\.st\S+ )\[(%r\d+)\], "
WEIGHT_TCGEN05: dict[str, tuple[str, str]] = {
    **TCGEN05,
    "weight a column on": (F16_MMA, r"\1[\2], [\3+1], \4, \5, p;"),
    "weight of the next MMA": (F16_MMA, r"\1[\2], [\3+8], \4, \5, p;"),
    "operands in the other format": (
        F16_MMA,
        rf"{{.reg .b32 q; xor.b32 q, \5, {1 << 7 | 1 << 10}; \1[\2], [\3], \4, q, p;}}",
    ),
    "decoded weight not stored": (r"tcgen05\.st[^;]*;", ""),
    "decoded weight stored a column on": (ST, r"\1[\2+1], "),
    "decoded weight stored to another warp's lanes": (
        ST + r"([^;]*;)",
        rf"{{{_more(2, 32 << 16)} \1[q], \3}}",
    ),
    "wait for stores left out": (r"tcgen05\.wait::st\.sync\.aligned;", ""),
    "codes loaded from elsewhere": (
        r"(ld\.shared\.v4\.b32 \t?\{[^}]*\}, )\[(%r\d+)(\+\d+)?\];",
        rf"{{{_more(2, 16)} \1[q\3];}}",
    ),
    "scales not loaded": (r"@p ld\.global\.\w+ [^;]*;", ""),
    "scales loaded from elsewhere": (
        r"(@p ld\.global\.\w+ [^,]*, )\[(%rd\d+)(\+\d+)\];",
        rf"{{{Q64}\2, 4; \1[q\3];}}",
    ),
    "not multiplied by a scale": (r"mul\.rn\.b?f16x2 \t?(%r\d+), (%r\d+), ([^;]*);", r"mov.b32 \1, \2;"),
}
"""Faults of GEMMs whose MMAs read a decoded weight from tensor memory."""
COPY = r"(cp\.async\.c[ag]\S+ )\[(%r\d+)\], \[(%rd\d+)\],([^;]*);"
SCALED_MMA = (
    r"(mma\.sync\S+block_scale\S+ \{[^}]*\}, \{[^}]*\}, )(\{[^}]*\}), (\{[^}]*\}), "
    r"(\{%r\d+\}), \{0, 0\}, (\{%r\d+\}), \{0, 0\};"
)
BLOCK_SCALED_MMA: dict[str, tuple[str, str]] = {
    **BARRIERS,
    "copy left out": (COPY, ""),
    "copy from 16 bytes on": (COPY, rf"{{{Q64}\3, 16; \1[\2], [q],\4;}}"),
    "copy to another place": (COPY, rf"{{{_more(2, 16)} \1[q], [\3],\4;}}"),
    "copies not committed": (r"cp\.async\.commit_group;", ""),
    "copies not waited for": (r"cp\.async\.wait_group[^;]*;", ""),
    "MMA left out": (SCALED_MMA, ""),
    "accumulators of nothing": (
        SCALED_MMA,
        r"{.reg .b32 q; mov.b32 q, 0; \1\2, {q, q, q, q}, \4, {0, 0}, \5, {0, 0};}",
    ),
    "scales exchanged": (SCALED_MMA, r"\1\2, \3, \5, {0, 0}, \4, {0, 0};"),
    "load of the next word": (r"(ld\.shared\.b32 \t%r\d+, )\[(%r\d+)(\+\d+)?\];", rf"{{{_more(2, 4)} \1[q\3];}}"),
    "sum stored elsewhere": (r"(st\.shared\.b32 \t)\[(%r\d+)(\+\d+)?\]", r"\1[\2+8]"),
}


LDMATRIX = r"(ldmatrix\S+ \{[^}]*\}, )\[(%r\d+)(\+\d+)?\];"
LOAD = r"@p (ld\.global\.(?:v4\.b32|u8) [^,{]*(?:\{[^}]*\}, |, ))\[(%rd\d+)(\+\d+)\];"
WITH_SCALES = SCALED_MMA.replace(r"(\{%r\d+\})", r"\{(%r\d+)\}")
OTHER_BLOCKS = "prmt.b32 q, {}, 0, 0x0321;"
ROUTED_CODES: dict[str, tuple[str, str]] = {
    **BARRIERS,
    **{what: fault for what, fault in TCGEN05.items() if fault[0] in (WAIT, ARRIVE, EXPECT, INIT, TENSOR, BULK)},
    **{what: TCGEN05[what] for what in ("other bytes expected", "proxy fence left out")},
    **{what: fault for what, fault in BLOCK_SCALED_MMA.items() if fault[0] == SCALED_MMA},
    "weight's scales of other blocks": (
        WITH_SCALES,
        rf"{{.reg .b32 q; {OTHER_BLOCKS.format(chr(92) + '4')} \1\2, \3, {{q}}, {{0, 0}}, {{\5}}, {{0, 0}};}}",
    ),
    "activations' scales of other blocks": (
        WITH_SCALES,
        rf"{{.reg .b32 q; {OTHER_BLOCKS.format(chr(92) + '5')} \1\2, \3, {{\4}}, {{0, 0}}, {{q}}, {{0, 0}};}}",
    ),
    "matrices from 16 bytes on": (LDMATRIX, rf"{{{_more(2, 16)} \1[q\3];}}"),
    "matrices from 128 bytes on": (LDMATRIX, rf"{{{_more(2, 128)} \1[q\3];}}"),
    "codes or scales of activations not loaded": (LOAD, ""),
    "codes or scales of activations loaded from elsewhere": (LOAD, rf"{{{Q64}\2, 16; @p \1[q\3];}}"),
    "codes of activations stored elsewhere": (
        r"(st\.global\.v4\.b32 \t)\[(%rd\d+)(\+\d+)?\]([^;]*;)",
        rf"{{{Q64}\2, 16; \1[q\3]\4}}",
    ),
    "scales of activations stored elsewhere": (
        r"(st\.global\.[bu](?:8|16) \t)\[(%rd\d+)(\+\d+)?\]([^;]*;)",
        rf"{{{Q64}\2, 2; \1[q\3]\4}}",
    ),
}
"""Faults of kernels for experts whose block-scaled MMAs multiply FP4 codes."""


def _edit(pattern: str, number: int, to: str) -> Edit:
    def edit(ptx: str) -> str:
        match = list(re.finditer(pattern, ptx))[number]
        return ptx[: match.start()] + match.expand(to) + ptx[match.end() :]

    return edit


def faults_of(ptx: str, kinds: Mapping[str, tuple[str, str]] = TCGEN05) -> Iterator[Fault]:
    """Yield every fault of these kinds that can be injected into the PTX."""
    for what, (pattern, to) in kinds.items():
        for number in range(len(re.findall(pattern, ptx))):
            yield Fault(what, number, _edit(pattern, number, to))


class Unfound(NamedTuple):
    """Expected number of faults of one kind that stay undetected.

    Attributes:
        count: number of faults of the kind that stay undetected.
        reason: explanation why these faults change nothing, or why the emulator does not detect them.
        dead: True if the faults change nothing on any machine.
    """

    count: int
    reason: str
    dead: bool = True


CONVERGED = Unfound(2, "the emulator's warps converge, and tcgen05.wait::ld is for the whole warp", dead=False)
NO_K_TILES = Unfound(1, "LLVM emits a loop over k tiles for a k of 0, which never runs")
LOOPS = {"wait left out": NO_K_TILES, "wait for the other phase": NO_K_TILES, "commit left out": NO_K_TILES}
NOTHING_READ = Unfound(
    1, "epilogue warps read neither alpha nor bias, and other warps have waited for their accumulators' operands"
)
READ_LATE = Unfound(1, "alpha is read after the cluster's barrier, which follows other waits")
ONE_TILE = Unfound(1, "with split-K a CTA computes one tile, so nothing waits for an empty accumulator")
ACC_USED_ONCE = Unfound(1, "an accumulator is multiplied only once")
FOURTH_TILE = Unfound(1, "the fourth tile would wait for this accumulator")
TABLE_ENDS = Unfound(1, "the barriers that end the table of experts follow")
MISSING = Unfound(1, "a token outside of the test's shape")
LOADED_AT_ONCE = Unfound(1, "emulated loads complete at once, and the wait for the next loads covers them", dead=False)
EVERY = 16
"""By default, only every 16th fault is tried."""

Run = Callable[[int | None, Edit | None], tuple[torch.Tensor, torch.Tensor]]
"""Function (seed for the order of threads, edit of the PTX) that runs a kernel and returns the result and the expected
result."""


def found(run: Run, fault: Fault) -> bool:
    """Return True if, in any of three orders of threads, the emulator reports an error or the result changes."""
    for seed in (None, 0, 1):
        try:
            got, want = run(seed, fault.edit)
        except EmulationError:
            return True
        if not torch.equal(got, want):
            return True
    return False


def check_faults(
    run: Run,
    kernel: Any,
    arch: str,
    known: Mapping[str, Unfound],
    request: pytest.FixtureRequest,
    kinds: Mapping[str, tuple[str, str]] = TCGEN05,
    least: int = 36,
) -> None:
    """Inject faults into a kernel's PTX, and check that each is detected except the known ones. By default, try a part
    of the faults; with ``--more-emulated``, try all.

    Args:
        run: function that runs the kernel.
        kernel: kernel, compiled for the architecture named ``arch``.
        known: faults that stay undetected, keyed by kind.
        request: pytest's fixture ``request``, whose options say how many faults are tried.
        kinds: kinds of faults.
        least: minimum number of kinds of faults that must be possible in the kernel.
    """
    all_tried = request.config.getoption("more_emulated")
    ptx = compile_ptx(kernel, ARCHS[arch]).ptx
    assert torch.equal(*run(0, None))
    every = [*faults_of(ptx, kinds)]
    assert len({fault.what for fault in every}) >= least
    tried = every if all_tried else every[::EVERY]
    unfound = [fault for fault in tried if not found(run, fault)]
    counts = Counter(fault.what for fault in unfound)
    excused = {what: known[what].count if what in known else 0 for what in counts}
    assert all(counts[what] <= excused[what] for what in counts), [fault.id for fault in unfound]
    if all_tried:  # if only some faults were tried, percentages mean little
        dead = sum(count for what, count in counts.items() if known[what].dead)
        assert len(tried) - len(unfound) >= 0.95 * (len(tried) - dead)
