"""Base class of the benchmarks of row-wise ops whose output is bfloat16, for GEMMs with 16-bit activations."""

from __future__ import annotations

from typing import ClassVar

from .rows import RowBenchmark


class RoundedRows(RowBenchmark):
    """Benchmark of a row-wise op whose output is rounded to the input's dtype."""

    settings: ClassVar = {"dtype": "bfloat16"}
