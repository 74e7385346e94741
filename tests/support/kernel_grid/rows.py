"""Kernels of rows: quantising, with or without a norm, a sum or a gate before; and dequantising."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from support.kernel_grid.common import ARCHS, BF16, FP16, FP32, KernelCase
from torch_cute_ops.formats import (
    FP8_SCALE_LAYOUTS,
    MXFP4,
    NVFP4,
    SCALE_LAYOUTS,
    FP4Format,
    FP8Format,
    resolve_fp8_format,
)
from torch_cute_ops.kernels import fp4_dequant, row_quant
from torch_cute_ops.runtime.arch import ARCHS as GPU_ARCHS

SPANS = ((16, 32, 48, 128), (1152, 2048, 2880, 4096), (7168, 8192), (16_384, 32_768, 65_536))
"""Widths of rows that share a warp, that have one, that have several, and that are split."""

WIDTHS = tuple(itertools.chain(*SPANS))

WIDE = (7168, 65_536)
"""Widths at which threads hold the most values: of those that one CTA has, and of those that several share."""

FP4_TARGETS = tuple(itertools.product(("nvfp4", "nvfp4-g", "mxfp4"), SCALE_LAYOUTS))

FP8_TARGETS = (("tensor", "row"), ("token", "row"), ("block128", "row"), ("block128", "column"))
"""Format (``-g``: with a global scale) and scale layout."""

ROUNDED = ("rounded", "row")
"""No format: values in the input dtype."""

TARGETS = (*FP4_TARGETS, *FP8_TARGETS, ROUNDED)

DTYPES = ((BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32))
"""Of the input (or of what is written), and of the weight."""


@dataclass(frozen=True)
class What:
    """What a kernel does, as in ``kernels.row_quant.RowQuantSpec``; ``also`` are outputs beside codes and scales."""

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
        if not self.source or self.also:
            return FP4_TARGETS
        return TARGETS if self.name != "quantize" else (*FP4_TARGETS, *FP8_TARGETS)


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
class Case(KernelCase):
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
            and self.width % max(16, 1 if self.format is None else self.format.width_multiple) == 0
            # Two fp32 rows and an fp32 weight do not fit into 8 CTAs of 99 KB.
            and (self.what.source, self.dtypes[0], self.width, self.arch) != ("add", FP32, 65_536, "sm_120a")
        )

    @property
    def format(self) -> FP4Format | FP8Format | None:
        name, layout = self.target
        if self.target == ROUNDED:
            return None
        if self.target in FP8_TARGETS:
            return resolve_fp8_format(name, layout)[0]
        return MXFP4 if name == "mxfp4" else NVFP4

    @property
    def kernel(self) -> Any:
        """The kernel that ``plan`` chooses.

        Raises:
            ValueError: from ``plan``, if it supports none.
        """
        name, layout = self.target
        dtype, weight = self.dtypes
        if self.what.name == "dequantize":
            config = fp4_dequant.plan(dtype, self.width, self.format, SCALE_LAYOUTS[layout], name == "nvfp4-g")
            return fp4_dequant.FP4DequantKernel(config)
        spec = row_quant.RowQuantSpec(
            source=self.what.source,
            dtype=dtype,
            weight_dtype=weight if self.what.normalises else None,
            width=self.width,
            norm_width=self.width,
            fmt=self.format,
            layout={**SCALE_LAYOUTS, **FP8_SCALE_LAYOUTS}[layout],
            also_linear="linear" in self.what.also,
            has_factor=name in ("nvfp4-g", "tensor"),
            writes_norm="norm" in self.what.also or self.target == ROUNDED,
            swiglu=self.what.swiglu,
        )
        return row_quant.RowQuantKernel(row_quant.plan(spec, GPU_ARCHS[self.arch]))

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


TIGHT = (
    Case(WHAT["norm"], (BF16, BF16), 7168, ("nvfp4", "linear"), "sm_120a"),
    Case(WHAT["norm-norm"], (BF16, FP32), 7168, ("nvfp4", "linear"), "sm_100a"),
)
"""Cases that have spilled, between those in which pairs of choices meet."""


def every_case() -> Iterator[Case]:
    """The whole grid."""
    choices = itertools.product(WHATS, DTYPES, WIDTHS, TARGETS, ARCHS)
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
