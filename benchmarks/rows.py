"""Base class of the benchmarks of row-wise ops on (M, H) bfloat16 tensors. It defines their sizes, targets, buffer
sets, and peers (the implementations that our ops are compared with)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

import torch_cute_ops
from torch_cute_ops.ops._define import as_tuple
from torch_cute_ops.registry import OPS

from . import compositions, peers, targets
from .buffers import poisoned_outputs
from .case import Benchmark, Case, Mark, Row, Tensors, Variant, at_least, at_most

WIDTHS = (1536, 2048, 4096, 5120, 7168, 8192, 16384, 32768)
MARK_WIDTHS = (2048, 4096, 7168, 8192, 16384, 32768)
DECODE_WIDTH = 7168
DECODE_ROWS = (1, 8, 32, 128)
LARGE = 2**26
"""Smallest number of elements M·H for which our bandwidth is compared with a copy's bandwidth."""
INDUCTOR_LARGE = (16384, 8192)
INDUCTOR_DECODE = (32, DECODE_WIDTH)
DTYPE = torch.bfloat16
EPS = 1e-6

SMALLEST_LARGE = frozenset((math.ceil(LARGE / h), h) for h in MARK_WIDTHS)
MARK_SIZES = SMALLEST_LARGE | {(m, DECODE_WIDTH) for m in DECODE_ROWS} | {INDUCTOR_LARGE}
QUICK_SIZES = MARK_SIZES | {(4 * m, h) for m, h in SMALLEST_LARGE}
FULL_SIZES = QUICK_SIZES | {(2**k, h) for k in range(17) for h in WIDTHS}
SIZES = {"marks": MARK_SIZES, "quick": QUICK_SIZES, "full": FULL_SIZES}
"""(M, H) of each set of sizes. "marks" contains the sizes that have targets. "quick" also contains sizes with four
times their M·H. "full" also contains the powers of two from M = 1 to 65,536 for every width."""

STATIC = frozenset((INDUCTOR_LARGE, INDUCTOR_DECODE))
"""Sizes that Inductor compiles separately, in addition to the sizes for which an op has a target relative to
Inductor."""
DYNAMIC = frozenset((m, h) for m in (256, 2048, 16384) for h in WIDTHS)
"""Sizes of "full" for which Inductor compiles once per width, with a symbolic M. A second value of M that falls into
the same row tile would cause another compilation."""

ABOUT = """\
QuACK writes bfloat16 and does not quantise. Inductor compiles either for one shape ("static" in the JSON file), or for
one row length with a symbolic number of rows ("dynamic")."""

ADD_NOTES = (
    "QuACK's rmsnorm stores the new residual in a new tensor; our op and Inductor update the residual in place.",
    "Inductor may normalise the sum before it rounds it to bfloat16; `mismatch` in the JSON file counts differences.",
    "Repeated calls update the same residual, which therefore grows to at most 256 to 512 times the input.",
)


def ratio(row: Row, over: str, under: str) -> float | None:
    """Return the time of the variant `over` divided by the time of the variant `under`, in one row of results."""
    variants = row["variants"]
    return variants[over]["us"] / variants[under]["us"] if over in variants and under in variants else None


def rows_and_width(row: Row) -> tuple[int, int]:
    """Return the sizes of a case from its row of results: the number of rows M, and the row length."""
    m, width = row["sizes"].values()
    return m, width


class RowBenchmark(Benchmark):
    """Benchmark of an op on M rows. Subclasses define the bytes moved, the arguments and the targets.

    The functions `torch_cute_ops.<op>` and `compositions.<op>` are measured. Both take the row tensors, then the
    weight, then keyword arguments.
    """

    family = "row_quant"
    tolerance = 1e-3
    about = ABOUT
    of_copy = targets.OF_COPY
    width = "H"
    """Name of the row length in the sizes of a case."""
    inputs_per_row = 1
    """Length of an input row divided by the row length: 2 for gates."""
    adds = False
    """True if the op adds its input to a residual in place."""
    weighted = True
    """True if the op takes a weight (H,) in the input dtype."""
    choices: ClassVar[Mapping[str, str]] = {}
    """Choices of the cases whose bandwidth is compared with a copy's."""
    most_over_quack: float | None = None
    """Target for M ≤ 128: largest ratio of our time to the time of QuACK's rmsnorm. None if there is no target."""
    least_over_inductor: ClassVar[Mapping[tuple[int, int], float]] = {}
    """Targets for the speedup over the composition compiled by Inductor, by size (M, H)."""

    @property
    def notes(self) -> Sequence[str]:
        return ADD_NOTES if self.adds else ()

    # --- cases ---

    def case(self, m: int, width: int, inductor: str = "", choices: Mapping[str, str] | None = None) -> Case:
        """Return the benchmark case with these sizes. If `choices` is None, the case uses the op's default choices."""
        return Case({"M": m, self.width: width}, inductor, self.choices if choices is None else choices)

    def cases(self, sizes: str) -> list[Case]:
        static = frozenset(self.least_over_inductor) | (STATIC if sizes != "marks" else frozenset())
        compiled = dict.fromkeys(DYNAMIC if sizes == "full" else (), "dynamic") | dict.fromkeys(static, "static")
        # For each width, run the largest M first. If Inductor compiles with a symbolic M, it then tunes the kernel for
        # the largest M that the kernel serves.
        ordered = sorted(SIZES[sizes], key=lambda size: (size[1], -size[0]))
        return [self.case(m, width, compiled.get((m, width), "")) for m, width in ordered]

    def smallest(self, case: Case) -> Case:
        return self.case(1, case[self.width], choices=case.choices)

    def panel(self, case: Case) -> str:
        title = f"{self.width} = {case[self.width]:,}"
        return f"{title}, {case.chosen}" if case.choices else title

    # --- tensors and calls ---

    def make_set(self, case: Case, device: torch.device) -> Tensors:
        tensors = self.make_inputs(case, device)
        return tensors | poisoned_outputs(self.op, lambda fake: self.call(fake, case, tensors))

    def make_inputs(self, case: Case, device: torch.device) -> Tensors:
        """Return the op's tensor arguments by name. The argument `scale` is named "given", because "scale" is an
        output."""
        # Repeated calls add x to the same residual. The residual grows until x is less than half an ulp of the
        # residual, and then does not change. In bfloat16 this happens at 256 to 512 times |x|. After any number of
        # replays, the sums of squares are therefore far inside 2^-80 to 2^80, and the time of a kernel does not depend
        # on the values.
        m, width = case["M"], case[self.width]
        tensors = {"input": torch.randn(m, width * self.inputs_per_row, dtype=DTYPE, device=device)}
        if self.adds:
            tensors["residual"] = torch.randn(m, width, dtype=DTYPE, device=device)
        if self.weighted:
            tensors["weight"] = torch.randn(width, dtype=DTYPE, device=device)
        return tensors

    def rows(self, tensors: Tensors) -> list[torch.Tensor]:
        """Return the input, and the residual if the op takes one."""
        return [tensors[name] for name in ("input", "residual") if name in tensors]

    def outputs(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a buffer set that are passed as `out` to the op."""
        return tuple(tensors[name] for name in OPS[self.op].outputs)

    def results(self, returned: Any, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """Return all tensors that the op or the composition writes: the returned tensors, and the residual if it is
        updated."""
        return (*as_tuple(returned), tensors["residual"]) if self.adds else as_tuple(returned)

    def call(self, function: Callable[..., Any], case: Case, tensors: Tensors, **more: Any) -> Any:
        """Call `function`, the op or the composition, with the tensors of one buffer set."""
        if self.weighted:
            more = {"weight": tensors["weight"], "eps": EPS, **more}
        if "given" in tensors:
            more["scale"] = tensors["given"]
        return function(*self.rows(tensors), **more, **case.choices)

    def run(self, case: Case, tensors: Tensors) -> None:
        """Run our op on one buffer set, into its preallocated outputs."""
        out = self.outputs(tensors)
        self.call(getattr(torch_cute_ops, self.op), case, tensors, out=out if len(out) > 1 else out[0])

    def composition(self) -> Callable[..., Any]:
        """Return the function that computes the op with plain torch operations."""
        return getattr(compositions, self.op)

    # --- variants ---

    def ours(self, case: Case, sets: Sequence[Tensors]) -> Variant:
        def call(i: int) -> tuple[torch.Tensor, ...]:
            self.run(case, sets[i])
            return self.results(self.outputs(sets[i]), sets[i])

        return Variant(call, self.bytes_moved(case))

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        return self._quack(case, sets) if name == "quack" else self._inductor(case, sets)

    def _quack(self, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        norm = peers.quack_rmsnorm()
        if isinstance(norm, str):
            return norm
        m, h = case["M"], case[self.width]
        matrices = 4 if self.adds else 2  # input and output; with a residual, also its old and new values
        note = "residual and norm only" if self.adds else "norm only"
        return Variant(
            lambda i: norm(sets[i]["input"], sets[i]["weight"], EPS, sets[i].get("residual")),
            DTYPE.itemsize * (matrices * m * h + h),
            note,
            checked=False,
        )

    def _inductor(self, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        compiled = peers.inductor(self.composition(), case, [row for tensors in sets for row in self.rows(tensors)])
        if isinstance(compiled, str):
            return compiled
        return Variant(
            lambda i: self.results(self.call(compiled, case, sets[i]), sets[i]), self.bytes_moved(case), case.inductor
        )

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        if self.adds:
            tensors = {**tensors, "residual": tensors["residual"].clone()}
        return self.results(self.call(self.composition(), case, tensors), tensors)

    # --- marks ---

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        rows = [row for row in rows if row["choices"] == self.choices]
        marks = [self.copy_mark(rows, width) for width in MARK_WIDTHS]
        if self.most_over_quack is not None:
            marks.append(self.decode_mark(rows, self.most_over_quack))
        return marks + [self.inductor_mark(rows, size, least) for size, least in self.least_over_inductor.items()]

    def copy_mark(self, rows: Sequence[Row], width: int, prefix: str = "") -> Mark:
        """Return the target for one width: the smallest of our bandwidths, as fractions of a copy's bandwidth, over the
        cases with M·H ≥ 2^26."""
        large = [row for row in rows if rows_and_width(row)[1] == width and math.prod(rows_and_width(row)) >= LARGE]
        name = f"{prefix}{self.width}={width}, M·{self.width} ≥ 2^26: of copy"
        return at_least(name, min((row["variants"]["ours"]["of_copy"] for row in large), default=None), self.of_copy)

    def decode_mark(self, rows: Sequence[Row], most: float) -> Mark:
        """Return the target for M ≤ 128 and H = 7168: our time divided by the time of QuACK's rmsnorm. The largest of
        these ratios must be at most ``most``."""
        decode = [row for row in rows if rows_and_width(row)[1] == DECODE_WIDTH and rows_and_width(row)[0] <= 128]
        ratios = [x for x in (ratio(row, "ours", "quack") for row in decode) if x is not None]
        peer = "QuACK's rmsnorm with residual" if self.adds else "QuACK's rmsnorm"
        name = f"decode, M ≤ 128, {self.width}={DECODE_WIDTH}: time over {peer}"
        return at_most(name, max(ratios, default=None), most, " ×")

    def inductor_mark(self, rows: Sequence[Row], size: tuple[int, int], least: float, prefix: str = "") -> Mark:
        """Return the target for one size: the time of the composition, compiled by Inductor, divided by our time."""
        found = [ratio(row, "inductor", "ours") for row in rows if rows_and_width(row) == size]
        name = f"{prefix}{size[0]}×{size[1]}: faster than Inductor"
        return at_least(name, found[0] if found else None, least, " ×")


class GatedRows(RowBenchmark):
    """Benchmark of an op that applies SwiGLU to the two halves of each row. I is the width of the output."""

    peers = ("inductor",)
    width = "I"
    inputs_per_row = 2
    weighted = False
