"""fp8_quantize_block128x128: FP8 quantisation of a matrix with a scale per 128 × 128 elements."""

from __future__ import annotations

from typing import ClassVar

from ..case import Case
from ..formulas import row_bytes
from ..rows import DTYPE, RowBenchmark


class Fp8QuantizeBlock128x128(RowBenchmark):
    op = "fp8_quantize_block128x128"
    peers = ("inductor",)
    settings: ClassVar = {"dtype": "bfloat16", "format": "FP8", "granularity": "128 × 128"}
    tolerance = 0.0  # bit-exact, because the only reduction is a maximum
    weighted = False

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (input) and writes (data and scales)."""
        m, h = case["M"], case["H"]
        return row_bytes(m, h, DTYPE.itemsize) + m * h + row_bytes(-(-m // 128), -(-h // 128), 4)


BENCHMARK = Fp8QuantizeBlock128x128()
