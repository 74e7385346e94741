"""fp4_quantize: NVFP4 quantisation alone. Inductor is the only peer that quantises without a norm."""

from __future__ import annotations

from typing import ClassVar

from .. import targets
from ..case import Case
from ..formulas import fp4_bytes, row_bytes
from ..fp4_rows import Fp4Rows
from ..rows import DTYPE, INDUCTOR_LARGE


class Fp4Quantize(Fp4Rows):
    op = "fp4_quantize"
    peers = ("inductor",)
    tolerance = 0.0  # bit-exact, because nothing is reduced over the row
    weighted = False
    least_over_inductor: ClassVar = {INDUCTOR_LARGE: targets.FP4_OVER_INDUCTOR}

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (input) and writes (packed data and scales)."""
        m, h = case["M"], case["H"]
        return row_bytes(m, h, DTYPE.itemsize) + fp4_bytes(m, h)


BENCHMARK = Fp4Quantize()
