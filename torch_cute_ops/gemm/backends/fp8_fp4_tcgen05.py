"""GEMMs of FP8 activations and an FP4 weight on the tensor cores of data-center Blackwell: ``kernels/fp8_fp4_tcgen05``.

The GEMM may be plain or have experts over rows. With per-token scales, torch's operations prepare the weight's scales
at each call if they are not prepared, and restore the order of k if k of the activations is interleaved."""

from typing import ClassVar, Final

import torch

from torch_cute_ops.formats.interleave import deinterleave_k
from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp8 import has_tokens_and_fp4
from torch_cute_ops.gemm.backends.fp8_fp4_token_wgmma import PREPARE_SECONDS, prepared
from torch_cute_ops.gemm.backends.fp8_tcgen05 import FP8Tcgen05, FP8Tcgen05Tactic
from torch_cute_ops.gemm.decode import fp4_format, weight_scales
from torch_cute_ops.gemm.fp8_tiles import K_TILE
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp8_fp4_tcgen05
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

DECODING_INSTRUCTIONS: Final = {16: 400.0, 32: 330.0}
"""Instructions in which a thread decodes a weight row of a k tile, keyed by the elements of a block scale (counted in
the PTX of both formats)."""
DECODER_RATE: Final = 0.5
"""Instructions per clock that a decoder warp issues (a guess: its instructions depend on each other). The warps of a
team run on different schedulers of the SM."""
PROMOTION_CLOCKS: Final = 3.5
"""Clocks in which a warp loads a column of a k tile's accumulator, scales it and adds it to the sums: as in
``fp8_tcgen05``, and one for the product of the token's scale and the row's power of two."""


class FP8FP4Tcgen05(FP8Tcgen05):
    """Backend for FP8 activations with block scales and an FP4 weight. ``cta_group`` of its tactics is 1."""

    tiles: ClassVar = fp8_fp4_tcgen05.TILES_M
    promotion_clocks: ClassVar = PROMOTION_CLOCKS

    def handles(self, problem: GemmProblem) -> bool:
        return problem.a.has_fp8_blocks and problem.b.is_fp4 and problem.grouping.over in ("none", "rows")

    def weight_row_bytes(self, problem: GemmProblem) -> int:
        return K_TILE // 2 + K_TILE // fp4_format(problem).block_size

    def decoding_clocks(self, problem: GemmProblem, tile_m: int) -> float:
        instructions = DECODING_INSTRUCTIONS[fp4_format(problem).block_size]
        return instructions / DECODER_RATE / fp8_fp4_tcgen05.teams(self.has_blocks, tile_m)

    def kernels(self, problem: GemmProblem, tactic: FP8Tcgen05Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        config = fp8_fp4_tcgen05.plan(
            rows=problem.grouping.rows,
            epilogue=self.epilogue(problem),
            fmt=fp4_format(problem),
            layout=weight_scales(problem) if self.has_blocks else None,
            tile_m=tactic.tile_m,
            split_k=tactic.split_k,
            arch=arch,
            pdl=settings.PDL,
        )
        return (KernelSpec(fp8_fp4_tcgen05.KERNEL, config),)


class FP8FP4TokenTcgen05(FP8FP4Tcgen05):
    """Backend for FP8 activations with per-token or per-tensor scales, and an FP4 weight. Accumulators are fp32 in
    tensor memory, over a CTA's whole range of K, whatever ``fast_accum`` is."""

    has_blocks = False

    def handles(self, problem: GemmProblem) -> bool:
        return has_tokens_and_fp4(problem) and problem.grouping.over in ("none", "rows")

    def estimate(self, problem: GemmProblem, m: int, tactic: FP8Tcgen05Tactic, target: Target) -> float:
        seconds = super().estimate(problem, m, tactic, target)
        if problem.a.is_interleaved:
            seconds += cost.memory_seconds(2 * m * problem.k, 1, target)
        if not problem.b.is_prepared:
            seconds += PREPARE_SECONDS + problem.experts * problem.n * problem.k / cost.bytes_per_second(target)
        return seconds

    def launcher(self, problem: GemmProblem, tactic: FP8Tcgen05Tactic, target: Target) -> Launch:
        function, max_ctas, _ = self.compiled(problem, tactic, target)

        def launch(given: Operands, out: torch.Tensor) -> None:
            a, b, a_scale, b_scale, alpha, bias, offsets, counts, _ = given
            if problem.a.is_interleaved:
                a = deinterleave_k(a, problem.k)
            if not problem.b.is_prepared:
                b, b_scale = prepared(problem, b, b_scale)
            function(a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, None, max_ctas)

        return launch

    def checks_operands(self, problem: GemmProblem, tactic: FP8Tcgen05Tactic) -> bool:
        return problem.b.is_prepared and not problem.a.is_interleaved
