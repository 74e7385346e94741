"""Run our wgmma GEMMs in the PTX emulator, on a GPU and by the reference, for ``calibrate_ptx.py`` without CUTLASS.

Operands are chosen so that partial sums are exact and all results must be equal. A case is a problem, a number of rows,
a backend and its tactic. The backend's launcher computes the case, on a GPU or with kernels that the emulator executes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from samples._fp4_gemm import POWERS, random_matrix
from samples.mm_fp8_block import sample

from ptx_emulator.adapter import run_kernel
from torch_cute_ops.formats import FP8_BLOCK128, MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.formats.fp8 import COLUMN
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.backends import _fp4 as fp4_backends
from torch_cute_ops.gemm.backends import _fp8 as fp8_backends
from torch_cute_ops.gemm.backends.reference import Reference
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem, Grouping, Operand, Tactic
from torch_cute_ops.gemm.select import BACKENDS
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.runtime.arch import ARCHS

Tensor = torch.Tensor
ARCH = "sm_90a"
CPU = torch.device("cpu")
SMS = 6
"""Number of SMs for which backends plan, both in the emulator and on a GPU: the order of additions depends on this
number."""
FP32 = torch.float32


class OwnCase(NamedTuple):
    """A GEMM with ``m`` rows, computed by a tactic of the named backend."""

    name: str
    backend: str
    problem: GemmProblem
    m: int
    tactic: Tactic

    @property
    def size(self) -> str:
        """M, N and K as text."""
        return f"{self.m}×{self.problem.n}×{self.problem.k}"


def fp4_gemm(a: FP4Format | torch.dtype, b: FP4Format, n: int, k: int, experts: int = 0, layout: str = "128x4") -> Any:
    scales = SCALE_LAYOUTS[layout]
    left = Operand(a, scales) if isinstance(a, FP4Format) else Operand(a)
    return GemmProblem(
        left, Operand(b, scales), n, k, Epilogue(FP32), Grouping("k", experts) if experts else Grouping()
    )


def fp8_gemm(n: int, k: int, b: FP4Format | None = None) -> GemmProblem:
    weight = Operand(FP8_BLOCK128) if b is None else Operand(b, SCALE_LAYOUTS["128x4"])
    return GemmProblem(Operand(FP8_BLOCK128, COLUMN), weight, n, k, Epilogue(FP32))


F16, BF16 = torch.float16, torch.bfloat16
OWN_CASES = (
    OwnCase("NVFP4 by NVFP4, 64 rows, stream-K", "wgmma", fp4_gemm(NVFP4, NVFP4, 512, 1088), 50, (64, 256, 0)),
    OwnCase("NVFP4 by NVFP4, 32 rows, cluster of 2", "wgmma", fp4_gemm(NVFP4, NVFP4, 264, 1088), 30, (32, 256, 2)),
    OwnCase("NVFP4 by float16, 128 rows", "wgmma", fp4_gemm(F16, NVFP4, 136, 800), 130, (128, 128, 1)),
    OwnCase("MXFP4 by bfloat16, 256 rows", "wgmma", fp4_gemm(BF16, MXFP4, 136, 544), 260, (256, 128, 0)),
    OwnCase("experts over k, dense", "wgmma", fp4_gemm(NVFP4, NVFP4, 256, 6 * 256, 6), 40, (64, 256, 0)),
    OwnCase("experts over k, routed", "routed", fp4_gemm(NVFP4, NVFP4, 136, 6 * 320, 6), 40, (16, 64, 1)),
    OwnCase("FP8 by FP8, 128 rows", "wgmma", fp8_gemm(264, 640), 200, (128, 128, 1)),
    OwnCase("FP8 by FP8, 32 rows, cluster of 2", "wgmma", fp8_gemm(264, 1280), 30, (32, 128, 2)),
    OwnCase("FP8 by NVFP4, 64 rows", "wgmma_ss", fp8_gemm(264, 640, NVFP4), 60, (64, 128, 1)),
)


def operands(case: OwnCase) -> tuple[Operands, Tensor]:
    """Return random operands whose partial sums are exact, and a result tensor full of NaN."""
    problem, m = case.problem, case.m
    torch.manual_seed(problem.k)
    a_scale = alpha = None
    if problem.a.is_fp8:
        a, b, a_scale, b_scale = sample("", m, problem.n, problem.k, CPU, exact=True).args
    elif problem.a.is_fp4:
        a, a_scale = _fp4_matrix(m, problem.k, problem.a)
    else:
        assert isinstance(problem.a.format, torch.dtype)
        a = torch.randint(-8, 9, (m, problem.k)).to(problem.a.format)
    if problem.b.is_fp4:
        codes, b_scale = _fp4_matrix(problem.n, problem.k, problem.b)
        b = codes.t()
    if problem.grouping.over == "k":
        alpha = torch.randint(0, 3, (m, problem.experts)) / 2 * (torch.rand(m, problem.experts) < 0.3)
    return Operands(a, b, a_scale, b_scale, alpha), torch.full((m, problem.n), torch.nan)


def _fp4_matrix(rows: int, k: int, operand: Operand) -> tuple[Tensor, Tensor]:
    assert isinstance(operand.format, FP4Format) and operand.scale_layout is not None
    fmt = operand.format
    codes, scale = random_matrix(rows, k, fmt, operand.scale_layout.name, CPU, POWERS[fmt.scale_format])
    return codes, scale.view(fmt.scale_dtype)


def by_reference(case: OwnCase) -> Tensor:
    """Compute the case with the reference, in float64."""
    given, out = operands(case)
    Reference().launcher(case.problem, (), Target(CPU, None, 1))(given, out)
    return out


def by_emulator(case: OwnCase, seed: int | None) -> Tensor:
    """Compute the case in the emulator. ``seed`` selects the order of warps and copies."""
    given, out = operands(case)
    with _emulated(seed):
        _launcher(case, CPU)(given, out)
    return out


def by_gpu(case: OwnCase) -> Tensor:
    """Compute the case on this machine's GPU."""
    given, out = operands(case)
    device = torch.device("cuda", torch.cuda.current_device())
    result = out.to(device)
    moved: list[Any] = [None if one is None else _moved(one, device) for one in given]
    _launcher(case, device)(Operands(*moved), result)
    torch.cuda.synchronize()
    return result.cpu()


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def _launcher(case: OwnCase, device: torch.device) -> Callable[..., Any]:
    (backend,) = (one for one in BACKENDS if one.name == case.backend and one.handles(case.problem))
    return backend.launcher(case.problem, backend.named(case.tactic), Target(device, ARCHS[ARCH], SMS))


@contextmanager
def _emulated(seed: int | None) -> Iterator[None]:
    """Make the backends' launchers execute their kernels in the emulator while the ``with`` block runs."""

    def compile_kernel(kernel: Any, arch: Any) -> Callable[..., Any]:
        return lambda *call: run_kernel(kernel.make(), arch, *call, seed=seed, max_steps=2_000_000)

    with (
        mock.patch.object(fp4_backends, "compile_kernel", compile_kernel),
        mock.patch.object(fp8_backends, "compile_kernel", compile_kernel),
    ):
        yield
