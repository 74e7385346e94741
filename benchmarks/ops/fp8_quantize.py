"""fp8_quantize: FP8 quantisation alone. Inductor is the only peer that quantises without a norm."""

from __future__ import annotations

from ..case import Case
from ..formulas import fp8_bytes, row_bytes
from ..fp8_rows import Fp8Rows
from ..rows import DTYPE


class Fp8Quantize(Fp8Rows):
    op = "fp8_quantize"
    peers = ("inductor",)
    tolerance = 0.0  # bit-exact, because the only reduction is a maximum
    weighted = False

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (input) and writes (data and scales)."""
        m, h = case["M"], case["H"]
        return row_bytes(m, h, DTYPE.itemsize) + fp8_bytes(m, h, case.choices["granularity"])


BENCHMARK = Fp8Quantize()
