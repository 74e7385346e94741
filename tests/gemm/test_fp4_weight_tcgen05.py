"""The backend ``tcgen05`` of GEMMs with 16-bit activations and an FP4 weight: supported problems, tactics, estimates,
and its launcher's call of the kernel."""

import dataclasses

import pytest
import torch
from samples._fp4_gemm import POWERS, random_matrix
from support.emulated import CPU, poisoned
from support.gemm_problems import BF16, FP16, FP32, HOPPER, backend_for, fp4_problem
from support.gemm_problems import CPU as NO_GPU

from ptx_emulator.adapter import run_kernel
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.gemm import select
from torch_cute_ops.gemm.backends import _fp4
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.kernels import fp4_weight_tcgen05
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.fp4_weight_tcgen05 import STREAM_K
from torch_cute_ops.reference.mm_fp4 import fp4_gemm
from torch_cute_ops.runtime.arch import ARCHS

(BLACKWELL,) = usual_targets(ARCHS["sm_100a"])
BACKEND = backend_for("tcgen05", fp4_problem(a_dtype=BF16))
WITH_ROW_SCALE = dataclasses.replace(fp4_problem(a_dtype=BF16), epilogue=Epilogue(BF16, has_row_scale=True))


@pytest.mark.parametrize(
    ("reason", "problem"),
    [
        (None, fp4_problem(n=8, k=32, a_dtype=BF16)),
        (None, fp4_problem(n=8, k=96, fmt=MXFP4, a_dtype=FP16)),
        (None, fp4_problem(k=64, layout="linear", a_dtype=FP16)),
        ("n=12 and k=64: they have to be multiples of 8 and 32", fp4_problem(n=12, k=64, a_dtype=BF16)),
        ("n=8 and k=48: they have to be multiples of 8 and 32", fp4_problem(n=8, k=48, a_dtype=BF16)),
        (
            "b has 6 scales a row; in the linear layout they have to be a multiple of 4",
            fp4_problem(k=192, fmt=MXFP4, layout="linear", a_dtype=BF16),
        ),
        ("16-bit activations have no row_scale", WITH_ROW_SCALE),
    ],
)
def test_supported_problems(reason, problem):
    assert BACKEND.reason_unsupported(problem, BLACKWELL) == reason


def test_supported_gpus():
    problem = fp4_problem(a_dtype=BF16)
    for arch in ARCHS.values():
        reason = BACKEND.reason_unsupported(problem, usual_targets(arch)[0])
        assert reason == (None if arch.has_tcgen05 else f"needs data-center Blackwell's tcgen05; this is {arch.name}")
    assert "needs a CUDA device" in BACKEND.reason_unsupported(problem, NO_GPU)
    assert not BACKEND.handles(fp4_problem()) and not BACKEND.handles(fp4_problem(k=768, experts=12, a_dtype=BF16))


@pytest.mark.parametrize("k", [32, 512, 16_384])
@pytest.mark.parametrize("m", [1, 16, 17, 64, 65, 250, 4096])
def test_tactics(m, k):
    """Check that tile_m fits M, that narrow tiles are offered for few rows only, that split_k leaves no CTA idle, and
    that every kernel can be built."""
    problem = fp4_problem(k=k, a_dtype=BF16)
    tactics = BACKEND.tactics(problem, m, BLACKWELL)
    assert tactics and len(set(tactics)) == len(tactics)
    for tactic in tactics:
        tile_m, split_k = tactic
        assert tile_m >= min(64, m) and (tile_m < 2 * m or tile_m == 16)
        assert split_k <= -(-k // 128) and (tile_m <= 128 or split_k == 1)
        (kernel,) = BACKEND.kernels(problem, tactic, BLACKWELL.arch)
        assert kernel.config.reason_unsupported(BLACKWELL.arch) is None
    assert max(tactic.split_k for tactic in tactics) == min(8, 1 << (-(-k // 128)).bit_length() - 1)


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
def test_estimates_are_near_the_limits(fmt):
    """Check estimates against a B200's data sheet: with few rows the weight is read at 6.8 TB/s, or an SM decodes 33
    elements (MXFP4: 27) per clock; with many rows 2.06 PFLOP/s are computed."""
    problem = fp4_problem(16_384, 16_384, fmt, a_dtype=BF16)

    def least(m):
        return min(BACKEND.estimate(problem, m, tactic, BLACKWELL) for tactic in BACKEND.tactics(problem, m, BLACKWELL))

    limit = max(problem.bytes_moved(1) / 6.8e12, 16_384**2 / ({NVFP4: 33, MXFP4: 27}[fmt] * 148 * 1.7e9))
    assert 1 < least(1) / limit < 1.5
    assert 1 < least(16_384) / (problem.flops(16_384) / 2.06e15) < 1.6
    many = [least(m) for m in (1, 16, 64, 256, 1024, 4096)]
    assert many == sorted(many)


def test_automatic_choice():
    """Check that "auto" takes the backend for large weights, and for many rows of any weight."""
    for size, rows in ((8192, (1, 16, 64, 256, 4096)), (2048, (256, 4096))):
        problem = fp4_problem(size, size, a_dtype=BF16)
        for m in rows:
            assert select.choose(problem, m, BLACKWELL).backend is BACKEND


def test_stream_k() -> None:
    """Check that stream-K is offered for a single m tile, and chosen if whole tiles do not divide evenly among SMs, and
    that its estimate includes partial sums and the second kernel."""
    problem = fp4_problem(19_968, 6_656, a_dtype=BF16)

    def estimate(tactic):
        return BACKEND.estimate(problem, 1, tactic, BLACKWELL)

    tactics = BACKEND.tactics(problem, 1, BLACKWELL)
    assert min(tactics, key=estimate) == (16, STREAM_K)
    assert all(split_k != STREAM_K for _, split_k in BACKEND.tactics(problem, 200, BLACKWELL))
    # 156 tiles on 148 SMs take two waves. 148 tiles take one wave, so stream-K does not pay.
    even = fp4_problem(148 * 128, 6_656, a_dtype=BF16)
    costs = [BACKEND.estimate(even, 1, BACKEND.named((16, split_k)), BLACKWELL) for split_k in (1, STREAM_K)]
    sums = 2 * 2 * 148 * 128 * 4  # bytes, written and read
    assert costs[1] - costs[0] >= 1e-6 + sums / BLACKWELL.bandwidth


@pytest.mark.parametrize(
    ("a_dtype", "fmt", "layout", "tactic"),
    [
        (BF16, NVFP4, "128x4", (16, 2)),
        (FP16, NVFP4, "linear", (64, 1)),
        (FP16, MXFP4, "128x4", (32, 1)),
        (BF16, NVFP4, "linear", (16, STREAM_K)),
    ],
)
def test_a_call(a_dtype, fmt, layout, tactic, monkeypatch):
    """Call the backend's launcher, with the kernel executed in the emulator, and compare the result with the reference.

    With MXFP4, float16 activations are rounded to bfloat16 first.
    """
    m, n, k = 11, 136, 640
    problem = fp4_problem(n, k, fmt, layout=layout, a_dtype=a_dtype, out_dtype=FP32, alpha="column", bias_dtype=FP32)
    target = dataclasses.replace(BLACKWELL, sms=2, device=CPU)
    monkeypatch.setattr(
        _fp4, "compile_kernel", lambda kernel, arch: lambda *call: run_kernel(kernel.make(), arch, *call, strict=True)
    )
    a = torch.randint(-4, 5, (m, k)).to(a_dtype)
    a[0, 0] = 1 + 2**-9  # rounded to 1 in bfloat16
    b, b_scale = random_matrix(n, k, fmt, layout, CPU, POWERS[fmt.scale_format])
    alpha, bias, out = torch.rand(n), torch.randn(n), poisoned(m, n, dtype=FP32)
    tactic = BACKEND.named(tactic)
    assert BACKEND.checks_operands(problem, tactic) == (fmt == NVFP4)
    BACKEND.launcher(problem, tactic, target)(Operands(a, b.t(), None, b_scale, alpha, bias), out)
    assert torch.equal(out, fp4_gemm(a, None, b, b_scale, alpha, bias, FP32, fmt, None, SCALE_LAYOUTS[layout]))


CONFIG = fp4_weight_tcgen05.plan(
    dtype=BF16,
    fmt=NVFP4,
    layout=SCALE_LAYOUTS["128x4"],
    epilogue=fp4_problem().epilogue,
    tile_m=64,
    split_k=1,
    arch=BLACKWELL.arch,
    pdl=True,
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": SCALE_LAYOUTS["8x4"]}, "the layout 8x4 is not for scales of weights"),
        ({"dtype": FP16, "fmt": MXFP4}, "decoded mxfp4 weights exceed float16"),
        ({"tile_m": 8}, "tile_m is 8; it has to be one of (16, 32, 64, 128, 256) with 1 CTAs for each MMA"),
        (
            {"tile_m": 256, "split_k": 2, "stages": 2},
            "split_k is 2; it has to be one of (1,) with tile_m=256 and 1 CTAs for each MMA, without experts",
        ),
        ({"tile_m": 256, "split_k": STREAM_K, "stages": 3}, "split_k is 0; it has to be one of (1,) with tile_m=256"),
        ({"split_k": STREAM_K, "stages": 3}, "stages is 3; it has to be a multiple of 2"),
        ({"stages": 3}, "stages is 3; it has to be a multiple of 2, the number of decoder groups"),
        ({"tile_m": 128, "split_k": 2, "stages": 0}, "67584 bytes of partial sums do not fit into 0 stages"),
        ({"stages": 8}, "needs 1024 columns of tensor memory; an SM has 512"),
        ({"stages": 10}, "bytes of shared memory; sm_100a has 232448"),
        ({"epilogue": Epilogue(BF16, has_row_scale=True)}, "16-bit activations have no row_scale"),
    ],
)
def test_refused_configs(changes, reason):
    assert CONFIG.reason_unsupported(BLACKWELL.arch) is None
    assert reason in dataclasses.replace(CONFIG, **changes).reason_unsupported(BLACKWELL.arch)
    assert CONFIG.reason_unsupported(HOPPER.arch) == "sm_90a has no tcgen05 instructions"


@pytest.mark.parametrize(("tile_m", "stages"), [(16, 6), (32, 6), (64, 6), (128, 4), (256, 3)])
def test_memory(tile_m: int, stages: int) -> None:
    """Check the number of stages, and that accumulators and decoded k tiles fit into tensor memory together."""
    config = fp4_weight_tcgen05.plan(
        **{name: getattr(CONFIG, name) for name in ("dtype", "fmt", "layout", "epilogue", "split_k", "pdl")},
        tile_m=tile_m,
        arch=BLACKWELL.arch,
    )
    assert config.stages == stages and config.stages % config.teams == 0
    assert config.acc_columns + 64 * stages <= config.tmem_columns == 512
    assert config.accumulators == (1 if tile_m == 256 else 2)
    # Two CTAs never share an SM, with 228 KB of shared memory, of which the system takes 1 KB for each CTA.
    assert 2 * (config.smem_bytes + 1024) > 228 * 1024 and config.smem_bytes <= BLACKWELL.arch.smem_per_cta
    assert config.workspace_bytes(3, 148) == 0
    assert dataclasses.replace(config, split_k=STREAM_K).workspace_bytes(3, 148) == 2 * 148 * 3 * 128 * 4
    # A stage holds the activations in 16 bits, and 64 bytes of codes for each row.
    assert config.stage.size_bytes == 128 * (2 * tile_m + 64)
