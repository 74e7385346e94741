"""The backend ``cublas`` of MXFP8 GEMMs: its kernels, its estimates, and its calls, whose operands the emulator
decodes."""

import dataclasses

import pytest
import torch
from samples import mm_fp8_block
from samples._epilogue import exact_epilogue
from support.emulated import CPU, poisoned
from support.gemm_problems import BF16, FP16, FP32, HOPPER, backend_for, mx_problem
from support.gemm_problems import CPU as NO_GPU
from support.tactics import check_every_tactic

from ptx_emulator.adapter import run_kernel
from torch_cute_ops.formats import SCALE_LAYOUTS
from torch_cute_ops.gemm import error_bounds
from torch_cute_ops.gemm.backends import mxfp8_cublas
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.select import target_of
from torch_cute_ops.reference.mm_fp4 import matmul_rows
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

BACKEND = backend_for("cublas", mx_problem())
TARGET = dataclasses.replace(HOPPER, device=CPU, sms=2)
"""Target whose kernels run in the emulator."""


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Run kernels in the emulator and cuBLAS's GEMM in float64; return the list of all scales that kernels read."""
    scales: list[torch.Tensor] = []

    def compiled(kernel, arch):
        def call(*given):
            scales.append(given[1])
            run_kernel(kernel.make(), arch, *given)

        return call

    monkeypatch.setattr(mxfp8_cublas, "compile_kernel", compiled)
    monkeypatch.setattr(mxfp8_cublas, "accumulate", lambda a, b: matmul_rows(a.double(), b.double()).float())
    return scales


def call(sample, problem) -> torch.Tensor:
    out = poisoned(sample.args[0].shape[0], problem.n, dtype=problem.out_dtype)
    epilogue = (sample.kwargs.get(name) for name in ("alpha", "bias"))
    BACKEND.launcher(problem, (), TARGET)(Operands(*sample.args, *epilogue), out)
    return out


def test_supported_gpus() -> None:
    """Check that the backend supports every GPU, has a kernel for linear and for 128x4 scales, and that its estimate
    exceeds the time of reading the operands, writing them decoded, and multiplying them."""
    problem = mx_problem(4096, 7168)
    for arch in ARCHS.values():
        (target, *_) = usual_targets(arch)
        assert BACKEND.reason_unsupported(problem, target) is None and BACKEND.tactics(problem, 16, target) == ((),)
        layouts = [kernel.config.layout.name for kernel in BACKEND.kernels(problem, (), arch)]
        assert layouts == ["linear", "128x4"]
    assert "needs a CUDA device" in BACKEND.reason_unsupported(problem, NO_GPU)
    bandwidth = 4.8e12
    for m in (1, 256, 4096):
        least = 5 * (4096 + m) * 7168 / bandwidth + 2 * m * 4096 * 7168 / 989e12
        assert least < BACKEND.estimate(problem, m, (), HOPPER) < 4 * least


@pytest.mark.parametrize("weight_layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_layouts_of_scales(layout: str, weight_layout: str, decoded) -> None:
    """Check exact sums with scales in each layout, and that only scales in the 8x4 layout are copied."""
    one = mm_fp8_block.mx_sample("", 19, 136, 192, CPU, exact=True, layout=layout, weight_layout=weight_layout)
    want = OPS["mm_fp8_block"].reference(*one.args, alpha=None, bias=None, out_dtype=FP32)
    assert torch.equal(call(one, mx_problem(136, 192, FP32)), want)
    given = {scale.data_ptr() for scale in one.args[2:]}
    assert sum(scale.data_ptr() not in given for scale in decoded) == [layout, weight_layout].count("8x4")


def test_strided_scales(decoded) -> None:
    """Check linear scales that are columns of a wider matrix."""
    one = mm_fp8_block.mx_sample("", 19, 136, 192, CPU, exact=True, layout="linear")
    a, b, a_scale, b_scale = one.args
    want = OPS["mm_fp8_block"].reference(*one.args, alpha=None, bias=None, out_dtype=FP32)
    wide = torch.cat((a_scale,) * 2, 1)[:, : a_scale.shape[1]]
    sample = dataclasses.replace(one, args=(a, b, wide, b_scale))
    assert torch.equal(call(sample, mx_problem(136, 192, FP32)), want)


@pytest.mark.parametrize(("out_dtype", "alpha"), [(BF16, "one"), (FP16, None), (FP32, "column")])
def test_random_operands(out_dtype, alpha, decoded) -> None:
    """Check results with an epilogue against sums in float64."""
    one = mm_fp8_block.mx_sample("", 33, 264, 832, CPU)
    factors = {None: None, "one": torch.tensor([0.75]), "column": torch.rand(264)}[alpha]
    bias = torch.randn(264)
    problem = mx_problem(264, 832, out_dtype, alpha, FP32)
    one = dataclasses.replace(one, kwargs={"alpha": factors, "bias": bias})
    want, allowed = error_bounds.expected(problem, Operands(*one.args, factors, bias), 33, 832 * error_bounds.EPS)
    assert error_bounds.difference(call(one, problem), want, allowed) is None


def test_range_of_scales(decoded) -> None:
    """Check the smallest and the largest scale with which decoding is exact, by sums of one product."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN
    a = torch.zeros(2, 64, dtype=torch.uint8)
    a[:, 0] = 0x38  # 1
    b = torch.zeros(256, 64, dtype=torch.uint8)
    b[:, 0] = codes
    a_scale = torch.full((2, 2), 127, dtype=torch.uint8)
    for exponent in (-124, 119):
        b_scale = torch.full((256, 2), exponent + 127, dtype=torch.uint8)
        numbers = codes.view(torch.float8_e4m3fn).double() * 2.0**exponent
        left, right = (matrix.view(torch.float8_e4m3fn) for matrix in (a, b))
        sample = mm_fp8_block.Sample("", (left, right.t(), a_scale, b_scale), {})
        assert torch.equal(call(sample, mx_problem(256, 64, FP32)), numbers.float().expand(2, -1))


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mma_sync", "cublas"])
@pytest.mark.parametrize(("m", "k"), [(1, 64), (9, 448), (60, 2880), (300, 512)])
@pytest.mark.parametrize("epilogue", ["none", "both"])
def test_every_tactic(name: str, m: int, k: int, epilogue: str) -> None:
    """Use inputs whose sums are exact, and check that every tactic overwrites the poisoned output with exactly these
    sums."""
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    given = {"out_dtype": FP32, **(exact_epilogue(264, target.device) if epilogue == "both" else {})}
    for layout, weight_layout in zip(SCALE_LAYOUTS, reversed(SCALE_LAYOUTS), strict=True):
        layouts = {"layout": layout, "weight_layout": weight_layout}
        one = mm_fp8_block.mx_sample("", m, 264, k, target.device, exact=True, **layouts)
        check_every_tactic(OPS["mm_fp8_block"], name, one, given, target)
