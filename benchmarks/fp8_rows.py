"""Base class of the benchmarks of row-wise ops that write FP8. All sizes are measured with one scale per token, and
some sizes also with block scales or with one scale per tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from . import targets
from .case import Case, Mark, Row, Tensors
from .rows import DECODE_WIDTH, INDUCTOR_DECODE, INDUCTOR_LARGE, LARGE, RowBenchmark

TOKEN = {"granularity": "token"}
BLOCK128_ROW = {"granularity": "block128", "scale_layout": "row"}
BLOCK128_COLUMN = {"granularity": "block128", "scale_layout": "column"}
TENSOR = {"granularity": "tensor"}
OTHERS = (BLOCK128_ROW, BLOCK128_COLUMN, TENSOR)
"""Choices other than `TOKEN`, measured at H = 7,168 in "quick" and "full"."""
OTHERS_LARGE = math.ceil(LARGE / DECODE_WIDTH)
"""M of the large case of `OTHERS`."""
OTHERS_ROWS = {"marks": (), "quick": (32, OTHERS_LARGE), "full": (*(2**k for k in range(17)), OTHERS_LARGE)}
GIVEN_SCALE = 0.0625
"""Static scale of a tensor. The values reach 10 or 20, so almost no element saturates."""


class Fp8Rows(RowBenchmark):
    """Benchmark of an op that writes FP8 codes and float32 scales. The choices of a case select the granularity and the
    layout of the scales."""

    settings: ClassVar = {"dtype": "bfloat16", "format": "FP8 (e4m3)", "scales": "float32"}
    choices: ClassVar = TOKEN
    least_over_inductor: ClassVar = {
        (32768, 2048): targets.FP8_OVER_INDUCTOR,
        INDUCTOR_LARGE: targets.FP8_OVER_INDUCTOR,
        (1, DECODE_WIDTH): targets.FP8_DECODE_OVER_INDUCTOR,
        INDUCTOR_DECODE: targets.FP8_DECODE_OVER_INDUCTOR,
    }

    def cases(self, sizes: str) -> list[Case]:
        return super().cases(sizes) + [
            self.case(m, DECODE_WIDTH, "static" if (m, choices) == (OTHERS_LARGE, BLOCK128_ROW) else "", choices)
            for choices in OTHERS
            for m in sorted(OTHERS_ROWS[sizes], reverse=True)
        ]

    def make_inputs(self, case: Case, device: torch.device) -> Tensors:
        given = {"given": torch.full((1,), GIVEN_SCALE, device=device)} if case.choices == TENSOR else {}
        return super().make_inputs(case, device) | given

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        marks = super().marks(rows)
        for choices in OTHERS:
            some = [row for row in rows if row["choices"] == choices]
            prefix = f"{' '.join(choices.values())}, "
            marks.append(self.copy_mark(some, DECODE_WIDTH, prefix))
            if choices == BLOCK128_ROW:
                size = (OTHERS_LARGE, DECODE_WIDTH)
                marks.append(self.inductor_mark(some, size, targets.FP8_OVER_INDUCTOR, prefix))
        return marks
