"""FP4 GEMMs whose kernel gates its activations, executed by the PTX emulator: what is particular to the gate.
``test_fp4_gemm_emulated`` has their sums."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from ptx import EmulationError, compile_ptx, run_kernel
from support.emulated import CPU, KERNEL_WAIT, PASSED, WAIT, changed, check_in_orders, is_static, poisoned
from support.epilogues import operands
from support.kernel_grid import BF16, FP16, FP32, WgmmaCase
from test_fp4_gemm_emulated import STATIC, WGMMAS, Wgmma, multiply_by_warpgroups

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.kernels import fp4_wgmma, row_quant
from torch_cute_ops.kernels.common.epilogue import Epilogue
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.testing.samples._fp4_gemm import random_matrix

GATED = [one for one in WGMMAS if one.values[0].case.gated]
READ_AHEAD = [one for one in STATIC if one.values[0].case.gated]


@pytest.mark.parametrize("one", READ_AHEAD)
def test_gates_wait_for_the_kernel_before(one: Wgmma) -> None:
    """The warps beside the producer, which gate activations, and the consumers, which gate the first."""
    one = is_static(one)
    kernel = one.case.kernel
    waits = range(len(re.findall(KERNEL_WAIT, compile_ptx(kernel, ARCHS[one.case.arch]).ptx)))
    assert len(waits) == 2
    for number in waits:
        with pytest.raises((EmulationError, AssertionError)):
            got, want = multiply_by_warpgroups(one, changed(KERNEL_WAIT, number), late=("a",))
            assert torch.equal(got, want)


def gated(one: Wgmma, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What the kernel of ``silu_mul`` makes of rows; and the results of the GEMM of that, and of the one that gates,
    with and without an overlap of launches."""
    (m, n, k), case = one.sizes, one.case
    b, scale = random_matrix(n, k, case.format, case.layout, CPU)
    alpha, bias = operands(case.epilogue, n)
    arch, behind = ARCHS[case.arch], poisoned(m, k, dtype=rows.dtype)
    gate = row_quant.RowQuantKernel(row_quant.plan(row_quant.Problem.of_gated_rows(rows.dtype, k), arch, pdl=True))
    run_kernel(gate, arch, *row_quant.Arguments(rows, *[None] * 6, behind, None, None, 0.0, None, None, None, 132))
    results = []
    for a, config in (
        (behind, replace(case, gated=False).kernel.config),
        (rows, case.kernel.config),
        (rows, replace(case.kernel.config, pdl=False)),
    ):
        out = poisoned(m, n, dtype=case.epilogue.out_dtype)
        size = -(-m // case.tokens) * config.workspace_bytes(k, one.workers, shares=one.shares)
        workspace = None if config.arranges else poisoned(size, dtype=torch.uint8)
        shared = workspace, None, one.workers, int(one.shares)
        given = fp4_wgmma.Arguments(a, None, b.t(), scale.view(case.format.scale_dtype), alpha, bias, out, *shared)
        run_kernel(fp4_wgmma.FP4WgmmaKernel(config), arch, *given, seed=one.seed, strict=True)
        results.append(out)
    return behind, results


@pytest.mark.parametrize("one", GATED)
def test_a_gate_is_that_of_silu_mul(one: Wgmma) -> None:
    """Results are to the bit those of its kernel, and of this one without the gate."""
    (m, n, k), case = one.sizes, one.case
    torch.manual_seed(n)
    _, results = gated(one, (torch.randn(m, 2 * k) * 4).to(case.a_dtype or case.dtype))
    assert results[0].isfinite().all() and results[0].any()
    assert torch.equal(results[1], results[0]) and torch.equal(results[2], results[0])


@pytest.mark.parametrize("value", ["overflow", "largest", "gate of -inf", "gate of NaN"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_a_gate_of_special_values(tokens: int, dtype: torch.dtype, value: str) -> None:
    """Of one row, where products pass the largest number of the dtype, or nearly; and where silu is NaN: as silu_mul
    has it, in the last block of k, behind which chunks have nothing."""
    one = Wgmma(
        WgmmaCase(dtype, NVFP4, "128x4", None, tokens, Epilogue(FP32), 1, gated=True), (1, 136, 288), 0, False, 0
    )
    (_, _, k), most = one.sizes, torch.finfo(dtype).max
    torch.manual_seed(k)
    rows = torch.randn(1, 2 * k).to(dtype)
    special = {"overflow": (most, 2.0), "largest": (most / 4, 4.0), "gate of -inf": (-torch.inf, 1.0)}
    rows[0, k - 2], rows[0, -2] = (torch.tensor(each) for each in special.get(value, (torch.nan, 1.0)))
    behind, results = gated(one, rows)
    want = {"overflow": torch.inf, "largest": most}.get(value, torch.nan)
    torch.testing.assert_close(behind[0, k - 2].item(), want, rtol=0, atol=0, equal_nan=True)
    assert results[0].isfinite().any() == (value == "largest")
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0, equal_nan=True)


# A CTA has more chunks than stages. See ``test_fp4_gemm_emulated`` for its waits.
ROW = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", None, 1, Epilogue(FP32), 2, gated=True), (1, 136, 7168), 0, False, None)
ROWS = Wgmma(WgmmaCase(FP16, NVFP4, "128x4", None, 8, Epilogue(FP32), 2, gated=True), (8, 136, 3072), 0, False, None)


@pytest.mark.parametrize("one", [ROW, ROWS], ids=["row", "rows"])
@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(changed(WAIT, -4, PASSED), id="stage free for activations"),
        pytest.param(changed(r"bar\.sync\s+1", 0), id="first activations in order"),
        pytest.param(changed(r"bar\.warp\.sync", 0), id="activations in order"),
        pytest.param(changed(WAIT, -2, PASSED), id="activations there"),
    ],
)
def test_what_orders_gated_activations_is_needed(one: Wgmma, edit: Any) -> None:
    """Without it the emulator finds a race, or the sums are wrong; in some order, where others may come out right."""
    with pytest.raises((EmulationError, AssertionError)):
        check_in_orders(multiply_by_warpgroups, one, 6, edit)


@pytest.mark.parametrize("one", [ROW, ROWS], ids=["row", "rows"])
def test_what_orders_gated_activations_is_enough(one: Wgmma) -> None:
    check_in_orders(multiply_by_warpgroups, one, 2)
