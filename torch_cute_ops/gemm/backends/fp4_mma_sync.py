"""GEMMs with an FP4 weight, with ``mma.sync``, for few rows, when reading the weight limits the speed.

The weight is decoded in registers. If the activations are FP4 too, and the GPU supports block-scaled ``mma.sync``, the
codes are multiplied without decoding.
"""

import itertools
from typing import NamedTuple

import torch

from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp4 import FP4KernelBackend
from torch_cute_ops.gemm.decode import (
    decoder,
    decoding_kernel,
    fp4_format,
    multiplies_codes,
    reason_not_words,
    sixteen_bit_dtype,
    weight_scales,
)
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp4_mma
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

SPLIT_K = (1, 2, 3, 4, 6, 8)
CTAS_PER_SM = (1, 2)
EFFICIENCY = 0.25
"""Rate of the tensor cores, divided by their rate in a good large GEMM. The rate is low because every warp reads all
activations of its CTA (180 TFLOP/s with 64 rows, measured on an H200)."""
DECODE_CLOCKS = 0.035
"""SM clocks to decode one weight element (measured on an H200)."""
WAVE_SECONDS = 1.5e-6
"""Time in seconds of a CTA's first copies and last partial sums (measured on an H200)."""
FP4_RATE = 4
"""Rate of the tensor cores with FP4 operands, divided by their rate with 16-bit operands (from the data sheet, not
measured)."""
DECODE_SECONDS = 5e-6
"""Time in seconds of the kernel that decodes FP4 activations, including its launch (measured on an H200)."""


class MmaSyncTactic(NamedTuple):
    """Tactic of ``FP4MmaSync``.

    Attributes:
        tile_m: number of rows of ``a`` in a tile.
        split_k: number of CTAs that compute one tile, each over a range of K. They form a cluster.
        ctas_per_sm: number of CTAs that run on an SM at the same time.
    """

    tile_m: int
    split_k: int
    ctas_per_sm: int


class FP4MmaSync(FP4KernelBackend):
    """Backend that multiplies with ``mma.sync``, on every GPU."""

    name = "mma_sync"
    tactic_type = MmaSyncTactic
    kernel = fp4_mma.KERNEL
    has_wgmma = False

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        return reason_not_words(problem)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[MmaSyncTactic, ...]:
        k_tiles = -(-problem.k // fp4_mma.K_TILE)
        widest = cost.smallest_tile(fp4_mma.TILES_M, m)
        every = itertools.starmap(MmaSyncTactic, itertools.product(fp4_mma.TILES_M, SPLIT_K, CTAS_PER_SM))
        tactics = [tactic for tactic in every if tactic.tile_m <= widest and tactic.split_k <= k_tiles]
        return self.buildable(problem, tactics, target)

    def estimate(self, problem: GemmProblem, m: int, tactic: MmaSyncTactic, target: Target) -> float:
        tile_m, split_k, ctas_per_sm = tactic
        ctas = -(-problem.n // fp4_mma.TILE_N) * -(-m // tile_m) * split_k
        slots = cost.places(target.sms * ctas_per_sm, split_k)
        waves = -(-ctas // slots)
        # The model assumes that each CTA gets a fixed share of the bandwidth, so a partial wave takes as long as a full
        # wave.
        weight_bytes = fp4_mma.TILE_N * problem.b.row_bytes(problem.k)
        by_codes = target.arch is not None and multiplies_codes(problem, target.arch)
        row_bytes = problem.a.row_bytes(problem.k) if by_codes else 2 * problem.k
        activation_bytes = 0.5 * tile_m * row_bytes  # halved, because L2 has about twice the bandwidth of memory
        read = (weight_bytes + activation_bytes) / split_k
        flops = 2 * fp4_mma.TILE_N * tile_m * problem.k // split_k
        multiplied = cost.tensor_core_seconds(flops * ctas_per_sm, target, sms=1) / EFFICIENCY
        decoded = cost.weight_seconds(fp4_mma.TILE_N * problem.k // split_k * ctas_per_sm, DECODE_CLOCKS)
        computed = multiplied / FP4_RATE if by_codes else cost.overlapped(decoded, multiplied, order=2)
        busy = cost.overlapped(computed, read / (cost.bytes_per_second(target) / slots), order=4)
        decoding = DECODE_SECONDS if problem.a.is_fp4 and not by_codes else 0.0
        return cost.LAUNCH_SECONDS + waves * (busy + WAVE_SECONDS) + decoding

    def config(self, problem: GemmProblem, tactic: MmaSyncTactic, arch: Arch) -> fp4_mma.Config | None:
        by_codes = multiplies_codes(problem, arch)
        return fp4_mma.plan(
            dtype=torch.uint8 if by_codes else sixteen_bit_dtype(problem),
            fmt=fp4_format(problem),
            layout=weight_scales(problem),
            epilogue=problem.epilogue,
            **tactic._asdict(),
            arch=arch,
            pdl=settings.PDL,
            a_layout=problem.a.scale_layout if by_codes else None,
        )

    def kernels(self, problem: GemmProblem, tactic: MmaSyncTactic, arch: Arch) -> tuple[KernelSpec, ...]:
        kernels, layout = super().kernels(problem, tactic, arch), problem.a.scale_layout
        if layout is None or multiplies_codes(problem, arch):
            return kernels
        return *kernels, decoding_kernel(problem, layout, sixteen_bit_dtype(problem))

    def launcher(self, problem: GemmProblem, tactic: MmaSyncTactic, target: Target) -> Launch:
        function, config = self.compiled(problem, tactic, target)
        by_codes = config.a_layout is not None
        dtype, layout = sixteen_bit_dtype(problem), problem.a.scale_layout
        decode = None if layout is None or by_codes else decoder(problem, layout, dtype, target)
        casts = problem.a.format not in (dtype, problem.b.format)

        def launch(given: Operands, out: torch.Tensor) -> None:
            a, b, a_scale, b_scale, alpha, bias, _, _, _, row_scale = given
            if decode is not None:
                assert a_scale is not None
                a = decode(a, a_scale)
            elif casts:
                a = a.to(dtype)
            function(a, a_scale if by_codes else None, b, b_scale, alpha, bias, row_scale, out)

        return launch

    def checks_operands(self, problem: GemmProblem, tactic: MmaSyncTactic) -> bool:
        return problem.a.format == sixteen_bit_dtype(problem)
