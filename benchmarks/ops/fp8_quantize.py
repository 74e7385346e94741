"""fp8_quantize: FP8 quantisation alone. No peer quantises without a norm, so it is compared with Inductor alone."""

from __future__ import annotations

from ..case import Case
from ..formulas import fp8_bytes, row_bytes
from ..fp8_rows import Fp8Rows
from ..rows import DTYPE


class Fp8Quantize(Fp8Rows):
    op = "fp8_quantize"
    peers = ("inductor",)
    tolerance = 0.0  # no reduction whose order matters: bit-exact
    weighted = False

    def bytes_moved(self, case: Case) -> int:
        """Input read, data and scales written; bytes."""
        m, h = case["M"], case["H"]
        return row_bytes(m, h, DTYPE.itemsize) + fp8_bytes(m, h, case.choices["granularity"])


BENCHMARK = Fp8Quantize()
