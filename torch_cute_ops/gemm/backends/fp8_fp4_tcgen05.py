"""GEMMs of FP8 activations and an FP4 weight on the tensor cores of data-center Blackwell.

An MXFP4 weight is multiplied without decoding if K is a multiple of 128 (``kernels/fp8_mxfp4_tcgen05``). Other weights
are decoded to FP8 (``kernels/fp8_fp4_tcgen05``). The GEMM may be plain or have experts over rows. With per-token
scales, torch's operations prepare the weight's scales at each call if they are not prepared, and restore the order of k
if the activations are interleaved along k."""

from collections.abc import Mapping
from typing import Any, Final

import torch

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.formats.interleave import deinterleave_k
from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp8 import has_blocks_and_fp4, has_tokens_and_fp4
from torch_cute_ops.gemm.backends._tcgen05 import Tcgen05Tactic
from torch_cute_ops.gemm.backends.fp8_fp4_token_wgmma import arranging, preparing_seconds
from torch_cute_ops.gemm.backends.fp8_tcgen05 import FP8Tcgen05
from torch_cute_ops.gemm.decode import fp4_format, weight_scales
from torch_cute_ops.gemm.fp8_tiles import K_TILE
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp8_fp4_tcgen05, fp8_mxfp4_tcgen05
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

DECODING_INSTRUCTIONS: Final = {16: 400.0, 32: 330.0}
"""Number of instructions with which a thread decodes a weight row of a k tile, keyed by the block size of the format.
Counted in the PTX."""
DECODER_RATE: Final = 0.5
"""Instructions per clock that a decoder warp issues. Not measured: a guess below 1, because the instructions depend on
each other. The warps of a team run on different schedulers of the SM."""
PROMOTION_CLOCKS: Final = 3.5
"""Clocks in which a warp loads a column of a k tile's accumulator, scales it and adds it to the sums: one more than in
``fp8_tcgen05``, for the product of the token's scale and the row's power of two."""


class FP8FP4Tcgen05(FP8Tcgen05):
    """Backend for FP8 activations with block scales and an FP4 weight. ``cta_group`` of its tactics is 1."""

    def handles(self, problem: GemmProblem) -> bool:
        return has_blocks_and_fp4(problem)

    def tiles_m(self, problem: GemmProblem) -> Mapping[tuple[bool, int], tuple[int, ...]]:
        return fp8_mxfp4_tcgen05.TILES_M if is_undecoded(problem) else fp8_fp4_tcgen05.TILES_M

    def promotion_clocks(self, problem: GemmProblem) -> float:
        return super().promotion_clocks(problem) if is_undecoded(problem) else PROMOTION_CLOCKS

    def weight_row_bytes(self, problem: GemmProblem) -> int:
        return K_TILE // 2 + K_TILE // fp4_format(problem).block_size

    def decoding_clocks(self, problem: GemmProblem, tile_m: int) -> float:
        if is_undecoded(problem):
            return 0.0
        instructions = DECODING_INSTRUCTIONS[fp4_format(problem).block_size]
        return instructions / DECODER_RATE / fp8_fp4_tcgen05.teams(self.has_blocks, tile_m)

    def kernels(self, problem: GemmProblem, tactic: Tcgen05Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        given: dict[str, Any] = {
            "rows": problem.grouping.rows,
            "epilogue": self.epilogue(problem),
            "layout": weight_scales(problem) if self.has_blocks else None,
            "tile_m": tactic.tile_m,
            "split_k": tactic.split_k,
            "arch": arch,
            "pdl": settings.PDL,
        }
        if is_undecoded(problem):
            return (KernelSpec(fp8_mxfp4_tcgen05.KERNEL, fp8_mxfp4_tcgen05.plan(**given)),)
        return (KernelSpec(fp8_fp4_tcgen05.KERNEL, fp8_fp4_tcgen05.plan(fmt=fp4_format(problem), **given)),)

    def launcher(self, problem: GemmProblem, tactic: Tcgen05Tactic, target: Target) -> Launch:
        launch = super().launcher(problem, tactic, target)
        if not is_undecoded(problem):
            return launch
        return lambda given, out: launch(given._replace(b=aligned_codes(given.b)), out)

    def checks_operands(self, problem: GemmProblem, tactic: Tcgen05Tactic) -> bool:
        return not is_undecoded(problem)


class FP8FP4TokenTcgen05(FP8FP4Tcgen05):
    """Backend for FP8 activations with per-token or per-tensor scales, and an FP4 weight. Regardless of
    ``fast_accum``, fp32 accumulators in tensor memory sum over a CTA's whole range of K."""

    has_blocks = False

    def handles(self, problem: GemmProblem) -> bool:
        return has_tokens_and_fp4(problem)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tcgen05Tactic, target: Target) -> float:
        seconds = super().estimate(problem, m, tactic, target)
        if problem.a.is_interleaved:
            seconds += cost.memory_seconds(2 * m * problem.k, 1, target)
        return seconds + preparing_seconds(problem, target)

    def launcher(self, problem: GemmProblem, tactic: Tcgen05Tactic, target: Target) -> Launch:
        launch = super().launcher(problem, tactic, target)
        return arranging(launch, problem, lambda a: deinterleave_k(a, problem.k))

    def checks_operands(self, problem: GemmProblem, tactic: Tcgen05Tactic) -> bool:
        return super().checks_operands(problem, tactic) and problem.b.is_prepared and not problem.a.is_interleaved


def is_undecoded(problem: GemmProblem) -> bool:
    """Return True if the tensor cores multiply the weight's codes without decoding them first."""
    return fp4_format(problem) == MXFP4 and problem.k % fp8_mxfp4_tcgen05.MULTIPLE == 0


def aligned_codes(b: torch.Tensor) -> torch.Tensor:
    """Return a weight's codes, copied if their address or strides lack the alignment that TMA needs to spread them."""
    starts = b.data_ptr(), *b.stride()[:-2]
    return b.mT.contiguous().clone().mT if any(start % fp8_mxfp4_tcgen05.ALIGN for start in starts) else b
