"""What the benchmark file of an op defines: cases, bytes by formula, tensors, variants and marks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

Tensors = dict[str, torch.Tensor]
Row = dict[str, Any]
"""One measured case as it stands in the JSON file (built by `runner.run_case`)."""


@dataclass(frozen=True)
class Case:
    """One problem size. `inductor` says how the torch composition is compiled there: "" (not at all), "static"
    (`dynamic=False`, one compile for this shape) or "dynamic" (one compile for each row length, with a symbolic M).
    `choices` are what else the cases of one op differ in, such as arguments by their names."""

    sizes: Mapping[str, int]
    inductor: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    def __str__(self) -> str:
        return " ".join([*(f"{name}={value}" for name, value in self.sizes.items()), self.chosen]).rstrip()

    @property
    def chosen(self) -> str:
        """The choices, for a title."""
        return " ".join(self.choices.values())


@dataclass(frozen=True)
class Variant:
    """One way to do the work. `call(i)` runs it on buffer set i and returns the outputs (kept alive by the caller, so
    that sets never share memory); `bytes` is what this way must move at least (its own formula, bytes a call)."""

    call: Callable[[int], Any]
    bytes: int
    note: str = ""
    checked: bool = True
    """Whether the outputs of `call` are those of the op, and are compared with `Benchmark.expected`."""


@dataclass(frozen=True)
class Mark:
    """A target and what was measured. `value` None: this run did not measure it. `notes`: the notes, by the name of
    their file, where they are others than those of the benchmark."""

    name: str
    goal: str
    value: float | None
    passed: bool | None
    unit: str = ""
    notes: str = ""


def at_least(name: str, value: float | None, goal: float, unit: str = "", notes: str = "") -> Mark:
    """A mark that holds where value >= goal."""
    return Mark(name, f"≥ {goal:g}{unit}", value, None if value is None else value >= goal, unit, notes)


def at_most(name: str, value: float | None, goal: float, unit: str = "", notes: str = "") -> Mark:
    """A mark that holds where value <= goal."""
    return Mark(name, f"≤ {goal:g}{unit}", value, None if value is None else value <= goal, unit, notes)


class Benchmark(ABC):
    """The benchmark of one op. A file `ops/<op>.py` binds an instance to the module name `BENCHMARK`."""

    op: str
    family: ClassVar[str]
    """The kernel family whose notes, `docs/notes/<family>.md`, say what limits the op."""
    settings: ClassVar[Mapping[str, str]]
    """What all cases have in common (dtype, format, layout), for the report."""
    peers: ClassVar[Sequence[str]] = ("quack", "inductor")
    """The peers that exist for this op, in the order of the table's columns."""
    of_copy: ClassVar[float | None] = None
    """The target for the fraction of the copy's bandwidth at large sizes, for the picture."""
    tolerance: float = 0.0
    """Largest fraction of output elements that may differ from `expected` (docs/numerics.md)."""
    checked_elements: int = 2**27
    """Cases up to this many elements (first two sizes multiplied) are checked against `expected` before timing."""
    about: str = ""
    """What the report says of the variants, after the method."""

    @property
    def notes(self) -> Sequence[str]:
        """What the report says below the table, a line each."""
        return ()

    @property
    def ways(self) -> Sequence[str]:
        """Our other ways to do the work, such as an op's backends: `peer` serves them too, and they run without
        peers."""
        return ()

    @abstractmethod
    def cases(self, sizes: str) -> list[Case]:
        """The cases of "marks", "quick" or "full", in the order they run; each set holds the one before."""

    @abstractmethod
    def bytes_moved(self, case: Case) -> int:
        """Bytes the op must move: each input read once, each output written once (padding is not counted)."""

    def flops(self, case: Case) -> int:
        """Multiplications and additions of the op; 0 where memory alone takes the time."""
        return 0

    @abstractmethod
    def smallest(self, case: Case) -> Case:
        """The smallest case that runs the same compiled kernels as `case`."""

    def prepare(self, cases: Sequence[Case], device: torch.device) -> None:  # noqa: B027  most peers need nothing
        """What the peers can do once for all cases, such as compiling in parallel. It may fail."""

    @abstractmethod
    def make_set(self, case: Case, device: torch.device) -> Tensors:
        """One buffer set: fresh random inputs, and poisoned outputs."""

    @abstractmethod
    def ours(self, case: Case, sets: Sequence[Tensors]) -> Variant:
        """Our op, with preallocated outputs."""

    @abstractmethod
    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        """The peer's variant, or the reason why there is none. Imports the peer only here."""

    @abstractmethod
    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """What `ours` must leave in its outputs, by plain torch operations on the same device."""

    def mismatch(self, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
        """The largest fraction, over the outputs, of elements that differ."""
        return mismatch(got, expected)

    @abstractmethod
    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        """The targets, judged on measured rows."""

    @abstractmethod
    def panel(self, case: Case) -> str:
        """The plot panel that a case belongs to."""


def mismatch(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest fraction, over the outputs, of elements that differ: e2m1 codes for packed `uint8`, bytes for FP8;
    a bfloat16 differs where it is off by more than one ulp, a float32 (a scale) by more than a row sum's rounding."""
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(f"an output is {a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}")
        if a.numel() == 0:
            continue
        if a.dtype == torch.uint8:
            differs = a ^ b
            fraction = ((differs & 0xF) != 0).float().mean() + ((differs >> 4) != 0).float().mean()
            worst = max(worst, fraction.item() / 2)
        elif a.dtype.itemsize == 1:
            worst = max(worst, (a.view(torch.uint8) != b.view(torch.uint8)).float().mean().item())
        else:
            relative = 2.0**-18 if a.dtype == torch.float32 else 2.0**-7
            close = (a.double() - b.double()).abs() <= b.double().abs() * relative
            worst = max(worst, 1.0 - close.double().mean().item())
    return worst
