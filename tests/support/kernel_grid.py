"""The kernel configurations that compile in tests, and how one of them is compiled in a process of its own."""

from __future__ import annotations

import importlib
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from support.epilogues import epilogues
from torch_cute_ops.formats import (
    MXFP4,
    NVFP4,
    SCALE_LAYOUTS,
    FP4Format,
    FP8Format,
    resolve_fp8_format,
)
from torch_cute_ops.formats.scale_layout import weight_layout
from torch_cute_ops.kernels.common.epilogue import Epilogue
from torch_cute_ops.kernels.common.expert_choice import ExpertChoice
from torch_cute_ops.kernels.common.fp4_operands import FP4Operands

SPANS = ((16, 32, 48, 128), (1152, 2048, 2880, 4096), (7168, 8192), (16_384, 32_768, 65_536))
"""Widths of rows that share a warp, that have one, that have several, and that are split."""
WIDTHS = tuple(itertools.chain(*SPANS))
WIDE = (7168, 65_536)
"""Widths at which threads hold the most values: of those that one CTA has, and of those that several share."""
ARCHS = ("sm_90a", "sm_100a", "sm_120a")
DESKTOP = ("sm_120a", "sm_121a")
FP4_TARGETS = tuple(itertools.product(("nvfp4", "nvfp4-g", "mxfp4"), SCALE_LAYOUTS))
FP8_TARGETS = (("tensor", "row"), ("token", "row"), ("block128", "row"), ("block128", "column"))
"""Format (``-g``: with a global scale) and scale layout."""
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = ((BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32))
"""Of the input (or of what is written), and of the weight."""


@dataclass(frozen=True)
class What:
    """What a kernel does, as in ``kernels.row_quant.Problem``; ``also`` are outputs beside codes and scales."""

    name: str
    source: str
    normalises: bool
    also: tuple[str, ...] = ()
    swiglu: bool = False

    @property
    def targets(self) -> Iterable[tuple[str, str]]:
        """Formats and layouts that some op has."""
        if "linear" in self.also:
            return [target for target in FP4_TARGETS if target[1] == "128x4"]
        return (*FP4_TARGETS, *FP8_TARGETS) if self.source and not self.also else FP4_TARGETS


WHATS = (
    What("quantize", "rows", False),
    What("norm", "rows", True),
    What("norm-norm", "rows", True, ("norm",)),
    What("add", "add", True),
    What("add-norm", "add", True, ("norm",)),
    What("add-linear", "add", True, ("linear",)),
    What("add-linear-norm", "add", True, ("linear", "norm")),
    What("silu", "silu_mul", False),
    What("swiglu", "silu_mul", False, swiglu=True),
    What("dequantize", "", False),
)
WHAT = {what.name: what for what in WHATS}


@dataclass(frozen=True)
class Case:
    """One configuration and the architecture to compile it for."""

    what: What
    dtypes: tuple[torch.dtype, torch.dtype]
    width: int
    target: tuple[str, str]
    arch: str

    @property
    def id(self) -> str:
        names = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
        dtypes = "".join(names[dtype] for dtype in self.dtypes[: 2 if self.what.normalises else 1])
        return "-".join((self.what.name, dtypes, str(self.width), *self.target, self.arch))

    @property
    def is_valid(self) -> bool:
        return (
            self.target in self.what.targets
            and (self.what.normalises or self.dtypes[0] == self.dtypes[1])
            # Without blocks, whole units of threads.
            and self.width % max(16, self.format.width_multiple) == 0
            # Two fp32 rows and an fp32 weight do not fit into 8 CTAs of 99 KB.
            and (self.what.source, self.dtypes[0], self.width, self.arch) != ("add", FP32, 65_536, "sm_120a")
        )

    @property
    def format(self) -> FP4Format | FP8Format:
        name, layout = self.target
        if self.target in FP8_TARGETS:
            return resolve_fp8_format(name, layout)[0]
        return MXFP4 if name == "mxfp4" else NVFP4

    @property
    def choices(self) -> tuple[Any, ...]:
        """One choice for each factor of the grid."""
        return self.what, self.dtypes, self.width, self.target, self.arch

    @property
    def pairs(self) -> list[tuple[tuple[int, Any], tuple[int, Any]]]:
        """Any two of the choices, with their places; and what, width and architecture of the widest, all three.

        Dtypes and targets do not meet each width, but one of each span.
        """
        what, dtypes, width, target, arch = enumerate(self.choices)
        span = (6, next(span for span in SPANS if self.width in span))
        wide = [((5, (self.what, self.arch)), width)] if self.width in WIDE else []
        by_span = itertools.product((dtypes, target), (span,))
        by_width = itertools.product((what, arch), (width,))
        return [*itertools.combinations((what, dtypes, target, arch), 2), *by_width, *by_span, *wide]


TIGHT = (Case(WHAT["norm"], (BF16, BF16), 7168, ("nvfp4", "linear"), "sm_120a"),)
"""Cases that have spilled, between those in which pairs of choices meet."""


def every_case() -> Iterator[Case]:
    """The whole grid."""
    choices = itertools.product(WHATS, DTYPES, WIDTHS, (*FP4_TARGETS, *FP8_TARGETS), ARCHS)
    return (case for case in itertools.starmap(Case, choices) if case.is_valid)


@cache
def covering_cases() -> tuple[Case, ...]:
    """A part of the grid in which any two choices meet, and what is done, architecture and a wide row all three; and
    ``TIGHT``.

    Greedily: a case for a pair that is still missing, of some the one that adds most.
    """
    having = defaultdict(list)
    for case in every_case():
        for pair in case.pairs:
            having[pair].append(case)
    some = random.Random(0)
    missing = dict.fromkeys(having)
    chosen: list[Case] = []
    while missing:
        candidates = having[next(iter(missing))]
        candidates = some.sample(candidates, min(len(candidates), 60))
        best = max(candidates, key=lambda case: sum(pair in missing for pair in case.pairs))
        chosen.append(best)
        for pair in best.pairs:
            missing.pop(pair, None)
    return *chosen, *(case for case in TIGHT if case not in chosen)


def kernel_of(case: AnyCase) -> Any:
    """The kernel that ``plan`` chooses.

    Raises:
        ValueError: from ``plan``, if it supports none.
    """
    if not isinstance(case, Case):
        return case.kernel
    from torch_cute_ops.kernels import fp4_dequant, row_quant
    from torch_cute_ops.runtime.arch import ARCHS as GPU_ARCHS

    name, layout = case.target
    dtype, weight = case.dtypes
    if case.what.name == "dequantize":
        config = fp4_dequant.plan(dtype, case.width, case.format, SCALE_LAYOUTS[layout], name == "nvfp4-g")
        return fp4_dequant.FP4DequantKernel(config)
    problem = row_quant.Problem(
        source=case.what.source,
        dtype=dtype,
        weight_dtype=weight if case.what.normalises else None,
        width=case.width,
        norm_width=case.width,
        fmt=case.format,
        layout=resolve_fp8_format(name, layout)[1] if case.target in FP8_TARGETS else SCALE_LAYOUTS[layout],
        also_linear="linear" in case.what.also,
        has_factor=name in ("nvfp4-g", "tensor"),
        writes_norm="norm" in case.what.also,
        swiglu=case.what.swiglu,
    )
    return row_quant.RowQuantKernel(row_quant.plan(problem, GPU_ARCHS[case.arch]))


def _short(*dtypes: torch.dtype) -> list[str]:
    return [str(dtype).removeprefix("torch.") for dtype in dtypes]


def _epilogue_id(epilogue: Epilogue) -> str:
    alpha = [] if epilogue.alpha is None else [f"alpha_{epilogue.alpha}"]
    bias = [] if epilogue.bias_dtype is None else [f"bias_{_short(epilogue.bias_dtype)[0]}"]
    return "-".join((*_short(epilogue.out_dtype), *alpha, *bias))


def _fp4_gemm_id(kind: str, case: AnyCase, *rest: str) -> str:
    return "-".join((kind, *_short(case.dtype), case.format.name, case.layout, *rest, case.arch))


@dataclass(frozen=True)
class MmaCase:
    """An FP4 GEMM by mma.sync and the architecture to compile it for."""

    dtype: torch.dtype
    format: FP4Format
    layout: str
    tokens: int
    splits: int
    epilogue: Epilogue
    arch: str
    ctas_per_sm: int = 1
    a_layout: str | None = None

    @property
    def id(self) -> str:
        tile = f"{self.tokens}x{self.splits}x{self.ctas_per_sm}"
        return _fp4_gemm_id("mma", self, *filter(None, (self.a_layout,)), tile, _epilogue_id(self.epilogue))

    @property
    def kernel(self) -> Any:
        """As the backend builds it; ``None`` if the architecture has no room for it."""
        from torch_cute_ops.kernels import fp4_mma
        from torch_cute_ops.runtime.arch import ARCHS as GPU_ARCHS

        config = fp4_mma.plan(
            dtype=self.dtype,
            fmt=self.format,
            layout=SCALE_LAYOUTS[self.layout],
            epilogue=self.epilogue,
            tokens=self.tokens,
            splits=self.splits,
            ctas_per_sm=self.ctas_per_sm,
            arch=GPU_ARCHS[self.arch],
            pdl=True,
            a_layout=SCALE_LAYOUTS[self.a_layout] if self.a_layout else None,
        )
        return None if config is None else fp4_mma.FP4MmaKernel(config)


def _a_dtype(case: WgmmaCase | ExpertsCase) -> torch.dtype:
    return torch.uint8 if case.a_layout is not None else case.a_dtype or case.dtype


def _operands(case: WgmmaCase | ExpertsCase) -> FP4Operands:
    a_layout = None if case.a_layout is None else SCALE_LAYOUTS[case.a_layout]
    return FP4Operands(_a_dtype(case), case.dtype, case.format, SCALE_LAYOUTS[case.layout], a_layout)


def _planned(family: Any, case: WgmmaCase | ExpertsCase | GatedExpertsCase, **given: Any) -> Any:
    """As the backend plans it; ``given``: what only this family's kernels have."""
    from torch_cute_ops.runtime.arch import ARCHS as GPU_ARCHS

    return family.plan(operands=_operands(case), tokens=case.tokens, arch=GPU_ARCHS[case.arch], pdl=True, **given)


def _activations_id(case: WgmmaCase | ExpertsCase | GatedExpertsCase) -> str:
    return case.a_layout or _short(_a_dtype(case))[0]


@dataclass(frozen=True)
class WgmmaCase:
    """An FP4 GEMM by wgmma, with the kernel that puts its activations in order. ``a_dtype`` is that of activations with
    16 bits, if not ``dtype``."""

    dtype: torch.dtype
    format: FP4Format
    layout: str
    a_layout: str | None
    tokens: int
    epilogue: Epilogue
    splits: int = 0
    width: int | None = None
    arch: str = "sm_90a"
    a_dtype: torch.dtype | None = None
    static_weight: bool = False

    @property
    def id(self) -> str:
        sums = f"{self.tokens}by{self.splits}" if self.width is None else f"{self.tokens}of{self.width}"
        kind = "wgmma-static" if self.static_weight else "wgmma"
        return _fp4_gemm_id(kind, self, _activations_id(self), sums, _epilogue_id(self.epilogue))

    @property
    def kernel(self) -> Any:
        """As the backend builds it."""
        from torch_cute_ops.kernels import fp4_wgmma

        given = {"epilogue": self.epilogue, "width": self.width, "splits": self.splits}
        config = _planned(fp4_wgmma, self, **given, static_weight=self.static_weight)
        return fp4_wgmma.FP4WgmmaKernel(config)


@dataclass(frozen=True)
class Tcgen05Case:
    """A GEMM of two FP4 operands by tcgen05: rows of activations of a tile, CTAs of an MMA, CTAs that split k."""

    format: FP4Format
    layout: str
    tokens: int
    group: int
    splits: int
    epilogue: Epilogue
    stages: int | None = None
    arch: str = "sm_100a"

    @property
    def id(self) -> str:
        tile = f"{self.tokens}by{self.splits}" if self.group == 1 else f"{self.tokens}of2"
        return "-".join(("tcgen05", self.format.name, self.layout, tile, _epilogue_id(self.epilogue), self.arch))

    @property
    def kernel(self) -> Any:
        """As the backend builds it; or with fewer stages."""
        from torch_cute_ops.kernels import fp4_tcgen05
        from torch_cute_ops.runtime.arch import ARCHS as GPU_ARCHS

        config = fp4_tcgen05.plan(
            fmt=self.format,
            layout=SCALE_LAYOUTS[self.layout],
            epilogue=self.epilogue,
            tokens=self.tokens,
            group=self.group,
            splits=self.splits,
            arch=GPU_ARCHS[self.arch],
            pdl=True,
        )
        assert config is not None
        return fp4_tcgen05.FP4Tcgen05Kernel(replace(config, stages=self.stages or config.stages))


TCGEN05_ARCHS = ("sm_100a", "sm_103a")
TCGEN05_KINDS = tuple(itertools.product((NVFP4, MXFP4), ("128x4", "linear")))
TCGEN05_TILES = tuple(
    [(tokens, 1, splits) for tokens in (8, 16, 32, 64, 128) for splits in (1, 2, 4, 8)] + [(256, 1, 1), (256, 2, 1)]
)


def tcgen05_cases(every: bool) -> list[Tcgen05Case]:
    """Kinds of operands with tiles: all of them, for each architecture, or a fourth, for these in turn; epilogues in
    turn."""
    finish, archs = itertools.cycle(epilogues((None, "one", "column"))), itertools.cycle(TCGEN05_ARCHS)
    return [
        Tcgen05Case(*kind, *tile, next(finish), arch=arch)
        for (i, kind), (j, tile) in itertools.product(enumerate(TCGEN05_KINDS), enumerate(TCGEN05_TILES))
        if every or (i + j) % 4 == 0
        for arch in (TCGEN05_ARCHS if every else [next(archs)])
    ]


@dataclass(frozen=True)
class Tcgen05ExpertsCase:
    """A GEMM of two FP4 operands by tcgen05 that is added up over experts: rows of the weight of a tile, parts of
    the experts, whether those are passed over that nothing is routed to, and an expert's width."""

    format: FP4Format
    layout: str
    columns: int
    parts: int
    routed: bool
    out_dtype: torch.dtype
    width: int
    stages: int | None = None
    arch: str = "sm_100a"
    bias_dtype: torch.dtype | None = None

    @property
    def id(self) -> str:
        tile = f"{self.columns}by{self.parts}{'routed' if self.routed else 'dense'}of{self.width}"
        bias = [] if self.bias_dtype is None else [f"bias_{_short(self.bias_dtype)[0]}"]
        dtypes = _short(self.out_dtype)[0], *bias
        return "-".join(("tcgen05_experts", self.format.name, self.layout, tile, *dtypes, self.arch))

    @property
    def kernel(self) -> Any:
        """As the backend builds it; or with fewer stages."""
        from torch_cute_ops.kernels import fp4_tcgen05_experts
        from torch_cute_ops.runtime.arch import ARCHS as GPU_ARCHS

        config = fp4_tcgen05_experts.plan(
            fmt=self.format,
            layout=SCALE_LAYOUTS[self.layout],
            out_dtype=self.out_dtype,
            width=self.width,
            columns=self.columns,
            parts=self.parts,
            routed=self.routed,
            arch=GPU_ARCHS[self.arch],
            pdl=True,
            bias_dtype=self.bias_dtype,
        )
        assert config is not None
        return fp4_tcgen05_experts.FP4Tcgen05ExpertsKernel(replace(config, stages=self.stages or config.stages))


def tcgen05_experts_cases(every: bool) -> list[Tcgen05ExpertsCase]:
    """Kinds of operands with tiles: all of them, for each architecture, or a few, for these in turn; widths and dtypes
    in turn."""
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
        if bias is None or case.layout != "linear" or case.columns == 32
        for arch in (TCGEN05_ARCHS if every else [case.arch])
    ]


WARPGROUP_KINDS: tuple[tuple[Any, ...], ...] = (
    (FP16, NVFP4, "linear", None),
    (BF16, NVFP4, "128x4", None),
    (FP16, NVFP4, "128x4", "8x4"),
    (FP16, NVFP4, "linear", "linear"),
    (BF16, MXFP4, "128x4", None),
    (BF16, MXFP4, "128x4", "128x4"),
)
"""What a weight and activations may be beside each other on sm_90a: dtype of the MMAs, format, layouts of scales."""
PER_COLUMN = tuple(Epilogue(dtype, "column", bias) for dtype, bias in ((BF16, FP32), (FP16, FP16), (FP32, FP32)))
"""The epilogues that need the most registers."""


def wgmma_cases(every: bool) -> list[WgmmaCase]:
    """Kinds of operands with tiles: all of them, or a third; epilogues in turn, ``PER_COLUMN`` with each tile."""
    light, heavy = itertools.cycle(epilogues((None, "one", "column"))), itertools.cycle(PER_COLUMN)
    tiles = [(tokens, 0) for tokens in (8, 16, 32, 64, 128, 256)]
    tiles += [(8, 1), (16, 8), (32, 3), (64, 3), (128, 8)]
    plain = [
        WgmmaCase(*kind, tokens, next(heavy if kind in WARPGROUP_KINDS[:3] else light), splits)
        for kind, (tokens, splits) in _together(WARPGROUP_KINDS, tiles, every)
    ]
    # Activations that are rounded to bfloat16, by a kernel of their own and by the CTAs themselves.
    rounded = [
        WgmmaCase(BF16, MXFP4, "128x4", None, tokens, Epilogue(FP16), splits, a_dtype=FP16)
        for tokens, splits in ((64, 0), (8, 2), (32, 1))
    ]
    static = [
        WgmmaCase(*kind, tokens, epilogue, splits, static_weight=True)
        for kind, (tokens, splits), epilogue in zip(
            (WARPGROUP_KINDS[1], WARPGROUP_KINDS[5]), ((8, 2), (32, 3)), PER_COLUMN[:2], strict=True
        )
    ]
    outs, widths = itertools.cycle((BF16, FP16, FP32)), itertools.cycle((256, 1024, 512))
    return (
        plain
        + rounded
        + static
        + [
            WgmmaCase(*kind, tokens, Epilogue(next(outs)), width=next(widths))
            for kind, tokens in _together(WARPGROUP_KINDS, (16, 32, 64, 128), every)
        ]
    )


def _together(some: Sequence[Any], others: Sequence[Any], every: bool) -> Iterator[tuple[Any, Any]]:
    """Each of ``some`` with every one of ``others``, or with every third."""
    for (i, one), (j, other) in itertools.product(enumerate(some), enumerate(others)):
        if every or (i + j) % 3 == 0:
            yield one, other


@dataclass(frozen=True)
class ExpertsCase:
    """The kernels of an FP4 GEMM that is added up over experts."""

    dtype: torch.dtype
    format: FP4Format
    layout: str
    a_layout: str | None
    group: int
    tokens: int
    out_dtype: torch.dtype
    classes: int = 1
    arch: str = "sm_90a"
    a_dtype: torch.dtype | None = None
    bias_dtype: torch.dtype | None = None

    @property
    def id(self) -> str:
        sizes = f"{self.group}of{self.tokens}by{self.classes}"
        bias = [] if self.bias_dtype is None else [f"bias_{_short(self.bias_dtype)[0]}"]
        return _fp4_gemm_id("experts", self, _activations_id(self), sizes, *_short(self.out_dtype), *bias)

    @property
    def kernel(self) -> Any:
        """For experts of two chunks, of which the second is not whole. Of MXFP4 without a bias they begin with tiles of
        scales, with one every second in the middle of a tile."""
        return self.kernel_for(384 if self.format == MXFP4 and self.bias_dtype is None else 320)

    def kernel_for(self, width: int) -> Any:
        """As the backend builds it."""
        from torch_cute_ops.kernels import fp4_experts

        sizes = {"width": width, "group": self.group, "classes": self.classes}
        given = {"out_dtype": self.out_dtype, "bias_dtype": self.bias_dtype, **sizes}
        return fp4_experts.FP4ExpertsKernel(_planned(fp4_experts, self, **given))


@dataclass(frozen=True)
class GatedExpertsCase:
    """The kernels of a gated FP4 GEMM over experts; ``finish`` are the arguments of ``fp4_gated_experts.Finish``."""

    dtype: torch.dtype
    format: FP4Format
    layout: str
    a_layout: str | None
    rows: int
    group: int
    tokens: int
    finish: tuple[Any, ...]
    arch: str = "sm_90a"
    a_dtype: torch.dtype | None = None
    parts: int = 1

    @property
    def id(self) -> str:
        sizes = f"{self.rows}by{self.group}in{self.parts}of{self.tokens}"
        named = (getattr(each, "name", None) or str(each).removeprefix("torch.") for each in self.finish)
        return _fp4_gemm_id("gated_experts", self, _activations_id(self), sizes, *named)

    @property
    def kernel(self) -> Any:
        """For five chunks of k, of which the last is not whole; or, with linear scales, for four."""
        return self.kernel_for(1024 if self.layout == "linear" else 1088)

    def kernel_for(self, width: int) -> Any:
        """As the backend builds it; ``None`` if it is none."""
        from torch_cute_ops.kernels import fp4_gated_experts

        sizes = {"width": width, "rows": self.rows, "group": self.group, "parts": self.parts}
        finish = fp4_gated_experts.Finish(*self.finish)
        config = _planned(fp4_gated_experts, self, finish=finish, **sizes)
        return None if config is None else fp4_gated_experts.FP4GatedExpertsKernel(config)


@dataclass(frozen=True)
class MoeCase:
    """A kernel around the experts' GEMMs, by its family (``moe_swiglu``: experts' rows of ``row_quant``).

    ``plan_arguments`` are those of the family's ``plan``; of ``moe_swiglu`` the width of a row, its dtype, whether
    there are offsets, and counts, and whether the gate is the general one.
    """

    family: str
    plan_arguments: tuple[Any, ...]
    arch: str = "sm_90a"

    @property
    def id(self) -> str:
        return "-".join((self.family, *(str(each).removeprefix("torch.") for each in self.plan_arguments), self.arch))

    @property
    def kernel(self) -> Any:
        """The kernel that ``plan`` chooses."""
        if self.family == "moe_swiglu":
            return _experts_rows_kernel(*self.plan_arguments, self.arch)
        family = importlib.import_module(f"torch_cute_ops.kernels.{self.family}")
        kernel = getattr(family, family.KERNEL.rpartition(".")[2])
        given = self.plan_arguments
        if self.family in ("moe_route", "moe_route_dense"):
            given = ExpertChoice(*given[:8]), *given[8:]
        return kernel(family.plan(*given))


def _experts_rows_kernel(width: int, dtype: torch.dtype, offsets: bool, counts: bool, swiglu: bool, arch: str) -> Any:
    from torch_cute_ops.kernels import row_quant
    from torch_cute_ops.runtime.arch import ARCHS as GPU_ARCHS

    problem = row_quant.Problem.of_gated_experts(dtype, width, offsets, counts, swiglu)
    return row_quant.RowQuantKernel(row_quant.plan(problem, GPU_ARCHS[arch]))


def moe_cases() -> list[MoeCase]:
    """The most experts of a token and others, narrow rows and wide ones; dtypes in turn."""
    archs = itertools.cycle(ARCHS)
    dtypes = itertools.cycle((BF16, FP16, FP32))
    finalize = [
        (next(dtypes), width, topk, residual)
        for width, topk, residual in ((7168, 8, True), (16_384, 16, True), (8, 1, False), (2880, 16, False))
    ]
    permute = [
        (next(dtypes), width, topk)
        for width, topk in ((7168, 8), (16_384, 16), (128, 1), (2880, 4), (2048, 16), (64, 3), (65_536, 4))
    ]
    given = ((True, True, False), (False, True, True), (True, False, False), (True, True, True))
    swiglu = [
        (width, dtype, *which)
        for dtype, widths in ((BF16, (128, 2048, 7168, 2880)), (FP16, (1152, 4096, 65_536)), (FP32, (2048, 18_432)))
        for width, which in zip(widths, given, strict=False)
    ]
    route = [
        (next(dtypes), experts, topk, *scoring, renormalize, masked)
        for (experts, topk, *scoring), renormalize, masked in (
            ((256, 8, True, True, 8, 4), True, False),
            ((512, 16, False, False, 1, 1), False, True),
            ((512, 16, True, True, 32, 4), True, True),
            ((5, 1, False, False, 1, 1), True, False),
            ((60, 4, True, False, 3, 2), False, False),
            ((510, 16, True, True, 17, 4), True, False),
        )
    ]
    ids = [(512, False), (512, True), (7, True)]
    # The choice of moe_route, with and without factors in place of the layout of rows.
    dense = [(*plan_arguments[:-1], i % 2 == 0) for i, plan_arguments in enumerate(route)]
    cases = {
        "moe_route": route,
        "moe_route_ids": ids,
        "moe_route_dense": dense,
        "moe_finalize": finalize,
        "moe_permute": permute,
        "moe_swiglu": swiglu,
    }
    return [MoeCase(family, plan_arguments, next(archs)) for family, some in cases.items() for plan_arguments in some]


@dataclass(frozen=True)
class FP8GemmCase:
    """An FP8 GEMM: ``layout`` as ``FP8_LAYOUTS`` names it, ``tile`` as of the family's ``TILES``."""

    family: str
    layout: str
    tile: tuple[int, ...]
    epilogue: Epilogue
    arch: str = "sm_90a"
    static_weight: bool = False

    @property
    def id(self) -> str:
        tile = "x".join(map(str, self.tile))
        static = ["static"] if self.static_weight else []
        return "-".join((self.family, *static, self.layout, tile, _epilogue_id(self.epilogue), self.arch))

    @property
    def kernel(self) -> Any:
        """As the op builds it."""
        from torch_cute_ops.kernels import fp8_mma, fp8_wgmma
        from torch_cute_ops.kernels.common.expert_layout import ExpertLayout
        from torch_cute_ops.runtime.arch import ARCHS as GPU_ARCHS

        rows = ExpertLayout(*FP8_LAYOUTS[self.layout])
        given: dict[str, Any] = {"rows": rows, "epilogue": self.epilogue, "arch": GPU_ARCHS[self.arch], "pdl": True}
        if self.family == "fp8_mma":
            return fp8_mma.FP8MmaKernel(fp8_mma.plan(tokens=self.tile[0], **given))
        names = ("tokens", "columns", "splits")
        given["static_weight"] = self.static_weight
        return fp8_wgmma.FP8WgmmaKernel(fp8_wgmma.plan(**dict(zip(names, self.tile, strict=True)), **given))


RECODED = (128, 128)
"""Rows of ``a`` and of the weight of a tile of ``fp8_fp4_recoded``."""


@dataclass(frozen=True)
class FP8FP4GemmCase:
    """A GEMM of FP8 activations and an FP4 weight; ``tile`` as of ``fp8_fp4_wgmma.TILES``, or ``RECODED``, the rest as
    elsewhere."""

    fmt: FP4Format
    scale_layout: str
    layout: str
    tile: tuple[int, int]
    epilogue: Epilogue
    arch: str = "sm_90a"
    static_weight: bool = False

    @property
    def is_recoded(self) -> bool:
        """Whether the weight is multiplied as ``before`` has written it."""
        return self.tile == RECODED

    @property
    def id(self) -> str:
        tile = "x".join(map(str, self.tile))
        family = "fp8_fp4_recoded" if self.is_recoded else "fp8_fp4_wgmma"
        family += "-static" if self.static_weight else ""
        parts = (family, self.fmt.name, self.scale_layout, self.layout, tile, _epilogue_id(self.epilogue))
        return "-".join((*parts, self.arch))

    @property
    def kernel(self) -> Any:
        """As the op builds it."""
        from torch_cute_ops.kernels import fp8_fp4_recoded, fp8_fp4_wgmma
        from torch_cute_ops.kernels.common.expert_layout import ExpertLayout
        from torch_cute_ops.runtime.arch import ARCHS as GPU_ARCHS

        rows = ExpertLayout(*FP8_LAYOUTS[self.layout])
        given: dict[str, Any] = {"rows": rows, "epilogue": self.epilogue, "arch": GPU_ARCHS[self.arch], "pdl": True}
        if self.is_recoded:
            return fp8_fp4_recoded.FP8FP4RecodedKernel(fp8_fp4_recoded.plan(**given))
        config = fp8_fp4_wgmma.plan(
            fmt=self.fmt,
            layout=SCALE_LAYOUTS[self.scale_layout],
            tokens=self.tile[0],
            splits=self.tile[1],
            static_weight=self.static_weight,
            **given,
        )
        return fp8_fp4_wgmma.FP8FP4WgmmaKernel(config)

    @property
    def before(self) -> RecodeCase | None:
        """What recodes the weight for it."""
        return RecodeCase(self.fmt, self.scale_layout, self.layout == "plain") if self.is_recoded else None


@dataclass(frozen=True)
class RecodeCase:
    """The kernel that writes an FP4 weight to memory in FP8."""

    fmt: FP4Format
    scale_layout: str
    is_plain: bool
    arch: str = "sm_90a"

    @property
    def id(self) -> str:
        return "-".join(
            ("fp4_to_fp8", self.fmt.name, self.scale_layout, "plain" if self.is_plain else "experts", self.arch)
        )

    @property
    def kernel(self) -> Any:
        """As the op builds it."""
        from torch_cute_ops.kernels import fp4_to_fp8

        layout = SCALE_LAYOUTS[self.scale_layout]
        return fp4_to_fp8.FP4ToFP8Kernel(fp4_to_fp8.Config(self.fmt, layout, self.is_plain, pdl=True))


FP8_LAYOUTS = {"plain": (False, False), "offsets": (True, False), "counted": (True, True), "masked": (False, True)}
"""Whether there are offsets, and counts."""


HAVE_SPILLED = (
    FP8GemmCase("fp8_wgmma", "plain", (128, 128, 1), Epilogue(FP32, "column", FP32)),
    FP8GemmCase("fp8_wgmma", "masked", (128, 128, 1), Epilogue(FP32, "expert_column", FP32)),
)
"""Each with another way to finish sums."""


def fp8_gemm_cases() -> list[FP8GemmCase]:
    """Every tile without and with alpha and bias of each column; layouts and other epilogues in turn."""
    from torch_cute_ops.kernels import fp8_mma, fp8_wgmma

    kinds = [("fp8_wgmma", tile, "sm_90a") for tile in fp8_wgmma.TILES]
    kinds += [("fp8_mma", (tokens,), arch) for tokens in fp8_mma.TILES for arch in ARCHS]
    layouts = itertools.cycle(FP8_LAYOUTS)
    light = itertools.cycle(epilogues((None, "one"))[::2])
    by_expert = itertools.cycle([*epilogues(("expert", "expert_column")), Epilogue(BF16, "expert_column", FP32)])
    by_column = itertools.cycle(PER_COLUMN)
    cases = [FP8GemmCase(family, next(layouts), tile, next(light), arch) for family, tile, arch in kinds]
    cases += HAVE_SPILLED
    cases.append(FP8GemmCase("fp8_wgmma", "plain", (64, 128, 2), PER_COLUMN[0], static_weight=True))
    for family, tile, arch in kinds:
        layout = next(layouts)
        cases.append(FP8GemmCase(family, layout, tile, next(by_column if layout == "plain" else by_expert), arch))
    return cases


def fp8_fp4_gemm_cases() -> list[FP8FP4GemmCase | RecodeCase]:
    """Every tile of either format; scale layouts, layouts of rows and epilogues in turn. Every layout of rows of the
    GEMM by a recoded weight, which does not know the weight's format."""
    from torch_cute_ops.kernels import fp8_fp4_wgmma

    layouts, scales = itertools.cycle(FP8_LAYOUTS), itertools.cycle(("128x4", "linear", "linear", "128x4"))
    by_expert = itertools.cycle([*epilogues(("expert", "expert_column")), Epilogue(BF16, "expert_column", FP32)])
    by_column = itertools.cycle(PER_COLUMN)
    cases = [FP8FP4GemmCase(NVFP4, "128x4", "plain", (64, 2), PER_COLUMN[0], static_weight=True)]
    for fmt, tile in itertools.product((NVFP4, MXFP4), fp8_fp4_wgmma.TILES):
        layout = next(layouts)
        epilogue = next(by_column if layout == "plain" else by_expert)
        cases.append(FP8FP4GemmCase(fmt, next(scales), layout, tile, epilogue))
    for layout in FP8_LAYOUTS:
        epilogue = next(by_column if layout == "plain" else by_expert)
        cases.append(FP8FP4GemmCase(NVFP4, "128x4", layout, RECODED, epilogue))
    kinds = itertools.product((NVFP4, MXFP4), ("128x4", "linear"), (True, False))
    return cases + [RecodeCase(*kind) for kind in kinds]


AnyCase = (
    Case
    | MmaCase
    | WgmmaCase
    | Tcgen05Case
    | Tcgen05ExpertsCase
    | ExpertsCase
    | GatedExpertsCase
    | MoeCase
    | FP8GemmCase
    | FP8FP4GemmCase
    | RecodeCase
)


def role_of(case: AnyCase) -> Any:
    """What a GEMM's case stands for in a part of its list, whatever the choices are that are made in turn. Those that
    need the most registers stand for themselves, and so do kernels that are no GEMM."""
    match case:
        case MmaCase():
            return type(case), case.tokens, case.ctas_per_sm, case.arch, case.a_layout is None
        case GatedExpertsCase():
            return type(case), case.rows, case.group
        case ExpertsCase():
            return type(case), case.group, case.tokens, case.bias_dtype is None, case.a_dtype
        case Tcgen05Case():
            return type(case), case.tokens, case.group, case.splits
        case Tcgen05ExpertsCase():
            return type(case), case.columns, case.parts > 1, case.routed
        case WgmmaCase() if not case.static_weight and case.epilogue not in PER_COLUMN:
            kind = case.dtype, case.format, case.layout, case.a_layout, case.a_dtype
            return type(case), kind, case.tokens, case.splits > 0, case.width is None
    if not isinstance(case, FP8GemmCase | FP8FP4GemmCase) or case.static_weight or case in HAVE_SPILLED:
        return case
    has_factors = case.epilogue.alpha not in (None, "one")  # of columns or experts
    if isinstance(case, FP8GemmCase):
        return case.family, case.tile, case.arch, has_factors
    return type(case), case.layout if case.is_recoded else case.fmt, case.tile, has_factors


def experts_cases(every: bool) -> list[ExpertsCase]:
    """Kinds of operands with sizes of a unit, all of them or a third; sizes of a tile, and the rest, in turn."""
    from torch_cute_ops.kernels import fp4_experts

    tiles = {8: (256, 16, 512), 16: (64, 512), 24: (512, 32, 128), 32: (256, 64, 128)}
    assert tuple(tiles) == fp4_experts.GROUPS
    assert {size for sizes in tiles.values() for size in sizes} == set(fp4_experts.TILES)
    turns = {group: itertools.cycle(sizes) for group, sizes in tiles.items()}
    rest = itertools.cycle(((BF16, 1), (FP16, 8), (FP32, 1), (BF16, 8)))
    cases = [
        ExpertsCase(*kind, group, next(turns[group]), *next(rest))
        for kind, group in _together(WARPGROUP_KINDS, tuple(turns), every)
    ]
    # With a bias, in either dtype: every size of a unit
    biased = {case.group: case for case in cases}
    cases += [replace(case, bias_dtype=FP32 if i % 2 else case.out_dtype) for i, case in enumerate(biased.values())]
    # What has spilled
    cases.append(ExpertsCase(BF16, MXFP4, "128x4", None, 24, 128, FP16, 8, bias_dtype=FP32))
    # Activations that are rounded to bfloat16
    return [*cases, ExpertsCase(BF16, MXFP4, "128x4", None, 16, 64, FP16, a_dtype=FP16)]


def gated_experts_cases(every: bool) -> list[GatedExpertsCase]:
    """Rows of a slice with sizes of a unit, and all kinds of operands or one in turn; the rest in turn."""
    from torch_cute_ops.kernels import fp4_gated_experts

    tiles = itertools.cycle(fp4_gated_experts.TILES)
    alphas, scales = itertools.cycle(("expert_half", "expert", None)), itertools.cycle(("expert", "one", None))
    biases = itertools.cycle((FP32, "out", None, FP32))
    kinds = (*WARPGROUP_KINDS, (BF16, MXFP4, "128x4", "8x4"))
    cases = []
    shapes = itertools.product(fp4_gated_experts.ROWS, fp4_gated_experts.GROUPS)
    for i, shape in enumerate(shapes):
        parts = fp4_gated_experts.PARTS[shape[0]]
        of_shape: list[GatedExpertsCase] = []
        for dtype, fmt, layout, a_layout in (*kinds[i % len(kinds) :], *kinds[: i % len(kinds)]):
            out = dtype if a_layout is None else fmt
            bias, scale = next(biases), next(scales)
            finish = (
                out,
                None if a_layout is None else SCALE_LAYOUTS[a_layout],
                next(alphas),
                dtype if bias == "out" else bias,
                scale if out == NVFP4 else None,
                len(cases) % 3 != 1,
            )
            sizes = *shape, next(tiles)
            case = GatedExpertsCase(
                dtype, fmt, layout, a_layout, *sizes, finish, parts=parts[(i + len(of_shape)) % len(parts)]
            )
            if case.kernel is not None and (every or not of_shape):
                of_shape.append(case)
        cases += of_shape
    return cases


def mma_cases(every: bool) -> list[MmaCase]:
    """Every tile and number of CTAs for every architecture, with all operand dtypes or one in turn; and so the rest."""
    kinds = ((FP16, NVFP4), (BF16, NVFP4), (BF16, MXFP4))
    splits, finish = itertools.cycle((1, 2, 3, 4, 6, 8)), itertools.cycle(epilogues((None, "one", "column")))
    layouts = itertools.cycle(("linear", "128x4"))
    tiles = tuple(itertools.product((8, 16, 32, 64), (1, 2)))
    cases = []
    for (i, (tokens, ctas_per_sm)), (j, arch), (k, kind) in itertools.product(*map(enumerate, (tiles, ARCHS, kinds))):
        if not every and k != (i + j) % len(kinds):
            continue
        case = MmaCase(*kind, next(layouts), tokens, next(splits), next(finish), arch, ctas_per_sm)
        if case.kernel is not None:
            cases.append(case)
    # FP4 activations, whose codes are multiplied
    kinds = ((NVFP4, "128x4"), (MXFP4, "linear"), (NVFP4, "linear"), (MXFP4, "8x4"))
    for i, (tokens, ctas_per_sm) in enumerate(tiles):
        every_kind = tuple(itertools.product(DESKTOP, kinds))
        for arch, (fmt, a_layout) in every_kind if every else [every_kind[3 * i % len(every_kind)]]:
            layout = weight_layout(SCALE_LAYOUTS[a_layout]).name
            case = MmaCase(torch.uint8, fmt, layout, tokens, next(splits), next(finish), arch, ctas_per_sm, a_layout)
            if case.kernel is not None:
                cases.append(case)
    return cases


def in_process(work: Callable[[Any], Any], case: Any) -> Any:
    """``work(case)``, or the text of its exception: exceptions of the DSL cannot all travel between processes."""
    try:
        return work(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def resources_of(case: AnyCase) -> Any:
    """Compile the case's kernel: the ``Resources`` of what it launches."""
    from torch_cute_ops.runtime.arch import ARCHS as GPU_ARCHS
    from torch_cute_ops.testing.resources import compile_for

    return compile_for(kernel_of(case), GPU_ARCHS[case.arch])[1]
