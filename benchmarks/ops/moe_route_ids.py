"""moe_route_ids: sort the routed pairs by expert, if another op has chosen the experts."""

from __future__ import annotations

from typing import Any

import torch

from ..case import Case, Tensors
from ..formulas import row_bytes
from ..moe_rows import PADDED, RoutingBenchmark


class MoeRouteIds(RoutingBenchmark):
    op = "moe_route_ids"
    peer_is_checked = True
    about = "Each token chooses 8 experts, all equally likely."

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (expert of each pair) and writes (row of each pair, pair of each row,
        offsets and counts)."""
        return row_bytes(2 * self.pairs(case) + self.rows(case) + 2 * case["E"] + 1, 1, 4)

    def numbers(self, case: Case) -> dict[str, Any]:
        return {"experts": case["E"], "alignment": PADDED}

    def arguments(self, case: Case, device: torch.device) -> Tensors:
        return self.routed(case, device, "ids")


BENCHMARK = MoeRouteIds()
