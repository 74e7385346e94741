"""What the benchmarks of the ops around the experts' products share: sizes, routings, buffer sets, marks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch

import torch_cute_ops
from torch_cute_ops.formats.experts import rows_bound
from torch_cute_ops.ops._spec import as_tuple
from torch_cute_ops.reference.moe_route import places_of
from torch_cute_ops.registry import OPS

from .case import Benchmark, Case, Mark, Row, Tensors, Variant, at_least, at_most

DTYPE = torch.bfloat16
EXPERTS, TOP = 256, 8
"""Of DeepSeek-V3: experts, and experts of a token."""
PACKED, PADDED = 1, 128
"""What an expert's first row is a multiple of: `grouped_mm_fp8` takes rows anywhere, others want whole tiles."""
DECODE_ROWS = (1, 8, 32, 64)
LARGE_ROWS = (4096, 16384)
SIZES = {
    "marks": (*DECODE_ROWS, *LARGE_ROWS),
    "quick": (*DECODE_ROWS, 512, *LARGE_ROWS),
    "full": tuple(2**k for k in range(15)),
}
"""Tokens of each set of sizes."""
COPY_GOAL, DECODE_GOAL = 0.88, 4.0
"""Least fraction of the copy's bandwidth at large sizes; most µs at decode."""
CODE_POISON = 0x5A


@cache
def routing(m: int, experts: int, alignment: int) -> dict[str, torch.Tensor]:
    """Where the rows of M tokens lie, all experts as likely; on the CPU, the same in each call."""
    generator = torch.Generator().manual_seed(m)
    ids = torch.rand(m, experts, generator=generator).topk(TOP, dim=1).indices
    names = ("expanded_to_permuted", "permuted_to_expanded", "offsets", "counts")
    return dict(zip(names, places_of(ids, experts, alignment), strict=True))


class MoeRowBenchmark(Benchmark):
    """An op on M tokens of 8 of 256 experts each: subclasses say the bytes, what the op takes and gives.

    A buffer set has the arguments of the op by name, then the outputs.
    """

    peers = ()
    tolerance = 1e-3
    width: ClassVar[str] = "H"
    """Name of the row length."""
    usual_width: ClassVar[int] = 7168
    outputs: ClassVar[tuple[str, ...]] = ("y", "scale")
    has_copy_mark = True
    alignments: ClassVar[tuple[int, ...]] = (PACKED, PADDED)
    """Of experts' rows in decode steps; in others they are padded."""
    about = """\
Tokens have 8 of 256 experts, all as likely; bytes are those of rows that are some token's. An expert's first row is a
multiple of `alignment`: with 128, 64 tokens' rows lie in a buffer of 33,024, most of it padding, and the addresses that
a measurement goes through, in GB, exceed what address translation keeps."""
    settings: ClassVar = {"dtype": "bfloat16", "experts": str(EXPERTS), "experts of a token": str(TOP)}

    @abstractmethod
    def arguments(self, case: Case, device: torch.device) -> dict[str, Any]:
        """The op's arguments, by name."""

    # --- cases ---

    def case(self, m: int, width: int | None = None, experts: int = EXPERTS, alignment: int = PADDED) -> Case:
        """A case of this op."""
        sizes = {"M": m, self.width: width or self.usual_width, "E": experts}
        return Case(sizes, choices={"alignment": str(alignment)} if len(self.alignments) > 1 else {})

    def cases(self, sizes: str) -> list[Case]:
        return [
            self.case(m, alignment=alignment)
            for m in sorted(SIZES[sizes], reverse=True)
            for alignment in (self.alignments if m <= max(DECODE_ROWS) else (PADDED,))
        ]

    def smallest(self, case: Case) -> Case:
        return self.case(1, case[self.width], case["E"], alignment_of(case.choices))

    def panel(self, case: Case) -> str:
        return f"{self.width} = {case[self.width]:,}, E = {case['E']}, alignment {alignment_of(case.choices)}"

    # --- formulas ---

    def pairs(self, case: Case) -> int:
        """Rows that are some token's."""
        return case["M"] * TOP

    # --- tensors and calls ---

    def routed(self, case: Case, device: torch.device, *names: str) -> dict[str, torch.Tensor]:
        """These parts of the case's routing."""
        parts = routing(case["M"], case["E"], alignment_of(case.choices))
        return {name: parts[name].to(device, copy=True) for name in names}

    def rows(self, case: Case) -> int:
        """Rows of the experts' buffer."""
        return rows_bound(case["M"], TOP, case["E"], alignment_of(case.choices))

    def make_set(self, case: Case, device: torch.device) -> Tensors:
        given = self.arguments(case, device)
        outputs = zip(self.outputs, as_tuple(OPS[self.op].fake(**given)), strict=True)
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        return tensors | {name: poisoned(output) for name, output in outputs}

    def call(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """Our op on one buffer set, into its outputs."""
        given = {name: tensor for name, tensor in tensors.items() if name not in self.outputs}
        out = tuple(tensors[name] for name in self.outputs)
        function = getattr(torch_cute_ops, self.op)
        function(**given, **self.numbers(case), out=out if len(out) > 1 else out[0])
        return out

    def numbers(self, case: Case) -> dict[str, Any]:
        """Arguments that are no tensors."""
        return {}

    def ours(self, case: Case, sets: Sequence[Tensors]) -> Variant:
        return Variant(lambda i: self.call(case, sets[i]), self.bytes_moved(case))

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        return "there is none"

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """The reference's outputs, in which what the op leaves unspecified is what it was: nothing writes there."""
        op = OPS[self.op]
        given = {name: tensor for name, tensor in tensors.items() if name not in self.outputs} | self.numbers(case)
        results = as_tuple(op.reference(**given))
        if op.defined is None:
            return results
        ones = tuple(torch.ones_like(result, dtype=torch.float32) for result in results)
        masks = op.defined(ones, **given)
        return tuple(
            torch.where(mask > 0, bits(result), bits(poisoned(result))).view(result.dtype)
            for mask, result in zip(masks, results, strict=True)
        )

    # --- marks ---

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        marks = []
        for alignment in self.alignments:
            decode = [row for row in rows if alignment_of(row["choices"]) == alignment]
            times = [row["variants"]["ours"]["us"] for row in decode if row["sizes"]["M"] <= max(DECODE_ROWS)]
            how = f", alignment {alignment}" if len(self.alignments) > 1 else ""
            marks.append(
                at_most(f"decode, M ≤ {max(DECODE_ROWS)}{how}: time", max(times, default=None), DECODE_GOAL, " µs")
            )
        if self.has_copy_mark:
            large = [row["variants"]["ours"]["of_copy"] for row in rows if row["sizes"]["M"] >= min(LARGE_ROWS)]
            marks.append(at_least(f"M ≥ {min(LARGE_ROWS):,}: of copy", min(large, default=None), COPY_GOAL))
        return marks


def alignment_of(choices: Mapping[str, str]) -> int:
    """What an expert's first row is a multiple of, by the choices of a case or a row."""
    return int(choices.get("alignment", PADDED))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same as integers: PyTorch cannot select among all float8 numbers."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """An output before the op has written it."""
    if like.dtype.itemsize == 1:
        return torch.full(like.shape, CODE_POISON, dtype=torch.uint8, device=like.device).view(like.dtype)
    if like.dtype.is_floating_point:
        # A number: comparisons are of numbers.
        return torch.full(like.shape, 12345.0, dtype=like.dtype, device=like.device)
    return torch.full(like.shape, -(2**31), dtype=like.dtype, device=like.device)
