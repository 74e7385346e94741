"""moe_route: choose each token's experts by grouped sigmoid scores, and sort the routed pairs by expert."""

from __future__ import annotations

from typing import Any

import torch

from ..case import Case, Tensors
from ..formulas import row_bytes
from ..moe_rows import CHOICE, DTYPE, PADDED, RoutingBenchmark


class MoeRoute(RoutingBenchmark):
    op = "moe_route"
    about = "Logits are bfloat16; equal logits are ties. Each token chooses from 4 of 8 groups of experts."

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (logits) and writes (weight, expert and row of each pair, the pair of each
        row, offsets and counts)."""
        m, experts = case["M"], case["E"]
        written = row_bytes(self.pairs(case), 3, 4) + row_bytes(self.rows(case) + 2 * experts + 1, 1, 4)
        return row_bytes(m, experts, DTYPE.itemsize) + written

    def numbers(self, case: Case) -> dict[str, Any]:
        return {**CHOICE, "alignment": PADDED}

    def arguments(self, case: Case, device: torch.device) -> Tensors:
        return {"logits": torch.randn(case["M"], case["E"], dtype=DTYPE, device=device)}


BENCHMARK = MoeRoute()
