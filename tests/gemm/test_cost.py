"""Memory bandwidth in the cost model: from the driver, or from data sheets."""

import ctypes

import pytest
import torch
from support.gemm_problems import fp4_problem, fp8_problem

from torch_cute_ops.gemm import cost, select
from torch_cute_ops.runtime.arch import ARCHS

CLOCK, BUS = 36, 37
"""Numbers of CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE and CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH."""


class Driver:
    """Simulated CUDA driver with two device attributes. It reports an error for an attribute that is None."""

    def __init__(self, kilohertz, bits):
        self.attributes = {CLOCK: kilohertz, BUS: bits}

    def cuDeviceGet(self, device, index):
        device._obj.value = index + 5
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        if device.value != 2 + 5 or self.attributes[attribute] is None:
            return 1
        value._obj.value = self.attributes[attribute]
        return 0


@pytest.fixture
def target(monkeypatch):
    """Return a function that makes a target from compute capability, number of SMs, memory clock (MHz) and bus width
    (bits)."""

    def made(capability, sms, megahertz, bits):
        kilohertz = None if megahertz is None else megahertz * 1000
        monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(kilohertz, bits))
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GPU of test")
        monkeypatch.setattr(select, "sm_count", lambda index: sms)
        select._gpu.cache_clear()
        return select.target_of(torch.device("cuda", 2))

    yield made
    select._gpu.cache_clear()


@pytest.mark.parametrize(
    ("gpu", "tbps"),
    [
        pytest.param(((9, 0), 132, 3201, 6144), 4.26, id="H200, measured"),
        pytest.param(((9, 0), 132, 2619, 5120), 3.02, id="H100, measured"),
        pytest.param(((9, 0), 132, 2619, 6144), 0.888 * 4.0, id="GH200"),
        pytest.param(((9, 0), 78, 2619, 6144), 0.888 * 4.0, id="H20"),
        pytest.param(((10, 0), 148, 3996, 8192), 0.888 * 7.67, id="B200"),
        pytest.param(((9, 0), 16, 3201, 768), 0.888 * 4.8 / 8, id="an eighth of an H200's memory"),
        pytest.param(((8, 0), 108, 1215, 5120), 0.888 * 1.555, id="A100, for which there are no kernels"),
        pytest.param(((9, 0), 132, None, None), 4.26, id="unknown, with the SMs of an H200"),
        pytest.param(((9, 0), 132, 0, 6144), 4.26, id="unknown clock"),
        pytest.param(((9, 0), 66, None, None), 4.26 / 2, id="unknown, with half of an H200's SMs"),
    ],
)
def test_bandwidth(target, gpu, tbps):
    assert cost.bytes_per_second(target(*gpu)) == pytest.approx(tbps * 1e12, rel=0.03)


def test_gpus_of_a_kind_are_planned_for_alike(target):
    """Check that a bandwidth within 3 % of a listed GPU's bandwidth is replaced by the listed value, so that plans made
    ahead of time are the same."""
    for arch in ARCHS.values():
        for gpu, listed in zip(arch.gpus, cost.usual_targets(arch), strict=True):
            for reported in (0.97 * gpu.bandwidth, 1.03 * gpu.bandwidth):
                assert arch.peak_bandwidth(gpu.sms, reported) == gpu.bandwidth == listed.bandwidth
    assert target((9, 0), 132, 3201, 6144).bandwidth == cost.usual_targets(ARCHS["sm_90a"])[0].bandwidth


@pytest.mark.parametrize("problem", [fp8_problem(16384, 16384), fp4_problem(16384, 16384)], ids=["fp8", "fp4"])
def test_estimates_are_of_the_memory(target, problem):
    """Check that the estimate for one row is longer on an H100 than on an H200, and about equal for 8,192 rows.

    The two GPUs differ in memory bandwidth alone.
    """

    def least(m, gpu):
        choice = select.choose(problem, m, gpu)
        return choice.backend.estimate(problem, m, choice.tactic, gpu)

    h200, h100 = target((9, 0), 132, 3201, 6144), target((9, 0), 132, 2619, 5120)
    assert 1.15 < least(1, h100) / least(1, h200) < 4.26 / 3.02 + 0.03
    assert least(8192, h100) == pytest.approx(least(8192, h200), rel=0.05)


def test_the_driver_is_asked_once(target, monkeypatch):
    first = target((9, 0), 132, 2619, 5120)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("asked again"))
    assert select.target_of(torch.device("cuda", 2)) is first
