"""fp8_quantize_per_tensor: FP8 quantisation with one scale that is computed from the tensor."""

from __future__ import annotations

from typing import ClassVar

from ..case import Case
from ..formulas import row_bytes
from ..rows import DTYPE, RowBenchmark


class Fp8QuantizePerTensor(RowBenchmark):
    op = "fp8_quantize_per_tensor"
    peers = ("inductor",)
    settings: ClassVar = {"dtype": "bfloat16", "format": "FP8", "granularity": "tensor, dynamic"}
    tolerance = 0.0  # bit-exact, because the only reduction is a maximum
    weighted = False

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (input, once) and writes (data and scale). The second kernel reads the
        input again, from L2 if it fits."""
        m, h = case["M"], case["H"]
        return row_bytes(m, h, DTYPE.itemsize) + m * h + 4


BENCHMARK = Fp8QuantizePerTensor()
