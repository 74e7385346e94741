"""fp4_quantize: NVFP4 quantisation alone. No peer quantises without a norm here, so only Inductor stands beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import compositions
from ..case import Case, Tensors
from ..formulas import fp4_bytes, row_bytes
from ..rows import DTYPE, RowBenchmark


class Fp4Quantize(RowBenchmark):
    op = "fp4_quantize"
    peers = ("inductor",)
    tolerance = 0.0  # no reduction over the row: bit-exact
    weighted = False

    def bytes_moved(self, case: Case) -> int:
        """Input read, packed data and scales written; bytes."""
        m, h = case["M"], case["H"]
        return row_bytes(m, h, DTYPE.itemsize) + fp4_bytes(m, h)

    def run(self, tensors: Tensors) -> None:
        torch.ops.cute.fp4_quantize.out(
            tensors["input"], None, 16, None, "128x4", y=tensors["y"], scale=tensors["scale"]
        )

    def composition(self) -> Callable[..., Any]:
        return compositions.fp4_quantize


BENCHMARK = Fp4Quantize()
