"""Base class of the benchmarks of row-wise ops that write NVFP4 with a scale per row, compared with the ops without
row scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

import torch_cute_ops

from . import targets
from .case import Case, Mark, Row, Tensors, Variant, at_most
from .formulas import fp4_bytes
from .fp4_rows import Fp4Rows
from .rows import ratio


class Fp4TokenRows(Fp4Rows):
    """Benchmark of an op that writes NVFP4 codes, 128x4 scales and a scale per row."""

    peers = ("plain", "inductor")
    settings: ClassVar = {"dtype": "bfloat16", "format": "NVFP4", "scale layout": "128x4", "global scale": "per row"}

    @property
    def plain(self) -> str:
        """Name of the op without row scales."""
        return self.op.removesuffix("_per_token")

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        return self._plain(case, sets) if name == "plain" else super().peer(name, case, sets)

    def _plain(self, case: Case, sets: Sequence[Tensors]) -> Variant:
        function = getattr(torch_cute_ops, self.plain)

        def call(i: int) -> tuple[torch.Tensor, ...]:
            out = sets[i]["y"], sets[i]["scale"]
            self.call(function, case, sets[i], out=out)
            return out

        row_scales = 4 * case["M"]
        return Variant(call, self.bytes_moved(case) - row_scales, "without row scales", checked=False)

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        ratios = [x for x in (ratio(row, "ours", "plain") for row in rows) if x is not None]
        name = f"time over {self.plain}, all sizes"
        return [*super().marks(rows), at_most(name, max(ratios, default=None), targets.PER_TOKEN_OVER_PLAIN, " ×")]


def written_bytes(rows: int, columns: int) -> int:
    """Return the size of codes, block scales and row scales in bytes."""
    return fp4_bytes(rows, columns) + 4 * rows
