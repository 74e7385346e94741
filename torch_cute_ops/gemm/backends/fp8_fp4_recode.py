"""FP8 activations and an FP4 weight on Hopper, for many rows: ``kernels/fp8_fp4_recode`` writes the weight to memory in
FP8, and then multiplies as with an FP8 weight.

Either the first kernel ends before the GEMM starts. Or it writes the rows that the GEMM's first tiles need, and another
launch of few CTAs, each on an SM of its own, writes the rest while the GEMM runs, whose tiles wait for their rows.
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
"""Time of the first kernel with next to no work (measured on an H200)."""
RECODE_RATE = 0.82
"""Rate at which it reads and writes, over that of a copy (measured on an H200)."""
BESIDE: Final = (8, 12)
"""SMs that write the weight beside the GEMM."""
MOST_BESIDE: Final = 4
"""At most one SM in so many."""
BESIDE_RATE = 40e9
"""Bytes that such an SM reads and writes a second, while the others multiply (measured on an H100)."""
BEHIND_SLOWDOWN, BESIDE_SLOWDOWN = 1.07, 1.04
"""Time of the GEMM behind the kernel that writes the weight, or beside it, over its time on as many SMs with an FP8
weight (measured on an H200; on an H100 1.17 and 1.04)."""
WAVES_FIRST = 2
"""Waves of the GEMM's tiles whose rows are written before it starts."""
LEAST_BESIDE = 0.75
"""Least share of the weight to be written beside the GEMM for which that is offered."""


class FP8FP4Recode(FP8FP4Backend):
    """A tactic is (rows of ``a`` in a tile, rows of the weight, SMs that write the weight beside the GEMM)."""

    name = "recode"

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        """Beside the GEMM only without experts: the host does not know their rows, and with few of them all would wait
        for few SMs."""
        tiles = MANY, fp8_fp4_recode.NOTE_ROWS
        few = first_tiles(problem, m, target) > (1 - LEAST_BESIDE) * weight_tiles(problem)
        if few or not settings.PDL or not problem.grouping.rows.is_plain:
            return ((*tiles, 0),)
        return tuple((*tiles, sms) for sms in (0, *BESIDE) if sms <= target.sms // MOST_BESIDE)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        beside = sms_beside(tactic)
        weight = problem.experts * problem.n * (problem.b.row_bytes(problem.k) + problem.k)
        multiply = many_rows_seconds(self.tile(tactic), problem, m, replace(target, sms=target.sms - beside))
        if beside == 0:
            first, multiply = 1.0, BEHIND_SLOWDOWN * multiply
        else:
            first = first_tiles(problem, m, target) / max(weight_tiles(problem), 1)
            write = (1 - first) * weight / (BESIDE_RATE * beside)
            # The first strip of tiles of rows needs all of the weight.
            strips = -(-m // (MANY * fp8_fp4_recode.RASTER))
            multiply *= BESIDE_SLOWDOWN
            multiply = max(multiply, write + multiply * (strips - 1) / strips)
        return RECODE_SECONDS + first * weight / (RECODE_RATE * bytes_per_second(target)) + multiply

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        rows, pdl, beside = problem.grouping.rows, settings.PDL, sms_beside(tactic) > 0
        recode = fp8_fp4_recode.WeightConfig(fp4_format(problem), weight_scales(problem), rows.is_plain, pdl)
        multiply = fp8_fp4_recode.plan(rows=rows, epilogue=problem.epilogue, arch=arch, pdl=pdl, overlaps_recode=beside)
        recoding = (recode, replace(recode, overlaps_gemm=True)) if beside else (recode,)
        return *(KernelSpec(fp8_fp4_recode.WEIGHT_KERNEL, each) for each in recoding), KernelSpec(
            fp8_fp4_recode.KERNEL, multiply
        )

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        assert target.arch is not None
        *recoding, multiply = (
            compile_kernel(kernel, target.arch) for kernel in self.kernels(problem, tactic, target.arch)
        )
        device, experts, n, k = target.device, problem.experts, problem.n, problem.k
        is_plain, beside = problem.grouping.rows.is_plain, sms_beside(tactic)
        max_ctas = self.tile(tactic).clusters(target.sms - beside)
        shape, strides = (experts, n, k), (n * k, k, 1)
        words, tiles = fp8_fp4_recode.note_words(n, k, experts), weight_tiles(problem)

        def launch(given: Operands, out: torch.Tensor) -> None:
            new = allocator(device)
            weight = new(shape, strides, torch.float8_e4m3fn)
            notes = new((words,), (1,), torch.int32)
            first = first_tiles(problem, out.shape[0], target) if beside else tiles
            for recode in recoding:
                recode(given.b, given.b_scale, weight, notes, first, beside)
            recoded = weight[0].t() if is_plain else weight
            multiply(
                *(given.a, recoded, given.a_scale, notes, given.offsets, given.counts),
                *(given.alpha, given.bias, out, None, max_ctas),
            )

        return launch

    def checks_operands(self, problem: GemmProblem, tactic: Tactic) -> bool:
        return False

    def tile(self, tactic: Tactic) -> Tile:
        tokens, columns, _ = map(int, tactic)
        return Tile(tokens, columns)


def sms_beside(tactic: Tactic) -> int:
    """SMs of a tactic that write the weight beside the GEMM."""
    return int(tactic[-1])


def weight_tiles(problem: GemmProblem) -> int:
    """Tiles of rows of the weight, of all experts."""
    return problem.experts * -(-problem.n // fp8_fp4_recode.NOTE_ROWS)


def first_tiles(problem: GemmProblem, m: int, target: Target) -> int:
    """Tiles of rows of the weight that are written before the GEMM of ``m`` rows starts, if others are beside it."""
    rows = min(-(-m // MANY), fp8_fp4_recode.RASTER)
    return min(weight_tiles(problem), WAVES_FIRST * -(-target.sms // max(1, rows)))
