"""Row-wise ops whose output is bfloat16, as GEMMs with 16-bit activations take it."""

from __future__ import annotations

from typing import ClassVar

from .rows import RowBenchmark


class RoundedRows(RowBenchmark):
    """Values rounded to the dtype of the input."""

    settings: ClassVar = {"dtype": "bfloat16"}
