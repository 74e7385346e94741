"""moe_route: the experts of each token by grouped sigmoids, and the order of their rows."""

from __future__ import annotations

from typing import Any

import torch

from ..case import Case
from ..formulas import row_bytes
from ..moe_rows import DTYPE, PADDED, TOP, MoeRowBenchmark


class MoeRoute(MoeRowBenchmark):
    op = "moe_route"
    width = "E"
    usual_width = 256
    outputs = ("weights", "ids", "expanded_to_permuted", "permuted_to_expanded", "offsets", "counts")
    has_copy_mark = False
    alignments = (PADDED,)
    about = "Logits are bfloat16 numbers, of which equal ones are ties; 4 of 8 groups of experts."

    def case(self, m: int, width: int | None = None, experts: int = 0, alignment: int = PADDED) -> Case:
        return Case({"M": m, "E": experts or width or self.usual_width})

    def bytes_moved(self, case: Case) -> int:
        """The logits read; weight, expert and row of each pair, pair of each row, offsets and counts written; bytes."""
        m, experts = case["M"], case["E"]
        written = row_bytes(self.pairs(case), 3, 4) + row_bytes(self.rows(case) + 2 * experts + 1, 1, 4)
        return row_bytes(m, experts, DTYPE.itemsize) + written

    def numbers(self, case: Case) -> dict[str, Any]:
        groups = {"scoring": "sigmoid", "num_groups": 8, "topk_groups": 4, "scaling_factor": 2.5}
        return {"topk": TOP, **groups, "alignment": PADDED}

    def arguments(self, case: Case, device: torch.device) -> dict[str, Any]:
        logits = torch.randn(case["M"], case["E"], dtype=DTYPE, device=device)
        return {"logits": logits, **self.numbers(case)}


BENCHMARK = MoeRoute()
