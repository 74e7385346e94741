"""Host function of the row-quantising kernel: grids of its launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.host_grids import grids, placed

from torch_cute_ops.formats import NVFP4, SCALE_LAYOUTS
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.kernels import row_quant
from torch_cute_ops.kernels.row_quant import RowQuantSpec
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.argspec import TensorArg
from torch_cute_ops.runtime.compiler import KernelSpec

HOPPER = ARCHS["sm_90a"]
APART = 1 << 40
SMS = 132


def launched(kernel: Any, rows: int, row_tiles: int) -> list[tuple[int, int, int]]:
    """Return the grid of each launch of a call that quantises ``rows`` rows."""
    dims = {"rows": rows, "row_stride": kernel.config.spec.input_width, "tile_rows": row_tiles}
    given: list[Any] = []
    for i, spec in enumerate(kernel.arguments()):
        given.append(placed(spec, (i + 1) * APART, dims) if isinstance(spec, TensorArg) else spec and SMS)
    return grids(kernel, HOPPER, *given)


@pytest.mark.parametrize(("layout", "tile"), [("128x4", 128), ("8x4", 8)])
def test_nothing_is_launched_for_another_number_of_scale_rows(layout: str, tile: int) -> None:
    """Check that nothing is launched if the number of rows of scale tiles is wrong. It is the only extent of an output
    that TVM-FFI does not check."""
    spec = RowQuantSpec(
        source="rows",
        dtype=torch.bfloat16,
        weight_dtype=torch.bfloat16,
        width=512,
        norm_width=512,
        fmt=NVFP4,
        layout=SCALE_LAYOUTS[layout],
    )
    kernel = KernelSpec(row_quant.KERNEL, row_quant.plan(spec, HOPPER, pdl=True)).make()

    for rows in (1, tile - 1, tile, tile + 1, 3 * tile):
        right = -(-rows // tile)
        assert all(0 not in grid for grid in launched(kernel, rows, right))
        for wrong in (right - 1, right + 1, right + tile, right * tile, rows):
            if wrong != right:
                assert 0 in launched(kernel, rows, wrong)[0], (rows, wrong)


@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("gate", [None, "silu"], ids=["rows", "gate"])
def test_few_rows_have_smaller_slices(layout: str, gate: Gate | None) -> None:
    """Check how rows of 14,336 columns are divided: two slices of 7,168, or for up to 128 rows seven slices of 2,048.

    A CTA processes a slice of a single row if enough CTAs can run at the same time. With tiled scales, whose padding
    must be zeroed, each slice gets at least 32 CTAs, unless the GPU has too few SMs for that.
    """
    spec = RowQuantSpec.for_fp4_rows(torch.bfloat16, 14_336, gate, NVFP4, SCALE_LAYOUTS[layout], has_factor=False)
    kernel = KernelSpec(row_quant.KERNEL, row_quant.plan(spec, HOPPER, pdl=True)).make()
    is_tiled = layout == "128x4"
    for rows, slices in ((1, 7), (8, 7), (128, 7), (129, 2), (4096, 2)):
        ctas = min(max(rows, 32) if is_tiled else rows, SMS // slices)
        assert launched(kernel, rows, -(-rows // 128)) == [(ctas * slices, 1, 1)], rows
