"""Base classes for the benchmarks of the ops of an expert layer that are not GEMMs. The classes define sizes, routings,
buffer sets and targets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch

import torch_cute_ops
from torch_cute_ops.formats.experts import rows_bound
from torch_cute_ops.ops._define import as_tuple
from torch_cute_ops.reference.moe_route import places_of
from torch_cute_ops.registry import OPS

from . import compositions, targets
from .buffers import bits, poisoned, poisoned_outputs
from .case import Benchmark, Case, Mark, Row, Tensors, Variant, at_least, at_most

DTYPE = torch.bfloat16
EXPERTS, TOP = 256, 8
"""Number of experts, and number of experts per token, of DeepSeek-V3."""
CHOICE: dict[str, Any] = {
    "topk": TOP,
    "scoring": "sigmoid",
    "num_groups": 8,
    "topk_groups": 4,
    "scaling_factor": 2.5,
}
"""Arguments of `moe_route` for DeepSeek-V3's routing."""
PACKED, PADDED = 1, 128
"""Alignments of an expert's first row in the buffer. `grouped_mm_fp8` accepts any alignment. Other libraries need each
expert to start at a whole tile."""
DECODE_ROWS = (1, 8, 32, 64)
LARGE_ROWS = (4096, 16384)
SIZES = {
    "marks": (*DECODE_ROWS, *LARGE_ROWS),
    "quick": (*DECODE_ROWS, 512, *LARGE_ROWS),
    "full": tuple(2**k for k in range(15)),
}
"""Numbers of tokens by set of sizes."""


@cache
def routing(m: int, experts: int, alignment: int) -> dict[str, torch.Tensor]:
    """Draw the experts of M tokens uniformly, and return the routing tensors by name, on the CPU. Equal arguments give
    equal values."""
    generator = torch.Generator().manual_seed(m)
    ids = torch.rand(m, experts, generator=generator).topk(TOP, dim=1).indices
    names = ("expanded_to_permuted", "permuted_to_expanded", "offsets", "counts")
    return dict(zip(names, places_of(ids, experts, alignment), strict=True)) | {"ids": ids.int()}


class MoeRowBenchmark(Benchmark):
    """Benchmark of an op on M tokens. A token uses 8 of 256 experts. Subclasses define the bytes and the
    arguments.

    A buffer set contains the arguments of the op by name, then the outputs.
    """

    peers: ClassVar[Sequence[str]] = ()
    tolerance = 1e-3
    of_copy: ClassVar[float | None] = targets.MOE_OF_COPY
    width: ClassVar[str] = "H"
    """Name of the row length in the sizes of a case."""
    usual_width: ClassVar[int] = 7168
    alignments: ClassVar[tuple[int, ...]] = (PACKED, PADDED)
    """Alignments with which calls with few tokens are measured. Calls with many tokens use padded rows."""
    about = """\
Tokens have 8 of 256 experts, all equally likely; bytes are those of the rows that belong to a token. An expert's first
row is a multiple of `alignment`: with 128, the rows of 64 tokens lie in a buffer of 33,024, most of it padding, and the
GB of addresses that a measurement goes through exceed what the TLBs hold."""
    settings: ClassVar = {"dtype": "bfloat16", "experts": str(EXPERTS), "experts of a token": str(TOP)}

    @abstractmethod
    def arguments(self, case: Case, device: torch.device) -> Tensors:
        """Return the op's tensor arguments by name."""

    # --- cases ---

    def case(self, m: int, width: int | None = None, experts: int = EXPERTS, alignment: int = PADDED) -> Case:
        """Return the benchmark case with these sizes and this alignment of each expert's first row."""
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
        """Return the number of routed pairs of a token and an expert. Each pair owns a row of the experts' buffer."""
        return case["M"] * TOP

    # --- tensors and calls ---

    def routed(self, case: Case, device: torch.device, *names: str) -> dict[str, torch.Tensor]:
        """Draw the routing of a case, and return the tensors in `names`, copied to the device."""
        parts = routing(case["M"], case["E"], alignment_of(case.choices))
        return {name: parts[name].to(device, copy=True) for name in names}

    def rows(self, case: Case) -> int:
        """Return the number of rows of the experts' buffer, padding included."""
        return rows_bound(case["M"], TOP, case["E"], alignment_of(case.choices))

    def make_set(self, case: Case, device: torch.device) -> Tensors:
        given = self.arguments(case, device)
        return given | poisoned_outputs(self.op, lambda fake: fake(**given, **self.numbers(case)))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the op's outputs."""
        return OPS[self.op].outputs

    def call(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """Run our op on one buffer set, into its outputs."""
        given = {name: tensor for name, tensor in tensors.items() if name not in self.outputs}
        out = tuple(tensors[name] for name in self.outputs)
        function = getattr(torch_cute_ops, self.op)
        function(**given, **self.numbers(case), out=out if len(out) > 1 else out[0])
        return out

    def numbers(self, case: Case) -> dict[str, Any]:
        """Return the op's arguments that are not tensors, by name."""
        return {}

    def ours(self, case: Case, sets: Sequence[Tensors]) -> Variant:
        return Variant(lambda i: self.call(case, sets[i]), self.bytes_moved(case))

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        return "there is none"

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the op's reference. Elements that the op leaves unwritten contain the poison value."""
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
            where = f", alignment {alignment}" if len(self.alignments) > 1 else ""
            name = f"decode, M ≤ {max(DECODE_ROWS)}{where}: time"
            marks.append(at_most(name, max(times, default=None), targets.MOE_DECODE_US, " µs"))
        if self.of_copy is not None:
            large = [row["variants"]["ours"]["of_copy"] for row in rows if row["sizes"]["M"] >= min(LARGE_ROWS)]
            marks.append(at_least(f"M ≥ {min(LARGE_ROWS):,}: of copy", min(large, default=None), self.of_copy))
        return marks


class RoutingBenchmark(MoeRowBenchmark):
    """Benchmark of an op that chooses experts or sorts rows by expert. The peer is the function in `compositions` with
    the op's name, run eagerly."""

    family = "moe_route"
    peers = ("torch",)
    width = "E"
    usual_width = EXPERTS
    of_copy = None
    alignments = (PADDED,)
    peer_is_checked: ClassVar[bool] = False
    """True if the peer's results must equal the op's. Otherwise torch may break ties of equal logits differently."""

    def case(self, m: int, width: int | None = None, experts: int = 0, alignment: int = PADDED) -> Case:
        return Case({"M": m, "E": experts or width or self.usual_width})

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        composition = getattr(compositions, self.op)
        given = [{k: v for k, v in tensors.items() if k not in self.outputs} for tensors in sets]
        return Variant(
            lambda i: as_tuple(composition(**given[i], **self.numbers(case))),
            self.bytes_moved(case),
            "eager",
            checked=self.peer_is_checked,
        )


def alignment_of(choices: Mapping[str, str]) -> int:
    """Return the alignment of each expert's first row, which the choices of a case or of a result row contain."""
    return int(choices.get("alignment", PADDED))
