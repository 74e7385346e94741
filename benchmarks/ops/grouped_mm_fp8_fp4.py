"""grouped_mm_fp8_fp4: one GEMM per expert. Activations are FP8 and have block scales; weights are FP4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

import torch_cute_ops

from .. import fp8_fp4_gemms, targets
from ..case import Case, Mark, Row, Tensors, Variant
from ..fp8_fp4_gemms import FORMATS, HUMMING
from ..fp8_gemms import DEEP_GEMM, experts_of
from .grouped_mm_fp8 import BENCHMARK as FP8
from .grouped_mm_fp8 import GroupedMmFp8, counts_of


class GroupedMmFp8Fp4(GroupedMmFp8):
    op = "grouped_mm_fp8_fp4"
    peers = fp8_fp4_gemms.PEERS
    family = "fp8_fp4_wgmma_ss"
    about = fp8_fp4_gemms.ABOUT
    settings: ClassVar = {"activations": "e4m3, 1 x 128 scales", "scale layout": "128x4", "result": "bfloat16"}

    def properties(self, case: Case) -> dict[str, Any]:
        return {**super().properties(case), **fp8_fp4_gemms.choices_of(case)}

    def cases(self, sizes: str) -> list[Case]:
        of_fp8 = super().cases(sizes)
        return [Case(one.sizes, choices={**one.choices, "weight": weight}) for weight in FORMATS for one in of_fp8]

    def panel(self, case: Case) -> str:
        return f"{super().panel(case)}, {case.choices['weight']}"

    def weight(self, case: Case, device: torch.device) -> Tensors:
        fmt = FORMATS[case.choices["weight"]]
        return fp8_fp4_gemms.random_weight(fmt, experts_of(case), case["N"], case["K"], device=device)

    def arguments(self, tensors: Tensors) -> Tensors:
        block_size: Any = fp8_fp4_gemms.format_of(tensors).block_size
        return {**super().arguments(tensors), "block_size": block_size}

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        counts, k = counts_of(case).tolist(), case["K"]
        rows, scales = tensors["a"].view(-1, k).split(counts), tensors["a_scale"].flatten(0, -2).split(counts)
        parts = map(fp8_fp4_gemms.gemm, rows, scales, fp8_fp4_gemms.decoded_weight(tensors))
        return (torch.cat(list(parts)).view_as(tensors["out"]),)

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        """Return the peer `name`: our GEMM with FP8 weights, DeepGEMM's GEMM with FP8 weights, or humming's GEMM with
        the FP4 weights."""
        if name in HUMMING:
            is_masked = case.choices["layout"] == "masked"
            experts = {
                "gemm_type": "grouped_masked" if is_masked else "grouped_contiguous",
                "layout": "counts" if is_masked else "offsets",
            }
            return fp8_fp4_gemms.humming(name, self.problem(case), self.rows_of_problem(case), sets, experts)
        weights = [FP8.weight(case, tensors["a"].device) for tensors in sets]
        if name == DEEP_GEMM:
            with_weights = [{**tensors, **weight} for tensors, weight in zip(sets, weights, strict=True)]
            return fp8_fp4_gemms.with_fp8_weight(FP8.peer(name, self._of_fp8(case), with_weights))

        def call(i: int) -> tuple[torch.Tensor, ...]:
            given = FP8.arguments({**sets[i], **weights[i]})
            torch_cute_ops.grouped_mm_fp8(**given, out=sets[i]["out"])
            return (sets[i]["out"],)

        return Variant(call, FP8.bytes_moved(self._of_fp8(case)), "FP8 weights", checked=False)

    def _of_fp8(self, case: Case) -> Case:
        return Case(case.sizes, choices={"layout": case.choices["layout"]})

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        few = {
            name: fp8_fp4_gemms.times_over_fp8(
                rows,
                lambda row, name=name: (
                    (row["choices"]["layout"], row["choices"]["weight"]) == ("masked", name) and row["sizes"]["M"] <= 16
                ),
            )
            for name in FORMATS
        }
        many = fp8_fp4_gemms.times_over_fp8(
            rows, lambda row: row["choices"]["layout"] == "contiguous" and row["sizes"]["M"] >= 1024
        )
        return [
            *(
                fp8_fp4_gemms.few_rows_mark(f"{name}, masked, 1 to 16 rows", ratios, targets.GROUPED_FP8_FP4_DECODE)
                for name, ratios in few.items()
            ),
            fp8_fp4_gemms.many_rows_mark("contiguous, ≥ 1,024 rows", many, targets.GROUPED_FP8_FP4_OVER_FP8),
        ]


BENCHMARK = GroupedMmFp8Fp4()
