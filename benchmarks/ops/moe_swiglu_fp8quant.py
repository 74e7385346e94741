"""moe_swiglu_fp8quant: SwiGLU's gate and FP8 quantisation of experts' rows. I is the width of the output.

If the rows have no padding, the op gets only offsets, and the kernel reads only the first and the last offset.
"""

from __future__ import annotations

import torch

from ..case import Case, Tensors
from ..formulas import fp8_bytes, row_bytes
from ..moe_rows import DTYPE, PACKED, MoeRowBenchmark, alignment_of


class MoeSwigluFp8quant(MoeRowBenchmark):
    op = "moe_swiglu_fp8quant"
    family = "row_quant"
    width = "I"
    usual_width = 2048

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (both halves of each pair's row, offsets and counts) and writes (codes and
        scales)."""
        pairs, width = self.pairs(case), case["I"]
        moved = row_bytes(pairs, 2 * width, DTYPE.itemsize) + fp8_bytes(pairs, width, "block128")
        return moved + row_bytes(2 if is_packed(case) else 2 * case["E"] + 1, 1, 4)

    def arguments(self, case: Case, device: torch.device) -> Tensors:
        rows = torch.randn(self.rows(case), 2 * case["I"], dtype=DTYPE, device=device)
        names = ("offsets",) if is_packed(case) else ("offsets", "counts")
        return {"input": rows, **self.routed(case, device, *names)}


def is_packed(case: Case) -> bool:
    """Check whether the rows have no padding."""
    return alignment_of(case.choices) == PACKED


BENCHMARK = MoeSwigluFp8quant()
