"""Kernels compile for every supported architecture, without spilled registers; no GPU is needed.

A part of the grid is compiled, in which every two choices meet, and half of the GEMM kernels; ``--every-kernel``
compiles all of it, in half an hour.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
from support import kernel_grid
from support.kernel_grid import (
    AnyCase,
    ExpertsCase,
    FP8FP4GemmCase,
    GatedExpertsCase,
    MoeCase,
    Tcgen05ExpertsCase,
    WgmmaCase,
    covering_cases,
    every_case,
    experts_cases,
    fp8_fp4_gemm_cases,
    fp8_gemm_cases,
    gated_experts_cases,
    kernel_of,
    mma_cases,
    moe_cases,
    tcgen05_cases,
    tcgen05_experts_cases,
    wgmma_cases,
)

from torch_cute_ops.kernels.common.warpgroup import WARPGROUP
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.testing.resources import Resources, compile_for, parse

ALLOWED_SPILLS: dict[str, str] = {
    "moe_route-float16-510-16-True-True-17-4-True-False-sm_120a": "a group is whole lanes, so with 17 "
    "groups a lane has 30 experts; no model that is known has groups whose number is no power of two",
    "experts-bfloat16-mxfp4-128x4-bfloat16-24of128by8-float16-bias_float32-sm_90a": "with CUDA 13's ptxas, 104 "
    "bytes of 96 registers a thread; with CUDA 12's none",
    "gated_experts-bfloat16-mxfp4-128x4-128x4-64by16in2of32-mxfp4-128x4-None-float32-None-True-sm_90a": "with CUDA "
    "13's ptxas, 132 bytes of 96 registers a thread; with CUDA 12's none",
}
"""Cases (by id) that may spill, each with the reason."""

REGISTERS_PER_SM = 65_536


def other_cases(every):
    gemms = (*mma_cases(every), *wgmma_cases(every), *tcgen05_cases(every))
    experts = (*experts_cases(every), *gated_experts_cases(every), *tcgen05_experts_cases(every))
    return *gemms, *experts, *moe_cases(), *fp8_gemm_cases(), *fp8_fp4_gemm_cases()


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        every = metafunc.config.getoption("every_kernel")
        cases = (*(every_case() if every else covering_cases()), *other_cases(every))
        metafunc.parametrize("case", [pytest.param(case, id=case.id) for case in cases])


@pytest.fixture(scope="module")
def compiled(request):
    """A function from a selected case to its ``Resources``.

    The cases are compiled in as many processes as there are processors. A worker of pytest-xdist is such a process
    already: it has a part of the tests, though it collects all, and compiles its own cases.
    """
    if hasattr(request.config, "workerinput"):
        yield lambda case: kernel_grid.in_process(kernel_grid.resources_of, case)
        return
    cases = [item.callspec.params["case"] for item in request.session.items if "compiled" in item.fixturenames]
    workers = min(os.cpu_count() or 1, 16, len(cases))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {case: pool.submit(kernel_grid.in_process, kernel_grid.resources_of, case) for case in cases}
        yield lambda case: futures[case].result(timeout=600)
        pool.shutdown(cancel_futures=True)


def test_compiles_without_spills(case: AnyCase, compiled):
    kernels = compiled(case)
    assert isinstance(kernels, list), kernels
    arch, config = ARCHS[case.arch], kernel_of(case).config
    # What puts activations in order for warpgroups is a kernel of its own, unless these do it; and what lists tokens.
    apart = isinstance(case, ExpertsCase | GatedExpertsCase) or (isinstance(case, WgmmaCase) and not config.arranges)
    # Few tokens are routed, and permuted, by one kernel, more by two; of few, rows are read past L1.
    either = isinstance(case, MoeCase) and case.family in ("moe_route", "moe_route_ids", "moe_permute")
    apart |= isinstance(case, MoeCase) and case.family == "moe_finalize"
    count = 3 if either else 2 if apart else 1
    if isinstance(case, Tcgen05ExpertsCase):
        # One finds the experts that are touched, another adds up the totals of parts.
        count += config.routed + config.shares_tiles
    assert len(kernels) == count
    assert getattr(config, "smem_bytes", 0) <= arch.smem_per_cta
    threads = max(getattr(config, "threads", 256), getattr(config, "more_threads", 0))
    for resources in kernels:
        assert case.id in ALLOWED_SPILLS or (resources.spill_bytes == 0 and resources.stack_bytes == 0), resources
        # Static shared memory is not used: CUDA 12 allows only 48 KB of it.
        assert resources.smem_bytes == 0
        assert resources.registers * threads <= REGISTERS_PER_SM, "a CTA cannot be launched"
    if hasattr(config, "registers"):
        # What consumers take, others have given away: the producers' warpgroups, and those that decode. The kernel that
        # multiplies comes first.
        own, given = kernels[0].registers, config.registers[1:]
        helpers = 32 * config.helpers * config.teams if isinstance(case, FP8FP4GemmCase) else 0
        producers = 32 * config.feeders if isinstance(case, GatedExpertsCase) else WARPGROUP
        groups = (threads - producers - helpers, producers, helpers)
        taken = sum(size * each for size, each in zip(groups, config.registers, strict=False))
        assert taken <= threads * own, "a warpgroup waits for registers for ever"
        if helpers:
            assert max(given) <= own <= config.registers[0], "setmaxnreg is not what it says: an illegal instruction"


def test_covering_cases_cover():
    """Any two choices of the grid that are possible together meet in some case."""

    def pairs(cases):
        return set().union(*(case.pairs for case in cases))

    missing = pairs(every_case()) - pairs(covering_cases())
    assert not missing, list(missing)[:5]
    assert {case.id for case in covering_cases()} <= {case.id for case in every_case()}


def test_allowed_spills_are_cases():
    cases = (*every_case(), *other_cases(every=True), *other_cases(every=False))
    assert set(ALLOWED_SPILLS) <= {case.id for case in cases}


def test_ids_are_unique():
    ids = [case.id for case in (*every_case(), *other_cases(every=True))]
    assert len(ids) == len(set(ids))


def test_remarks_are_understood():
    """A spill is seen: what ptxas prints for a kernel that has one."""
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
    """In a kernel that holds more values than there are registers."""
    from support.spilling_kernel import SpillingKernel

    _, (resources,) = compile_for(SpillingKernel(), ARCHS["sm_90a"])
    assert resources.spill_bytes >= 4 * (SpillingKernel.config - 255)
    assert resources.stack_bytes > 0
