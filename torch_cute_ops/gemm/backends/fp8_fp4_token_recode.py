"""GEMMs of many rows of FP8 activations with per-token scales and an FP4 weight on Hopper.

A first kernel writes the weight to memory in FP8 (``kernels/fp8_fp4_token_recode``). Then ``kernels/fp8_token_wgmma``
multiplies, with the powers of two of the weight's rows as the scales of an FP8 weight. Recoding pays off if
``fast_accum`` is False: tiles of ``kernels/fp8_fp4_token_wgmma`` then contain at most 128 rows, and decoding takes
longer than the MMAs.
"""

from dataclasses import replace
from typing import Final

import torch

from torch_cute_ops.formats.fp8 import FP8_TOKEN
from torch_cute_ops.formats.interleave import INTERLEAVED_K
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp8 import FP8Tactic
from torch_cute_ops.gemm.backends.fp8_fp4_token_wgmma import (
    FP8FP4TokenWgmma,
    interleaved_rows,
    interleaving_kernels,
    interleaving_seconds,
    prepared,
    preparing_seconds,
)
from torch_cute_ops.gemm.backends.fp8_token_wgmma import FP8TokenWgmma
from torch_cute_ops.gemm.cost import bytes_per_second
from torch_cute_ops.gemm.decode import fp4_format
from torch_cute_ops.gemm.fp8_tiles import K_TILE
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem, Operand
from torch_cute_ops.kernels import fp8_fp4_token_recode, fp8_token_wgmma
from torch_cute_ops.kernels.fp8_token_wgmma import MANY
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator, contiguous_strides
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec, compile_kernel

RECODE_SECONDS: Final = 3e-6
RECODE_RATE: Final = 0.8
"""Time of the recoding kernel with almost no work, and the rate at which it reads and writes, divided by the rate of a
copy. Both values are taken from ``fp8_fp4_recode``."""


class FP8FP4TokenRecode(FP8FP4TokenWgmma):
    """Backend that recodes the weight to FP8 in temporary memory at each call."""

    name = "recode"

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        reason = super().reason_unsupported(problem, target)
        return reason or ("with fast_accum, wgmma is faster" if problem.fast_accum else None)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[FP8Tactic, ...]:
        return tuple(FP8Tactic(*tile) for tile in fp8_token_wgmma.TILES if tile[0] == MANY and tile[1] >= K_TILE)

    def estimate(self, problem: GemmProblem, m: int, tactic: FP8Tactic, target: Target) -> float:
        given, rate = recoded(problem), bytes_per_second(target)
        seconds = FP8TokenWgmma().estimate(given, m, tactic, target) + RECODE_SECONDS
        seconds += problem.experts * problem.n * (problem.b.row_bytes(problem.k) + given.k) / (RECODE_RATE * rate)
        return seconds + interleaving_seconds(problem, m, target) + preparing_seconds(problem, target)

    def kernels(self, problem: GemmProblem, tactic: FP8Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        recode = fp8_fp4_token_recode.Config(fp4_format(problem), problem.grouping.rows.is_plain, settings.PDL)
        return (
            *interleaving_kernels(problem),
            KernelSpec(fp8_fp4_token_recode.KERNEL, recode),
            *FP8TokenWgmma().kernels(recoded(problem), tactic, arch),
        )

    def launcher(self, problem: GemmProblem, tactic: FP8Tactic, target: Target) -> Launch:
        assert target.arch is not None
        *first, recode, _ = (
            compile_kernel(kernel, target.arch) for kernel in self.kernels(problem, tactic, target.arch)
        )
        interleave = first[0] if first else None
        given_fp8, device = recoded(problem), target.device
        multiply = FP8TokenWgmma().launcher(given_fp8, tactic, target)
        experts, n, is_plain = problem.experts, problem.n, problem.grouping.rows.is_plain
        shape = experts, n, given_fp8.k

        def launch(given: Operands, out: torch.Tensor) -> None:
            a, b, a_scale, b_scale, alpha, bias, offsets, counts, *_ = given
            if not problem.b.is_prepared:
                b, b_scale = prepared(problem, b, b_scale)
            a = interleaved_rows(interleave, a, problem.k)
            new = allocator(device)
            weight = new(shape, contiguous_strides(shape), torch.float8_e4m3fn)
            scales = new((experts, n), (n, 1), torch.float32)
            recode(b, b_scale, weight, scales)
            if alpha is not None:
                scales = scales * (alpha[:, None] if problem.epilogue.alpha == "expert" else alpha)
            if is_plain:
                weight, scales = weight[0], scales[0]
            multiply(Operands(a, weight.mT, a_scale, scales, None, bias, offsets, counts, None), out)

        return launch

    def checks_operands(self, problem: GemmProblem, tactic: FP8Tactic) -> bool:
        return False


def recoded(problem: GemmProblem) -> GemmProblem:
    """Return the problem of the GEMM with the recoded weight, whose K is a multiple of 256."""
    return replace(
        problem,
        a=replace(problem.a, is_interleaved=False),
        b=Operand(FP8_TOKEN),
        k=-(-problem.k // INTERLEAVED_K) * INTERLEAVED_K,
        epilogue=replace(problem.epilogue, alpha=None),
        static_weight=False,
        prefetches=False,
    )
