"""Base classes of the FP8 backends."""

import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch

from torch_cute_ops.formats.fp8 import FP8_TENSOR, MXFP8
from torch_cute_ops.gemm.backend import Backend, Launch, Target
from torch_cute_ops.gemm.decode import reason_no_kernel, reason_no_wgmma
from torch_cute_ops.gemm.fp8_tiles import Tile
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import compile_kernel


def plan_of_tile(problem: GemmProblem, tile: Tile, arch: Arch) -> dict[str, Any]:
    """Return the arguments that all FP8 wgmma kernels' ``plan`` functions take."""
    return {
        "rows": problem.grouping.rows,
        "epilogue": problem.epilogue,
        "tile_m": tile.tile_m,
        "tile_n": tile.tile_n,
        "split_k": tile.split_k,
        "arch": arch,
        "pdl": settings.PDL,
        "static_weight": problem.static_weight,
        "prefetches": problem.prefetches,
    }


class FP8Tactic(NamedTuple):
    """Tactic of a wgmma backend.

    Attributes:
        tile_m: number of rows of ``a`` in a tile.
        tile_n: number of rows of the weight in a tile.
        split_k: number of CTAs that compute one tile, each over a range of K. They form a cluster.
    """

    tile_m: int
    tile_n: int
    split_k: int


class FP8Backend(Backend):
    """Base class of backends that launch one FP8 kernel, with or without experts over rows.

    Both operands have block scales, unless a subclass says otherwise.
    """

    tactic_type: ClassVar[Any] = FP8Tactic
    takes_row_scales: ClassVar[bool] = False
    """True if the weight may have a block scale for each row and 128 elements (1 × 128)."""

    @abc.abstractmethod
    def tile(self, tactic: Any) -> Tile:
        """Return the tile sizes of a tactic."""

    def handles(self, problem: GemmProblem) -> bool:
        if not problem.a.has_fp8_blocks or not problem.b.has_fp8_blocks:
            return False
        fits = self.takes_row_scales or not problem.b.scales_by_row
        return fits and problem.grouping.over in ("none", "rows")

    def epilogue(self, problem: GemmProblem) -> Epilogue:
        """Return the epilogue for the kernel's configuration."""
        return problem.epilogue

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return reason_no_kernel(target)

    def launcher(self, problem: GemmProblem, tactic: Any, target: Target) -> Launch:
        function, max_ctas, prefetches = self.compiled(problem, tactic, target)

        def launch(given: Operands, out: torch.Tensor) -> None:
            a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, _ = given
            following = prefetch if prefetches else None
            function(a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, following, max_ctas)

        return launch

    def compiled(self, problem: GemmProblem, tactic: Any, target: Target) -> tuple[Callable[..., None], int, bool]:
        """Return (compiled function, number of CTAs to launch, True if the kernel prefetches) for a tactic."""
        assert target.arch is not None
        (kernel,) = self.kernels(problem, tactic, target.arch)
        function = compile_kernel(kernel, target.arch)
        return function, self.ctas(problem, tactic, target), kernel.config.prefetches

    def ctas(self, problem: GemmProblem, tactic: Any, target: Target) -> int:
        """Return the number of CTAs that run at the same time."""
        tile = self.tile(tactic)
        return tile.clusters(target.sms) * tile.cluster

    def checks_operands(self, problem: GemmProblem, tactic: Any) -> bool:
        return True


class FP8TokenBackend(FP8Backend):
    """Base class of backends for FP8 operands without block scales: per-token or per-tensor scales of the activations,
    and per-channel or per-tensor scales of the weight. The weight's scales are the ``alpha`` of the kernel's
    epilogue."""

    def handles(self, problem: GemmProblem) -> bool:
        return has_token_scales(problem)

    def epilogue(self, problem: GemmProblem) -> Epilogue:
        return epilogue_of_token_scales(problem)

    def launcher(self, problem: GemmProblem, tactic: Any, target: Target) -> Launch:
        function, max_ctas, prefetches = self.compiled(problem, tactic, target)

        def launch(given: Operands, out: torch.Tensor) -> None:
            a, b, a_scale, b_scale, _, bias, offsets, counts, prefetch, _ = given
            following = prefetch if prefetches else None
            function(a, b, a_scale, None, offsets, counts, b_scale, bias, out, following, max_ctas)

        return launch


def has_token_scales(problem: GemmProblem) -> bool:
    """Return True if the problem multiplies FP8 matrices without block scales."""
    return problem.a.has_fp8_tokens and problem.b.is_fp8


def has_mxfp8(problem: GemmProblem) -> bool:
    """Return True if the problem multiplies MXFP8 matrices."""
    return problem.a.format == MXFP8


def has_blocks_and_fp4(problem: GemmProblem) -> bool:
    """Return True if the problem multiplies FP8 activations with block scales by an FP4 weight, plain or with experts
    over rows."""
    return problem.a.has_fp8_blocks and problem.b.is_fp4 and problem.grouping.over in ("none", "rows")


def has_tokens_and_fp4(problem: GemmProblem) -> bool:
    """Return True if the problem multiplies FP8 activations without block scales by an FP4 weight, plain or with
    experts over rows."""
    return problem.a.has_fp8_tokens and problem.b.is_fp4 and problem.grouping.over in ("none", "rows")


def epilogue_of_token_scales(problem: GemmProblem) -> Epilogue:
    """Return the epilogue of a problem without block scales, in which the weight's scales are ``alpha``."""
    has_one = problem.b.format == FP8_TENSOR
    if problem.grouping.over == "rows":
        return replace(problem.epilogue, alpha="expert" if has_one else "expert_column")
    return replace(problem.epilogue, alpha="one" if has_one else "column")


class FP8FP4Backend(FP8Backend):
    """Base class of the Hopper backends with block-scaled FP8 activations and an FP4 weight."""

    def handles(self, problem: GemmProblem) -> bool:
        return has_blocks_and_fp4(problem)

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return reason_no_wgmma(target)
