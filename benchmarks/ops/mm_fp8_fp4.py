"""mm_fp8_fp4: the GEMM of FP8 activations with block scales and an FP4 weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

import torch_cute_ops

from .. import fp8_fp4_gemms, targets
from ..case import Case, Mark, Row, Tensors, Variant
from ..fp8_fp4_gemms import FORMATS, HUMMING
from ..fp8_gemms import DEEP_GEMM, FP8GemmBenchmark
from ..gemms import problem_of
from .mm_fp8_block import BENCHMARK as FP8

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (57344, 8192))
"""(N, K) of all weights of Llama 8B, and of the largest weight of Llama 70B."""
ROWS = {
    "marks": (1, 16, 64, 256, 2048),
    "quick": (1, 16, 64, 128, 256, 1024, 2048, 4096),
    "full": tuple(2**i for i in range(14)),
}


class MmFp8Fp4(FP8GemmBenchmark):
    op = "mm_fp8_fp4"
    peers = fp8_fp4_gemms.PEERS
    family = "fp8_fp4_wgmma_ss"
    about = fp8_fp4_gemms.ABOUT
    settings: ClassVar = {"activations": "e4m3, 1 x 128 scales", "scale layout": "128x4", "result": "bfloat16"}

    def properties(self, case: Case) -> dict[str, Any]:
        return {**super().properties(case), **fp8_fp4_gemms.choices_of(case)}

    def case(self, m: int, n: int, k: int, weight: str = "mxfp4") -> Case:
        """Return the benchmark case of a GEMM with these sizes and this format of the weight."""
        return Case({"M": m, "N": n, "K": k}, choices={"weight": weight})

    def cases(self, sizes: str) -> list[Case]:
        return [self.case(m, n, k, weight) for weight in FORMATS for n, k in SHAPES for m in ROWS[sizes]]

    def panel(self, case: Case) -> str:
        return f"{super().panel(case)}, {case.choices['weight']}"

    def operands(self, case: Case, device: torch.device) -> Tensors:
        weight = fp8_fp4_gemms.random_weight(FORMATS[case.choices["weight"]], case["N"], case["K"], device=device)
        return self.activations(case["M"], case, device) | weight

    def arguments(self, tensors: Tensors) -> Tensors:
        given = {name: tensors[name] for name in ("a", "a_scale", "b_scale")}
        return {"b": tensors["b"].t(), **given, "block_size": fp8_fp4_gemms.format_of(tensors).block_size}  # type: ignore[dict-item]

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        """Return the peer `name`: our GEMM with an FP8 weight, DeepGEMM's GEMM with an FP8 weight, or humming's GEMM
        with the FP4 weight."""
        if name in HUMMING:
            return fp8_fp4_gemms.humming(name, self.problem(case), case["M"], sets)
        weights = [{name: one[0] for name, one in self.weight(case, tensors["a"].device).items()} for tensors in sets]
        if name == DEEP_GEMM:
            with_weights = [{**tensors, **weight} for tensors, weight in zip(sets, weights, strict=True)]
            return fp8_fp4_gemms.with_fp8_weight(FP8.peer(name, case, with_weights))

        def call(i: int) -> tuple[torch.Tensor, ...]:
            one, weight = sets[i], weights[i]
            out = one["out"]
            torch_cute_ops.mm_fp8_block(one["a"], weight["b"].t(), one["a_scale"], weight["b_scale"], out=out)
            return (out,)

        size = problem_of("mm_fp8_block", n=case["N"], k=case["K"], m=case["M"]).bytes_moved(case["M"])
        return Variant(call, size, "an FP8 weight", checked=False)

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        return (fp8_fp4_gemms.gemm(tensors["a"], tensors["a_scale"], fp8_fp4_gemms.decoded_weight(tensors)),)

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        many = fp8_fp4_gemms.times_over_fp8(rows, lambda row: row["sizes"]["M"] >= 2048)
        return [fp8_fp4_gemms.many_rows_mark("M ≥ 2,048", many, targets.FP8_FP4_OVER_FP8)]


BENCHMARK = MmFp8Fp4()
