"""Kernels compile for every supported architecture, without spilled registers. No GPU is needed.

By default, some of the GEMM kernels are compiled, and a selection of the grid of row kernels that contains every pair
of choices. ``--every-kernel`` compiles all kernels, in half an hour. If a test in the emulator compiles a kernel with
the same role, that test checks its resources, and this file skips it.
"""

import collections
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from support import kernel_grid
from support.kernel_fit import ALLOWED_SPILLS, check_fit, instructions_of
from support.kernel_grid import (
    KernelCase,
    covering_cases,
    every_case,
    experts_cases,
    fp8_fp4_gemm_cases,
    fp8_fp4_mma_cases,
    fp8_fp4_tcgen05_cases,
    fp8_fp4_token_gemm_cases,
    fp8_gemm_cases,
    fp8_tcgen05_cases,
    fp8_token_gemm_cases,
    gated_experts_cases,
    mma_cases,
    moe_cases,
    mxfp8_gemm_cases,
    mxfp8_tcgen05_cases,
    tcgen05_cases,
    tcgen05_experts_cases,
    tcgen05_gated_cases,
    weight_tcgen05_cases,
    wgmma_cases,
)
from support.kernel_grid.rows import WIDTHS
from test_fp4_experts_emulated import EVERY as EXPERTS
from test_fp4_gated_experts_emulated import EVERY as GATED
from test_fp4_gemm_emulated import MMAS, NATIVE_MMAS, ROW_SCALED_MMAS, ROW_SCALED_WGMMAS, WGMMAS
from test_fp4_tcgen05_emulated import COVERING as TCGEN05
from test_fp4_tcgen05_emulated import ROW_SCALED as ROW_SCALED_TCGEN05
from test_fp4_tcgen05_experts_emulated import COVERING as TCGEN05_EXPERTS
from test_fp4_tcgen05_gated_experts_emulated import COVERING as TCGEN05_GATED
from test_fp4_weight_tcgen05_emulated import COVERING as WEIGHT_TCGEN05
from test_fp8_fp4_gemm_emulated import RUNS as FP8_FP4_RUNS
from test_fp8_fp4_mma_emulated import COVERING as FP8_FP4_MMA
from test_fp8_fp4_tcgen05_emulated import COVERING as FP8_FP4_TCGEN05
from test_fp8_fp4_token_gemm_emulated import RUNS as FP8_FP4_TOKEN_RUNS
from test_fp8_gemm_emulated import RUNS as FP8_RUNS
from test_fp8_tcgen05_emulated import COVERING as FP8_TCGEN05
from test_fp8_token_gemm_emulated import RUNS as FP8_TOKEN_RUNS
from test_mxfp8_tcgen05_emulated import COVERING as MXFP8_TCGEN05

from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.testing.resources import Resources, compile_for, parse

ROW_SCALED = (*ROW_SCALED_MMAS, *ROW_SCALED_WGMMAS)
FP4_GEMMS = (one.values[0] for one in (*MMAS, *NATIVE_MMAS, *WGMMAS, *ROW_SCALED))
FP4_TCGEN05 = (*TCGEN05, *ROW_SCALED_TCGEN05, *TCGEN05_EXPERTS, *TCGEN05_GATED, *WEIGHT_TCGEN05)
FP4 = (*EXPERTS, *FP4_TCGEN05, *FP4_GEMMS)
FP8_FP4 = (*FP8_FP4_RUNS, *FP8_FP4_TOKEN_RUNS, *FP8_FP4_MMA, *FP8_FP4_TCGEN05)
FP8 = (*FP8_RUNS, *FP8_TOKEN_RUNS, *FP8_FP4, *FP8_TCGEN05, *MXFP8_TCGEN05)
EMULATED = {one.case.role for one in (*FP4, *GATED, *FP8)}
"""Roles of kernels whose resources the emulator's tests check."""


def other_cases(every):
    gemms = (*mma_cases(every), *wgmma_cases(every), *tcgen05_cases(every), *weight_tcgen05_cases(every))
    experts = (*experts_cases(every), *gated_experts_cases(every), *tcgen05_experts_cases(every))
    gated = tcgen05_gated_cases(every)
    cases = (
        *gemms,
        *experts,
        *gated,
        *moe_cases(),
        *fp8_gemm_cases(every),
        *fp8_token_gemm_cases(every),
        *mxfp8_gemm_cases(every),
        *fp8_tcgen05_cases(every),
        *mxfp8_tcgen05_cases(every),
        *fp8_fp4_tcgen05_cases(every),
        *fp8_fp4_gemm_cases(every),
        *fp8_fp4_mma_cases(every),
        *fp8_fp4_token_gemm_cases(every),
    )
    return cases if every else tuple(case for case in cases if case.role not in EMULATED)


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        every = metafunc.config.getoption("every_kernel")
        cases = (*(every_case() if every else covering_cases()), *other_cases(every))
        metafunc.parametrize("case", [pytest.param(case, id=case.id) for case in cases])


@pytest.fixture(scope="module")
def compiled(request):
    """Yield a function that returns the ``Resources`` and the tensor-core instructions of a selected case.

    Without pytest-xdist, all selected cases are compiled in parallel, in one process per processor. A worker of
    pytest-xdist collects all tests but runs only some, so it compiles each case when its test runs.
    """
    if hasattr(request.config, "workerinput"):
        yield lambda case: kernel_grid.in_process(kernel_grid.build_of, case)
        return
    cases = [item.callspec.params["case"] for item in request.session.items if "compiled" in item.fixturenames]
    workers = min(os.cpu_count() or 1, 16, len(cases))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {case: pool.submit(kernel_grid.in_process, kernel_grid.build_of, case) for case in cases}
        yield lambda case: futures[case].result(timeout=600)
        pool.shutdown(cancel_futures=True)


def test_compiles_without_spills(case: KernelCase, compiled):
    """Check registers, spills and shared memory, and that the machine code uses the intended tensor cores."""
    built = compiled(case)
    assert isinstance(built, tuple), built
    check_fit(case, case.kernel, *built)


def test_covering_cases_cover():
    """Check that every possible pair of choices occurs in some case of the selection. Cases with widths that the grid
    does not list are additional."""

    def pairs(cases):
        return set().union(*(case.pairs for case in cases if case.width in WIDTHS))

    missing = pairs(every_case()) - pairs(covering_cases())
    assert not missing, list(missing)[:5]
    assert {case.id for case in covering_cases()} <= {case.id for case in every_case()}


def test_documented_instructions():
    """Check that the table of docs/architecture.md names exactly the tensor-core instructions that the tests of all
    cases require."""
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("### Tensor-core instructions")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    documented = {
        (package, column): set(re.findall(r"`([\w.]+)`", cell))
        for first, *cells in lines
        for package in re.findall(r"`(\w+)`", first)
        for column, cell in enumerate(cells)
        if cell.strip()
    }
    required = collections.defaultdict(set)
    for case in (*other_cases(every=True), *(one.case for one in (*FP4, *GATED, *FP8))):
        column = 0 if ARCHS[case.arch].has_wgmma else 1 if ARCHS[case.arch].has_tcgen05 else 2
        kernel = case.kernel
        if found := instructions_of(kernel, case.arch):
            required[type(kernel).__module__.split(".")[-2], column] |= found
    assert documented == required


def test_allowed_spills_are_cases():
    emulated = (one.case for one in (*FP4, *GATED, *FP8))
    cases = (*every_case(), *other_cases(every=True), *other_cases(every=False), *emulated)
    assert set(ALLOWED_SPILLS) <= {case.id for case in cases}


def test_ids_are_unique():
    ids = [case.id for case in (*every_case(), *other_cases(every=True))]
    assert len(ids) == len(set(ids))


def test_remarks_are_understood():
    """Check that ptxas's output about a spill is parsed."""
    text = (
        "remark[ptxas info]: ptxas output: ptxas info    : 0 bytes gmem\n"
        "ptxas         .     24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size, 1048 bytes smem\n"
    )
    want = Resources(registers=168, stack_bytes=24, spill_bytes=36, smem_bytes=1048)
    assert parse(text) == [want] and parse(text + text) == [want, want]
    assert parse(text.replace(", 1048 bytes smem", ""))[0].smem_bytes == 0
    assert parse(text.replace(" ", "\n    ")) == parse(text)
    for bad in ("", text.replace("Used", "used"), text + text.replace("Used", "used")):
        with pytest.raises(RuntimeError, match="expected ptxas's remarks on kernels"):
            parse(bad)
    slow = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to"
    with pytest.raises(RuntimeError, match="does not overlap"):
        parse(text + slow)


@pytest.mark.filterwarnings("ignore:This static loop")
def test_a_spill_is_found():
    """Check that a spill is found in a kernel that needs more values at once than a thread has registers."""
    from support.spilling_kernel import SpillingKernel

    (resources,) = compile_for(SpillingKernel(), ARCHS["sm_90a"]).resources
    assert resources.spill_bytes >= 4 * (SpillingKernel.config - 255)
    assert resources.stack_bytes > 0


OPERATIONS = {"fp8_wgmma-plain-128x128x1-float16": 12_000, "fp8_fp4_recode-nvfp4-128x4-plain-128x128-float32": 20_000}
"""Limits for the operations in the DSL's representation of kernels with many accumulators, keyed by the beginning of
the case's id."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_large_kernels_consist_of_few_operations(name, monkeypatch):
    """Check the number of operations, because the time to compile a kernel grows with it."""
    from cutlass.base_dsl.compiler import Compiler

    class Traced(BaseException):  # the DSL wraps an Exception in its own
        pass

    def compile(self, module, *args, **kwargs):
        raise Traced(str(module).count("\n"))

    monkeypatch.setattr(Compiler, "compile", compile)
    case = next(run.case for run in FP8 if run.case.id.startswith(name))
    with pytest.raises(Traced) as traced:
        compile_for(case.kernel, ARCHS[case.arch])
    assert traced.value.args[0] < OPERATIONS[name]
