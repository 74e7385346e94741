"""Row-wise ops whose output is FP8: every size with a scale per token, some with the other granularities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from .case import Case, Mark, Row, Tensors
from .rows import DECODE_WIDTH, INDUCTOR_DECODE, INDUCTOR_LARGE, LARGE, POISON, RowBenchmark

TOKEN = {"granularity": "token"}
BLOCK128_ROW = {"granularity": "block128", "scale_layout": "row"}
BLOCK128_COLUMN = {"granularity": "block128", "scale_layout": "column"}
TENSOR = {"granularity": "tensor"}
OTHERS = (BLOCK128_ROW, BLOCK128_COLUMN, TENSOR)
"""The choices beside `TOKEN`: measured at H = 7,168, in "quick" and "full"."""
OTHERS_LARGE = math.ceil(LARGE / DECODE_WIDTH)
"""M of their large case."""
OTHERS_ROWS = {"marks": (), "quick": (32, OTHERS_LARGE), "full": (*(2**k for k in range(17)), OTHERS_LARGE)}
GIVEN_SCALE = 0.0625
"""The scale of a whole tensor: what is quantised reaches 10 or 20, so that nearly nothing saturates."""


class Fp8Rows(RowBenchmark):
    """Codes, and float32 scales as the case's choices say."""

    settings: ClassVar = {"dtype": "bfloat16", "format": "FP8 (e4m3)", "scales": "float32"}
    choices: ClassVar = TOKEN
    inductor_goals: ClassVar = {(32768, 2048): 2.0, INDUCTOR_LARGE: 2.0, (1, DECODE_WIDTH): 1.0, INDUCTOR_DECODE: 1.0}
    block128_goal: float = 2.0
    """How many times faster than Inductor with a scale per 128 elements of a row, at the large size of the others."""

    def cases(self, sizes: str) -> list[Case]:
        return super().cases(sizes) + [
            self.case(m, DECODE_WIDTH, "static" if (m, choices) == (OTHERS_LARGE, BLOCK128_ROW) else "", choices)
            for choices in OTHERS
            for m in sorted(OTHERS_ROWS[sizes], reverse=True)
        ]

    def make_outputs(self, case: Case, device: torch.device) -> Tensors:
        m, width, choices = case["M"], case[self.width], case.choices
        y = torch.full((m, width), POISON, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        scale = torch.full(scale_shape(m, width, choices), float("nan"), device=device)
        given = {"given": torch.full((1,), GIVEN_SCALE, device=device)} if choices == TENSOR else {}
        return {**given, "y": y, "scale": scale}

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        marks = super().marks(rows)
        for choices in OTHERS:
            some = [row for row in rows if row["choices"] == choices]
            facts = f"{' '.join(choices.values())}, "
            marks.append(self.copy_mark(some, DECODE_WIDTH, facts))
            if choices == BLOCK128_ROW:
                marks.append(self.inductor_mark(some, (OTHERS_LARGE, DECODE_WIDTH), self.block128_goal, facts))
        return marks


def scale_shape(m: int, width: int, choices: Mapping[str, str]) -> tuple[int, ...]:
    """Shape of the scales of (m, width) values."""
    if choices == TENSOR:
        return (1,)
    if choices == TOKEN:
        return m, 1
    return (width // 128, m) if choices == BLOCK128_COLUMN else (m, width // 128)
