"""The kernel configurations that compile in tests, and how one of them is compiled in a process of its own."""

from __future__ import annotations

import importlib
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format, FP8Format, resolve_fp8_format

SPANS = ((16, 32, 48, 128), (1152, 2048, 2880, 4096), (7168, 8192), (16_384, 32_768, 65_536))
"""Widths of rows that share a warp, that have one, that have several, and that are split."""
WIDTHS = tuple(itertools.chain(*SPANS))
WIDE = (4096, 7168, 8192, 65_536)
"""Widths at which threads hold the most values."""
ARCHS = ("sm_90a", "sm_100a", "sm_120a")
FP4_TARGETS = tuple(itertools.product(("nvfp4", "nvfp4-g", "mxfp4"), SCALE_LAYOUTS))
FP8_TARGETS = (("tensor", "row"), ("token", "row"), ("block128", "row"), ("block128", "column"))
"""Format (``-g``: with a global scale) and scale layout."""
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = ((BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32))
"""Of the input (or of what is written), and of the weight."""


@dataclass(frozen=True)
class What:
    """What a kernel does, as in ``kernels.row_quant.Problem``."""

    name: str
    source: str
    normalises: bool
    third: str | None = None

    @property
    def targets(self) -> Iterable[tuple[str, str]]:
        """Formats and layouts that some op has."""
        if self.third == "linear":
            return [target for target in FP4_TARGETS if target[1] == "128x4"]
        has_fp8 = self.third is None and (self.normalises or self.source == "silu_mul")
        return (*FP4_TARGETS, *FP8_TARGETS) if has_fp8 else FP4_TARGETS


WHATS = (
    What("quantize", "rows", False),
    What("norm", "rows", True),
    What("norm-norm", "rows", True, "norm"),
    What("add", "add", True),
    What("add-norm", "add", True, "norm"),
    What("add-linear", "add", True, "linear"),
    What("silu", "silu_mul", False),
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
            and self.width % (self.format.block_size or 16) == 0
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
    if isinstance(case, ProductCase | WgmmaCase | ExpertsCase | MoeCase | FP8ProductCase):
        return case.kernel
    from torch_cute_ops.kernels import fp4_dequant, row_quant
    from torch_cute_ops.runtime.arch import ARCHS as FACTS

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
        also_linear=case.what.third == "linear",
        has_factor=name in ("nvfp4-g", "tensor"),
        writes_norm=case.what.third == "norm",
    )
    return row_quant.RowQuantKernel(row_quant.plan(problem, FACTS[case.arch]))


def _product_id(kind: str, case: AnyCase, *rest: str) -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in (case.dtype, case.out_dtype)]
    alpha = "alpha" if case.has_alpha else "plain"
    return "-".join((kind, *names, case.format.name, case.layout, *rest, alpha, case.arch))


@dataclass(frozen=True)
class ProductCase:
    """A kernel of FP4 products and the architecture to compile it for."""

    dtype: torch.dtype
    format: FP4Format
    layout: str
    tokens: int
    splits: int
    out_dtype: torch.dtype
    has_alpha: bool
    arch: str
    ctas_per_sm: int = 1

    @property
    def id(self) -> str:
        return _product_id("product", self, f"{self.tokens}x{self.splits}x{self.ctas_per_sm}")

    @property
    def kernel(self) -> Any:
        """As the backend builds it; ``None`` if the architecture has no room for it."""
        from torch_cute_ops.kernels import fp4_mma
        from torch_cute_ops.runtime.arch import ARCHS as FACTS

        config = fp4_mma.plan(
            dtype=self.dtype,
            fmt=self.format,
            layout=SCALE_LAYOUTS[self.layout],
            out_dtype=self.out_dtype,
            has_alpha=self.has_alpha,
            tokens=self.tokens,
            splits=self.splits,
            ctas_per_sm=self.ctas_per_sm,
            arch=FACTS[self.arch],
            pdl=True,
        )
        return None if config is None else fp4_mma.FP4MmaKernel(config)


@dataclass(frozen=True)
class WgmmaCase:
    """A warpgroup kernel of FP4 products, with the one that puts its activations in order."""

    dtype: torch.dtype
    format: FP4Format
    layout: str
    a_layout: str | None
    tokens: int
    out_dtype: torch.dtype
    has_alpha: bool
    splits: int = 0
    width: int | None = None
    arch: str = "sm_90a"

    @property
    def id(self) -> str:
        sums = f"{self.tokens}by{self.splits}" if self.width is None else f"{self.tokens}of{self.width}"
        return _product_id("wgmma", self, self.a_layout or "16-bit", sums)

    @property
    def kernel(self) -> Any:
        """As the backend builds it."""
        from torch_cute_ops.kernels import fp4_wgmma
        from torch_cute_ops.runtime.arch import ARCHS as FACTS

        config = fp4_wgmma.plan(
            dtype=self.dtype,
            fmt=self.format,
            layout=SCALE_LAYOUTS[self.layout],
            a_layout=None if self.a_layout is None else SCALE_LAYOUTS[self.a_layout],
            out_dtype=self.out_dtype,
            has_alpha=self.has_alpha,
            width=self.width,
            tokens=self.tokens,
            splits=self.splits,
            arch=FACTS[self.arch],
            pdl=True,
        )
        return fp4_wgmma.FP4WgmmaKernel(config)


WARPGROUP_KINDS = (
    (FP16, NVFP4, "linear", None),
    (BF16, NVFP4, "128x4", None),
    (FP16, NVFP4, "128x4", "8x4"),
    (FP16, NVFP4, "linear", "linear"),
    (BF16, MXFP4, "128x4", None),
    (BF16, MXFP4, "128x4", "128x4"),
)
"""What a weight and activations may be beside each other on sm_90a: dtype of products, format, layouts of scales."""


def wgmma_cases(every: bool) -> list[WgmmaCase]:
    """Kinds of operands with tiles: all of them, or half; the rest in turn."""
    rest = itertools.cycle(itertools.product((True, False), (BF16, FP16, FP32)))
    tiles = [(tokens, 0) for tokens in (8, 16, 32, 64, 128, 256)]
    tiles += [(8, 1), (16, 8), (32, 3), (64, 3), (128, 8)]
    plain = [
        WgmmaCase(*kind, tokens, *reversed(next(rest)), splits)
        for kind, (tokens, splits) in _together(WARPGROUP_KINDS, tiles, every)
    ]
    outs, widths = itertools.cycle((BF16, FP16, FP32)), itertools.cycle((256, 1024, 512))
    return plain + [
        WgmmaCase(*kind, tokens, next(outs), True, width=next(widths))
        for kind, tokens in _together(WARPGROUP_KINDS, (16, 32, 64, 128), every)
    ]


def _together(some: Sequence[Any], others: Sequence[Any], every: bool) -> Iterator[tuple[Any, Any]]:
    """Each of ``some`` with every one of ``others``, or with every second."""
    for (i, one), (j, other) in itertools.product(enumerate(some), enumerate(others)):
        if every or (i + j) % 2 == 0:
            yield one, other


@dataclass(frozen=True)
class ExpertsCase:
    """The kernels of FP4 products that are added up over experts."""

    dtype: torch.dtype
    format: FP4Format
    layout: str
    a_layout: str | None
    group: int
    tokens: int
    out_dtype: torch.dtype
    classes: int = 1
    has_alpha: bool = True
    arch: str = "sm_90a"

    @property
    def id(self) -> str:
        return _product_id("experts", self, self.a_layout or "16-bit", f"{self.group}of{self.tokens}by{self.classes}")

    @property
    def kernel(self) -> Any:
        """For experts of two chunks, of which the second is not whole."""
        return self.kernel_for(320)

    def kernel_for(self, width: int) -> Any:
        """As the backend builds it."""
        from torch_cute_ops.kernels import fp4_experts
        from torch_cute_ops.runtime.arch import ARCHS as FACTS

        config = fp4_experts.plan(
            dtype=self.dtype,
            fmt=self.format,
            layout=SCALE_LAYOUTS[self.layout],
            a_layout=None if self.a_layout is None else SCALE_LAYOUTS[self.a_layout],
            out_dtype=self.out_dtype,
            width=width,
            group=self.group,
            tokens=self.tokens,
            classes=self.classes,
            arch=FACTS[self.arch],
            pdl=True,
        )
        return fp4_experts.FP4ExpertsKernel(config)


@dataclass(frozen=True)
class MoeCase:
    """A kernel around the experts' products: ``facts`` are those of the op of that name."""

    op: str
    facts: tuple[Any, ...]
    arch: str = "sm_90a"

    @property
    def id(self) -> str:
        return "-".join((self.op, *(str(fact).removeprefix("torch.") for fact in self.facts), self.arch))

    @property
    def kernel(self) -> Any:
        """As the op builds it."""
        from torch_cute_ops.runtime.arch import ARCHS as FACTS

        op = importlib.import_module(f"torch_cute_ops.ops.{self.op}")
        return op._wanted(op._Facts(*self.facts, 0), FACTS[self.arch]).make()


def moe_cases() -> list[MoeCase]:
    """The most experts of a token and others, narrow rows and wide ones; dtypes in turn."""
    archs = itertools.cycle(ARCHS)
    dtypes = itertools.cycle((BF16, FP16, FP32))
    finalize = [
        (width, next(dtypes), topk, residual)
        for width, topk, residual in ((7168, 8, True), (16_384, 16, True), (8, 1, False), (2880, 16, False))
    ]
    permute = [
        (width, next(dtypes), topk) for width, topk in ((7168, 8), (16_384, 16), (128, 1), (2048, 16), (65_536, 4))
    ]
    swiglu = [
        (2 * width, dtype, *given)
        for dtype, widths in ((BF16, (128, 2048, 7168)), (FP16, (1152, 4096, 65_536)), (FP32, (2048, 18_432)))
        for width, given in zip(widths, itertools.cycle(((True, True), (False, True), (True, False))))
    ]
    route = [
        (experts, next(dtypes), topk, *scoring, renormalize, masked)
        for (experts, topk, *scoring), renormalize, masked in (
            ((256, 8, True, "sigmoid", 8, 4), True, False),
            ((512, 16, False, "softmax", 1, 1), False, True),
            ((512, 16, True, "sigmoid", 32, 4), True, True),
            ((5, 1, False, "softmax", 1, 1), True, False),
            ((60, 4, False, "sigmoid", 3, 2), False, False),
            ((510, 16, True, "sigmoid", 17, 4), True, False),
        )
    ]
    cases = {
        "moe_route": route,
        "moe_finalize": finalize,
        "moe_permute_fp8quant": permute,
        "moe_swiglu_fp8quant": swiglu,
    }
    return [MoeCase(op, facts, next(archs)) for op, some in cases.items() for facts in some]


@dataclass(frozen=True)
class FP8ProductCase:
    """A kernel of FP8 products: ``layout`` as ``FP8_LAYOUTS`` names it, ``tile`` as of the family's ``TILES``."""

    family: str
    layout: str
    tile: tuple[int, ...]
    out_dtype: torch.dtype
    arch: str = "sm_90a"

    @property
    def id(self) -> str:
        tile = "x".join(map(str, self.tile))
        return "-".join((self.family, self.layout, tile, str(self.out_dtype).removeprefix("torch."), self.arch))

    @property
    def kernel(self) -> Any:
        """As the op builds it."""
        from torch_cute_ops.kernels import fp8_mma, fp8_wgmma
        from torch_cute_ops.kernels.common.expert_layout import ExpertLayout
        from torch_cute_ops.runtime.arch import ARCHS as FACTS

        rows = ExpertLayout(*FP8_LAYOUTS[self.layout])
        given = {"rows": rows, "out_dtype": self.out_dtype, "arch": FACTS[self.arch], "pdl": True}
        if self.family == "fp8_mma":
            return fp8_mma.FP8MmaKernel(fp8_mma.plan(tokens=self.tile[0], **given))
        names = ("tokens", "columns", "splits")
        return fp8_wgmma.FP8WgmmaKernel(fp8_wgmma.plan(**dict(zip(names, self.tile, strict=True)), **given))


FP8_LAYOUTS = {"plain": (False, False), "offsets": (True, False), "counted": (True, True), "masked": (False, True)}
"""Whether there are offsets, and counts."""


def fp8_product_cases() -> list[FP8ProductCase]:
    """Every tile; layouts and dtypes of the result, which share all code but a few lines, in turn."""
    from torch_cute_ops.kernels import fp8_mma, fp8_wgmma

    layouts, out_dtypes = itertools.cycle(FP8_LAYOUTS), itertools.cycle((BF16, FP16, FP32))
    kinds = [("fp8_wgmma", tile, "sm_90a") for tile in fp8_wgmma.TILES]
    kinds += [("fp8_mma", (tokens,), arch) for tokens in fp8_mma.TILES for arch in ARCHS]
    return [FP8ProductCase(family, next(layouts), tile, next(out_dtypes), arch) for family, tile, arch in kinds]


AnyCase = Case | ProductCase | WgmmaCase | ExpertsCase | MoeCase | FP8ProductCase


def experts_cases(every: bool) -> list[ExpertsCase]:
    """Kinds of operands with sizes of a unit, all of them or half, and every size of a tile; the rest in turn."""
    from torch_cute_ops.kernels import fp4_experts

    tiles = {8: (256, 16, 512), 16: (64, 512), 24: (512, 32, 128), 32: (256, 64, 128)}
    assert tuple(tiles) == fp4_experts.GROUPS
    assert {size for sizes in tiles.values() for size in sizes} == set(fp4_experts.TILES)
    turns = {group: itertools.cycle(sizes) for group, sizes in tiles.items()}
    rest = itertools.cycle(((BF16, 1), (FP16, 8), (FP32, 1), (BF16, 8)))
    return [
        ExpertsCase(*kind, group, next(turns[group]), *next(rest))
        for kind, group in _together(WARPGROUP_KINDS, tuple(turns), every)
    ]


def product_cases(every: bool) -> list[ProductCase]:
    """Every tile and number of CTAs for every architecture, with all operand dtypes or one in turn; and so the rest."""
    kinds = ((FP16, NVFP4), (BF16, NVFP4), (BF16, MXFP4))
    rest = itertools.cycle(itertools.product((1, 2, 3, 4, 6, 8), (BF16, FP16, FP32), (True, False)))
    layouts = itertools.cycle(("linear", "128x4"))
    tiles = tuple(itertools.product((8, 16, 32, 64), (1, 2)))
    cases = []
    for (i, (tokens, ctas_per_sm)), (j, arch), (k, kind) in itertools.product(*map(enumerate, (tiles, ARCHS, kinds))):
        if not every and k != (i + j) % len(kinds):
            continue
        case = ProductCase(*kind, next(layouts), tokens, *next(rest), arch, ctas_per_sm)
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
    from torch_cute_ops.runtime.arch import ARCHS as FACTS
    from torch_cute_ops.testing.resources import compile_for

    return compile_for(kernel_of(case), FACTS[case.arch])[1]
