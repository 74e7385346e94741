"""Cases of GEMMs by tcgen05: FP4, dense and over experts, 16 bits by FP4, FP8, and FP8 by FP4."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch

from support.epilogues import epilogues
from support.kernel_grid.common import BF16, FP16, FP32, PER_COLUMN, KernelCase, epilogue_id, short
from support.kernel_grid.fp8_gemms import FP8_LAYOUTS, has_factors
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.kernels import (
    fp4_tcgen05,
    fp4_tcgen05_experts,
    fp4_tcgen05_gated_experts,
    fp4_weight_tcgen05,
    fp8_fp4_tcgen05,
    fp8_mxfp4_tcgen05,
    fp8_tcgen05,
    mxfp8_tcgen05,
)
from torch_cute_ops.kernels.common.blackwell.layouts import MMA_M
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.common.experts.gated_layouts import GatedEpilogue
from torch_cute_ops.kernels.common.fp8.layouts import ExpertLayout
from torch_cute_ops.runtime.arch import ARCHS as GPU_ARCHS
from torch_cute_ops.runtime.compiler import KernelSpec

TCGEN05_ARCHS = ("sm_100a", "sm_103a")

TCGEN05_KINDS = tuple(itertools.product((NVFP4, MXFP4), ("128x4", "linear")))

TCGEN05_TILES = tuple(
    [(tokens, 1, splits) for tokens in (8, 16, 32, 64, 128) for splits in (1, 2, 4, 8)] + [(256, 1, 1), (256, 2, 1)]
)


@dataclass(frozen=True, kw_only=True)
class Tcgen05KernelCase(KernelCase):
    """Base class of the cases.

    Attributes:
        stages: number of pipeline stages, or None for the largest number that fits.
        arch: name of the architecture.
        package: package of the kernel.
    """

    stages: int | None = None
    arch: str = "sm_100a"
    package: ClassVar[Any]

    @property
    def given(self) -> dict[str, Any]:
        """Fields of the configuration, by name. By default, they are the fields of the case."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("stages", "arch")}

    @property
    def kernel(self) -> Any:
        """Kernel as the backend builds it, but with fewer pipeline stages if the case asks for them."""
        config = self.package.plan(**self.given, arch=GPU_ARCHS[self.arch], pdl=True)
        assert config is not None
        return KernelSpec(self.package.KERNEL, replace(config, stages=self.stages or config.stages)).make()


def tile_id(case: Any) -> str:
    """Return an id part for a tile that CTAs share: the CTAs split K, or two CTAs share each MMA."""
    return f"{case.tile_m}by{case.split_k}" if case.cta_group == 1 else f"{case.tile_m}of2"


@dataclass(frozen=True)
class Tcgen05Case(Tcgen05KernelCase):
    """GEMM of two FP4 operands by tcgen05. ``cta_group`` is the number of CTAs that share an MMA."""

    format: FP4Format
    layout: str
    tile_m: int
    cta_group: int
    split_k: int
    epilogue: Epilogue
    package: ClassVar = fp4_tcgen05

    @property
    def id(self) -> str:
        return "-".join(
            ("tcgen05", self.format.name, self.layout, tile_id(self), epilogue_id(self.epilogue), self.arch)
        )

    @property
    def role(self) -> Any:
        return type(self), self.tile_m, self.cta_group, self.split_k

    @property
    def given(self) -> dict[str, Any]:
        return {
            "fmt": self.format,
            "layout": SCALE_LAYOUTS[self.layout],
            "epilogue": self.epilogue,
            "tile_m": self.tile_m,
            "cta_group": self.cta_group,
            "split_k": self.split_k,
        }


def tcgen05_cases(every: bool) -> list[Tcgen05Case]:
    """If ``every``, return a case for each combination of operands, tile and architecture. Otherwise return a fourth of
    the combinations of operands and tile, each for one architecture.

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
class Tcgen05ExpertsCase(Tcgen05KernelCase):
    """GEMM of two FP4 operands by tcgen05 over experts, each with ``expert_k`` elements of K. If ``routed``, experts
    without tokens are skipped."""

    format: FP4Format
    layout: str
    tile_n: int
    classes: int
    routed: bool
    out_dtype: torch.dtype
    expert_k: int
    package: ClassVar = fp4_tcgen05_experts
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
    def given(self) -> dict[str, Any]:
        return {
            "fmt": self.format,
            "layout": SCALE_LAYOUTS[self.layout],
            "out_dtype": self.out_dtype,
            "expert_k": self.expert_k,
            "tile_n": self.tile_n,
            "classes": self.classes,
            "routed": self.routed,
            "bias_dtype": self.bias_dtype,
        }


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


@dataclass(frozen=True)
class Tcgen05GatedCase(Tcgen05KernelCase):
    """First GEMM of experts, with its gate, of two FP4 operands by tcgen05. ``epilogue`` contains arguments of
    ``GatedEpilogue``."""

    format: FP4Format
    layout: str
    tile_n: int
    epilogue: tuple[Any, ...]
    package: ClassVar = fp4_tcgen05_gated_experts

    @property
    def id(self) -> str:
        named = (getattr(each, "name", None) or str(each).removeprefix("torch.") for each in self.epilogue)
        return "-".join(("tcgen05_gated", self.format.name, self.layout, str(self.tile_n), *named, self.arch))

    @property
    def role(self) -> Any:
        return type(self), self.tile_n

    @property
    def a_layout(self) -> str:
        """Scale layout of the activations, which equals the scale layout of the weight."""
        return self.layout

    @property
    def given(self) -> dict[str, Any]:
        return {
            "fmt": self.format,
            "layout": SCALE_LAYOUTS[self.layout],
            "epilogue": GatedEpilogue(*self.epilogue),
            "tile_n": self.tile_n,
        }

    def kernel_for(self, k: int) -> Any:
        """Return the kernel, which does not depend on K."""
        return self.kernel


def tcgen05_gated_cases(every: bool) -> list[Tcgen05GatedCase]:
    """Return cases with all kinds of operands and tiles for each architecture if ``every``, and otherwise with a third
    of them.

    Architectures and epilogues alternate from case to case.
    """
    archs, finish = itertools.cycle(TCGEN05_ARCHS), itertools.cycle(range(5))
    cases = []
    for (i, (fmt, layout)), (j, tile_n) in itertools.product(
        enumerate(TCGEN05_KINDS), enumerate(fp4_tcgen05_gated_experts.TILES_N)
    ):
        scale = "expert" if fmt == NVFP4 else None
        epilogues = (
            (fmt, SCALE_LAYOUTS["128x4"], "expert", None, scale and "one", "silu"),
            (fmt, SCALE_LAYOUTS["linear"], "expert_half", FP32, scale, "swiglu", True),
            (BF16, None, None, BF16, None, "gelu"),
            (fmt, SCALE_LAYOUTS["8x4"], "expert", FP32, None, "gelu_tanh", True),
            (FP16, None, "expert", None, None, "relu2", True),
        )
        arch, epilogue = next(archs), epilogues[next(finish)]
        if every or (i + j) % 3 == 0:
            cases += [
                Tcgen05GatedCase(fmt, layout, tile_n, epilogue, arch=one)
                for one in (TCGEN05_ARCHS if every else (arch,))
            ]
    return cases


WEIGHT_TCGEN05_KINDS = (*((dtype, NVFP4) for dtype in (BF16, FP16)), (BF16, MXFP4))

WEIGHT_TCGEN05_TILES = tuple(
    (tile_m, split_k) for tile_m in fp4_weight_tcgen05.TILES_M for split_k in fp4_weight_tcgen05.split_ks(tile_m)
)


@dataclass(frozen=True)
class WeightTcgen05Case(Tcgen05KernelCase):
    """GEMM of 16-bit activations and an FP4 weight by tcgen05. ``dtype`` is the dtype of the MMAs' operands."""

    dtype: torch.dtype
    fmt: FP4Format
    layout: str
    tile_m: int
    split_k: int
    epilogue: Epilogue
    package: ClassVar = fp4_weight_tcgen05

    @property
    def id(self) -> str:
        kind = short(self.dtype)[0], self.fmt.name, self.layout, f"{self.tile_m}by{self.split_k}"
        return "-".join(("weight_tcgen05", *kind, epilogue_id(self.epilogue), self.arch))

    @property
    def role(self) -> Any:
        return type(self), self.dtype, self.fmt, self.layout, self.tile_m, min(self.split_k, 2)

    @property
    def given(self) -> dict[str, Any]:
        return super().given | {"layout": SCALE_LAYOUTS[self.layout]}


def weight_tcgen05_cases(every: bool) -> list[WeightTcgen05Case]:
    """Return cases of each tile: without split-K, and with one other ``split_k``. If ``every``, return all ``split_k``,
    with all kinds of operands, for each architecture.

    Architectures, kinds of operands and epilogues alternate from case to case.
    """
    archs, finish = itertools.cycle(TCGEN05_ARCHS), itertools.cycle(epilogues((None, "one", "column")))
    splits = itertools.cycle(fp4_weight_tcgen05.split_ks(MMA_M)[1:])
    chosen = {tile_m: next(splits) for tile_m in fp4_weight_tcgen05.TILES_M}
    kinds = [(*kind, layout) for layout in ("128x4", "linear") for kind in WEIGHT_TCGEN05_KINDS]
    others, cases = itertools.cycle(kinds), []
    for tile_m, split_k in WEIGHT_TCGEN05_TILES:
        if not every and split_k not in (1, chosen[tile_m]):
            continue
        arch = next(archs)
        for kind in kinds if every else (next(others),):
            one = WeightTcgen05Case(*kind, tile_m, split_k, next(finish))
            cases += [replace(one, arch=each) for each in (TCGEN05_ARCHS if every else (arch,))]
    return cases


FP8_TCGEN05_TILES = tuple(
    (has_blocks, tile_m, cta_group, split_k)
    for (has_blocks, cta_group), tiles in fp8_tcgen05.TILES_M.items()
    for tile_m in tiles
    for split_k in fp8_tcgen05.splits(ExpertLayout(), has_blocks, tile_m, cta_group)
)


@dataclass(frozen=True)
class FP8Tcgen05Case(Tcgen05KernelCase):
    """GEMM of two FP8 operands by tcgen05.

    Attributes:
        layout: expert layout, a key of ``FP8_LAYOUTS``.
        has_blocks, tile_m, cta_group, split_k, epilogue, stages, arch: fields of the configuration.
    """

    layout: str
    has_blocks: bool
    tile_m: int
    cta_group: int
    split_k: int
    epilogue: Epilogue
    package: ClassVar = fp8_tcgen05

    @property
    def id(self) -> str:
        scales = "block" if self.has_blocks else "token"
        return "-".join(("fp8_tcgen05", scales, self.layout, tile_id(self), epilogue_id(self.epilogue), self.arch))

    @property
    def role(self) -> Any:
        tile = self.has_blocks, self.tile_m, self.cta_group, self.split_k > 1
        return type(self), tile, has_factors(self.epilogue)

    @property
    def given(self) -> dict[str, Any]:
        return {
            "rows": ExpertLayout(*FP8_LAYOUTS[self.layout]),
            "epilogue": self.epilogue,
            "has_blocks": self.has_blocks,
            "tile_m": self.tile_m,
            "cta_group": self.cta_group,
            "split_k": self.split_k,
        }


def fp8_tcgen05_cases(every: bool) -> list[FP8Tcgen05Case]:
    """Return cases of each tile with an alpha and bias per column or expert: without split-K, and with one number of
    CTAs that share K. If ``every``, return all these numbers, also without alpha and bias, for each architecture.

    Architectures, layouts and epilogues alternate from case to case.
    """
    layouts, archs = itertools.cycle(FP8_LAYOUTS), itertools.cycle(TCGEN05_ARCHS)
    light = itertools.cycle(epilogues((None, "one"))[::2])
    by_expert = itertools.cycle([*epilogues(("expert", "expert_column")), Epilogue(BF16, "expert_column", FP32)])
    by_column = itertools.cycle(PER_COLUMN)
    cases = []
    splits = itertools.cycle(fp8_tcgen05.SPLIT_K[1:])
    chosen = {tile[:3]: next(splits) for tile in FP8_TCGEN05_TILES}
    for tile in FP8_TCGEN05_TILES:
        if not every and tile[3] not in (1, chosen[tile[:3]]):
            continue
        layout, arch = next(layouts) if tile[3] == 1 else "plain", next(archs)
        heavy = next(by_column if layout == "plain" else by_expert)
        for epilogue in (heavy, next(light)) if every else (heavy,):
            cases += [
                FP8Tcgen05Case(layout, *tile, epilogue, arch=one) for one in (TCGEN05_ARCHS if every else (arch,))
            ]
    return cases


MXFP8_TCGEN05_TILES = tuple(
    (tile_m, cta_group, split_k)
    for (has_blocks, cta_group), tiles in mxfp8_tcgen05.TILES_M.items()
    for tile_m in tiles
    for split_k in mxfp8_tcgen05.splits(ExpertLayout(), has_blocks, tile_m, cta_group)
)


@dataclass(frozen=True)
class MXFP8Tcgen05Case(Tcgen05KernelCase):
    """GEMM of two MXFP8 operands by tcgen05. ``cta_group`` is the number of CTAs that share an MMA."""

    tile_m: int
    cta_group: int
    split_k: int
    epilogue: Epilogue
    package: ClassVar = mxfp8_tcgen05

    @property
    def id(self) -> str:
        return "-".join(("mxfp8_tcgen05", tile_id(self), epilogue_id(self.epilogue), self.arch))

    @property
    def role(self) -> Any:
        return type(self), self.tile_m, self.cta_group, self.split_k > 1, has_factors(self.epilogue)


def mxfp8_tcgen05_cases(every: bool) -> list[MXFP8Tcgen05Case]:
    """Return cases of each tile with an alpha and bias per column: without split-K, and with one other ``split_k``. If
    ``every``, return all ``split_k``, also without alpha and bias, for each architecture.

    Architectures and epilogues alternate from case to case.
    """
    archs, by_column = itertools.cycle(TCGEN05_ARCHS), itertools.cycle(PER_COLUMN)
    light = itertools.cycle(epilogues((None, "one"))[::2])
    splits = itertools.cycle(mxfp8_tcgen05.SPLIT_K[1:])
    chosen = {tile[:2]: next(splits) for tile in MXFP8_TCGEN05_TILES}
    cases = []
    for tile in MXFP8_TCGEN05_TILES:
        if not every and tile[2] not in (1, chosen[tile[:2]]):
            continue
        arch = next(archs)
        for epilogue in (next(by_column), next(light)) if every else (next(by_column),):
            cases += [MXFP8Tcgen05Case(*tile, epilogue, arch=one) for one in (TCGEN05_ARCHS if every else (arch,))]
    return cases


FP8_FP4_TCGEN05_TILES = tuple(
    (family.__name__.split(".")[-1], has_blocks, tile_m, split_k)
    for family in (fp8_fp4_tcgen05, fp8_mxfp4_tcgen05)
    for (has_blocks, cta_group), tiles in family.TILES_M.items()
    for tile_m in tiles
    for split_k in family.splits(ExpertLayout(), has_blocks, tile_m, cta_group)
)


@dataclass(frozen=True)
class FP8FP4Tcgen05Case(Tcgen05KernelCase):
    """GEMM of FP8 activations and an FP4 weight by tcgen05.

    Attributes:
        layout: expert layout, a key of ``FP8_LAYOUTS``.
        scales: scale layout of the weight, or None for per-token scales of the activations and prepared scales of the
            weight.
        fmt, tile_m, split_k, epilogue, stages, arch: fields of the configuration.
        family: package of the kernel.
    """

    layout: str
    scales: str | None
    fmt: FP4Format
    tile_m: int
    split_k: int
    epilogue: Epilogue
    family: str = "fp8_fp4_tcgen05"

    @property
    def id(self) -> str:
        kind = self.fmt.name, self.scales or "token", self.layout, f"{self.tile_m}by{self.split_k}"
        return "-".join((self.family, *kind, epilogue_id(self.epilogue), self.arch))

    @property
    def role(self) -> Any:
        tile = self.family, self.fmt, self.scales, self.tile_m, self.split_k > 1
        return type(self), tile, has_factors(self.epilogue)

    @property
    def package(self) -> Any:  # type: ignore[override]
        return {"fp8_fp4_tcgen05": fp8_fp4_tcgen05, "fp8_mxfp4_tcgen05": fp8_mxfp4_tcgen05}[self.family]

    @property
    def given(self) -> dict[str, Any]:
        fmt = {"fmt": self.fmt} if self.family == "fp8_fp4_tcgen05" else {}
        return {
            "rows": ExpertLayout(*FP8_LAYOUTS[self.layout]),
            "epilogue": self.epilogue,
            "layout": None if self.scales is None else SCALE_LAYOUTS[self.scales],
            "tile_m": self.tile_m,
            "split_k": self.split_k,
            **fmt,
        }


def fp8_fp4_tcgen05_cases(every: bool) -> list[FP8FP4Tcgen05Case]:
    """Return cases of each tile with an alpha and bias per column or expert: without split-K, and with one other
    ``split_k``. If ``every``, return all ``split_k``, in both formats and scale layouts, for each architecture.

    Architectures, formats, layouts and epilogues alternate from case to case.
    """
    layouts, archs = itertools.cycle(FP8_LAYOUTS), itertools.cycle(TCGEN05_ARCHS)
    kinds = itertools.cycle(TCGEN05_KINDS)
    by_expert = itertools.cycle([*epilogues(("expert", "expert_column")), Epilogue(BF16, "expert_column", FP32)])
    by_column = itertools.cycle(PER_COLUMN)
    splits = itertools.cycle(fp8_fp4_tcgen05.SPLIT_K[1:])
    chosen = {tile[:3]: next(splits) for tile in FP8_FP4_TCGEN05_TILES}
    cases = []
    for family, has_blocks, tile_m, split_k in FP8_FP4_TCGEN05_TILES:
        if not every and split_k not in (1, chosen[family, has_blocks, tile_m]):
            continue
        layout, arch = next(layouts) if split_k == 1 else "plain", next(archs)
        for fmt, scales in TCGEN05_KINDS if every and has_blocks else (next(kinds),):
            if family == "fp8_mxfp4_tcgen05":
                fmt = MXFP4
            epilogue = next(by_column if layout == "plain" else by_expert)
            one = FP8FP4Tcgen05Case(layout, scales if has_blocks else None, fmt, tile_m, split_k, epilogue)
            one = replace(one, family=family)
            cases += [replace(one, arch=each) for each in (TCGEN05_ARCHS if every else (arch,))]
    return cases
