"""rmsnorm_fp4quant: RMSNorm and NVFP4 quantisation in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import compositions
from ..case import Case, Tensors
from ..formulas import fp4_bytes, row_bytes
from ..rows import DTYPE, EPS, RowBenchmark


class RmsnormFp4quant(RowBenchmark):
    op = "rmsnorm_fp4quant"

    def bytes_moved(self, case: Case) -> int:
        """Input and weight read, packed data and scales written; bytes."""
        m, h = case["M"], case["H"]
        return row_bytes(m, h, DTYPE.itemsize) + row_bytes(1, h, DTYPE.itemsize) + fp4_bytes(m, h)

    def run(self, tensors: Tensors) -> None:
        torch.ops.cute.rmsnorm_fp4quant.out(
            tensors["input"], tensors["weight"], None, EPS, 16, None, "128x4", y=tensors["y"], scale=tensors["scale"]
        )

    def composition(self) -> Callable[..., Any]:
        return compositions.rmsnorm_fp4quant


BENCHMARK = RmsnormFp4quant()
