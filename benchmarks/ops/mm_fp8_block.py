"""mm_fp8_block: the GEMM of FP8 matrices with block scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from .. import targets
from ..case import Case, Mark, Row, Tensors, Variant, at_least
from ..fp8_gemms import (
    DEEP_GEMM,
    FP8GemmBenchmark,
    Prepared,
    aligned_columns,
    decoded_gemm,
    found,
    peer_mark,
    rate,
)
from ..gemms import DTYPE

SHAPES = ((4096, 7168), (7168, 2048))
"""(N, K) of DeepSeek-V3's experts."""
ROWS = {"marks": (8192,), "quick": (1, 16, 64, 256, 1024, 4096, 8192), "full": tuple(2**i for i in range(15))}
TORCH = ("rowwise", "blockwise")


class MmFp8Block(FP8GemmBenchmark):
    op = "mm_fp8_block"
    peers = (*TORCH, DEEP_GEMM)

    def case(self, m: int, n: int, k: int) -> Case:
        """Return the benchmark case of a GEMM with these sizes."""
        return Case({"M": m, "N": n, "K": k})

    def cases(self, sizes: str) -> list[Case]:
        return [self.case(m, n, k) for n, k in SHAPES for m in ROWS[sizes]]

    def operands(self, case: Case, device: torch.device) -> Tensors:
        weight = {name: tensor[0] for name, tensor in self.weight(case, device).items()}
        return self.activations(case["M"], case, device) | weight

    def arguments(self, tensors: Tensors) -> Tensors:
        return {"b": tensors["b"].t(), **{name: tensors[name] for name in ("a", "a_scale", "b_scale")}}

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        def rowwise(t: Tensors) -> Callable[[], torch.Tensor]:
            one, two = t["a"].new_ones(len(t["a"]), 1, dtype=torch.float32), t["a_scale"].new_ones(1, len(t["b"]))
            return lambda: torch._scaled_mm(t["a"], t["b"].t(), one, two, out_dtype=DTYPE, use_fast_accum=True)

        def blockwise(t: Tensors) -> Callable[[], torch.Tensor]:
            scale = t["a_scale"], t["b_scale"].t()
            return lambda: torch._scaled_mm(t["a"], t["b"].t(), *scale, out_dtype=DTYPE)

        def deep_gemm(library: ModuleType, t: Tensors) -> Prepared:
            a, b = (t["a"], aligned_columns(t["a_scale"])), (t["b"], t["b_scale"])
            return lambda: library.fp8_gemm_nt(a, b, t["out"]), t["out"]

        if name == DEEP_GEMM:
            return self.deep_gemm(deep_gemm, case, sets)
        if name == "rowwise":
            return self.torch_gemm(rowwise, case, sets, "one scale for each row")
        return self.torch_gemm(blockwise, case, sets)

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        return (decoded_gemm(*(tensors[name] for name in ("a", "b", "a_scale", "b_scale"))),)

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        large = found(rows, M=8192, N=4096, K=7168)
        many = [row for row in rows if row["sizes"]["M"] >= 4096]
        at_large = None if large is None else rate(large)
        return [
            at_least("8192 x 4096 x 7168: rate", at_large, targets.FP8_TFLOPS, " TFLOP/s"),
            peer_mark("M ≥ 4,096: rate over torch's FP8 GEMMs", many, TORCH),
            peer_mark("M ≥ 4,096: rate over torch's with the same scales", many, ("blockwise",)),
            peer_mark("M ≥ 4,096: rate over DeepGEMM's", many, (DEEP_GEMM,)),
        ]


BENCHMARK = MmFp8Block()
