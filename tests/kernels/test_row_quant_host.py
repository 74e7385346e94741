"""The host function of the row-quantising kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.host_grids import grids, placed

from torch_cute_ops.formats import NVFP4, SCALE_LAYOUTS
from torch_cute_ops.kernels import row_quant
from torch_cute_ops.kernels.row_quant import Problem
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.argspec import TensorArg
from torch_cute_ops.runtime.compiler import KernelSpec

HOPPER = ARCHS["sm_90a"]
APART = 1 << 24


@pytest.mark.parametrize(("layout", "tile"), [("128x4", 128), ("8x4", 8)])
def test_nothing_is_launched_for_another_number_of_scale_rows(layout: str, tile: int) -> None:
    """Tiled scales have as many rows as whole tiles: of all extents of outputs the one that TVM-FFI does not check."""
    problem = Problem(
        source="rows",
        dtype=torch.bfloat16,
        weight_dtype=torch.bfloat16,
        width=512,
        norm_width=512,
        fmt=NVFP4,
        layout=SCALE_LAYOUTS[layout],
    )
    kernel = KernelSpec(row_quant.KERNEL, row_quant.plan(problem, HOPPER, pdl=True)).make()

    def launched(rows: int, scale_rows: int) -> list[tuple[int, int, int]]:
        dims = {"rows": rows, "row_stride": 512, "scale_rows": scale_rows}
        given: list[Any] = []
        for i, spec in enumerate(kernel.arguments()):
            given.append(placed(spec, (i + 1) * APART, dims) if isinstance(spec, TensorArg) else spec and 4)
        return grids(kernel, HOPPER, *given)

    for rows in (1, tile - 1, tile, tile + 1, 3 * tile):
        right = -(-rows // tile) * tile
        assert all(0 not in grid for grid in launched(rows, right))
        for wrong in (right - tile, right - 1, right + 1, right + tile, rows):
            if wrong != right:
                assert 0 in launched(rows, wrong)[0], (rows, wrong)
