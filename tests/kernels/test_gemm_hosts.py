"""Host functions of the GEMM kernels: how many CTAs they launch, and that they launch none where tensors overlap."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.epilogues import epilogues
from support.host_grids import Placed, grids, placed
from support.kernel_grid import (
    BF16,
    FP16,
    FP32,
    ExpertsCase,
    FP8GemmCase,
    MmaCase,
    Tcgen05Case,
    Tcgen05ExpertsCase,
    WgmmaCase,
)

from torch_cute_ops.formats import MXFP4, NVFP4
from torch_cute_ops.kernels.common.epilogue import Epilogue
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.argspec import TensorArg

APART = 1 << 24
"""Bytes between tensors that do not overlap."""
COLUMN = Epilogue(BF16, "column", FP32)
CASES = [
    MmaCase(FP16, NVFP4, "128x4", 8, 1, COLUMN, "sm_90a"),
    WgmmaCase(FP16, NVFP4, "128x4", "8x4", 8, COLUMN, 1),
    WgmmaCase(BF16, NVFP4, "128x4", None, 64, COLUMN),
    WgmmaCase(BF16, MXFP4, "128x4", "128x4", 64, Epilogue(FP32), width=256),
    ExpertsCase(FP16, NVFP4, "128x4", "128x4", 16, 16, FP32),
    Tcgen05Case(NVFP4, "128x4", 8, 1, 1, COLUMN),
    Tcgen05Case(MXFP4, "linear", 256, 2, 1, COLUMN),
    Tcgen05ExpertsCase(MXFP4, "128x4", 64, 2, True, BF16, 256, bias_dtype=FP32),
    FP8GemmCase("fp8_wgmma", "masked", (16, 128, 1), Epilogue(FP32, "expert_column", FP32)),
    FP8GemmCase("fp8_mma", "counted", (16,), Epilogue(BF16, "expert", BF16), "sm_120a"),
]
DIMS = {
    **{"m": 24, "n": 136, "k": 512, "k_bytes": 256, "blocks": 32, "scale_rows": 256},
    **{"a_rows": 128, "b_rows": 256, "a_bytes": 256, "a_scale_rows": 128, "a_blocks": 32, "workspace_bytes": 4096},
    **{"experts": 2, "alpha_stride": 2, "alpha_column_stride": 1},
    **{"rows": 12, "offsets": 3, "rows_of_expert": 6144, "out_of_expert": 1632, "a_scale_pitch": 24},
    **{"b_of_expert": 136 * 512, "b_scale_rows": 2, "b_scale_of_expert": 64},
}
NUMBERS = {"workers": 3, "shares": 1, "max_ctas": 8, "ctas": 4}


def call_of(case: Any) -> Any:
    """Arguments of which none overlaps another."""
    specs = case.kernel.arguments()
    given = {}
    for i, (name, spec) in enumerate(zip(specs._fields, specs, strict=True)):
        is_tensor = isinstance(spec, TensorArg)
        given[name] = placed(spec, (i + 1) * APART, DIMS) if is_tensor else None if spec is None else NUMBERS[name]
    return type(specs)(**given)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_nothing_is_launched_where_the_result_overlaps(case: Any) -> None:
    """By one byte, at either end; tensors that touch do not overlap."""
    kernel, arch, call = case.kernel, ARCHS[case.arch], call_of(case)
    usual = grids(kernel, arch, *call)
    assert all(0 not in grid for grid in usual)
    out = call.out
    for name, other in call._asdict().items():
        if not isinstance(other, Placed) or name == "out":
            continue
        for address, overlaps in (
            (other.end - 1, True),
            (other.end, False),
            (other.address - out.nbytes + 1, True),
            (other.address - out.nbytes, False),
        ):
            launched = grids(kernel, arch, *call._replace(out=out._replace(address=address)))
            assert (0 in launched[0]) is overlaps, (name, address - other.address)
            # The launch of no CTAs fails, and ends the call.
            assert launched == (launched[:1] if overlaps else usual)


@pytest.mark.parametrize(
    "case", [case for case in CASES if call_of(case)._asdict().get("workspace")], ids=lambda case: case.id
)
def test_nothing_is_launched_where_the_workspace_overlaps(case: Any) -> None:
    call = call_of(case)
    for name, other in call._asdict().items():
        if isinstance(other, Placed) and name != "workspace":
            moved = call._replace(workspace=call.workspace._replace(address=other.address))
            assert 0 in grids(case.kernel, ARCHS[case.arch], *moved)[0], name


@pytest.mark.parametrize(
    ("tile", "sms", "ctas"),
    [
        # 300 x 400: tiles of the weight's rows, times those of 300 rows
        ((64, 1, 1), 148, 4 * 5),
        ((64, 1, 1), 7, 7),
        ((64, 1, 4), 7, 4 * 5 * 4),
        ((256, 1, 1), 148, 4 * 2),
        ((256, 2, 1), 148, 2 * 2 * 2),
        ((256, 2, 1), 7, 6),
        ((256, 2, 1), 1, 2),
    ],
)
def test_ctas_by_tcgen05(tile: tuple[int, int, int], sms: int, ctas: int) -> None:
    """At most one for each SM, in whole pairs; but a cluster for each tile where its CTAs split k."""
    case = Tcgen05Case(NVFP4, "128x4", *tile, Epilogue(BF16))
    specs = case.kernel.arguments()
    dims = DIMS | {"n": 400, "m": 300, "a_rows": 384, "b_rows": 512}
    call = type(specs)(
        *(placed(s, i * APART**2, dims) if isinstance(s, TensorArg) else None for i, s in enumerate(specs))
    )
    assert grids(case.kernel, ARCHS[case.arch], *call._replace(ctas=sms)) == [(ctas, 1, 1)]


@pytest.mark.parametrize(
    ("parts", "routed", "sms", "launched"),
    [
        # 300 x 400 in tiles of 128 x 64, of 70 experts
        (1, False, 7, [7]),
        (1, True, 148, [(3, 3), 3 * 7]),
        (5, False, 148, [3 * 7 * 5, 300 * 50 // 256 + 1]),
        (5, True, 0, [(5, 3), 1, 300 * 50 // 256 + 1]),
    ],
)
def test_ctas_by_tcgen05_with_experts(parts: int, routed: bool, sms: int, launched: list[Any]) -> None:
    """At most one for each SM, that share the units; before them one for each 32 experts of a part and tile of tokens,
    and after them as many as add up totals."""
    case = Tcgen05ExpertsCase(NVFP4, "128x4", 64, parts, routed, BF16, 64)
    specs = case.kernel.arguments()
    dims = DIMS | {"n": 400, "m": 300, "a_rows": 384, "b_rows": 512, "experts": 70, "alpha_stride": 70}
    call = type(specs)(
        *(placed(s, i * APART**2, dims) if isinstance(s, TensorArg) else None for i, s in enumerate(specs))
    )
    every = [(*one, 1) if isinstance(one, tuple) else (one, 1, 1) for one in launched]
    assert grids(case.kernel, ARCHS[case.arch], *call._replace(ctas=sms)) == every


@pytest.mark.parametrize("max_ctas", [4, 132])
@pytest.mark.parametrize("layout", ["plain", "offsets", "counted", "masked"])
@pytest.mark.parametrize(
    ("family", "tile", "arch"),
    [("fp8_wgmma", (16, 128, 4), "sm_90a"), ("fp8_wgmma", (128, 64, 1), "sm_90a"), ("fp8_mma", (64,), "sm_120a")],
)
def test_as_many_ctas_as_tiles(family: str, tile: tuple[int, ...], arch: str, layout: str, max_ctas: int) -> None:
    """As many as may run, in whole clusters; or, whatever rows experts have, at least one for each tile."""
    case = FP8GemmCase(family, layout, tile, epilogues((None,))[0], arch)
    kernel = case.kernel
    tokens, columns, splits = (*tile, 128, 1)[:3] if len(tile) == 1 else tile
    for seed in range(20):
        some = random.Random(seed)
        experts = 1 if layout == "plain" else some.randint(1, 20)
        n, room = some.randint(1, 80) * 8, some.randint(1, 300)
        counts = [some.randint(0, room) for _ in range(experts)]
        counts[0] = max(counts[0], 1)
        rows = room if layout == "masked" else sum(counts)
        dims = DIMS | {"n": n, "rows": rows, "experts": experts, "b_scale_rows": -(-n // 128)}
        specs = kernel.arguments()
        call = type(specs)(
            *(placed(s, i * APART**2, dims) if isinstance(s, TensorArg) else None for i, s in enumerate(specs))
        )
        ((ctas, *rest),) = grids(kernel, ARCHS[arch], *call._replace(max_ctas=max_ctas))
        across = -(-n // columns)
        tiles = sum(-(-count // tokens) for count in counts) * across
        assert rest == [1, 1] and ctas % splits == 0 and 0 < ctas <= max_ctas
        assert ctas == max_ctas or ctas // splits >= tiles
        assert layout != "plain" or ctas == min(max_ctas // splits, tiles) * splits
