"""fp4_quantize_four_over_six: NVFP4 quantisation with the better of two scales per block."""

from __future__ import annotations

from ..case import Case
from ..formulas import fp4_bytes, row_bytes
from ..fp4_rows import Fp4Rows
from ..rows import DTYPE


class Fp4QuantizeFourOverSix(Fp4Rows):
    op = "fp4_quantize_four_over_six"
    peers = ("inductor",)
    tolerance = 0.0  # bit-exact, because squared errors are added in a fixed order
    weighted = False

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (input) and writes (packed data and scales)."""
        m, h = case["M"], case["H"]
        return row_bytes(m, h, DTYPE.itemsize) + fp4_bytes(m, h)


BENCHMARK = Fp4QuantizeFourOverSix()
