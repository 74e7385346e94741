"""grouped_mm_fp8: one GEMM per expert, of FP8 matrices with block scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from torch_cute_ops.gemm.problem import GemmProblem

from .. import moe_rows, targets
from ..case import Case, Mark, Row, Tensors, Variant, at_least
from ..fp8_gemms import (
    BLOCK,
    DEEP_GEMM,
    FP8GemmBenchmark,
    Prepared,
    aligned_columns,
    decoded_gemm,
    experts_of,
    found,
    peer_mark,
    rate,
)
from ..gemms import DTYPE

SHAPES = ((4096, 7168), (7168, 2048))
"""(N, K) of DeepSeek-V3's experts: gate and up, and down."""
PREFILL = {
    "marks": ((4, 8192), (8, 4096), (32, 1024)),
    "quick": ((4, 8192), (8, 512), (8, 4096), (32, 128), (32, 1024)),
    "full": tuple((experts, rows // experts) for experts in (4, 8, 16, 32) for rows in (4096, 8192, 16384, 32768)),
}
"""Pairs (experts, rows per expert) in the contiguous layout, with 4,096 to 32,768 rows in total."""
DECODE = {
    "marks": ((8, 16), (32, 1), (32, 16), (32, 64)),
    "quick": tuple((experts, rows) for experts in (8, 32) for rows in (1, 8, 16, 64)),
    "full": tuple((experts, 2**i) for experts in (8, 16, 32) for i in range(7)),
}
"""Pairs (experts, rows per expert) in the masked layout. Every row of the buffer belongs to a token."""
ROUTED = {"marks": (), "quick": ((32, 4), (32, 16), (32, 64)), "full": tuple((32, 2**i) for i in range(11))}
"""Pairs (experts, mean rows per expert) in the contiguous layout without padding. Each token is routed to 8 random
experts."""
BY_LAYOUT = {"contiguous": PREFILL, "masked": DECODE, "routed": ROUTED}
PEER = "scaled_grouped_mm"
DEEP_GEMM_ROWS = 128
"""Rows of DeepGEMM's largest tile."""


class GroupedMmFp8(FP8GemmBenchmark):
    op = "grouped_mm_fp8"
    peers = (PEER, DEEP_GEMM)

    def properties(self, case: Case) -> dict[str, Any]:
        layout = {"masked": True} if case.choices["layout"] == "masked" else {"counts": False}
        return {**super().properties(case), "experts": case["E"], **layout}

    def case(self, experts: int, m: int, n: int, k: int, layout: str = "contiguous") -> Case:
        """Return the benchmark case of a grouped GEMM with these sizes. ``m`` is the number of rows per expert, or
        their average in the layout "routed"."""
        return Case({"M": m, "N": n, "K": k, "E": experts}, choices={"layout": layout})

    def cases(self, sizes: str) -> list[Case]:
        return [
            self.case(*size, n, k, layout)
            for n, k in SHAPES
            for layout, of_layout in BY_LAYOUT.items()
            for size in of_layout[sizes]
        ]

    def panel(self, case: Case) -> str:
        return f"{super().panel(case)}, {case.choices['layout']}"

    # --- formulas ---

    def problem(self, case: Case) -> GemmProblem:
        """Return the GEMM problem of a case. Experts without rows are not counted."""
        problem, used = super().problem(case), int(counts_of(case).count_nonzero())
        return replace(problem, grouping=replace(problem.grouping, experts=used))

    def rows_of_problem(self, case: Case) -> int:
        """Return the M that the formulas of the GEMM problem take. In the masked layout, M is the number of rows per
        expert. In other layouts, M is the number of rows of all experts."""
        return case["M"] if case.choices["layout"] == "masked" else int(counts_of(case).sum())

    def bytes_moved(self, case: Case) -> int:
        return self.problem(case).bytes_moved(self.rows_of_problem(case))

    def flops(self, case: Case) -> int:
        return self.problem(case).flops(self.rows_of_problem(case))

    # --- tensors ---

    def operands(self, case: Case, device: torch.device) -> Tensors:
        counts = counts_of(case)
        tensors = self.activations(int(counts.sum()), case, device) | self.weight(case, device)
        if case.choices["layout"] == "masked":
            tensors["a"] = tensors["a"].view(len(counts), -1, case["K"])
            tensors["a_scale"] = tensors["a_scale"].unflatten(0, tensors["a"].shape[:2])
            tensors["counts"] = counts.to(device, copy=True)
        else:
            tensors["offsets"] = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(device)
        return tensors

    def arguments(self, tensors: Tensors) -> Tensors:
        names = ("a", "b", "a_scale", "b_scale", "offsets", "counts")
        return {name: tensors[name] for name in names if name in tensors} | {"b": tensors["b"].mT}

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        counts, k = counts_of(case).tolist(), case["K"]
        rows, scales = tensors["a"].view(-1, k).split(counts), tensors["a_scale"].flatten(0, -2).split(counts)
        parts = map(decoded_gemm, rows, tensors["b"], scales, tensors["b_scale"])
        return (torch.cat(list(parts)).view_as(tensors["out"]),)

    # --- peers ---

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        """Return torch's or DeepGEMM's variant. torch's GEMM needs rows without padding, which all cases of this
        benchmark provide."""
        experts, layout = experts_of(case), case.choices["layout"]
        if name == DEEP_GEMM:
            return self.deep_gemm(masked if layout == "masked" else contiguous, case, sets)

        def make(t: Tensors) -> Callable[[], torch.Tensor]:
            a = t["a"].view(-1, case["K"])
            one, two = t["a_scale"].new_ones(len(a)), t["a_scale"].new_ones(experts, case["N"])
            ends = counts_of(case).cumsum(0).int().to(a.device)
            return lambda: torch._scaled_grouped_mm(
                a, t["b"].mT, one, two, offs=ends, out_dtype=DTYPE, use_fast_accum=True
            )

        return self.torch_gemm(make, case, sets, "one scale for each row")

    # --- marks ---

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        large = found(rows, M=8192, N=4096, K=7168, E=4, layout="contiguous")
        at_large = None if large is None else rate(large)
        prefill = [row for row in rows if row["choices"]["layout"] == "contiguous"]
        streams = [row["variants"]["ours"]["of_copy"] for row in rows if row["choices"]["layout"] == "masked"]
        decode = "masked, 1 to 64 rows: of copy"
        return [
            at_least("4 x 8192 x 4096 x 7168: rate", at_large, targets.FP8_TFLOPS, " TFLOP/s"),
            peer_mark("contiguous: rate over torch's grouped FP8 GEMM", prefill, (PEER,)),
            peer_mark("contiguous: rate over DeepGEMM's", prefill, (DEEP_GEMM,)),
            at_least(decode, min(streams, default=None), targets.FP8_DECODE_OF_COPY),
        ]


def counts_of(case: Case) -> torch.Tensor:
    """Return the number of rows of each expert: (E,) int32 on the CPU."""
    experts, m = experts_of(case), case["M"]
    if case.choices["layout"] != "routed":
        return torch.full((experts,), m, dtype=torch.int32)
    return moe_rows.routing(experts * m // moe_rows.TOP, experts, moe_rows.PACKED)["counts"]


def contiguous(library: ModuleType, t: Tensors) -> Prepared:
    """Prepare DeepGEMM's grouped GEMM in the contiguous layout. The number of rows of each expert must be a multiple of
    128."""
    a, b = (t["a"], aligned_columns(t["a_scale"])), (t["b"], t["b_scale"])
    counts = t["offsets"].diff().cpu()
    if (counts % BLOCK).any():
        raise ValueError("DeepGEMM expects a multiple of 128 rows for each expert")
    owners = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts).to(t["a"].device)
    return lambda: library.m_grouped_fp8_gemm_nt_contiguous(a, b, t["out"], owners), t["out"]


def masked(library: ModuleType, t: Tensors) -> Prepared:
    """Prepare DeepGEMM's grouped GEMM in the masked layout. Each expert's rows are padded to whole tiles, because
    DeepGEMM writes whole tiles."""
    experts, m, _ = t["a"].shape
    room = -m % DEEP_GEMM_ROWS
    rows = torch.nn.functional.pad(t["a"].view(torch.uint8), (0, 0, 0, room)).view(t["a"].dtype)
    scale = torch.nn.functional.pad(t["a_scale"], (0, 0, 0, room))
    out = t["out"].new_empty(experts, m + room, t["out"].shape[2])
    a, b = (rows, aligned_columns(scale)), (t["b"], t["b_scale"])
    return lambda: library.fp8_m_grouped_gemm_nt_masked(a, b, out, t["counts"], m), out[:, :m]


BENCHMARK = GroupedMmFp8()
