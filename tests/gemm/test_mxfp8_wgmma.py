"""The backend ``wgmma`` of MXFP8 GEMMs, and of FP8 GEMMs with block scales of each weight row."""

import dataclasses

import pytest
import torch
from samples import grouped_mm_fp8, mm_fp8_block
from samples._epilogue import exact_epilogue
from samples._fp8_gemm import with_row_scales
from support.gemm_problems import CPU as NO_GPU
from support.gemm_problems import FP32, HOPPER, backend_for, mx_problem
from support.tactics import check_every_tactic

from torch_cute_ops.formats import SCALE_LAYOUTS
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.gemm.select import choose, target_of
from torch_cute_ops.kernels.common.fp8.layouts import MANY, ExpertLayout
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

BACKEND = backend_for("wgmma", mx_problem())


def test_supported_gpus() -> None:
    """Check that the backend supports Hopper only."""
    problem = mx_problem(4096, 7168)
    for arch in ARCHS.values():
        (target, *_) = usual_targets(arch)
        assert (BACKEND.reason_unsupported(problem, target) is None) == arch.has_wgmma
    assert "needs a CUDA device" in BACKEND.reason_unsupported(problem, NO_GPU)


@pytest.mark.parametrize("rows", [ExpertLayout(), ExpertLayout(True, True), ExpertLayout(False, True)], ids=str)
def test_kernels_of_tactics(rows: ExpertLayout) -> None:
    """Check the kernels of each tactic: the GEMM, and kernels that fold rows with linear and with 128x4 scales. If the
    weight is folded before the GEMM, its scales become the epilogue's alpha. This is not offered in the masked layout,
    in which the experts' numbers of rows are unknown."""
    problem = mx_problem(4096, 7168, rows=rows, experts=1 if rows.is_plain else 8)
    tactics = {tactic for m in (1, 64, 4096) for tactic in BACKEND.tactics(problem, m, HOPPER)}
    assert {tactic.tile_m for tactic in tactics if tactic.folds_first} == (set() if rows.is_masked else {MANY})
    for tactic in tactics:
        gemm, *folding = (kernel.config for kernel in BACKEND.kernels(problem, tactic, HOPPER.arch))
        assert gemm.reason_unsupported(HOPPER.arch) is None and gemm.rows == rows
        assert (gemm.tile_m, gemm.tile_n, gemm.split_k) == tactic[:3]
        granularities = [(config.layout.name, config.by_row) for config in folding]
        expected = [("linear", False), ("128x4", False)]
        if tactic.folds_first:
            assert gemm.epilogue.alpha == ("column" if rows.is_plain else "expert_column")
            expected += [("linear", True), ("128x4", True)]
        assert granularities == expected


def test_choices() -> None:
    """Check that the weight is folded before GEMMs with many rows only, and that estimates exceed the time of reading
    the operands and of multiplying."""
    problem = mx_problem(4096, 7168)
    chosen = {m: choose(problem, m, HOPPER) for m in (1, 64, 256, 1024, 4096)}
    assert [one.tactic.folds_first for one in chosen.values()] == [False, False, False, True, True]
    for m, one in chosen.items():
        least = max((4096 + m) * 7168 / 4.8e12, 2 * m * 4096 * 7168 / 1979e12)
        assert least < one.backend.estimate(problem, m, one.tactic, HOPPER) < 5 * least


def test_bytes_of_row_scales() -> None:
    """Check that a problem counts the scales of all weight rows, and which backends multiply with them."""
    problem = mx_problem(4096, 7168)
    blocks = dataclasses.replace(problem.b, format=mm_fp8_block_operand().format)
    plain = dataclasses.replace(problem, a=mm_fp8_block_operand(), b=blocks)
    by_row = dataclasses.replace(plain, b=dataclasses.replace(blocks, scales_by_row=True))
    assert by_row.bytes_moved(16) - plain.bytes_moved(16) == 4 * 56 * (4096 - 32)
    for arch in ("sm_90a", "sm_100a", "sm_120a"):
        (target, *_) = usual_targets(ARCHS[arch])
        few, many = (choose(by_row, m, target) for m in (1, 4096))
        assert few.backend.name == many.backend.name == ("wgmma" if arch == "sm_90a" else "mma_sync")
        assert few.tactic.tile_m < many.tactic.tile_m
        assert many.backend.estimate(by_row, 4096, many.tactic, target) < 1
    many = choose(plain, 4096, HOPPER)
    assert many.backend.estimate(by_row, 4096, many.tactic, HOPPER) > many.backend.estimate(
        plain, 4096, many.tactic, HOPPER
    )


def mm_fp8_block_operand():
    """Return the storage of activations with block scales of 128 elements."""
    op = OPS["mm_fp8_block"]
    one = mm_fp8_block.sample("", 1, 8, 128, torch.device("cpu"))
    return op.path.operands(op.bind(*one.args))[0]


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mma_sync", "wgmma"])
@pytest.mark.parametrize(("m", "k"), [(1, 64), (9, 448), (60, 2880), (300, 512)])
@pytest.mark.parametrize("epilogue", ["none", "both"])
def test_every_tactic(name: str, m: int, k: int, epilogue: str) -> None:
    """Use inputs whose sums are exact, and check that every tactic overwrites the poisoned output with exactly these
    sums: for MXFP8 with scales in each layout, and for FP8 with scales of each weight row."""
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    given = {"out_dtype": FP32, **(exact_epilogue(264, target.device) if epilogue == "both" else {})}
    for layout, weight_layout in zip(SCALE_LAYOUTS, reversed(SCALE_LAYOUTS), strict=True):
        layouts = {"layout": layout, "weight_layout": weight_layout}
        one = mm_fp8_block.mx_sample("", m, 264, k, target.device, exact=True, **layouts)
        check_every_tactic(OPS["mm_fp8_block"], name, one, given, target)
    one = with_row_scales(mm_fp8_block.sample("", m, 264, k, target.device, exact=True), exact=True)
    check_every_tactic(OPS["mm_fp8_block"], name, one, given, target)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mma_sync", "wgmma"])
@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("scales", ["mxfp8", "rows"])
@pytest.mark.parametrize("epilogue", ["none", "both"])
def test_every_tactic_of_experts(name: str, layout: str, scales: str, epilogue: str) -> None:
    """Check every tactic with experts, as ``test_every_tactic`` does."""
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    if layout == "masked":
        one = grouped_mm_fp8.masked("", [3, 0, 130], 132, 264, 448, target.device, exact=True)
    else:
        one = grouped_mm_fp8.contiguous("", [130, 0, 7, 65], 264, 448, target.device, exact=True)
    one = grouped_mm_fp8.with_mx_scales(one, exact=True) if scales == "mxfp8" else with_row_scales(one, exact=True)
    experts = len(one.args[1])
    given = {"out_dtype": FP32, **(exact_epilogue(264, target.device, experts) if epilogue == "both" else {})}
    check_every_tactic(OPS["grouped_mm_fp8"], name, one, given, target)
