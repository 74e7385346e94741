"""GEMMs of many rows of FP8 activations and an FP4 weight on Hopper, by ``kernels/fp8_fp4_recode``.

A first kernel writes the weight to memory in FP8. The GEMM then multiplies as with an FP8 weight. The first kernel
writes either all weight rows before the GEMM starts, or only the rows that the GEMM's first tiles need. In the second
case, another launch writes the other rows while the GEMM runs. This launch consists of few CTAs, each on a separate SM.
Each tile of the GEMM waits until its weight rows are written.
"""

from dataclasses import replace
from typing import Final, NamedTuple

import torch

from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp8 import FP8FP4Backend
from torch_cute_ops.gemm.backends.fp8_wgmma import many_rows_seconds
from torch_cute_ops.gemm.cost import bytes_per_second
from torch_cute_ops.gemm.decode import fp4_format, weight_scales
from torch_cute_ops.gemm.fp8_tiles import Tile
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp8_fp4_recode
from torch_cute_ops.kernels.fp8_wgmma import MANY
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec, compile_kernel

RECODE_SECONDS = 3e-6
"""Time in seconds of the recoding kernel with almost no work (measured on an H200)."""
RECODE_RATE = 0.82
"""Rate at which the recoding kernel reads and writes, divided by the rate of a copy (measured on an H200)."""
RECODE_SMS: Final = (8, 12)
"""Supported numbers of SMs that recode while the GEMM runs."""
MIN_SMS_PER_RECODE_SM: Final = 4
"""Smallest allowed ratio of the GPU's SMs to the SMs that recode."""
OVERLAPPED_RATE = 40e9
"""Bytes per second that an SM reads and writes while it recodes during the GEMM (measured on an H100)."""
AFTER_SLOWDOWN, OVERLAPPED_SLOWDOWN = 1.07, 1.04
"""Time of the GEMM, divided by the time of a GEMM with an FP8 weight on the same number of SMs, in two cases: the GEMM
runs after the recoding kernel, or the two kernels overlap. Both ratios were measured on an H200. On an H100 they are
1.17 and 1.04."""
WAVES_FIRST = 2
"""Number of waves of the GEMM's tiles whose weight rows are recoded before the GEMM starts."""
LEAST_OVERLAPPED = 0.75
"""Smallest fraction of the weight that must be recoded during the GEMM. If it is less, the tactic is not offered."""


class RecodeTactic(NamedTuple):
    """Tactic of ``FP8FP4Recode``.

    Attributes:
        tile_m: number of rows of ``a`` in a tile of the GEMM.
        tile_n: number of rows of the weight in a tile.
        recode_sms: number of SMs that recode while the GEMM runs, or 0 to recode the whole weight before the GEMM.
    """

    tile_m: int
    tile_n: int
    recode_sms: int


class FP8FP4Recode(FP8FP4Backend):
    """Backend that recodes the weight to FP8 in temporary memory at each call."""

    name = "recode"
    tactic_type = RecodeTactic

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[RecodeTactic, ...]:
        """Return the tactics. With experts, recoding never overlaps the GEMM.

        The host does not know the experts' numbers of rows. If only a few experts had rows, all CTAs would wait for the
        few SMs that recode.
        """
        tile = MANY, fp8_fp4_recode.NOTE_ROWS
        few = first_tiles(problem, m, target) > (1 - LEAST_OVERLAPPED) * weight_tiles(problem)
        if few or not settings.PDL or not problem.grouping.rows.is_plain:
            return (RecodeTactic(*tile, 0),)
        most = target.sms // MIN_SMS_PER_RECODE_SM
        return tuple(RecodeTactic(*tile, sms) for sms in (0, *RECODE_SMS) if sms <= most)

    def estimate(self, problem: GemmProblem, m: int, tactic: RecodeTactic, target: Target) -> float:
        sms = tactic.recode_sms
        weight_bytes = problem.experts * problem.n * (problem.b.row_bytes(problem.k) + problem.k)
        multiply = many_rows_seconds(self.tile(tactic), problem, m, replace(target, sms=target.sms - sms))
        if sms == 0:
            first, multiply = 1.0, AFTER_SLOWDOWN * multiply
        else:
            first = first_tiles(problem, m, target) / max(weight_tiles(problem), 1)
            recode = (1 - first) * weight_bytes / (OVERLAPPED_RATE * sms)
            # The first strip of m tiles needs the whole weight. So recoding has ended before the second strip begins.
            strips = -(-m // (MANY * fp8_fp4_recode.RASTER))
            multiply *= OVERLAPPED_SLOWDOWN
            multiply = max(multiply, recode + multiply * (strips - 1) / strips)
        return RECODE_SECONDS + first * weight_bytes / (RECODE_RATE * bytes_per_second(target)) + multiply

    def kernels(self, problem: GemmProblem, tactic: RecodeTactic, arch: Arch) -> tuple[KernelSpec, ...]:
        family, rows, pdl, overlaps = fp8_fp4_recode, problem.grouping.rows, settings.PDL, tactic.recode_sms > 0
        recode = family.WeightConfig(fp4_format(problem), weight_scales(problem), rows.is_plain, pdl)
        multiply = family.plan(rows=rows, epilogue=problem.epilogue, arch=arch, pdl=pdl, overlaps_recode=overlaps)
        recoding = [KernelSpec(family.WEIGHT_KERNEL, recode)]
        if overlaps:
            recoding.append(KernelSpec(family.WEIGHT_KERNEL, replace(recode, overlaps_gemm=True)))
        return *recoding, KernelSpec(family.KERNEL, multiply)

    def launcher(self, problem: GemmProblem, tactic: RecodeTactic, target: Target) -> Launch:
        assert target.arch is not None
        *recoding, multiply = (
            compile_kernel(kernel, target.arch) for kernel in self.kernels(problem, tactic, target.arch)
        )
        device, experts, n, k = target.device, problem.experts, problem.n, problem.k
        is_plain, recode_sms = problem.grouping.rows.is_plain, tactic.recode_sms
        max_ctas = self.tile(tactic).clusters(target.sms - recode_sms)
        shape, strides = (experts, n, k), (n * k, k, 1)
        words, tiles = fp8_fp4_recode.note_words(n, k, experts), weight_tiles(problem)

        def launch(given: Operands, out: torch.Tensor) -> None:
            new = allocator(device)
            weight = new(shape, strides, torch.float8_e4m3fn)
            notes = new((words,), (1,), torch.int32)
            first = first_tiles(problem, out.shape[0], target) if recode_sms else tiles
            for recode in recoding:
                recode(given.b, given.b_scale, weight, notes, first, recode_sms)
            recoded = (weight[0] if is_plain else weight).mT
            multiply(
                *(given.a, recoded, given.a_scale, notes, given.offsets, given.counts),
                *(given.alpha, given.bias, out, None, max_ctas),
            )

        return launch

    def checks_operands(self, problem: GemmProblem, tactic: RecodeTactic) -> bool:
        return False

    def tile(self, tactic: RecodeTactic) -> Tile:
        return Tile(tactic.tile_m, tactic.tile_n)


def weight_tiles(problem: GemmProblem) -> int:
    """Return the number of n tiles of all experts together."""
    return problem.experts * -(-problem.n // fp8_fp4_recode.NOTE_ROWS)


def first_tiles(problem: GemmProblem, m: int, target: Target) -> int:
    """Return the number of n tiles that are recoded before a GEMM of ``m`` rows starts. The remaining n tiles are
    recoded while the GEMM runs."""
    rows = min(-(-m // MANY), fp8_fp4_recode.RASTER)
    return min(weight_tiles(problem), WAVES_FIRST * -(-target.sms // max(1, rows)))
