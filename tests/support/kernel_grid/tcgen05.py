"""Cases of FP4 GEMMs by tcgen05, dense and over experts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch

from support.epilogues import epilogues
from support.kernel_grid.common import BF16, FP16, FP32, KernelCase, epilogue_id, short
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.kernels import fp4_tcgen05, fp4_tcgen05_experts
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.runtime.arch import ARCHS as GPU_ARCHS

TCGEN05_ARCHS = ("sm_100a", "sm_103a")

TCGEN05_KINDS = tuple(itertools.product((NVFP4, MXFP4), ("128x4", "linear")))

TCGEN05_TILES = tuple(
    [(tokens, 1, splits) for tokens in (8, 16, 32, 64, 128) for splits in (1, 2, 4, 8)] + [(256, 1, 1), (256, 2, 1)]
)


@dataclass(frozen=True)
class Tcgen05Case(KernelCase):
    """GEMM of two FP4 operands by tcgen05. ``cta_group`` is the number of CTAs that share an MMA."""

    format: FP4Format
    layout: str
    tile_m: int
    cta_group: int
    split_k: int
    epilogue: Epilogue
    stages: int | None = None
    arch: str = "sm_100a"

    @property
    def id(self) -> str:
        tile = f"{self.tile_m}by{self.split_k}" if self.cta_group == 1 else f"{self.tile_m}of2"
        return "-".join(("tcgen05", self.format.name, self.layout, tile, epilogue_id(self.epilogue), self.arch))

    @property
    def role(self) -> Any:
        return type(self), self.tile_m, self.cta_group, self.split_k

    @property
    def kernel(self) -> Any:
        """Kernel as the backend builds it, but with fewer pipeline stages if the case asks for them."""
        config = fp4_tcgen05.plan(
            fmt=self.format,
            layout=SCALE_LAYOUTS[self.layout],
            epilogue=self.epilogue,
            tile_m=self.tile_m,
            cta_group=self.cta_group,
            split_k=self.split_k,
            arch=GPU_ARCHS[self.arch],
            pdl=True,
        )
        assert config is not None
        return fp4_tcgen05.FP4Tcgen05Kernel(replace(config, stages=self.stages or config.stages))


def tcgen05_cases(every: bool) -> list[Tcgen05Case]:
    """Return cases with all kinds of operands and tiles for each architecture if ``every``, and otherwise with a fourth
    of them.

    Architectures and epilogues alternate from case to case.
    """
    finish, archs = itertools.cycle(epilogues((None, "one", "column"))), itertools.cycle(TCGEN05_ARCHS)
    return [
        Tcgen05Case(*kind, *tile, next(finish), arch=arch)
        for (i, kind), (j, tile) in itertools.product(enumerate(TCGEN05_KINDS), enumerate(TCGEN05_TILES))
        if every or (i + j) % 4 == 0
        for arch in (TCGEN05_ARCHS if every else [next(archs)])
    ]


@dataclass(frozen=True)
class Tcgen05ExpertsCase(KernelCase):
    """GEMM of two FP4 operands by tcgen05 over experts, each with ``expert_k`` elements of K. If ``routed``, experts
    without tokens are skipped."""

    format: FP4Format
    layout: str
    tile_n: int
    classes: int
    routed: bool
    out_dtype: torch.dtype
    expert_k: int
    stages: int | None = None
    arch: str = "sm_100a"
    bias_dtype: torch.dtype | None = None

    @property
    def id(self) -> str:
        tile = f"{self.tile_n}by{self.classes}{'routed' if self.routed else 'dense'}of{self.expert_k}"
        bias = [] if self.bias_dtype is None else [f"bias_{short(self.bias_dtype)[0]}"]
        dtypes = short(self.out_dtype)[0], *bias
        return "-".join(("tcgen05_experts", self.format.name, self.layout, tile, *dtypes, self.arch))

    @property
    def role(self) -> Any:
        return type(self), self.tile_n, self.classes > 1, self.routed

    @property
    def kernel(self) -> Any:
        """Kernel as the backend builds it, but with fewer pipeline stages if the case asks for them."""
        config = fp4_tcgen05_experts.plan(
            fmt=self.format,
            layout=SCALE_LAYOUTS[self.layout],
            out_dtype=self.out_dtype,
            expert_k=self.expert_k,
            tile_n=self.tile_n,
            classes=self.classes,
            routed=self.routed,
            arch=GPU_ARCHS[self.arch],
            pdl=True,
            bias_dtype=self.bias_dtype,
        )
        assert config is not None
        return fp4_tcgen05_experts.FP4Tcgen05ExpertsKernel(replace(config, stages=self.stages or config.stages))


def tcgen05_experts_cases(every: bool) -> list[Tcgen05ExpertsCase]:
    """Return cases with all kinds of operands and tiles for each architecture if ``every``, and otherwise with a few of
    them.

    Architectures, widths and dtypes alternate from case to case.
    """
    widths, archs = itertools.cycle((256, 320, 64, 2048, 768)), itertools.cycle(TCGEN05_ARCHS)
    outs = itertools.cycle((BF16, FP16, FP32))
    tiles = [*itertools.product((128, 64, 32), (1, 2, 3, 5, 8), (False, True))]
    biases = itertools.cycle((None, FP32, "out", None))
    cases = [
        Tcgen05ExpertsCase(*kind, *tile, next(outs), next(widths), arch=next(archs))
        for (i, kind), (j, tile) in itertools.product(enumerate(TCGEN05_KINDS), enumerate(tiles))
        if (every or (5 * i + j) % 13 == 0) and not (kind[1] == "linear" and tile[0] == 128)
    ]
    return [
        replace(case, bias_dtype=case.out_dtype if bias == "out" else bias, arch=arch)
        for case, bias in zip(cases, biases, strict=False)
        if bias is None or case.layout != "linear" or case.tile_n == 32
        for arch in (TCGEN05_ARCHS if every else [case.arch])
    ]
