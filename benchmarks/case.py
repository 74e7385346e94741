"""Interface of an op's benchmark: its cases, formulas for bytes moved, tensors, variants and targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

Tensors = dict[str, torch.Tensor]
Row = dict[str, Any]
"""The results of one case, as in the JSON file. `runner.run_case` creates it."""


@dataclass(frozen=True)
class Case:
    """One problem size for which an op is measured.

    Attributes:
        sizes: Sizes by name.
        inductor: Mode in which Inductor compiles the baseline of plain torch ops: "" (not compiled), "static" (with
            `dynamic=False`, for this shape) or "dynamic" (once per row length, with a symbolic M).
        choices: Arguments other than sizes that differ between the cases of an op, by name.
    """

    sizes: Mapping[str, int]
    inductor: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    def __str__(self) -> str:
        return " ".join([*(f"{name}={value}" for name, value in self.sizes.items()), self.chosen]).rstrip()

    @property
    def chosen(self) -> str:
        """Return ``choices`` as text for a title."""
        return " ".join(self.choices.values())


@dataclass(frozen=True)
class Variant:
    """One implementation to measure: our op, one of its backends, or a peer.

    Attributes:
        call: `call(i)` runs the implementation on buffer set i and returns the outputs. The caller keeps the outputs
            alive, so that their memory is not reused by a call with another buffer set.
        bytes: Smallest number of bytes that a call of this implementation must move.
    """

    call: Callable[[int], Any]
    bytes: int
    note: str = ""
    checked: bool = True
    """True if `call` computes the op, so that its outputs are compared with `Benchmark.expected`."""


@dataclass(frozen=True)
class Mark:
    """A target and the measured value.

    `value` is None if the run did not measure the quantity. `notes` names the file in docs/notes that explains the
    value. If `notes` is empty, the notes of the benchmark's kernel family explain it.
    """

    name: str
    goal: str
    value: float | None
    passed: bool | None
    unit: str = ""
    notes: str = ""


def at_least(name: str, value: float | None, goal: float, unit: str = "", notes: str = "") -> Mark:
    """Return a target that is reached if `value` is at least `goal`."""
    return Mark(name, f"≥ {goal:g}{unit}", value, None if value is None else value >= goal, unit, notes)


def at_most(name: str, value: float | None, goal: float, unit: str = "", notes: str = "") -> Mark:
    """Return a target that is reached if `value` is at most `goal`."""
    return Mark(name, f"≤ {goal:g}{unit}", value, None if value is None else value <= goal, unit, notes)


class Benchmark(ABC):
    """Benchmark of one op. The file `ops/<op>.py` assigns an instance to `BENCHMARK`."""

    op: str
    family: ClassVar[str]
    """Kernel family of the op. The file `docs/notes/<family>.md` explains the op's limits."""
    settings: ClassVar[Mapping[str, str]]
    """Properties common to all cases (dtype, format, layout), for the report."""
    peers: ClassVar[Sequence[str]] = ("quack", "inductor")
    """Peers of this op, in the order of the table's columns."""
    of_copy: ClassVar[float | None] = None
    """Target for our bandwidth at large sizes, as a fraction of a copy's bandwidth. The picture shows the target as a
    line."""
    tolerance: float = 0.0
    """Largest fraction of output elements that may differ from `expected` (docs/numerics.md)."""
    checked_elements: int = 2**27
    """Largest number of elements (product of the first two sizes) for which a case's results are checked."""
    about: str = ""
    """Description of the variants, which the report prints after the description of the method."""

    @property
    def notes(self) -> Sequence[str]:
        """Return the lines that the report prints below the table."""
        return ()

    @property
    def ways(self) -> Sequence[str]:
        """Return the names of our implementations other than the default, such as backends. `peer` creates a variant
        for each name, even in runs without peers."""
        return ()

    @abstractmethod
    def cases(self, sizes: str) -> list[Case]:
        """Return the cases of the set "marks", "quick" or "full", in the order in which they run. "quick" contains all
        cases of "marks", and "full" all cases of "quick"."""

    @abstractmethod
    def bytes_moved(self, case: Case) -> int:
        """Return the number of bytes that the op must move, if it reads each input once and writes each output once.
        Padding is not counted."""

    def flops(self, case: Case) -> int:
        """Return the op's number of multiplications and additions, or 0 if memory bandwidth always limits the op."""
        return 0

    @abstractmethod
    def smallest(self, case: Case) -> Case:
        """Return the smallest case that uses the same compiled kernels as `case`, for the warm-up."""

    def prepare(self, cases: Sequence[Case], device: torch.device) -> None:  # noqa: B027  most peers need nothing
        """Prepare the peers once for all cases, for example by compiling in parallel. Exceptions are ignored."""

    @abstractmethod
    def make_set(self, case: Case, device: torch.device) -> Tensors:
        """Return one buffer set: new random inputs and poisoned outputs (see `buffers.py`)."""

    @abstractmethod
    def ours(self, case: Case, sets: Sequence[Tensors]) -> Variant:
        """Return the variant of our op with preallocated outputs."""

    @abstractmethod
    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        """Return the peer's variant, or the reason why it is missing. Only this method imports the peer."""

    @abstractmethod
    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """Return the expected outputs of `ours`, computed by plain torch operations on the same device."""

    def mismatch(
        self, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], case: Case | None = None
    ) -> float:
        """Return the fraction of elements that differ, in the output with the most differences. The accepted error of
        an element may depend on the case."""
        return mismatch(got, expected)

    @abstractmethod
    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        """Return the targets of the op with the values measured in ``rows``."""

    @abstractmethod
    def panel(self, case: Case) -> str:
        """Return the title of the plot panel that shows a case."""


def mismatch(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Compare each output in `got` with the expected output, and return the largest fraction of differing elements.

    Elements are e2m1 codes for packed `uint8`, and bytes for FP8. A bfloat16 number counts as different if its error
    exceeds one ulp. A float32 number (a scale) counts as different if its error exceeds the rounding error of a row
    sum.
    """
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
