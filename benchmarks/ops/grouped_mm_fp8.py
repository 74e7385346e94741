"""grouped_mm_fp8: products of FP8 matrices under block scales, one for each expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import torch

import torch_cute_ops

from ..case import Case, Mark, Row, Tensors, Variant, at_least
from ..fp8_products import (
    BLOCK,
    DEEP_GEMM,
    DTYPE,
    FLOPS_GOAL,
    STREAM_GOAL,
    FP8ProductBenchmark,
    Prepared,
    experts_of,
    found,
    peer_mark,
    rate,
    rows_last,
    sums,
)

SHAPES = ((4096, 7168), (7168, 2048))
"""(N, K) of DeepSeek-V3's experts: gate and up, and down."""
PREFILL = {
    "marks": ((4, 8192), (8, 4096), (32, 1024)),
    "quick": ((4, 8192), (8, 512), (8, 4096), (32, 128), (32, 1024)),
    "full": tuple((experts, rows // experts) for experts in (4, 8, 16, 32) for rows in (4096, 8192, 16384, 32768)),
}
"""Experts, and rows of each, in the contiguous layout: 4,096 to 32,768 rows."""
DECODE = {
    "marks": ((8, 16), (32, 1), (32, 16), (32, 64)),
    "quick": tuple((experts, rows) for experts in (8, 32) for rows in (1, 8, 16, 64)),
    "full": tuple((experts, 2**i) for experts in (8, 16, 32) for i in range(7)),
}
"""The same in the masked layout, of which each has as much room as it needs."""
PEER = "scaled_grouped_mm"
DEEP_GEMM_ROWS = 128
"""Of DeepGEMM's widest tile."""


class GroupedMmFp8(FP8ProductBenchmark):
    op = "grouped_mm_fp8"
    peers = (PEER, DEEP_GEMM)

    def case(self, experts: int, m: int, n: int, k: int, layout: str = "contiguous") -> Case:
        """A case of this op: ``m`` rows of each expert."""
        return Case({"M": m, "N": n, "K": k, "E": experts}, choices={"layout": layout})

    def cases(self, sizes: str) -> list[Case]:
        return [
            self.case(*size, n, k, layout)
            for n, k in SHAPES
            for layout, of_layout in (("contiguous", PREFILL), ("masked", DECODE))
            for size in of_layout[sizes]
        ]

    def panel(self, case: Case) -> str:
        return f"{super().panel(case)}, {case.choices['layout']}"

    def make_set(self, case: Case, device: torch.device) -> Tensors:
        m, n, k, experts = case["M"], case["N"], case["K"], experts_of(case)
        tensors = self.rows(experts * m, case, device) | self.weight(case, device)
        if case.choices["layout"] == "masked":
            tensors["a"] = tensors["a"].view(experts, m, k)
            tensors["a_scale"] = tensors["a_scale"].view(-1, experts, m)
            tensors["counts"] = torch.full((experts,), m, dtype=torch.int32, device=device)
        else:
            tensors["offsets"] = torch.arange(experts + 1, dtype=torch.int32, device=device) * m
        tensors["out"] = torch.full((*tensors["a"].shape[:-1], n), float("nan"), dtype=DTYPE, device=device)
        return tensors

    def call(self, tensors: Tensors) -> None:
        operands = (tensors[name] for name in ("a", "b", "a_scale", "b_scale"))
        given = {name: tensors[name] for name in ("offsets", "counts") if name in tensors}
        torch_cute_ops.grouped_mm_fp8(*operands, **given, out=tensors["out"])

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        """torch's, which takes rows packed one expert after the other: here both layouts are that; or DeepGEMM's."""
        m, experts = case["M"], experts_of(case)
        if name == DEEP_GEMM:
            is_masked = case.choices["layout"] == "masked"
            return self.deep_gemm(masked if is_masked else contiguous, case, sets)

        def make(t: Tensors) -> Callable[[], torch.Tensor]:
            a = t["a"].view(-1, case["K"])
            one, two = t["a_scale"].new_ones(len(a)), t["a_scale"].new_ones(experts, case["N"])
            ends = torch.arange(1, experts + 1, dtype=torch.int32, device=a.device) * m
            return lambda: torch._scaled_grouped_mm(
                a, t["b"].mT, one, two, offs=ends, out_dtype=DTYPE, use_fast_accum=True
            )

        return self.peer_of(make, case, sets, "scales of whole rows")

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        m, k, experts = case["M"], case["K"], experts_of(case)
        rows, scales = tensors["a"].view(experts, m, k), tensors["a_scale"].view(-1, experts, m)
        parts = [
            sums(rows[expert], tensors["b"][expert], scales[:, expert], tensors["b_scale"][expert])
            for expert in range(experts)
        ]
        return (torch.cat(parts).view_as(tensors["out"]),)

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        large = found(rows, M=8192, N=4096, K=7168, E=4, layout="contiguous")
        prefill = [row for row in rows if row["choices"]["layout"] == "contiguous"]
        streams = [row["variants"]["ours"]["of_copy"] for row in rows if row["choices"]["layout"] == "masked"]
        return [
            at_least("4 x 8192 x 4096 x 7168: rate", None if large is None else rate(large), FLOPS_GOAL, " TFLOP/s"),
            peer_mark("contiguous: as fast as torch's grouped FP8 product", prefill, (PEER,)),
            peer_mark("contiguous: as fast as DeepGEMM", prefill, (DEEP_GEMM,)),
            at_least("masked, 1 to 64 rows: of a copy's bandwidth", min(streams, default=None), STREAM_GOAL),
        ]


def contiguous(library: ModuleType, t: Tensors) -> Prepared:
    """DeepGEMM's product of rows one expert after the other, of which it wants multiples of 128."""
    a, b = (t["a"], rows_last(t["a_scale"])), (t["b"], t["b_scale"])
    each = t["offsets"].diff().cpu()
    if (each % BLOCK).any():
        raise ValueError("an expert's rows are no multiple of 128")
    owners = torch.arange(len(each), dtype=torch.int32).repeat_interleave(each).to(t["a"].device)
    return lambda: library.m_grouped_fp8_gemm_nt_contiguous(a, b, t["out"], owners), t["out"]


def masked(library: ModuleType, t: Tensors) -> Prepared:
    """DeepGEMM's product of equally many rows for each expert. It writes whole tiles, for which there is room here."""
    experts, m, _ = t["a"].shape
    room = -m % DEEP_GEMM_ROWS
    rows = torch.nn.functional.pad(t["a"].view(torch.uint8), (0, 0, 0, room)).view(t["a"].dtype)
    scale = torch.nn.functional.pad(t["a_scale"].transpose(0, 1).contiguous(), (0, room))
    out = t["out"].new_empty(experts, m + room, t["out"].shape[2])
    a, b = (rows, rows_last(scale)), (t["b"], t["b_scale"])
    return lambda: library.fp8_m_grouped_gemm_nt_masked(a, b, out, t["counts"], m), out[:, :m]


BENCHMARK = GroupedMmFp8()
