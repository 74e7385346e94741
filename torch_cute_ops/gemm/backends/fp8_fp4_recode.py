"""FP8 activations and an FP4 weight on Hopper, for many rows: ``kernels/fp8_fp4_recode`` writes the weight to memory in
FP8, and then multiplies as with an FP8 weight.

Either the first kernel ends before the GEMM starts. Or it writes the rows that the GEMM's first tiles need, and another
launch of few CTAs, each on its own SM, writes the rest while the GEMM runs, whose tiles wait for their rows.
"""

from dataclasses import replace
from typing import Final

import torch

from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp8 import FP8FP4Backend
from torch_cute_ops.gemm.backends.fp8_wgmma import many_rows_seconds
from torch_cute_ops.gemm.cost import bytes_per_second
from torch_cute_ops.gemm.decode import fp4_format, weight_scales
from torch_cute_ops.gemm.fp8_tiles import Tile
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels import fp8_fp4_recode
from torch_cute_ops.kernels.fp8_wgmma import MANY
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec, compile_kernel

RECODE_SECONDS = 3e-6
"""Time of the first kernel with hardly any work (measured on an H200)."""
RECODE_RATE = 0.82
"""Rate at which the first kernel reads and writes, over the rate of a copy (measured on an H200)."""
WRITERS: Final = (8, 12)
"""Numbers of SMs that write the weight while the GEMM runs."""
MIN_SMS_PER_WRITER: Final = 4
"""At most one SM in four writes."""
WRITER_RATE = 40e9
"""Bytes a second that such an SM reads and writes while the others multiply (measured on an H100)."""
AFTER_SLOWDOWN, OVERLAP_SLOWDOWN = 1.07, 1.04
"""Time of the GEMM after the kernel that writes the weight, or during it, over its time on the same number of SMs with
an FP8 weight (measured on an H200; on an H100 1.17 and 1.04)."""
WAVES_FIRST = 2
"""Waves of the GEMM's tiles whose rows are written before it starts."""
MIN_OVERLAP = 0.75
"""Smallest share of the weight that must be left to write during the GEMM to offer overlap."""


class FP8FP4Recode(FP8FP4Backend):
    """Tactics are (tile_m, tile_n, SMs that write the weight while the GEMM runs)."""

    name = "recode"

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        """Offer overlap only without experts: the host does not know their rows, and with few rows all CTAs would
        wait for few SMs."""
        tiles = MANY, fp8_fp4_recode.NOTE_ROWS
        few = first_tiles(problem, m, target) > (1 - MIN_OVERLAP) * weight_tiles(problem)
        if few or not settings.PDL or not problem.grouping.rows.is_plain:
            return ((*tiles, 0),)
        return tuple((*tiles, sms) for sms in (0, *WRITERS) if sms <= target.sms // MIN_SMS_PER_WRITER)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        writers = writer_sms(tactic)
        weight = problem.experts * problem.n * (problem.b.row_bytes(problem.k) + problem.k)
        multiply = many_rows_seconds(self.tile(tactic), problem, m, replace(target, sms=target.sms - writers))
        if writers == 0:
            first, multiply = 1.0, AFTER_SLOWDOWN * multiply
        else:
            first = first_tiles(problem, m, target) / max(weight_tiles(problem), 1)
            write = (1 - first) * weight / (WRITER_RATE * writers)
            # The first strip of row tiles needs all of the weight.
            strips = -(-m // (MANY * fp8_fp4_recode.RASTER))
            multiply *= OVERLAP_SLOWDOWN
            multiply = max(multiply, write + multiply * (strips - 1) / strips)
        return RECODE_SECONDS + first * weight / (RECODE_RATE * bytes_per_second(target)) + multiply

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        rows, pdl, overlaps = problem.grouping.rows, settings.PDL, writer_sms(tactic) > 0
        recode = fp8_fp4_recode.WeightConfig(fp4_format(problem), weight_scales(problem), rows.is_plain, pdl)
        multiply = fp8_fp4_recode.plan(
            rows=rows, epilogue=problem.epilogue, arch=arch, pdl=pdl, overlaps_recode=overlaps
        )
        recoding = (recode, replace(recode, overlaps_gemm=True)) if overlaps else (recode,)
        return *(KernelSpec(fp8_fp4_recode.WEIGHT_KERNEL, each) for each in recoding), KernelSpec(
            fp8_fp4_recode.KERNEL, multiply
        )

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        assert target.arch is not None
        *recoding, multiply = (
            compile_kernel(kernel, target.arch) for kernel in self.kernels(problem, tactic, target.arch)
        )
        device, experts, n, k = target.device, problem.experts, problem.n, problem.k
        is_plain, writers = problem.grouping.rows.is_plain, writer_sms(tactic)
        max_ctas = self.tile(tactic).clusters(target.sms - writers)
        shape, strides = (experts, n, k), (n * k, k, 1)
        words, tiles = fp8_fp4_recode.note_words(n, k, experts), weight_tiles(problem)

        def launch(given: Operands, out: torch.Tensor) -> None:
            new = allocator(device)
            weight = new(shape, strides, torch.float8_e4m3fn)
            notes = new((words,), (1,), torch.int32)
            first = first_tiles(problem, out.shape[0], target) if writers else tiles
            for recode in recoding:
                recode(given.b, given.b_scale, weight, notes, first, writers)
            recoded = weight[0].t() if is_plain else weight
            multiply(
                *(given.a, recoded, given.a_scale, notes, given.offsets, given.counts),
                *(given.alpha, given.bias, out, None, max_ctas),
            )

        return launch

    def checks_operands(self, problem: GemmProblem, tactic: Tactic) -> bool:
        return False

    def tile(self, tactic: Tactic) -> Tile:
        tile_m, tile_n, _ = map(int, tactic)
        return Tile(tile_m, tile_n)


def writer_sms(tactic: Tactic) -> int:
    """Return the number of SMs that write the weight while the GEMM runs."""
    return int(tactic[-1])


def weight_tiles(problem: GemmProblem) -> int:
    """Return the number of weight tiles of all experts."""
    return problem.experts * -(-problem.n // fp8_fp4_recode.NOTE_ROWS)


def first_tiles(problem: GemmProblem, m: int, target: Target) -> int:
    """Return the number of weight tiles that are written before a GEMM of ``m`` rows that overlaps the rest."""
    rows = min(-(-m // MANY), fp8_fp4_recode.RASTER)
    return min(weight_tiles(problem), WAVES_FIRST * -(-target.sms // max(1, rows)))
