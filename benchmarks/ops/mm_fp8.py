"""mm_fp8: the GEMM of FP8 matrices with per-token and per-channel scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

import torch_cute_ops

from .. import targets
from ..case import Case, Mark, Row, Tensors, Variant
from ..fp8_gemms import TOKEN_NOISE, FP8GemmBenchmark, codes, peer_mark, scales
from ..gemms import DTYPE

SHAPES = ((28672, 4096), (4096, 14336), (8192, 8192))
"""(N, K) of the largest weights of Llama 8B, and a square weight."""
ROWS = {
    "marks": (1, 16, 64, 256, 4096),
    "quick": (1, 16, 64, 256, 1024, 4096),
    "full": tuple(2**i for i in range(14)),
}
SUMS = {"promoted": False, "fast": True}
"""Values of `fast_accum` by name."""
PEERS = {"rowwise": "promoted", "rowwise_fast": "fast"}
"""Entry of `SUMS` that accumulates in the same way, keyed by the name of torch's GEMM with one scale for each row and
column."""
ABOUT = """\
"promoted" cases add sums of at most 512 elements of K in fp32 (`fast_accum=False`); "fast" cases accumulate all of K in
the tensor cores. torch's GEMMs have the same scales: "rowwise" runs with `use_fast_accum=False`, "rowwise_fast" with
`True`. Marks compare our GEMM with torch's GEMM of the same accumulation."""


class MmFp8(FP8GemmBenchmark):
    op = "mm_fp8"
    peers = tuple(PEERS)
    settings: ClassVar = {"operands": "e4m3", "scales": "per token and per channel, float32", "result": "bfloat16"}
    family = "fp8_token_wgmma"
    about = ABOUT

    def properties(self, case: Case) -> dict[str, Any]:
        return {**super().properties(case), "fast_accum": SUMS[case.choices["sums"]]}

    def case(self, m: int, n: int, k: int, sums: str = "promoted") -> Case:
        """Return the benchmark case of a GEMM with these sizes. `sums`, a key of `SUMS`, selects how products are
        accumulated."""
        return Case({"M": m, "N": n, "K": k}, choices={"sums": sums})

    def cases(self, sizes: str) -> list[Case]:
        return [self.case(m, n, k, sums) for sums in SUMS for n, k in SHAPES for m in ROWS[sizes]]

    def noise(self, case: Case | None) -> float:
        return TOKEN_NOISE

    def panel(self, case: Case) -> str:
        return f"{super().panel(case)}, {case.choices['sums']}"

    def operands(self, case: Case, device: torch.device) -> Tensors:
        m, n, k = (case[name] for name in ("M", "N", "K"))
        factors = {"a_scale": scales(m, 1, device=device), "b_scale": scales(n, device=device)}
        return {"a": codes(m, k, device), "b": codes(n, k, device), **factors}

    def arguments(self, tensors: Tensors) -> Tensors:
        return {"b": tensors["b"].t(), **{name: tensors[name] for name in ("a", "a_scale", "b_scale")}}

    def with_backend(self, case: Case, sets: Sequence[Tensors], backend: str) -> Variant:
        fast_accum = SUMS[case.choices["sums"]]

        def call(i: int) -> tuple[torch.Tensor, ...]:
            options: dict[str, Any] = {"backend": backend, "fast_accum": fast_accum, "out": sets[i]["out"]}
            torch_cute_ops.mm_fp8(**self.arguments(sets[i]), **options)
            return self.results(sets[i])

        return Variant(call, self.bytes_moved(case))

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        options: dict[str, Any] = {"out_dtype": DTYPE, "use_fast_accum": SUMS[PEERS[name]]}

        def rowwise(t: Tensors) -> Callable[[], torch.Tensor]:
            scale = t["a_scale"], t["b_scale"][None]
            return lambda: torch._scaled_mm(t["a"], t["b"].t(), *scale, **options)

        return self.torch_gemm(rowwise, case, sets)

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        a, b, a_scale, b_scale = (tensors[name].double() for name in ("a", "b", "a_scale", "b_scale"))
        return (((a * a_scale) @ (b * b_scale[:, None]).t()).to(DTYPE),)

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        marks = []
        for peer, sums in PEERS.items():
            some = [row for row in rows if row["choices"]["sums"] == sums]
            few = [row for row in some if row["sizes"]["M"] <= 64]
            many = [row for row in some if row["sizes"]["M"] > 64]
            for name, of, least in (("M ≤ 64", few, targets.TOKEN_FEW_ROWS), ("M > 64", many, targets.TOKEN_MANY_ROWS)):
                marks.append(peer_mark(f"{sums}, {name}: rate over torch's with the same scales", of, (peer,), least))
        return marks


BENCHMARK = MmFp8()
