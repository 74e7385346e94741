"""GEMMs of FP8 activations with per-token scales and an FP4 weight, by Hopper's wgmma: ``kernels/fp8_fp4_token_wgmma``.

The GEMM may be plain or have experts over rows. If k of the activations is not interleaved, a first kernel interleaves
it (``kernels/interleave_k``). If the weight's scales are not prepared, torch's operations prepare them at each call."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.formats.interleave import INTERLEAVED_K
from torch_cute_ops.formats.prepared_scales import prepared_of_linear
from torch_cute_ops.formats.scale_layout import to_linear
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp8 import FP8Backend, FP8Tactic, has_tokens_and_fp4, plan_of_tile
from torch_cute_ops.gemm.cost import bytes_per_second
from torch_cute_ops.gemm.decode import fp4_format, reason_no_wgmma, weight_scales
from torch_cute_ops.gemm.fp8_tiles import K_TILE, Tile, has_random_rows, rows_of_expert
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp8_fp4_token_wgmma, interleave_k
from torch_cute_ops.kernels.common.core.layouts import WGMMA_M
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator, contiguous_strides
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec, compile_kernel

# Fitted to times of every tactic on an H200 (five weight shapes, 1 to 4,096 rows). The root mean square of the error
# is 3 to 18 %, depending on ``tile_m``.

K_TILE_CLOCKS: Final = {8: 410.0, 16: 410.0, 32: 420.0, 64: 700.0, 128: 830.0, 256: 1120.0}
"""SM clocks per k tile, keyed by ``tile_m``."""
TWO_K_GROUPS: Final = 500.0
"""SM clocks per k tile for tiles of 64 rows with two K groups."""
TILE_CLOCKS: Final = {8: 1600.0, 16: 2000.0, 32: 2400.0, 64: 3000.0, 128: 4600.0, 256: 7200.0}
"""SM clocks between two tiles, in which no MMAs run, keyed by ``tile_m``."""
SHARE_CLOCKS: Final = {8: 1000.0, 16: 1200.0, 32: 1200.0, 64: 2500.0, 128: 1500.0, 256: 3500.0}
"""SM clocks to add the partial sums of a tile, for each CTA of the cluster after the first, keyed by ``tile_m``."""
MANY_SPLIT: Final = 4
"""Largest number of m tiles for which K is split, if the tiles have more than 64 rows."""
INTERLEAVE_SECONDS: Final = 1.5e-6
"""Time in seconds by which a separate launch that interleaves few rows delays the GEMM. Not measured."""
PREPARE_SECONDS: Final = 80e-6
"""Time in seconds to prepare the scales of a small weight at each call, by some 25 launches. Not measured."""
SIGNS: Final = 0x80
"""Sign bit of an e4m3 scale."""


class FP8FP4TokenWgmma(FP8Backend):
    """Backend for FP8 activations with per-token scales and an FP4 weight, on Hopper."""

    name = "wgmma"

    def handles(self, problem: GemmProblem) -> bool:
        return has_tokens_and_fp4(problem)

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return reason_no_wgmma(target)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[FP8Tactic, ...]:
        rows = rows_of_expert(problem, m)
        # With random routing, most experts own less than twice the mean number of rows.
        most = 2 * rows if has_random_rows(problem) else rows
        tactics = [
            tactic
            for tactic in itertools.starmap(FP8Tactic, fp8_fp4_token_wgmma.TILES)
            if (problem.fast_accum or tactic.tile_m != fp8_fp4_token_wgmma.FAST_TILE_M)
            and (tactic.split_k == 1 or rows <= tactic.tile_m * (MANY_SPLIT if tactic.tile_m > WGMMA_M else 1))
        ]
        widest = min((tactic.tile_m for tactic in tactics if tactic.tile_m >= most), default=max(tactics).tile_m)
        return tuple(tactic for tactic in tactics if tactic.tile_m <= widest)

    def estimate(self, problem: GemmProblem, m: int, tactic: FP8Tactic, target: Target) -> float:
        tile = self.tile(tactic)
        size, split_k = tile.tile_m, tile.split_k
        clocks = TWO_K_GROUPS if (size, split_k, problem.fast_accum) == (WGMMA_M, 1, True) else K_TILE_CLOCKS[size]
        clocks += TILE_CLOCKS[size] * K_TILE * split_k / max(problem.k, K_TILE)
        seconds = tile.seconds(problem, m, target, clocks, 0.0, problem.b.row_bytes(K_TILE), SHARE_CLOCKS[size])
        return seconds + interleaving_seconds(problem, m, target) + preparing_seconds(problem, target)

    def kernels(self, problem: GemmProblem, tactic: FP8Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        if not problem.a.is_interleaved:
            # The kernel that interleaves k waits for all earlier kernels before it lets the GEMM start. So the weight
            # is complete when the GEMM starts.
            problem = replace(problem, static_weight=True)
        elif not problem.b.is_prepared:
            problem = replace(problem, static_weight=False)  # the launches right before the GEMM write the weight
        given = plan_of_tile(problem, self.tile(tactic), arch)
        config = fp8_fp4_token_wgmma.plan(**given, fmt=fp4_format(problem), fast_accum=problem.fast_accum)
        return *interleaving_kernels(problem), KernelSpec(fp8_fp4_token_wgmma.KERNEL, config)

    def launcher(self, problem: GemmProblem, tactic: FP8Tactic, target: Target) -> Launch:
        assert target.arch is not None
        kernels = self.kernels(problem, tactic, target.arch)
        *first, multiply = (compile_kernel(kernel, target.arch) for kernel in kernels)
        tile, interleave = self.tile(tactic), first[0] if first else None
        max_ctas, prefetches = tile.clusters(target.sms) * tile.cluster, kernels[-1].config.prefetches

        def launch(given: Operands, out: torch.Tensor) -> None:
            a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, _ = given
            if not problem.b.is_prepared:
                b, b_scale = prepared(problem, b, b_scale)
            a = interleaved_rows(interleave, a, problem.k)
            following = prefetch if prefetches else None
            multiply(a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, following, max_ctas)

        return launch

    def checks_operands(self, problem: GemmProblem, tactic: FP8Tactic) -> bool:
        return problem.a.is_interleaved and problem.b.is_prepared

    def tile(self, tactic: FP8Tactic) -> Tile:
        return Tile(*tactic)


def interleaving_seconds(problem: GemmProblem, m: int, target: Target) -> float:
    """Estimate the time to interleave k of the activations during a call: 0 if it is interleaved."""
    return 0.0 if problem.a.is_interleaved else INTERLEAVE_SECONDS + 2 * m * problem.k / bytes_per_second(target)


def preparing_seconds(problem: GemmProblem, target: Target) -> float:
    """Estimate the time to prepare the weight's scales during a call: 0 if they are prepared."""
    if problem.b.is_prepared:
        return 0.0
    return PREPARE_SECONDS + problem.experts * problem.n * problem.k / bytes_per_second(target)


def interleaving_kernels(problem: GemmProblem) -> tuple[KernelSpec, ...]:
    """Return the kernel that interleaves k of the activations, or no kernel if k is interleaved."""
    return () if problem.a.is_interleaved else (KernelSpec(interleave_k.KERNEL, interleave_k.Config(settings.PDL)),)


def interleaved_rows(interleave: Callable[..., None] | None, a: torch.Tensor, k: int) -> torch.Tensor:
    """Return activations whose k is interleaved, as (..., K rounded up to a multiple of 256).

    Args:
        interleave: kernel that interleaves k, or None if ``a`` is already interleaved.
        a: activations (..., K), or (..., ⌈K/256⌉, 256) if already interleaved.
        k: number of elements of a row, without padding.
    """
    if interleave is None:
        return a.flatten(-2)
    padded = -(-k // INTERLEAVED_K) * INTERLEAVED_K
    shape = (*a.shape[:-1], padded)
    to = allocator(a.device)(shape, contiguous_strides(shape), a.dtype)
    interleave(a.reshape(-1, k), to.view(-1, padded))
    return to


def arranging(launch: Launch, problem: GemmProblem, arrange: Callable[[torch.Tensor], torch.Tensor]) -> Launch:
    """Return a function that launches a GEMM with prepared scales of the weight, which it prepares if they are not.

    Args:
        launch: function that launches the GEMM.
        problem: problem whose operands calls pass.
        arrange: function that returns interleaved activations as ``launch`` takes them.
    """

    def launch_arranged(given: Operands, out: torch.Tensor) -> None:
        a, b, a_scale, b_scale, *rest = given
        if problem.a.is_interleaved:
            a = arrange(a)
        if not problem.b.is_prepared:
            b, b_scale = prepared(problem, b, b_scale)
        launch(Operands(a, b, a_scale, b_scale, *rest), out)

    return launch_arranged


def prepared(problem: GemmProblem, b: torch.Tensor, b_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Prepare the scales of a weight during a call. Return the weight and its prepared scales.

    Prepared scales have no sign. So the signs of negative scales move to the codes of their blocks, in a copy.
    """
    fmt, layout = fp4_format(problem), weight_scales(problem)
    experts = problem.experts if problem.grouping.over == "rows" else None
    rows, blocks = problem.n * (experts or 1), problem.k // fmt.block_size
    linear = to_linear(b_scale.view(fmt.scale_dtype), layout, rows, blocks).view(rows, blocks)
    scales = prepared_of_linear(linear, problem.n, fmt, experts)
    if fmt == MXFP4:
        return b, scales
    signs = linear.view(torch.uint8) & SIGNS
    flips = (signs | signs >> 4).repeat_interleave(fmt.block_size // 2, 1)
    codes = b.mT
    return (codes.view(torch.uint8) ^ flips.view(codes.shape)).mT, scales
