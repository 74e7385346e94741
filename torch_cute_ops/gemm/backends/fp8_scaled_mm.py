"""FP8 GEMMs with per-token, per-channel or per-tensor scales by PyTorch's scaled GEMM."""

from typing import Final

import torch

from torch_cute_ops.formats.fp8 import FP8_TENSOR
from torch_cute_ops.gemm.backend import Backend, Launch, Target
from torch_cute_ops.gemm.backends._fp8 import has_token_scales
from torch_cute_ops.gemm.cost import memory_seconds, tensor_core_seconds
from torch_cute_ops.gemm.decode import reason_no_kernel
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

MULTIPLE: Final = 16
"""Divisor that N must have in PyTorch's scaled GEMM."""
RATES: Final = {False: 1.8, True: 1.9}
"""Rate of FP8 GEMMs, divided by the rate of 16-bit GEMMs, keyed by ``fast_accum``. In three GEMMs with 4,096 rows on an
H200, the ratios were 1.75 to 1.91 and 1.86 to 1.94."""
RAMP_SECONDS: Final = 6e-6
"""Fixed time in seconds of a call, in addition to the time for its bytes or operations (fitted to calls with 256 rows
on an H200)."""

Tensor = torch.Tensor


class FP8ScaledMM(Backend):
    """Backend that calls ``torch._scaled_mm``, which runs a kernel of cuBLASLt or CUTLASS.

    If PyTorch supports the dtypes of the scales and of the bias, it applies both. Otherwise it computes sums in fp32,
    and separate kernels apply scales and bias. If N is not a multiple of 16, each call decodes the operands to
    bfloat16, which is exact, and multiplies the decoded operands.
    """

    name = "scaled_mm"

    def handles(self, problem: GemmProblem) -> bool:
        return has_token_scales(problem) and problem.grouping.over == "none"

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return reason_no_kernel(target)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        return ((),)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        flops, moved, acc_bytes = problem.flops(m), problem.bytes_moved(m), 4 * m * problem.n
        computed = tensor_core_seconds(flops, target) / RATES[problem.fast_accum]
        seconds = RAMP_SECONDS + max(computed, memory_seconds(moved, 1, target))
        if is_one_call(problem):
            return seconds
        if problem.n % MULTIPLE:
            decoded = 2 * problem.k * (problem.n + m)
            seconds = tensor_core_seconds(flops, target) + memory_seconds(moved + 2 * decoded, 3, target)
        # The fp32 sums are written once by the GEMM, then read and written by two other kernels.
        return seconds + memory_seconds(5 * acc_bytes, 3, target)

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        return ()

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        n, dtype, fast_accum = problem.n, problem.out_dtype, problem.fast_accum
        is_by_tensor = problem.a.format == problem.b.format == FP8_TENSOR

        def launch(given: Operands, out: Tensor) -> None:
            assert given.a_scale is not None
            if is_by_tensor:
                scales = given.a_scale[:1].reshape(1), given.b_scale
            else:
                scales = given.a_scale.contiguous(), given.b_scale.expand(n).contiguous()[None]
            torch._scaled_mm(
                given.a, given.b, *scales, bias=given.bias, out_dtype=dtype, use_fast_accum=fast_accum, out=out
            )

        def launch_sums(given: Operands, out: Tensor) -> None:
            assert given.a_scale is not None
            if n % MULTIPLE:
                a, b = given.a.bfloat16(), given.b.t().bfloat16().t()
                acc = torch.mm(a, b, out_dtype=torch.float32)
            else:
                acc, one = torch.empty_like(out, dtype=torch.float32), torch.ones(1, device=out.device)
                torch._scaled_mm(
                    given.a, given.b, one, one, out_dtype=torch.float32, use_fast_accum=fast_accum, out=acc
                )
            acc.mul_(given.a_scale).mul_(given.b_scale)
            if given.bias is not None:
                acc.add_(given.bias)
            out.copy_(acc)

        return launch if is_one_call(problem) else launch_sums


def is_one_call(problem: GemmProblem) -> bool:
    """Return True if PyTorch's scaled GEMM applies the scales and the bias of the problem."""
    dtypes = problem.out_dtype, problem.epilogue.bias_dtype or torch.bfloat16
    return problem.n % MULTIPLE == 0 and dtypes == (torch.bfloat16, torch.bfloat16)
