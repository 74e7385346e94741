"""fp4_quantize_per_token: NVFP4 quantisation with a scale per row."""

from __future__ import annotations

from ..case import Case
from ..formulas import row_bytes
from ..fp4_token_rows import Fp4TokenRows, written_bytes
from ..rows import DTYPE


class Fp4QuantizePerToken(Fp4TokenRows):
    op = "fp4_quantize_per_token"
    tolerance = 0.0  # bit-exact, because the amax of a row does not depend on the order
    weighted = False

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (input) and writes (packed data, scales and row scales)."""
        m, h = case["M"], case["H"]
        return row_bytes(m, h, DTYPE.itemsize) + written_bytes(m, h)


BENCHMARK = Fp4QuantizePerToken()
