"""Cases of FP8 GEMMs, and of GEMMs of FP8 activations and an FP4 weight."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from support.epilogues import epilogues
from support.kernel_grid.common import ARCHS, BF16, FP32, PER_COLUMN, KernelCase, epilogue_id
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.formats.experts import USUAL_EXPERTS
from torch_cute_ops.kernels import (
    fp8_fp4_mma,
    fp8_fp4_recode,
    fp8_fp4_token_wgmma,
    fp8_fp4_wgmma_codes,
    fp8_fp4_wgmma_rs,
    fp8_fp4_wgmma_ss,
    fp8_mma,
    fp8_token_wgmma,
    fp8_wgmma,
    mxfp8_wgmma,
)
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.common.fp8.layouts import ExpertLayout
from torch_cute_ops.runtime.arch import ARCHS as GPU_ARCHS

FP8_LAYOUTS = {"plain": (False, False), "offsets": (True, False), "counted": (True, True), "masked": (False, True)}
"""Layouts of experts' rows, keyed by name: whether a call passes offsets, and whether it passes counts."""

WGMMA_FAMILIES = ("fp8_wgmma", "fp8_wgmma-rows", "mxfp8_wgmma")
"""Families of ``FP8GemmCase`` with the tiles of ``fp8_wgmma``."""
MMA_FAMILIES = {"fp8_mma": fp8_mma.TILES, "fp8_mma-rows": fp8_mma.MX_TILES}
"""Families of ``FP8GemmCase`` with mma.sync, and their tiles."""
RECODED = (128, 128)
"""(tile_m, tile_n) of ``fp8_fp4_recode``."""


def has_factors(epilogue: Epilogue) -> bool:
    """Return True if alpha is a factor per column or per expert, and not a single number or None."""
    return epilogue.alpha not in (None, "one")


def hints_of(case: FP8GemmCase | FP8FP4GemmCase) -> list[str]:
    """Return id parts that tell whether the weight is static, and whether the kernel prefetches."""
    return ["static"] * case.static_weight + ["prefetching"] * case.prefetches


def layout_id(case: Any) -> str:
    """Return an id part that names the layout of experts' rows."""
    return case.layout if case.max_experts == USUAL_EXPERTS else f"{case.layout}{case.max_experts}"


@dataclass(frozen=True)
class FP8GemmCase(KernelCase):
    """An FP8 GEMM with block scales, or an MXFP8 GEMM by wgmma.

    Attributes:
        family: package of the kernel, with "-rows" for a scale of each weight row and 128 elements, or "-alpha" for a
            scale of each weight row, which ``alpha`` contains.
        layout: expert layout, a key of ``FP8_LAYOUTS``.
        tile: a tile of the family's ``TILES``.
        epilogue, arch, static_weight, prefetches: fields of the configuration.
        max_experts: number of experts for which the table of experts has room.
    """

    family: str
    layout: str
    tile: tuple[int, ...]
    epilogue: Epilogue
    arch: str = "sm_90a"
    static_weight: bool = False
    prefetches: bool = False
    max_experts: int = USUAL_EXPERTS

    @property
    def id(self) -> str:
        tile = "x".join(map(str, self.tile))
        return "-".join((self.family, *hints_of(self), layout_id(self), tile, epilogue_id(self.epilogue), self.arch))

    @property
    def role(self) -> Any:
        if self.static_weight or self in HAVE_SPILLED:
            return self
        return self.family, self.tile, self.arch, has_factors(self.epilogue), self.prefetches

    @property
    def kernel(self) -> Any:
        """Kernel, built as the op builds it."""
        rows = ExpertLayout(*FP8_LAYOUTS[self.layout], self.max_experts)
        given: dict[str, Any] = {"rows": rows, "epilogue": self.epilogue, "arch": GPU_ARCHS[self.arch], "pdl": True}
        if self.family in MMA_FAMILIES:
            by_row = {"scales_by_row": True} if self.family.endswith("-rows") else {}
            return fp8_mma.FP8MmaKernel(fp8_mma.plan(**mma_sizes(self.tile), **given, **by_row))
        names = ("tile_m", "tile_n", "split_k")
        given |= {"static_weight": self.static_weight, "prefetches": self.prefetches}
        given |= dict(zip(names, self.tile, strict=True))
        if self.family == "mxfp8_wgmma":
            return mxfp8_wgmma.MXFP8WgmmaKernel(mxfp8_wgmma.plan(**given))
        _, _, scales = self.family.partition("-")
        return fp8_wgmma.FP8WgmmaKernel(fp8_wgmma.plan(**given, weight_scales=scales or "blocks"))


def mma_sizes(tile: tuple[int, ...]) -> dict[str, int]:
    """Return the sizes of a tile of ``fp8_mma``: ``(tile_m,)`` or ``(tile_m, split_k)``."""
    return dict(zip(("tile_m", "split_k"), tile, strict=False))


@dataclass(frozen=True)
class MXFP8GemmCase(KernelCase):
    """A GEMM of MXFP8 matrices by ``fp8_mma``: ``tile_m``, the epilogue, the architecture, the expert layout, a key of
    ``FP8_LAYOUTS``, and ``split_k``."""

    tile_m: int
    epilogue: Epilogue
    arch: str = "sm_90a"
    layout: str = "plain"
    split_k: int = 1

    @property
    def id(self) -> str:
        layout = () if self.layout == "plain" else (self.layout,)
        tile = str(self.tile_m) if self.split_k == 1 else f"{self.tile_m}x{self.split_k}"
        return "-".join(("fp8_mma-mx", *layout, tile, epilogue_id(self.epilogue), self.arch))

    @property
    def kernel(self) -> Any:
        """Kernel, built as the op builds it."""
        rows = ExpertLayout(*FP8_LAYOUTS[self.layout], USUAL_EXPERTS)
        given = {"rows": rows, "epilogue": self.epilogue, "arch": GPU_ARCHS[self.arch], "pdl": True}
        return fp8_mma.FP8MmaKernel(fp8_mma.plan(tile_m=self.tile_m, is_mx=True, split_k=self.split_k, **given))


@dataclass(frozen=True)
class FP8TokenGemmCase(KernelCase):
    """An FP8 GEMM with per-token scales.

    Attributes:
        layout: expert layout, a key of ``FP8_LAYOUTS``.
        tile: a tile of the family's ``TILES``.
        fast_accum, epilogue, arch, static_weight, prefetches: fields of the configuration. ``fp8_mma`` uses only the
            epilogue.
        family: package of the kernel.
    """

    layout: str
    tile: tuple[int, ...]
    fast_accum: bool
    epilogue: Epilogue
    arch: str = "sm_90a"
    static_weight: bool = False
    prefetches: bool = False
    family: str = "fp8_token_wgmma"

    @property
    def id(self) -> str:
        tile = "x".join(map(str, self.tile))
        family = (self.family, *hints_of(self), *["fast"] * self.fast_accum)
        family += ("token",) if self.family == "fp8_mma" else ()
        return "-".join((*family, self.layout, tile, epilogue_id(self.epilogue), self.arch))

    @property
    def role(self) -> Any:
        kind = self.family, self.arch, self.tile, self.fast_accum, has_factors(self.epilogue), self.prefetches
        return self if self.static_weight else kind

    @property
    def kernel(self) -> Any:
        """Kernel, built as the op builds it."""
        rows, arch = ExpertLayout(*FP8_LAYOUTS[self.layout]), GPU_ARCHS[self.arch]
        given: dict[str, Any] = {"rows": rows, "epilogue": self.epilogue, "arch": arch, "pdl": True}
        if self.family == "fp8_mma":
            return fp8_mma.FP8MmaKernel(fp8_mma.plan(has_blocks=False, **mma_sizes(self.tile), **given))
        config = fp8_token_wgmma.plan(
            **given,
            **dict(zip(("tile_m", "tile_n", "split_k"), self.tile, strict=True)),
            static_weight=self.static_weight,
            prefetches=self.prefetches,
            fast_accum=self.fast_accum,
        )
        return fp8_token_wgmma.FP8TokenWgmmaKernel(config)


@dataclass(frozen=True)
class FP8FP4TokenGemmCase(KernelCase):
    """A GEMM of FP8 activations with per-token scales and an FP4 weight.

    Attributes:
        fmt: format of the weight.
        layout: expert layout, a key of ``FP8_LAYOUTS``.
        tile: a tile of the family's ``TILES``.
        fast_accum, epilogue, arch, static_weight, prefetches: fields of the configuration.
    """

    fmt: FP4Format
    layout: str
    tile: tuple[int, ...]
    fast_accum: bool
    epilogue: Epilogue
    arch: str = "sm_90a"
    static_weight: bool = False
    prefetches: bool = False

    @property
    def id(self) -> str:
        tile = "x".join(map(str, self.tile))
        family = ("fp8_fp4_token_wgmma", *hints_of(self), *["fast"] * self.fast_accum, self.fmt.name)
        return "-".join((*family, self.layout, tile, epilogue_id(self.epilogue), self.arch))

    @property
    def role(self) -> Any:
        kind = self.fmt, self.tile, self.fast_accum, has_factors(self.epilogue), self.prefetches
        return self if self.static_weight else kind

    @property
    def kernel(self) -> Any:
        """Kernel, built as the op builds it."""
        config = fp8_fp4_token_wgmma.plan(
            fmt=self.fmt,
            rows=ExpertLayout(*FP8_LAYOUTS[self.layout]),
            epilogue=self.epilogue,
            **dict(zip(("tile_m", "tile_n", "split_k"), self.tile, strict=True)),
            arch=GPU_ARCHS[self.arch],
            pdl=True,
            static_weight=self.static_weight,
            prefetches=self.prefetches,
            fast_accum=self.fast_accum,
        )
        return fp8_fp4_token_wgmma.FP8FP4TokenWgmmaKernel(config)


@dataclass(frozen=True)
class FP8FP4GemmCase(KernelCase):
    """A GEMM of FP8 activations and an FP4 weight.

    Attributes:
        fmt, scale_layout: format and scale layout of the weight.
        layout: expert layout, a key of ``FP8_LAYOUTS``.
        tile: a tile of the family's ``TILES``, or ``RECODED``.
        epilogue, arch, static_weight, prefetches: fields of the configuration.
        family: package of the kernel.
        overlaps: True if the weight is recoded while the GEMM runs.
        max_experts: number of experts for which the table of experts has room.
    """

    fmt: FP4Format
    scale_layout: str
    layout: str
    tile: tuple[int, ...]
    epilogue: Epilogue
    arch: str = "sm_90a"
    static_weight: bool = False
    family: str = "fp8_fp4_wgmma_ss"
    overlaps: bool = False
    prefetches: bool = False
    max_experts: int = USUAL_EXPERTS

    @property
    def is_recoded(self) -> bool:
        """True if kernels before the GEMM re-encode the weight in FP8."""
        return self.family == "fp8_fp4_recode"

    @property
    def id(self) -> str:
        tile = "x".join(map(str, self.tile))
        family = (self.family, *hints_of(self), *["overlapping"] * self.overlaps)
        parts = (*family, self.fmt.name, self.scale_layout, layout_id(self), tile, epilogue_id(self.epilogue))
        return "-".join((*parts, self.arch))

    @property
    def role(self) -> Any:
        if self.static_weight:
            return self
        kind = (self.layout, self.overlaps) if self.is_recoded else self.fmt
        return self.family, kind, self.tile, has_factors(self.epilogue), self.prefetches

    @property
    def kernel(self) -> Any:
        """Kernel, built as the op builds it."""
        rows = ExpertLayout(*FP8_LAYOUTS[self.layout], self.max_experts)
        given: dict[str, Any] = {"rows": rows, "epilogue": self.epilogue, "arch": GPU_ARCHS[self.arch], "pdl": True}
        if self.is_recoded:
            config = fp8_fp4_recode.plan(**given, overlaps_recode=self.overlaps)
            return fp8_fp4_recode.FP8FP4RecodeKernel(config)
        given |= {"layout": SCALE_LAYOUTS[self.scale_layout], "static_weight": self.static_weight}
        given["prefetches"] = self.prefetches
        given |= dict(zip(("tile_m", "tile_n", "split_k"), self.tile, strict=True))
        if self.family == "fp8_fp4_wgmma_ss":
            return fp8_fp4_wgmma_ss.FP8FP4WgmmaSSKernel(fp8_fp4_wgmma_ss.plan(fmt=self.fmt, **given))
        if self.family == "fp8_fp4_wgmma_codes":
            return fp8_fp4_wgmma_codes.FP8FP4WgmmaCodesKernel(fp8_fp4_wgmma_codes.plan(**given))
        return fp8_fp4_wgmma_rs.FP8FP4WgmmaRSKernel(fp8_fp4_wgmma_rs.plan(**given))

    @property
    def before(self) -> tuple[RecodeCase, ...]:
        """Cases of the kernels that re-encode the weight in FP8."""
        whole = RecodeCase(self.fmt, self.scale_layout, self.layout == "plain")
        return () if not self.is_recoded else (whole, replace(whole, overlaps=True)) if self.overlaps else (whole,)


@dataclass(frozen=True)
class FP8FP4MmaCase(KernelCase):
    """A GEMM of FP8 activations and an FP4 weight by mma.sync.

    Attributes:
        layout: expert layout, a key of ``FP8_LAYOUTS``.
        scales: scale layout of the weight, or None for per-token scales of the activations and prepared scales of the
            weight.
        fmt, tile_m, epilogue, arch, is_interleaved: fields of the configuration.
    """

    layout: str
    scales: str | None
    fmt: FP4Format
    tile_m: int
    epilogue: Epilogue
    arch: str = "sm_120a"
    is_interleaved: bool = False

    @property
    def id(self) -> str:
        kind = self.fmt.name, self.scales or "token", *["interleaved"] * self.is_interleaved, self.layout
        return "-".join(("fp8_fp4_mma", *kind, str(self.tile_m), epilogue_id(self.epilogue), self.arch))

    @property
    def role(self) -> Any:
        kind = self.fmt, self.scales is None, self.is_interleaved, self.tile_m, self.arch
        return type(self), kind, has_factors(self.epilogue)

    @property
    def kernel(self) -> Any:
        """Kernel, built as the backend builds it."""
        config = fp8_fp4_mma.plan(
            rows=ExpertLayout(*FP8_LAYOUTS[self.layout]),
            epilogue=self.epilogue,
            fmt=self.fmt,
            layout=None if self.scales is None else SCALE_LAYOUTS[self.scales],
            tile_m=self.tile_m,
            arch=GPU_ARCHS[self.arch],
            pdl=True,
            is_interleaved=self.is_interleaved,
        )
        assert config is not None
        return fp8_fp4_mma.FP8FP4MmaKernel(config)


@dataclass(frozen=True)
class RecodeCase(KernelCase):
    """The kernel that re-encodes an FP4 weight in FP8 in memory. ``overlaps`` is True if it runs while the GEMM
    runs."""

    fmt: FP4Format
    scale_layout: str
    is_plain: bool
    overlaps: bool = False
    arch: str = "sm_90a"

    @property
    def id(self) -> str:
        family = "fp8_fp4_recode-weight" + ("-overlapping" if self.overlaps else "")
        return "-".join((family, self.fmt.name, self.scale_layout, "plain" if self.is_plain else "experts", self.arch))

    @property
    def kernel(self) -> Any:
        """Kernel, built as the op builds it."""
        given = self.fmt, SCALE_LAYOUTS[self.scale_layout], self.is_plain
        from torch_cute_ops.kernels.fp8_fp4_recode.weight_kernel import RecodeWeightKernel

        config = fp8_fp4_recode.WeightConfig(*given, pdl=True, overlaps_gemm=self.overlaps)
        return RecodeWeightKernel(config)


HAVE_SPILLED = (
    FP8GemmCase("fp8_wgmma", "plain", (128, 128, 1), Epilogue(FP32, "column", FP32)),
    FP8GemmCase("fp8_wgmma", "masked", (128, 128, 1), Epilogue(FP32, "expert_column", FP32)),
)
"""Cases that have spilled registers; their epilogues differ."""


def has_turn(fmt: FP4Format, tokens: int, columns: int, splits: int) -> bool:
    """Return True if the selected cases combine this tile of ``fp8_fp4_wgmma_ss`` with this format.

    Tiles that differ only in split_k alternate between the two formats. If ``tile_m`` and ``tile_n`` occur with only
    one split_k, this tile appears in both formats.
    """
    sizes = sorted({tile[:2] for tile in fp8_fp4_wgmma_ss.TILES})
    of_size = [tile[2] for tile in fp8_fp4_wgmma_ss.TILES if tile[:2] == (tokens, columns)]
    return len(of_size) == 1 or (sizes.index((tokens, columns)) + of_size.index(splits) + (fmt == NVFP4)) % 2 == 0


def fp8_gemm_cases(every: bool) -> list[FP8GemmCase]:
    """Return cases in which every tile has an alpha and bias per column or expert. Tiles with many rows, or all tiles
    if ``every``, also appear without them. Layouts and other epilogues alternate from case to case."""
    kinds = [(family, tile, "sm_90a") for family in WGMMA_FAMILIES for tile in fp8_wgmma.TILES]
    kinds += [("fp8_wgmma-alpha", tile, "sm_90a") for tile in fp8_wgmma.TILES if tile[0] == fp8_wgmma.MANY]
    kinds += [(family, (tokens,), arch) for family, tiles in MMA_FAMILIES.items() for tokens in tiles for arch in ARCHS]
    layouts = itertools.cycle(FP8_LAYOUTS)
    light = itertools.cycle(epilogues((None, "one"))[::2])
    by_expert = itertools.cycle([*epilogues(("expert", "expert_column")), Epilogue(BF16, "expert_column", FP32)])
    by_column = itertools.cycle(PER_COLUMN)
    cases = [FP8GemmCase(family, next(layouts), tile, next(light), arch) for family, tile, arch in kinds]
    if not every:  # Cases with few rows and a light epilogue need fewer registers than the cases below.
        cases = [case for case in cases if case.tile[0] >= fp8_wgmma.MANY]
    cases += HAVE_SPILLED
    hinted = FP8GemmCase("fp8_wgmma", "plain", (64, 128, 2), PER_COLUMN[0], static_weight=True)
    cases += [hinted, replace(hinted, prefetches=True)]
    for family, tile, arch in kinds:
        layout = next(layouts)
        cases.append(FP8GemmCase(family, layout, tile, next(by_column if layout == "plain" else by_expert), arch))
    return cases


def mxfp8_gemm_cases(every: bool) -> list[MXFP8GemmCase]:
    """Return cases of every tile and architecture, with the epilogues that need the most registers, without and with
    experts."""
    by_expert = Epilogue(BF16, "expert_column", FP32), Epilogue(FP32, "expert_column", FP32)
    layouts = itertools.cycle(("counted", "masked", "offsets"))
    cases = []
    for arch in ARCHS:
        tiles = fp8_mma.mx_tiles(GPU_ARCHS[arch])
        cases += [MXFP8GemmCase(tile_m, epilogue, arch) for tile_m in tiles for epilogue in PER_COLUMN[:2]]
        cases += [MXFP8GemmCase(tile_m, each, arch, next(layouts)) for tile_m in tiles for each in by_expert]
        if GPU_ARCHS[arch].has_block_scaled_mma:
            cases += [MXFP8GemmCase(tile_m, PER_COLUMN[0], arch, split_k=4) for tile_m in tiles]
    return cases


def fp8_token_gemm_cases(every: bool) -> list[FP8TokenGemmCase]:
    """Return cases in which every tile appears with both values of ``fast_accum``, and if ``every`` also with light and
    heavy epilogues. Layouts and epilogues alternate."""
    layouts = itertools.cycle(FP8_LAYOUTS)
    by_expert = itertools.cycle([*epilogues(("expert", "expert_column")), Epilogue(BF16, "expert_column", FP32)])
    by_column = itertools.cycle([*PER_COLUMN, *epilogues(("one",))])
    hinted = FP8TokenGemmCase("plain", (64, 128, 2), False, PER_COLUMN[0], static_weight=True)
    cases = [hinted, replace(hinted, prefetches=True)]
    for number, tile in enumerate(fp8_token_wgmma.TILES):
        for fast_accum in (False, True):
            if every or tile[0] == fp8_token_wgmma.MANY or number % 2 == fast_accum:
                layout = next(layouts)
                epilogue = next(by_column if layout == "plain" else by_expert)
                cases.append(FP8TokenGemmCase(layout, tile, fast_accum, epilogue))
    for tile_m, arch in itertools.product(fp8_mma.TILES, ARCHS):
        layout = next(layouts)
        epilogue = next(by_column if layout == "plain" else by_expert)
        cases.append(FP8TokenGemmCase(layout, (tile_m,), False, epilogue, arch, family="fp8_mma"))
    many = (fp8_token_wgmma.MANY, 192, 1)
    return cases + [FP8TokenGemmCase("plain", many, fast, one) for fast in (False, True) for one in PER_COLUMN]


def fp8_fp4_token_gemm_cases(every: bool) -> list[FP8FP4TokenGemmCase]:
    """Return cases in which every tile appears with both values of ``fast_accum``, and if ``every`` also in both
    formats. Layouts, formats and epilogues alternate."""
    layouts, formats = itertools.cycle(FP8_LAYOUTS), itertools.cycle((NVFP4, MXFP4, MXFP4))
    by_expert = itertools.cycle([*epilogues(("expert", "expert_column")), Epilogue(BF16, "expert_column", FP32)])
    by_column = itertools.cycle([*PER_COLUMN, *epilogues(("one",))])
    hinted = FP8FP4TokenGemmCase(NVFP4, "plain", (64, 128, 2), False, PER_COLUMN[0], static_weight=True)
    cases = [hinted, replace(hinted, prefetches=True)]
    for tile in fp8_fp4_token_wgmma.TILES:
        for fast_accum in (False, True) if tile[0] != fp8_fp4_token_wgmma.FAST_TILE_M else (True,):
            for fmt in (NVFP4, MXFP4) if every else (next(formats),):
                layout = next(layouts)
                epilogue = next(by_column if layout == "plain" else by_expert)
                cases.append(FP8FP4TokenGemmCase(fmt, layout, tile, fast_accum, epilogue))
    return cases


def fp8_fp4_mma_cases(every: bool) -> list[FP8FP4MmaCase]:
    """Return cases of each tile and architecture with both formats, and of each kind of scales on one architecture or,
    if ``every``, on each. Layouts and epilogues alternate from case to case."""
    layouts = itertools.cycle(FP8_LAYOUTS)
    by_expert = itertools.cycle([*epilogues(("expert", "expert_column")), Epilogue(BF16, "expert_column", FP32)])
    by_column = itertools.cycle(PER_COLUMN)
    kinds = ("128x4", False), ("linear", False), (None, False), (None, True)
    cases = []
    for i, (arch, tile_m, fmt) in enumerate(itertools.product(ARCHS, fp8_fp4_mma.TILES, (NVFP4, MXFP4))):
        for j, (scales, is_interleaved) in enumerate(kinds):
            layout = next(layouts)
            epilogue = next(by_column if layout == "plain" else by_expert)
            if every or (i + j) % len(kinds) == 0 or (arch == "sm_120a" and (i + j) % 2 == 0):
                cases.append(FP8FP4MmaCase(layout, scales, fmt, tile_m, epilogue, arch, is_interleaved))
        next(layouts)
    return cases


def fp8_fp4_gemm_cases(every: bool) -> list[FP8FP4GemmCase | RecodeCase]:
    """Return cases with every tile. Scale layouts, expert layouts and epilogues alternate from case to case.

    If ``every``, each tile of ``fp8_fp4_wgmma_ss`` appears in both formats, and otherwise in one format, chosen so that
    each format appears with each size and each split_k. ``fp8_fp4_recode`` does not depend on the format; it appears in
    every expert layout.
    """
    layouts, scales = itertools.cycle(FP8_LAYOUTS), itertools.cycle(("128x4", "linear", "linear", "128x4"))
    by_expert = itertools.cycle([*epilogues(("expert", "expert_column")), Epilogue(BF16, "expert_column", FP32)])
    by_column = itertools.cycle(PER_COLUMN)
    cases = [FP8FP4GemmCase(NVFP4, "128x4", "plain", (64, 128, 2), PER_COLUMN[0], static_weight=True)]
    cases.append(replace(cases[0], prefetches=True))
    for fmt, tile in itertools.product((NVFP4, MXFP4), fp8_fp4_wgmma_ss.TILES):
        layout = next(layouts)
        epilogue = next(by_column if layout == "plain" else by_expert)
        cases.append(FP8FP4GemmCase(fmt, next(scales), layout, tile, epilogue))
    if not every:
        cases = [case for case in cases if case.static_weight or has_turn(case.fmt, *case.tile)]
    few = [(NVFP4, "fp8_fp4_wgmma_rs", tile) for tile in fp8_fp4_wgmma_rs.TILES]
    few += [(MXFP4, "fp8_fp4_wgmma_codes", tile) for tile in fp8_fp4_wgmma_codes.TILES]
    for fmt, family, tile in few:
        layout = next(layouts)
        epilogue = next(by_column if layout == "plain" else by_expert)
        cases.append(FP8FP4GemmCase(fmt, next(scales), layout, tile, epilogue, family=family))
    for layout in FP8_LAYOUTS:
        epilogue = next(by_column if layout == "plain" else by_expert)
        one = FP8FP4GemmCase(NVFP4, "128x4", layout, RECODED, epilogue, family="fp8_fp4_recode")
        cases += [one, replace(one, overlaps=True)] if layout == "plain" else [one]
    kinds = itertools.product((NVFP4, MXFP4), ("128x4", "linear"), ((True, False), (True, True), (False, False)))
    return cases + [RecodeCase(fmt, scale_layout, *kind) for fmt, scale_layout, kind in kinds]
