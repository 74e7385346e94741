"""MXFP8 GEMMs by Hopper's wgmma, plain or grouped by rows: ``kernels/mxfp8_wgmma`` and ``kernels/fp8_wgmma``."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Final, NamedTuple

import torch

from torch_cute_ops.formats import SCALE_LAYOUTS, ScaleLayout
from torch_cute_ops.formats.scale_layout import layout_of_operand
from torch_cute_ops.formats.token_scales import with_alpha
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp8 import FP8Tactic, has_mxfp8, plan_of_tile
from torch_cute_ops.gemm.backends.fp8_mma_sync import mx_words_of
from torch_cute_ops.gemm.backends.fp8_wgmma import SHARE_CLOCKS, FP8Wgmma
from torch_cute_ops.gemm.cost import memory_seconds
from torch_cute_ops.gemm.fp8_tiles import Tile
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp8_wgmma, mxfp8_fold, mxfp8_wgmma
from torch_cute_ops.kernels.mxfp8_wgmma import MANY
from torch_cute_ops.reference.mm_fp8_block import linear_mx_scales
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec, compile_kernel

LINEAR: Final = SCALE_LAYOUTS["linear"]
LAYOUTS: Final = (LINEAR, SCALE_LAYOUTS["128x4"])
"""Layouts of scales that the folding kernel reads. Scales in other layouts are first converted to linear scales."""
DECODED_CLOCKS: Final = {128: (790.0, 4.3), 64: (500.0, 2.2)}
"""SM clocks per k tile if decoder warps fold the weight, keyed by ``tile_n``: fixed clocks, and clocks per row of ``a``
(fitted to GEMMs with 1 to 4,096 rows on an H200)."""

Tensor = torch.Tensor


class MXFP8Tactic(NamedTuple):
    """Tactic of ``MXFP8Wgmma``.

    Attributes:
        tile_m: number of rows of ``a`` in a tile.
        tile_n: number of rows of the weight in a tile.
        split_k: number of CTAs that compute one tile, each over a range of K. They form a cluster.
        folds_first: True if a kernel folds the weight before the GEMM, False if the GEMM's decoder warps fold it.
    """

    tile_m: int
    tile_n: int
    split_k: int
    folds_first: bool = False


class MXFP8Wgmma(FP8Wgmma):
    """Backend for MXFP8 operands on Hopper.

    Each 128 elements of a row get one scale, which rounds elements below 2^-6 times the largest scale of the 128
    elements (``kernels.mxfp8_fold``). A kernel folds the activations before the GEMM. The weight is folded by the
    GEMM's decoder warps. With many rows, a kernel folds the weight before the GEMM to one scale per row, which the
    epilogue applies, so that the mainloop is as fast as with scales of 128 × 128 elements. Decoder warps read words of
    four scales, so scales that are not linear, or whose rows are not whole words (K is no multiple of 128), are first
    rearranged.
    """

    tactic_type: ClassVar[Any] = MXFP8Tactic

    def handles(self, problem: GemmProblem) -> bool:
        return has_mxfp8(problem) and problem.grouping.over in ("none", "rows")

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[MXFP8Tactic, ...]:  # type: ignore[override]
        tiles = super().tactics(problem, m, target)
        # In the masked layout, experts may own far fewer rows than the buffer reserves, so that copying the weights of
        # all experts would take most of the time.
        may_fold = not problem.grouping.rows.is_masked
        many = [MXFP8Tactic(*tile, True) for tile in tiles if tile.tile_m == MANY and may_fold]
        return *(MXFP8Tactic(*tile) for tile in tiles), *many

    def estimate(self, problem: GemmProblem, m: int, tactic: MXFP8Tactic, target: Target) -> float:  # type: ignore[override]
        tile = self.tile(tactic)
        rows = m * (problem.experts if problem.grouping.rows.is_masked else 1)
        folding = memory_seconds(2 * rows * problem.k, 1, target)
        if tactic.folds_first:
            copying = memory_seconds(2 * problem.experts * problem.n * problem.k, 1, target)
            multiplying = super().estimate(problem, m, FP8Tactic(*tactic[:3]), target)
            return folding + copying + multiplying
        fixed, of_row = DECODED_CLOCKS[tile.tile_n]
        clocks = fixed + of_row * tile.tile_m
        return folding + tile.seconds(problem, m, target, clocks, 0.0, share_clocks=SHARE_CLOCKS)

    def kernels(self, problem: GemmProblem, tactic: MXFP8Tactic, arch: Arch) -> tuple[KernelSpec, ...]:  # type: ignore[override]
        granularities = (False, True) if tactic.folds_first else (False,)
        folding = (folding_kernel(problem.k, layout, by_row) for by_row in granularities for layout in LAYOUTS)
        return self._gemm_kernel(problem, tactic, arch), *folding

    def _gemm_kernel(self, problem: GemmProblem, tactic: MXFP8Tactic, arch: Arch) -> KernelSpec:
        given = plan_of_tile(problem, self.tile(tactic), arch)
        if tactic.folds_first:
            is_plain = problem.grouping.over == "none"
            given["epilogue"] = replace(problem.epilogue, alpha="column" if is_plain else "expert_column")
            return KernelSpec(fp8_wgmma.KERNEL, fp8_wgmma.plan(**given, weight_scales="alpha"))
        return KernelSpec(mxfp8_wgmma.KERNEL, mxfp8_wgmma.plan(**given))

    def launcher(self, problem: GemmProblem, tactic: MXFP8Tactic, target: Target) -> Launch:
        assert target.arch is not None
        kernel = self._gemm_kernel(problem, tactic, target.arch)
        multiply, prefetches = compile_kernel(kernel, target.arch), kernel.config.prefetches
        fold, max_ctas = folder(problem.k, target), self.ctas(problem, tactic, target)
        fold_weight = folder(problem.k, target, by_row=True) if tactic.folds_first else None

        def launch(given: Operands, out: Tensor) -> None:
            assert given.a_scale is not None
            b, alpha, b_scale = given.b, given.alpha, None
            if fold_weight is None:
                b_scale = mx_words_of(given.b_scale, b.mT.shape)
            else:
                weight, powers = fold_weight(b.mT, given.b_scale)
                b, alpha = weight.mT, with_alpha(powers.squeeze(-1), alpha)
            a, a_scale = fold(given.a, given.a_scale)
            rows, following = (given.offsets, given.counts), given.prefetch if prefetches else None
            multiply(a, b, a_scale, b_scale, *rows, alpha, given.bias, out, following, max_ctas)

        return launch

    def tile(self, tactic: Any) -> Tile:
        return Tile(*tactic[:3])


def folder(k: int, target: Target, by_row: bool = False) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a function that folds MXFP8 rows (..., K), contiguous, whose scales are bytes in any layout.

    The function returns elements (..., K) float8_e4m3fn, and scales (..., ⌈K/128⌉) float32, which form one column per
    128 elements over all leading dimensions; if ``by_row``, scales (..., 1).
    """
    assert target.arch is not None
    functions = {layout: compile_kernel(folding_kernel(k, layout, by_row), target.arch) for layout in LAYOUTS}
    groups, max_ctas = 1 if by_row else -(-k // mxfp8_fold.GROUP), target.sms * mxfp8_fold.CTAS_PER_SM

    def fold(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        *lead, _ = codes.shape
        rows, layout, allocate = codes.numel() // k, layout_of_operand(scale), allocator(target.device)
        if layout not in functions or not scale.is_contiguous():
            scale, layout = linear_mx_scales(scale, rows, k).contiguous(), LINEAR
        elif layout is LINEAR:
            scale = scale.view(rows, -1)
        folded, powers = allocate((rows, k), (k, 1), codes.dtype), allocate((groups, rows), (rows, 1), torch.float32)
        functions[layout](codes.view(rows, k), scale.view(torch.uint8), folded, powers, max_ctas)
        return folded.view(codes.shape), powers.view(groups, *lead).movedim(0, -1)

    return fold


def folding_kernel(k: int, layout: ScaleLayout, by_row: bool = False) -> KernelSpec:
    """Return the kernel that folds rows of ``k`` elements, with scales in this layout."""
    return KernelSpec(mxfp8_fold.KERNEL, mxfp8_fold.plan(k, layout, settings.PDL, by_row))
