"""mm_fp4: GEMM of NVFP4 activations and an NVFP4 weight."""

from __future__ import annotations

from collections.abc import Sequence

from .. import targets
from ..case import Mark, Row, at_most
from ..fp4_gemms import LLAMA_8B, FP4Activations


class MmFp4(FP4Activations):
    op = "mm_fp4"

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        ours = {tuple(row["sizes"].values()): row["variants"]["ours"] for row in rows}
        found = super().marks(rows)
        for n, k in ((4096, 4096), *LLAMA_8B):
            row = ours.get((1, n, k))
            above = None if row is None or row["of_read"] is None else row["us"] * (1 - row["of_read"])
            name = f"M = 1, {n:,} × {k:,}: above the time of its bytes"
            found.append(at_most(name, above, targets.FP4_ABOVE_FLOOR_US, " µs"))
        for (m, n, k), most in targets.FP4_FEW_ROWS_US.items():
            us = ours[m, n, k]["us"] if (m, n, k) in ours else None
            found.append(at_most(f"M = {m}, {n:,} × {k:,}: time", us, most, " µs"))
        return found


BENCHMARK = MmFp4()
