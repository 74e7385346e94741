"""moe_route_dense: choose each token's experts by grouped sigmoid scores, and write their routing weights to a matrix
(M, E)."""

from __future__ import annotations

from typing import Any

import torch

from ..case import Case, Tensors
from ..formulas import row_bytes
from ..moe_rows import CHOICE, DTYPE, RoutingBenchmark


class MoeRouteDense(RoutingBenchmark):
    op = "moe_route_dense"
    about = "Logits are bfloat16; equal logits are ties. Each token chooses from 4 of 8 groups of experts."

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (the logits) and writes (a float32 per token and expert)."""
        return row_bytes(case["M"], case["E"], DTYPE.itemsize + 4)

    def numbers(self, case: Case) -> dict[str, Any]:
        return CHOICE

    def arguments(self, case: Case, device: torch.device) -> Tensors:
        return {"logits": torch.randn(case["M"], case["E"], dtype=DTYPE, device=device)}


BENCHMARK = MoeRouteDense()
