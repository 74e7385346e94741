"""rmsnorm_fp4quant_with_norm: RMSNorm and NVFP4 quantisation in one pass, which also stores the normalised rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import compositions
from ..case import Case, Tensors
from ..formulas import fp4_bytes, row_bytes
from ..rows import DTYPE, EPS, RowBenchmark


class RmsnormFp4quantWithNorm(RowBenchmark):
    op = "rmsnorm_fp4quant_with_norm"
    has_norm = True

    def bytes_moved(self, case: Case) -> int:
        """Input and weight read; packed data, scales and normalised rows written; bytes."""
        m, h = case["M"], case["H"]
        return 2 * row_bytes(m, h, DTYPE.itemsize) + row_bytes(1, h, DTYPE.itemsize) + fp4_bytes(m, h)

    def run(self, tensors: Tensors) -> None:
        torch.ops.cute.rmsnorm_fp4quant_with_norm.out(
            tensors["input"],
            tensors["weight"],
            None,
            EPS,
            16,
            None,
            "128x4",
            y=tensors["y"],
            scale=tensors["scale"],
            norm=tensors["norm"],
        )

    def composition(self) -> Callable[..., Any]:
        return compositions.rmsnorm_fp4quant_with_norm


BENCHMARK = RmsnormFp4quantWithNorm()
