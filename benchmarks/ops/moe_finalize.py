"""moe_finalize: the weighted sum of each token's expert rows, plus a residual."""

from __future__ import annotations

import torch

from ..case import Case, Tensors
from ..formulas import row_bytes
from ..moe_rows import DTYPE, TOP, MoeRowBenchmark


class MoeFinalize(MoeRowBenchmark):
    op = "moe_finalize"
    family = "moe_finalize"

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (a row per pair, the residual, indices and weights) and writes
        (result)."""
        m, pairs = case["M"], self.pairs(case)
        return row_bytes(pairs + 2 * m, case["H"], DTYPE.itemsize) + row_bytes(pairs, 2, 4)

    def arguments(self, case: Case, device: torch.device) -> Tensors:
        m, width = case["M"], case["H"]
        return {
            "input": torch.randn(self.rows(case), width, dtype=DTYPE, device=device),
            **self.routed(case, device, "expanded_to_permuted"),
            "weights": torch.rand(m, TOP, device=device),
            "residual": torch.randn(m, width, dtype=DTYPE, device=device),
        }


BENCHMARK = MoeFinalize()
