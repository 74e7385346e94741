"""FP4 weights by ``mma.sync``: for few rows, where the weight's bytes take the time.

They are decoded in registers; but where the activations are FP4 too, and the GPU has block-scaled ``mma.sync``, that
multiplies codes, and nothing is decoded.
"""

import itertools

import torch

from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp4 import FP4KernelBackend
from torch_cute_ops.gemm.decode import (
    decoder,
    decoding_kernel,
    fp4_format,
    reason_not_words,
    sixteen_bit_dtype,
    weight_scales,
)
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels import fp4_mma
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

SPLITS = (1, 2, 3, 4, 6, 8)
CTAS_PER_SM = (1, 2)
EFFICIENCY = 0.25
"""Tensor-core rate as a share of what a good large GEMM reaches: every warp reads all activations of its CTA (measured
on an H200: 180 TFLOP/s with 64 tokens)."""
DECODE_CLOCKS = 0.035
"""SM clocks to decode a weight (measured on an H200)."""
WAVE_SECONDS = 1.5e-6
"""Prologue and epilogue of a CTA: the first copies, the last sums (measured on an H200)."""
FP4_RATE = 4
"""Tensor-core rate of FP4 over that of 16 bits (by data sheet: nothing of this has been measured)."""
DECODE_SECONDS = 5e-6
"""Time of the kernel that decodes FP4 activations, and of the additional launch (measured on an H200)."""


class FP4MmaSync(FP4KernelBackend):
    """A tactic is (rows of ``a`` per CTA, CTAs that split K, CTAs per SM)."""

    name = "mma_sync"
    kernel = fp4_mma.KERNEL
    has_wgmma = False

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        return reason_not_words(problem)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        chunks = -(-problem.k // fp4_mma.K_TILE)
        widest = cost.smallest_tile(fp4_mma.TILES_M, m)
        every = itertools.product(fp4_mma.TILES_M, SPLITS, CTAS_PER_SM)
        tactics = [tactic for tactic in every if tactic[0] <= widest and tactic[1] <= chunks]
        return self.buildable(problem, tactics, target)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        tokens, splits, ctas_per_sm = map(int, tactic)
        ctas = -(-problem.n // fp4_mma.TILE_N) * -(-m // tokens) * splits
        slots = cost.places(target.sms * ctas_per_sm, splits)
        waves = -(-ctas // slots)
        # A CTA of a partial wave takes as long as in a full one: it reads at its share of the bandwidth.
        weight = fp4_mma.TILE_N * problem.b.row_bytes(problem.k)
        native = target.arch is not None and _multiplies_codes(problem, target.arch)
        row_bytes = problem.a.row_bytes(problem.k) if native else 2 * problem.k
        activations = 0.5 * tokens * row_bytes  # from L2, at about twice the bandwidth of memory
        read = (weight + activations) / splits
        flops = 2 * fp4_mma.TILE_N * tokens * problem.k // splits
        multiplied = cost.tensor_core_seconds(flops * ctas_per_sm, target, sms=1) / EFFICIENCY
        decoded = cost.weight_seconds(fp4_mma.TILE_N * problem.k // splits * ctas_per_sm, DECODE_CLOCKS)
        computed = multiplied / FP4_RATE if native else cost.overlapped(decoded, multiplied, order=2)
        busy = cost.overlapped(computed, read / (cost.bytes_per_second(target) / slots), order=4)
        return cost.LAUNCH_SECONDS + waves * (busy + WAVE_SECONDS) + DECODE_SECONDS * (problem.a.is_fp4 and not native)

    def config(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> fp4_mma.Config | None:
        tokens, splits, ctas_per_sm = map(int, tactic)
        native = _multiplies_codes(problem, arch)
        return fp4_mma.plan(
            dtype=torch.uint8 if native else sixteen_bit_dtype(problem),
            fmt=fp4_format(problem),
            layout=weight_scales(problem),
            epilogue=problem.epilogue,
            tile_m=tokens,
            split_k=splits,
            ctas_per_sm=ctas_per_sm,
            arch=arch,
            pdl=settings.PDL,
            a_layout=problem.a.scale_layout if native else None,
        )

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        kernels, layout = super().kernels(problem, tactic, arch), problem.a.scale_layout
        if layout is None or _multiplies_codes(problem, arch):
            return kernels
        return *kernels, decoding_kernel(problem, layout, sixteen_bit_dtype(problem))

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        function, config = self.compiled(problem, tactic, target)
        if config.a_layout is not None:
            return lambda a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, out: function(
                a, a_scale, b, b_scale, alpha, bias, out
            )
        dtype, layout = sixteen_bit_dtype(problem), problem.a.scale_layout
        if layout is not None:
            decode = decoder(problem, layout, dtype, target)
            return lambda a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, out: function(
                decode(a, a_scale), None, b, b_scale, alpha, bias, out
            )
        if problem.a.format != dtype:
            return lambda a, b, _, b_scale, alpha, bias, offsets, counts, prefetch, out: function(
                a.to(dtype), None, b, b_scale, alpha, bias, out
            )
        return lambda a, b, _, b_scale, alpha, bias, offsets, counts, prefetch, out: function(
            a, None, b, b_scale, alpha, bias, out
        )

    def checks_operands(self, problem: GemmProblem, tactic: Tactic) -> bool:
        return problem.a.format == sixteen_bit_dtype(problem)


def _multiplies_codes(problem: GemmProblem, arch: Arch) -> bool:
    return problem.a.is_fp4 and arch.has_block_scaled_mma
