"""The MXFP8 kernel of ``fp8_mma``, executed in the PTX emulator and compared with the reference."""

from typing import Any, NamedTuple

import pytest
import torch
from samples.mm_fp8_block import mx_sample
from support.emulated import BLACKWELL, CONSUMER, CPU, HOPPER
from support.epilogues import finished, operands
from support.kernel_grid import BF16, FP16, FP32, MXFP8GemmCase

from ptx_emulator.adapter import run_kernel
from torch_cute_ops.formats.fp4 import UE8M0_NAN
from torch_cute_ops.gemm.backends.fp8_mma_sync import mx_words
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.fp8_mma import Arguments
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

mm_fp8_block = OPS["mm_fp8_block"].reference
POISON = 777.0


class Run(NamedTuple):
    """Launch of the kernel: case, M, N, K, largest number of CTAs, and seed of the order of warps."""

    case: MXFP8GemmCase
    m: int
    n: int
    k: int
    max_ctas: int
    seed: int | None = 0


def case(tile_m: int, arch: str, *epilogue: Any) -> MXFP8GemmCase:
    return MXFP8GemmCase(tile_m, Epilogue(*epilogue), arch)


RUNS = {
    "one-row": Run(case(16, HOPPER, BF16), 1, 8, 64, 2),
    "half-a-k-tile": Run(case(16, CONSUMER, FP32), 17, 136, 192, 2, 1),
    "many-k-tiles": Run(case(16, HOPPER, FP16, "one"), 5, 24, 896, 1, None),
    "large-tile": Run(case(32, BLACKWELL, FP32, "column", FP32), 70, 264, 384, 3),
    "large-tile-bf16": Run(case(32, CONSUMER, BF16, "column", BF16), 130, 128, 256, 1, 2),
    "persistent": Run(case(32, HOPPER, FP32), 129, 136, 128, 1, 3),
}


def execute(run: Run, edit: Any = None, bad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; return its result and the expected result. All sums are exact. If ``bad``, some scales are
    NaN, 2^-127 or large."""
    torch.manual_seed(run.k)
    a, b, a_scale, b_scale = mx_sample("", run.m, run.n, run.k, CPU, exact=True, layout="linear").args
    if bad:
        a_scale[0, 0], a_scale[-1, -1] = UE8M0_NAN, 0
        b_scale[1, 1], b_scale[-1, 0] = UE8M0_NAN, 180
    alpha, bias = operands(run.case.epilogue, run.n)
    sums = mm_fp8_block(a, b, a_scale, b_scale, alpha=None, bias=None, out_dtype=FP32)
    want = finished(sums, run.case.epilogue, alpha, bias)
    out = torch.full_like(want, POISON)
    scales = mx_words(a_scale, column_major=True), mx_words(b_scale)
    given = Arguments(a, b, *scales, None, None, alpha, bias, out, None, run.max_ctas)
    run_kernel(run.case.kernel, ARCHS[run.case.arch], *given, seed=run.seed, strict=True, scoped=True, edit=edit)
    return out, want


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_results(run: Run) -> None:
    """Check results bit for bit, for whole numbers and scales that are powers of two."""
    got, want = execute(run)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["half-a-k-tile", "large-tile"])
def test_special_scales(name: str) -> None:
    """Check that a NaN scale makes its row or column NaN, and check the smallest and a large scale."""
    got, want = execute(RUNS[name], bad=True)
    assert want.isnan().any() and not want.isnan().all()
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.0, equal_nan=True)


def test_each_block_takes_its_own_scale() -> None:
    """Check one-hot rows: element k of row k of ``a`` is 1, so row k of the result is row k of the weight, times the
    scales of the block of k."""
    k, n, run = 128, 8, RUNS["one-row"]
    a = torch.eye(k).to(torch.float8_e4m3fn)
    weight = torch.randint(-3, 4, (n, k)).float()
    a_scale, b_scale = (torch.randint(120, 134, (rows, k // 32), dtype=torch.uint8) for rows in (k, n))
    want = torch.empty(k, n)
    for row in range(k):
        exponent = a_scale[row, row // 32].int() + b_scale[:, row // 32].int() - 254
        want[row] = weight[:, row] * 2.0**exponent
    out = torch.full((k, n), POISON)
    scales = mx_words(a_scale, column_major=True), mx_words(b_scale)
    given = Arguments(a, weight.to(a.dtype).t(), *scales, None, None, None, None, out, None, 2)
    run_kernel(case(32, HOPPER, FP32).kernel, ARCHS[HOPPER], *given, seed=run.seed, strict=True, scoped=True)
    assert torch.equal(out, want)
