"""silu_mul_mm_fp4_weight_only: the down projection of a layer with SwiGLU, of bfloat16 gate and up and an NVFP4 weight.
The column "apart" is silu_mul and mm_fp4_weight_only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

import torch_cute_ops

from ..case import Case, Mark, Row, Tensors, Variant
from ..compositions import silu_mul
from ..fp4_gemms import FP4GemmBenchmark
from ..gemms import DTYPE

DOWN = ((4096, 14336), (8192, 28672))
"""(N, K) of the down projections of a Llama 8B and a 70B."""
ROWS: dict[str, tuple[int, ...]] = {
    "marks": (1, 8),
    "quick": (1, 8, 16, 64, 1024),
    "full": tuple(2**i for i in range(14)),
}
"""M of each set of sizes."""
APART = "apart"


class SiluMulMmFp4WeightOnly(FP4GemmBenchmark):
    op = "silu_mul_mm_fp4_weight_only"
    peers = ()
    settings: ClassVar = {"gate and up": "bfloat16", **FP4GemmBenchmark.settings}

    @property
    def ways(self) -> tuple[str, ...]:
        """The op's backends; and two ops in its place."""
        return (*super().ways, APART)

    def cases(self, sizes: str) -> list[Case]:
        return [self.case(m, n, k) for n, k in DOWN for m in ROWS[sizes]]

    def make_a(self, m: int, k: int, device: torch.device) -> Tensors:
        return super().make_a(m, 2 * k, device)

    def decoded_a(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return silu_mul(tensors["a"]).to(dtype)

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        if name != APART:
            return super().peer(name, case, sets)

        def call(i: int) -> tuple[Any, ...]:
            given = self.arguments(sets[i])
            given["a"] = torch_cute_ops.silu_mul(given["a"])
            torch_cute_ops.mm_fp4_weight_only(**given, out=sets[i]["out"])
            return self.results(sets[i])

        rows = 2 * case["M"] * case["K"] * DTYPE.itemsize  # written and read again
        return Variant(call, self.bytes_moved(case) + rows)

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        return self.choice_marks(rows)


BENCHMARK = SiluMulMmFp4WeightOnly()
