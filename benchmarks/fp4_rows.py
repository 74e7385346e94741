"""Base class of the benchmarks of row-wise ops that write NVFP4 with scales in the 128x4 layout."""

from __future__ import annotations

from typing import ClassVar

from .rows import RowBenchmark


class Fp4Rows(RowBenchmark):
    """Benchmark of a row-wise op that writes NVFP4 codes, and scales in the 128x4 layout."""

    settings: ClassVar = {"dtype": "bfloat16", "format": "NVFP4", "scale layout": "128x4", "global scale": "none"}
