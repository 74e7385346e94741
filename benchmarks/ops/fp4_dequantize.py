"""fp4_dequantize: decode NVFP4 to bfloat16. No target is set, because our GEMMs decode FP4 in registers and do not need
this op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from ..case import Case, Mark, Row, Tensors
from ..formulas import fp4_bytes, row_bytes
from ..fp4_gemms import random_nvfp4
from ..fp4_rows import Fp4Rows
from ..rows import DTYPE


class Fp4Dequantize(Fp4Rows):
    op = "fp4_dequantize"
    family = "fp4_dequant"
    settings: ClassVar = {**Fp4Rows.settings, "result": "bfloat16"}
    peers = ("inductor",)
    tolerance = 0.0
    weighted = False

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (packed data and scales) and writes (result)."""
        m, h = case["M"], case["H"]
        return fp4_bytes(m, h) + row_bytes(m, h, DTYPE.itemsize)

    def make_inputs(self, case: Case, device: torch.device) -> Tensors:
        codes, scale = random_nvfp4(case["M"], case["H"], device)
        return {"y": codes, "scale": scale}

    def rows(self, tensors: Tensors) -> list[torch.Tensor]:
        return [tensors["y"], tensors["scale"]]

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        return []


BENCHMARK = Fp4Dequantize()
