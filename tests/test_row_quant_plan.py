"""``plan()`` of the row-quantising kernels: every width has a plan that fits, and refusals say why."""

import itertools

import pytest
import torch
from launch_model import launches  # noqa: F401  (a fixture)

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.kernels.row_quant import Problem, plan
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

DTYPES = {
    "quantise-bf16": (torch.bfloat16, None),
    "norm-bf16": (torch.bfloat16, torch.bfloat16),
    "norm-fp32": (torch.float32, torch.float32),
}


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_every_width_has_a_plan(fmt, dtypes, arch):
    """Every multiple of the block to 65,536: slices cover the row and none is empty, threads and memory fit."""
    for width in range(fmt.block_size, 65_536 + 1, fmt.block_size):
        config = plan(Problem(*DTYPES[dtypes], width, fmt, SCALE_LAYOUTS["128x4"], False, True), ARCHS[arch])
        assert config.reason_unsupported(ARCHS[arch]) is None
        assert config.splits * config.slice_width >= width > (config.splits - 1) * config.slice_width
        assert config.splits in (1, 2, 4, 8)
        assert 0 < config.threads <= 1024 and config.threads % 32 == 0
        assert config.thread_blocks * config.threads_per_row >= config.slice_blocks
        assert config.smem_bytes <= ARCHS[arch].smem_per_cta


def test_plan_does_not_hold_what_a_call_brings():
    """It is a function of the problem, the architecture and the setting for PDL, and keeps them."""
    for arch, pdl, layout in itertools.product(ARCHS.values(), (True, False), SCALE_LAYOUTS.values()):
        problem = Problem(torch.float16, torch.float32, 2880, MXFP4, layout, False, True)
        config = plan(problem, arch, pdl=pdl)
        assert config == plan(problem, arch, pdl=pdl)
        assert config.problem == problem and config.pdl is pdl and config.has_e2m1_cvt is arch.has_e2m1_cvt


@pytest.mark.parametrize("name", ["rmsnorm_fp4quant", "rmsnorm_fp4quant_with_norm"])
def test_a_row_that_fits_no_cluster(name, launches):  # noqa: F811
    """The op says so, by its name; nothing is compiled."""
    width = 1 << 20
    with pytest.raises(ValueError, match=rf"cute::{name}: rows of {width} elements"):
        OPS[name].cuda(torch.zeros(1, width, dtype=torch.bfloat16), torch.ones(width, dtype=torch.bfloat16))
    assert not launches.compiled
