"""Row-wise ops whose output is NVFP4, with scales in the 128x4 layout."""

from __future__ import annotations

from typing import ClassVar

from .rows import RowBenchmark


class Fp4Rows(RowBenchmark):
    """Benchmark of a row-wise op that writes codes and scales in the default format and layout."""

    settings: ClassVar = {"dtype": "bfloat16", "format": "NVFP4", "scale layout": "128x4", "global scale": "none"}
