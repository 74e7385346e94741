"""The backend ``tcgen05`` of FP8 GEMMs: supported problems, tactics, estimates, and its call of the kernel."""

import dataclasses

import pytest
import torch
from samples import grouped_mm_fp8, mm_fp8, mm_fp8_block
from support.emulated import CPU, poisoned
from support.gemm_problems import (
    FP32,
    HOPPER,
    ROW_LAYOUTS,
    backend_for,
    check_needs_tcgen05,
    fp8_problem,
    token_problem,
)

from ptx_emulator.adapter import run_kernel
from torch_cute_ops.formats.experts import used_rows
from torch_cute_ops.gemm import select
from torch_cute_ops.gemm.backends import _fp8
from torch_cute_ops.gemm.backends._tcgen05 import STORE_BYTES_PER_CLOCK
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.kernels import fp8_tcgen05
from torch_cute_ops.kernels.common.fp8.layouts import ExpertLayout
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS, CLOCK_HZ

(BLACKWELL,) = usual_targets(ARCHS["sm_100a"])
BLOCK, TOKEN = backend_for("tcgen05", fp8_problem()), backend_for("tcgen05", token_problem())
BOTH = pytest.mark.parametrize("make", [fp8_problem, token_problem], ids=["block", "token"])


def of(make):
    """Return the backend for problems that ``make`` returns."""
    return BLOCK if make is fp8_problem else TOKEN


@BOTH
def test_supported_gpus(make):
    for rows in ROW_LAYOUTS:
        problem = make(rows=rows, experts=1 if rows.is_plain else 4)
        assert of(make).handles(problem)
        check_needs_tcgen05(of(make), problem)


@BOTH
@pytest.mark.parametrize("rows", ROW_LAYOUTS, ids=["plain", "offsets", "counted", "masked"])
@pytest.mark.parametrize("k", [64, 512, 16_384])
@pytest.mark.parametrize("m", [1, 16, 17, 64, 65, 250, 4096])
def test_tactics(make, rows, k, m):
    """Check that tile_m fits the rows of an expert, that narrow tiles are for few rows only, that split_k leaves no CTA
    idle, and that every kernel can be built."""
    experts = 1 if rows.is_plain else 4
    problem = make(k=k, rows=rows, experts=experts)
    of_expert = m if rows.is_masked else -(-m // experts)
    backend = of(make)
    tactics = backend.tactics(problem, m, BLACKWELL)
    assert tactics and len(set(tactics)) == len(tactics)
    widest = max(tactic.tile_m for tactic in tactics)
    for tactic in tactics:
        tile_m, cta_group, split_k = tactic
        assert tile_m >= 64 or tile_m >= of_expert
        assert split_k <= -(-k // 128) and (cta_group == 1 or split_k == 1) and (rows.is_plain or split_k == 1)
        (kernel,) = backend.kernels(problem, tactic, BLACKWELL.arch)
        assert kernel.config.reason_unsupported(BLACKWELL.arch) is None
        assert kernel.config.has_blocks == (make is fp8_problem)
    assert widest < 2 * of_expert * (2 if rows.has_offsets and not rows.has_counts else 1) or widest <= 32
    if rows.is_plain:
        narrow = any(tactic.tile_m <= (64 if make is fp8_problem else 128) for tactic in tactics)
        most = min(8, 1 << (-(-k // 128)).bit_length() - 1)
        assert max(tactic.split_k for tactic in tactics) == (most if narrow else 1)
    assert any(tactic.cta_group == 2 for tactic in tactics) == (
        widest == max(fp8_tcgen05.TILES_M[make is fp8_problem, 2])
    )


@BOTH
def test_estimates_are_near_the_limits(make):
    """Check estimates against a B200's data sheet: with few rows, the weight is read at 7.1 TB/s. With many rows, 4.1
    PFLOP/s are computed, or less with block scales, because promotion takes longer than the MMAs."""
    problem, backend = make(8192, 8192), of(make)

    def least(m):
        return min(backend.estimate(problem, m, tactic, BLACKWELL) for tactic in backend.tactics(problem, m, BLACKWELL))

    assert 1 < least(1) / (problem.bytes_moved(1) / 6.8e12) < 1.7
    assert 1 < least(16_384) / (problem.flops(16_384) / 4.1e15) < (2 if make is fp8_problem else 1.5)
    many = [least(m) for m in (1, 16, 64, 256, 1024, 4096)]
    assert many == sorted(many)


@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (2112, 7168), (16_384, 7168)])
def test_scaled_mm_is_chosen_for_many_rows(n, k, fast_accum):
    """Check that ``"auto"`` chooses cuBLAS for many rows, because ``tcgen05`` never ran on a GPU."""
    problem = dataclasses.replace(token_problem(n, k), fast_accum=fast_accum)
    for arch in ("sm_100a", "sm_103a"):
        (target, *_) = usual_targets(ARCHS[arch])
        names = [select.choose(problem, m, target).backend.name for m in (1, 1024, 4096, 16_384)]
        assert names == ["tcgen05", "scaled_mm", "scaled_mm", "scaled_mm"]


@BOTH
def test_estimates_count_the_stores_of_all_tiles(make):
    """Check that an estimate is at least the time in which the SMs store the result: with a small K, stores take longer
    than MMAs."""
    m, n = 8192, 8192
    problem = make(n, 128, out_dtype=FP32)
    stored = 4 * m * n / (STORE_BYTES_PER_CLOCK * BLACKWELL.sms * CLOCK_HZ)
    for tactic in of(make).tactics(problem, m, BLACKWELL):
        assert of(make).estimate(problem, m, tactic, BLACKWELL) > stored


def samples():
    """Yield, for each kind of call: the op, an exact sample, a tactic, and the problem."""
    given = {"out_dtype": FP32}
    yield "mm_fp8", mm_fp8.sample("", 19, 136, 576, CPU, exact=True), (32, 1, 2), token_problem(136, 576, **given)
    one = mm_fp8.sample("", 19, 136, 576, CPU, exact=True, one_a_scale=True, one_b_scale=True)
    yield "mm_fp8", one, (32, 1, 1), token_problem(136, 576, one_a_scale=True, one_b_scale=True, **given)
    one = mm_fp8_block.sample("", 19, 136, 576, CPU, exact=True)
    yield "mm_fp8_block", one, (32, 1, 1), fp8_problem(136, 576, **given)
    layouts = dict(zip(("plain", "offsets", "counted", "masked"), ROW_LAYOUTS, strict=True))
    for name in ("offsets", "counted", "masked"):
        if name == "masked":
            one = grouped_mm_fp8.masked("", (3, 0, 20), 21, 136, 448, CPU, exact=True)
        else:
            counted = {"exact": True, "counted": name == "counted", "spare": 5}
            one = grouped_mm_fp8.contiguous("", (3, 0, 20), 136, 448, CPU, **counted)
        rows = {"rows": layouts[name], "experts": 3}
        yield "grouped_mm_fp8", one, (16, 1, 1), fp8_problem(136, 448, **rows, **given)
        token = grouped_mm_fp8.with_token_scales(one, exact=True)
        yield "grouped_mm_fp8", token, (16, 1, 1), token_problem(136, 448, **rows, **given)


CALLS = [pytest.param(*one, id=f"{one[0]}-{i}") for i, one in enumerate(samples())]


@pytest.mark.parametrize(("op", "sample", "tactic", "problem"), CALLS)
def test_a_call(op, sample, tactic, problem, monkeypatch):
    """Call the backend's launcher with operands arranged as by the op, execute its kernel in the emulator, and check
    the result."""
    spec = OPS[op]
    want = spec.reference(*sample.args, **sample.kwargs, out_dtype=FP32)
    bound = spec.bind(*sample.args, **sample.kwargs)._asdict()
    target = dataclasses.replace(BLACKWELL, sms=2)
    run = lambda kernel, arch: lambda *call: run_kernel(kernel.make(), arch, *call, strict=True)  # noqa: E731
    monkeypatch.setattr(_fp8, "compile_kernel", run)
    backend = backend_for("tcgen05", problem)
    a, b, a_scale, b_scale = (bound[name] for name in ("a", "b", "a_scale", "b_scale"))
    if backend is TOKEN:
        a_scale = a_scale.reshape(-1, 1).expand(a.shape[:-1].numel(), 1)
    out = poisoned(*want.shape, dtype=FP32)
    rows = [bound.get(name) for name in ("offsets", "counts")]
    backend.launcher(problem, backend.named(tactic), target)(Operands(a, b, a_scale, b_scale, None, None, *rows), out)
    used = torch.ones(len(got := out.flatten(0, -2)), dtype=torch.bool)
    if not problem.grouping.rows.is_plain:
        used = used_rows(len(got), *rows)
        assert 0 < used.sum() < len(used)
    assert torch.equal(got[used], want.flatten(0, -2)[used])
    assert torch.equal(got[~used].view(torch.uint8), poisoned(*got[~used].shape, dtype=FP32).view(torch.uint8))


CONFIG = fp8_tcgen05.plan(
    rows=ExpertLayout(), epilogue=fp8_problem().epilogue, has_blocks=True, tile_m=64, arch=BLACKWELL.arch, pdl=True
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tile_m": 8}, "tile_m is 8; it has to be one of (16, 32, 64, 128) with 1 CTAs for each MMA"),
        ({"tile_m": 256}, "tile_m is 256; it has to be one of (16, 32, 64, 128) with 1 CTAs for each MMA"),
        ({"cta_group": 2}, "tile_m is 64; it has to be one of (128,) with 2 CTAs for each MMA"),
        (
            {"cta_group": 2, "tile_m": 128, "split_k": 2},
            "split_k is 2; it has to be one of (1,) with tile_m=128 and 2 CTAs for each MMA, without experts",
        ),
        (
            {"rows": ExpertLayout(True), "split_k": 2},
            "split_k is 2; it has to be one of (1,) with tile_m=64 and 1 CTAs for each MMA, with experts",
        ),
        ({"split_k": 2, "stages": 1}, "33792 bytes of partial sums do not fit into 1 stages"),
        ({"stages": 10}, "bytes of shared memory; sm_100a has 232448"),
        (
            {"epilogue": dataclasses.replace(fp8_problem().epilogue, alpha="expert")},
            "alpha is 'expert', but the GEMM is not grouped",
        ),
    ],
)
def test_refused_configs(changes, reason):
    assert CONFIG.reason_unsupported(BLACKWELL.arch) is None
    assert reason in dataclasses.replace(CONFIG, **changes).reason_unsupported(BLACKWELL.arch)
    assert CONFIG.reason_unsupported(HOPPER.arch) == "sm_90a has no tcgen05 instructions"


@pytest.mark.parametrize("has_blocks", [False, True])
def test_columns_of_tensor_memory(has_blocks):
    """Check that accumulators fit, and that a narrower tile leaves tensor memory to the next kernel."""
    for cta_group in (1, 2):
        for tile_m in fp8_tcgen05.TILES_M[has_blocks, cta_group]:
            for split_k in fp8_tcgen05.splits(ExpertLayout(), has_blocks, tile_m, cta_group):
                config = dataclasses.replace(
                    CONFIG, has_blocks=has_blocks, tile_m=tile_m, cta_group=cta_group, split_k=split_k
                )
                count = (4 if tile_m <= 64 else 2) if has_blocks else 2 if split_k == 1 else 1
                assert config.acc_columns == count * tile_m <= 512
                assert config.acc_columns <= config.tmem_columns < max(2 * config.acc_columns, 33)
