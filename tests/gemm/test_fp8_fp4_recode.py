"""The backend ``recode``: the problems for which the FP8 weight is written while the GEMM runs, and the number of SMs
that write."""

from dataclasses import replace

import pytest
import torch
from support.gemm_problems import H100, backend_for

from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.backends.fp8_fp4_recode import RECODE_SMS, first_tiles, weight_tiles
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import ARCHS

HOPPER = Target(torch.device("cuda"), ARCHS["sm_90a"], 132, bandwidth=4.8e12)
GPUS = {"H200": HOPPER, "H100": H100}
MEASURED = {
    ("H200", 1024, 28672, 4096): (236, 415, 301),
    ("H200", 2048, 28672, 4096): (447, 518, 440),
    ("H200", 4096, 28672, 4096): (849, 944, 876),
    ("H200", 2048, 57344, 8192): (1813, 2137, 1633),
    ("H100", 1024, 28672, 4096): (291, 433, 318),
    ("H100", 2048, 28672, 4096): (520, 508, 479),
    ("H100", 4096, 28672, 4096): (972, 967, 949),
    ("H100", 2048, 57344, 8192): (2190, 2147, 1781),
}
"""Measured times in µs with MXFP4, keyed by GPU, M, N and K. The first time is for writing the whole weight before the
GEMM. The other times are for writing the weight during the GEMM, with each number of SMs in ``RECODE_SMS``
(docs/notes/fp8_fp4_wgmma_ss.md)."""


def problem(n: int, k: int, op: str = "mm_fp8_fp4", **properties) -> GemmProblem:
    path = OPS[op].path
    kwargs = path.example(n=n, k=k, m=64, block_size=32, device="meta", **properties)
    return path.problem(OPS[op].bind(**kwargs))


def recode_sms(of: GemmProblem, m: int, target: Target = HOPPER) -> list:
    return [tactic.recode_sms for tactic in backend_for("recode", of).tactics(of, m, target)]


def test_only_large_weights_are_written_during_the_gemm(monkeypatch):
    """Check the conditions for writing during the GEMM: no experts, launches that can overlap, first tiles of the GEMM
    that need a small part of the weight, and few SMs that write."""
    large = problem(28672, 4096)
    assert recode_sms(large, 2048) == recode_sms(large, 4096) == [0, *RECODE_SMS]
    assert recode_sms(large, 64) == recode_sms(problem(4096, 14336), 4096) == [0]
    assert recode_sms(large, 2048, replace(HOPPER, sms=40)) == [0, 8]
    assert recode_sms(large, 2048, replace(HOPPER, sms=16)) == [0]
    for how in ({"masked": True}, {"counts": False}):
        assert recode_sms(problem(4096, 7168, "grouped_mm_fp8_fp4", experts=8, **how), 32768) == [0]
    monkeypatch.setattr(settings, "PDL", False)
    assert recode_sms(large, 2048) == [0]


@pytest.mark.parametrize("m", [1, 1024, 2048, 16384])
def test_first_tiles(m):
    """Check the number of weight tiles that are written before the GEMM starts. These weight tiles must suffice for two
    waves of 128 × 128 output tiles, with up to 16 tiles along M side by side."""
    large, small = problem(28672, 4096), problem(256, 4096)
    assert first_tiles(large, m, HOPPER) == {1: 224, 1024: 34, 2048: 18, 16384: 18}[m]
    assert first_tiles(small, m, HOPPER) == weight_tiles(small) == 2


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: "-".join(map(str, case)))
def test_the_choice_is_near_the_best_that_was_measured(case):
    gpu, m, n, k = case
    target, of = GPUS[gpu], problem(n, k)
    backend = backend_for("recode", of)
    measured = dict(zip((0, *RECODE_SMS), MEASURED[case], strict=True))
    tactics = backend.tactics(of, m, target)
    estimates = {tactic.recode_sms: 1e6 * backend.estimate(of, m, tactic, target) for tactic in tactics}
    assert measured[min(estimates, key=estimates.get)] <= 1.04 * min(measured.values())
    assert all(0.8 < seconds / measured[sms] < 1.2 for sms, seconds in estimates.items()), estimates
