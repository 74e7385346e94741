"""``plan()`` of the row-quantising kernels: a plan exists for every width, and errors give the reason."""

import dataclasses
import itertools
import random

import pytest
import torch
from support.launch_model import launches  # noqa: F401  (a fixture)

from torch_cute_ops.formats import FP8_BLOCK128, FP8_TOKEN, MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.formats.fp8 import COLUMN, ROW
from torch_cute_ops.kernels.row_quant import RowQuantSpec, plan
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = {
    "quantise-bf16": ("rows", BF16, None),
    "norm-bf16": ("rows", BF16, BF16),
    "norm-fp32": ("rows", FP32, FP32),
    "add-norm-bf16": ("add", BF16, BF16),
    "add-norm-fp32": ("add", FP32, FP32),
    "silu-bf16": ("silu_mul", BF16, None),
    "silu-fp32": ("silu_mul", FP32, None),
}
FORMATS = {
    "nvfp4": (NVFP4, SCALE_LAYOUTS["128x4"]),
    "mxfp4": (MXFP4, SCALE_LAYOUTS["128x4"]),
    "token": (FP8_TOKEN, ROW),
    "block128": (FP8_BLOCK128, COLUMN),
}


def spec_of(kind, fmt, width):
    source, dtype, weight_dtype = KINDS[kind]
    fmt, layout = FORMATS[fmt]
    return RowQuantSpec(source, dtype, weight_dtype, width, width, fmt, layout, False, False, weight_dtype is not None)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_every_width_has_a_plan(fmt, kind, arch):
    """Check all widths up to 65,536: the slices cover the row, no slice is empty, and threads and memory suffice."""
    step = max(16, FORMATS[fmt][0].width_multiple)
    first = random.randrange(1, 17)
    # Two fp32 rows and an fp32 weight are the only case that does not fit into 8 CTAs with 99 KB each.
    widest = 60_928 if (kind, arch) == ("add-norm-fp32", "sm_120a") else 65_536
    # 80,000 columns are beyond the limit. In MXFP4, the last of twelve slices would be too short for the number of
    # threads that the other slices use.
    beyond = [80_000] if widest == 65_536 and "norm" not in kind and fmt != "token" and step <= 32 else []
    for width in (step, *range(first * step, widest, 17 * step), widest, *beyond):
        config = plan(spec_of(kind, fmt, width), ARCHS[arch])
        assert config.reason_unsupported(ARCHS[arch]) is None
        assert config.splits * config.slice_width >= width > (config.splits - 1) * config.slice_width
        assert config.splits in (1, 2, 4, 8) or not config.is_cluster
        assert 0 < config.threads <= 1024 and config.threads % 32 == 0
        assert config.blocks_per_thread * config.threads_per_row >= config.slice_blocks
        assert config.common_blocks * config.threads_per_row + 32 * config.busy_warps >= config.slice_blocks
        assert config.smem_bytes <= ARCHS[arch].smem_per_cta
        if fmt == "block128":
            # Blocks that share a scale tile belong to neighbouring threads of one CTA.
            assert config.threads_per_row % 8 == 0 and (config.splits == 1 or config.slice_width % 128 == 0)
            assert config.has_short_block == (width % 128 != 0)
        assert not config.has_idle_threads or width == 64


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_are_cut_smaller(fmt, kind):
    """Check that few FP4 rows that must be divided anyway, and are wider than a slice, are divided into more slices of
    whole scale tiles."""
    is_cut = fmt in ("nvfp4", "mxfp4") and "norm" not in kind
    even = (4096, 8192, 14_336, 28_672, 53_248)
    # For some other widths, the last slice would be too short for the number of threads that the other slices use.
    for width in (1024, 2048, *even, 11_008, 18_944, 29_568, *range(32 * random.randrange(65, 96), 65_537, 31 * 64)):
        config = plan(spec_of(kind, fmt, width), ARCHS["sm_90a"])
        few = config.few_rows_config
        if width in even or not is_cut or width <= 2048:
            assert (few is not None) == (is_cut and width > 2048), width
        if few is not None:
            assert few.few_rows_config is None and few.reason_unsupported(ARCHS["sm_90a"]) is None
            assert few.splits > config.splits and few.blocks_per_thread <= config.blocks_per_thread
            assert few.splits == -(-width // 2048) or width not in even
            assert few.splits * few.slice_width >= width > (few.splits - 1) * few.slice_width


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_rows_of_experts_have_a_plan(dtype, arch):
    """Check plans for experts' rows of every width, with the table with which rows are found, and with either gate."""
    for width in (64, 2880, *range(64 * random.randrange(1, 15), 65_537, 14 * 64 + 64)):
        spec = spec_of("quantise-bf16", "block128", width)
        spec = dataclasses.replace(spec, dtype=dtype, rows="experts", source="silu_mul", has_counts=True)
        assert plan(spec, ARCHS[arch]) == dataclasses.replace(
            plan(dataclasses.replace(spec, swiglu=True), ARCHS[arch]), spec=spec
        )
        config = plan(spec, ARCHS[arch])
        assert config.reason_unsupported(ARCHS[arch]) is None
        assert config.splits * config.slice_width >= width > (config.splits - 1) * config.slice_width
        assert config.threads_per_row % 8 == 0 and (config.splits == 1 or config.slice_width % 128 == 0)
        assert config.threads <= 512


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtypes", ["bf16", "fp32"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_rows_are_computed_alike(fmt, dtypes, arch):
    """Check that RMSNorms add in the same order with and without a residual, with and without the normalised rows as an
    output, and with one or two scale layouts. Their results are then bitwise equal."""
    step = max(16, FORMATS[fmt][0].width_multiple)
    for width in range(step * random.randrange(1, 30), 60_928, 31 * step):
        spec = spec_of(f"norm-{dtypes}", fmt, width)
        configs = [
            plan(dataclasses.replace(spec, source=source, writes_norm=norm, also_linear=linear), ARCHS[arch])
            for source, norm, linear in itertools.product(("rows", "add"), (False, True), (False, True))
        ]
        assert len({(each.splits, each.threads_per_row, each.spec.folds) for each in configs}) == 1, width


@pytest.mark.parametrize(("width", "busy", "of"), [(2560, 1, 2), (5120, 2, 4), (7168, 2, 4)])
def test_schedulers_share_busy_warps(width, busy, of):
    """Check that warps with one block more than other warps are distributed evenly over the schedulers.

    In these rows, some threads process no last block. Warp w of an SM belongs to scheduler w % 4.
    """
    config = plan(spec_of("norm-bf16", "nvfp4", width), ARCHS["sm_90a"])
    assert (config.busy_warps, config.group_warps) == (busy, of)
    schedulers = [0] * 4
    for group, warp in itertools.product(range(config.groups), range(of)):
        if (warp + config.first_column(group) // 32) % of < busy:
            schedulers[(group * of + warp) % 4] += 1
    assert max(schedulers) - min(schedulers) <= 1


def test_shared_memory_is_divided():
    """Check that each region of shared memory begins where the previous region ends: rows, weight, scales of four rows,
    partial sums, barriers."""
    config = plan(spec_of("add-norm-bf16", "nvfp4", 4096), ARCHS["sm_90a"])
    at = config.smem_offsets
    assert at.norms - at.rows == config.groups * config.stages * 2 * 4096 * 2
    assert at.weight - at.norms == config.groups * 2 * 4096 * 2
    assert at.scales - at.weight == 4096 * 2
    assert at.partial_sums - at.scales == 2 * config.groups * 4 * 256
    assert at.barriers - at.partial_sums >= config.groups * 2 * (config.threads_per_row // 32) * 4
    assert at.end - at.barriers >= 8 * (config.groups * (config.stages + 2) + 1)
    assert all(offset % 128 == 0 for offset in at)


def test_plan_does_not_hold_what_a_call_brings():
    """Check that a plan depends only on the specification, the architecture and the setting for PDL."""
    for arch, pdl, kind in itertools.product(ARCHS.values(), (True, False), KINDS):
        spec = spec_of(kind, "mxfp4", 2880)
        config = plan(spec, arch, pdl=pdl)
        assert config == plan(spec, arch, pdl=pdl)
        assert config.spec == spec and config.pdl is pdl and config.has_e2m1_cvt is arch.has_e2m1_cvt


@pytest.mark.parametrize("name", ["rmsnorm_fp4quant", "rmsnorm_fp4quant_with_norm"])
def test_a_row_that_fits_no_cluster(name, launches):  # noqa: F811
    """Check that the op's error names the op, and that nothing is compiled."""
    width = 1 << 20
    with pytest.raises(ValueError, match=rf"cute::{name}: rows of {width} elements"):
        OPS[name].cuda(torch.zeros(1, width, dtype=torch.bfloat16), torch.ones(width, dtype=torch.bfloat16))
    assert not launches.compiled
