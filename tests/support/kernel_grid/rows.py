"""Cases of kernels that process rows: quantisation, optionally after a norm, a sum or a gate; and dequantisation."""

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
from torch_cute_ops.formats.fp8 import FP8_DYNAMIC_TENSOR
from torch_cute_ops.kernels import fp4_dequant, row_quant
from torch_cute_ops.runtime.arch import ARCHS as GPU_ARCHS

SPANS = ((16, 32, 48, 128), (1152, 2048, 2880, 4096), (7168, 8192), (16_384, 32_768, 65_536))
"""Groups of widths: several rows per warp; one warp per row; several warps per row; several CTAs per row."""

WIDTHS = tuple(itertools.chain(*SPANS))

WIDE = (7168, 65_536)
"""Widths for which a thread holds the most values: first for rows in one CTA, then for rows that several CTAs share."""

FP4_TARGETS = tuple(itertools.product(("nvfp4", "nvfp4-g", "mxfp4"), SCALE_LAYOUTS))

FP8_TARGETS = (("tensor", "row"), ("token", "row"), ("block128", "row"), ("block128", "column"))
"""Pairs (format, scale layout). The suffix ``-g`` means with a global scale."""

DYNAMIC_TENSOR = ("dynamic-tensor", "row")
"""Target of FP8 rows with one scale that is computed from the tensor. The grid does not contain it; see
``WITH_TENSOR_AMAX``."""

ROUNDED = ("rounded", "row")
"""Target of rows that are rounded to the input's dtype instead of quantised."""

TARGETS = (*FP4_TARGETS, *FP8_TARGETS, ROUNDED)

TOKEN_TARGETS = tuple(itertools.product(("nvfp4-t",), SCALE_LAYOUTS))
"""Targets of NVFP4 rows with a scale per row. The grid does not contain them; see ``ROW_SCALED``."""

SIX_TARGETS = tuple(itertools.product(("nvfp4-46", "nvfp4-46-g"), SCALE_LAYOUTS))
"""Targets of NVFP4 rows with the better of two scales per block. The grid does not contain them; see
``FOUR_OVER_SIX``."""

POWER_TARGETS = (
    *itertools.product(("block128-ue8m0",), ("row", "column")),
    *itertools.product(("block32",), SCALE_LAYOUTS),
)
"""Targets of FP8 rows whose block scales are powers of two. The grid does not contain them; see
``WITH_POWERS``."""

DTYPES = ((BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32))
"""Pairs (dtype of the input, or of the output of dequantisation; dtype of the weight)."""


@dataclass(frozen=True)
class What:
    """Operation of a kernel, as in ``kernels.row_quant.RowQuantSpec``. ``also`` names outputs in addition to codes
    and scales, ``more`` contains fields of the specification."""

    name: str
    source: str
    normalises: bool
    also: tuple[str, ...] = ()
    swiglu: bool = False
    weight_plus_one: bool = False
    gate: str = "silu"
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def targets(self) -> Iterable[tuple[str, str]]:
        """Formats and layouts that an op with this operation supports."""
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

PLUS_ONE = (
    What("norm1", "rows", True, weight_plus_one=True),
    What("norm1-norm", "rows", True, ("norm",), weight_plus_one=True),
    What("add1", "add", True, weight_plus_one=True),
    What("add1-linear-norm", "add", True, ("linear", "norm"), weight_plus_one=True),
)
"""Norms that multiply by 1 + weight. The grid does not contain them; see ``WITH_PLUS_ONE``."""

GELUS = (What("gelu_tanh", "silu_mul", False, gate="gelu_tanh"), What("gelu", "silu_mul", False, gate="gelu"))
"""Gates with GELU. The grid does not contain them; see ``WITH_GELU``."""

RELU = What("relu2", "silu_mul", False, gate="relu2")

LAYER = ("subtracts_mean", True), ("has_bias", True)
BARE, WIDER = ("has_weight", False), ("has_fp32_residual", True)

GENERAL = (
    What("layer", "rows", True, more=LAYER),
    What("layer-norm", "rows", True, ("norm",), more=LAYER),
    What("layer-bare", "rows", True, more=(LAYER[0], BARE)),
    What("norm-bare", "rows", True, more=(BARE,)),
    What("norm-bias", "rows", True, weight_plus_one=True, more=(LAYER[1],)),
    What("add-layer", "add", True, more=LAYER),
    What("add-wider", "add", True, more=(WIDER,)),
    What("add-wider-linear-norm", "add", True, ("linear", "norm"), more=(WIDER,)),
    What("add-wider-layer-norm", "add", True, ("norm",), more=(*LAYER, WIDER)),
)
"""LayerNorm, norms without a weight or with a bias, and norms after the addition of a float32 residual to 16-bit rows.
The grid does not contain them; see ``GENERAL_NORMS``."""

WHAT = {what.name: what for what in (*WHATS, *PLUS_ONE, *GELUS, RELU, *GENERAL)}


@dataclass(frozen=True)
class Case(KernelCase):
    """A configuration of a row kernel, and the architecture to compile it for."""

    what: What
    dtypes: tuple[torch.dtype, torch.dtype]
    width: int
    target: tuple[str, str]
    arch: str
    interleaved: bool = False

    @property
    def id(self) -> str:
        names = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
        dtypes = "".join(names[dtype] for dtype in self.dtypes[: 2 if self.what.normalises else 1])
        order = ("interleaved",) if self.interleaved else ()
        return "-".join((self.what.name, dtypes, str(self.width), *self.target, *order, self.arch))

    @property
    def is_valid(self) -> bool:
        return (
            self.target in self.what.targets
            and (self.what.normalises or self.dtypes[0] == self.dtypes[1])
            # Without block scales, the width must be a multiple of the 16 elements that a thread processes at once.
            and self.width % max(16, 1 if self.format is None else self.format.width_multiple) == 0
            # Excluded: two fp32 rows and an fp32 weight do not fit into 8 CTAs with 99 KB each.
            and (self.what.source, self.dtypes[0], self.width, self.arch) != ("add", FP32, 65_536, "sm_120a")
        )

    @property
    def format(self) -> FP4Format | FP8Format | None:
        name, layout = self.target
        if self.target == ROUNDED:
            return None
        if self.target == DYNAMIC_TENSOR:
            return FP8_DYNAMIC_TENSOR
        if self.target in (*FP8_TARGETS, *POWER_TARGETS):
            granularity, *powers = name.split("-")
            return resolve_fp8_format(granularity, layout, *powers)[0]
        return MXFP4 if name == "mxfp4" else NVFP4

    @property
    def kernel(self) -> Any:
        """Kernel with the configuration that ``plan`` chooses.

        Raises:
            ValueError: if ``plan`` supports no kernel.
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
            has_factor=name in ("nvfp4-g", "nvfp4-46-g", "tensor", "dynamic-tensor"),
            writes_norm="norm" in self.what.also or self.target == ROUNDED,
            swiglu=self.what.swiglu,
            interleaved=self.interleaved,
            has_row_scale=self.target in TOKEN_TARGETS,
            weight_plus_one=self.what.weight_plus_one,
            gate=self.what.gate,
            four_over_six=self.target in SIX_TARGETS,
            **dict(self.what.more),
        )
        return row_quant.RowQuantKernel(row_quant.plan(spec, GPU_ARCHS[self.arch]))

    @property
    def choices(self) -> tuple[Any, ...]:
        """The case's value for each factor of the grid."""
        return self.what, self.dtypes, self.width, self.target, self.arch

    @property
    def pairs(self) -> list[tuple[tuple[int, Any], tuple[int, Any]]]:
        """All pairs of the case's choices, as (index of the factor, choice); and for the widths in
        ``WIDE`` the triple of operation, width and architecture.

        A dtype or target is paired with the group of widths (``SPANS``) instead of the width.
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
"""Cases that have spilled registers, in addition to the cases that cover pairs."""

INTERLEAVED = (
    Case(WHAT["add"], (BF16, BF16), 7168, ("token", "row"), "sm_90a", interleaved=True),
    Case(WHAT["swiglu"], (BF16, BF16), 2880, ("tensor", "row"), "sm_90a", interleaved=True),
)
"""Cases whose codes are interleaved along k, without and with blocks of zeros at the end of a row."""

ROW_SCALED = tuple(
    itertools.starmap(
        Case,
        (
            (WHAT["quantize"], (BF16, BF16), 48, TOKEN_TARGETS[1], "sm_90a"),
            (WHAT["quantize"], (BF16, BF16), 7168, TOKEN_TARGETS[1], "sm_90a"),
            (WHAT["quantize"], (FP32, FP32), 65_536, TOKEN_TARGETS[0], "sm_120a"),
            (WHAT["norm"], (BF16, BF16), 7168, TOKEN_TARGETS[0], "sm_120a"),
            (WHAT["norm"], (FP16, FP32), 4096, TOKEN_TARGETS[1], "sm_90a"),
            (WHAT["norm"], (BF16, FP32), 7168, TOKEN_TARGETS[2], "sm_100a"),
            (WHAT["add"], (BF16, BF16), 7168, TOKEN_TARGETS[1], "sm_90a"),
            (WHAT["add"], (FP32, FP32), 4096, TOKEN_TARGETS[1], "sm_100a"),
            (WHAT["add"], (BF16, BF16), 16_384, TOKEN_TARGETS[0], "sm_120a"),
            (WHAT["silu"], (BF16, BF16), 7168, TOKEN_TARGETS[1], "sm_90a"),
            (WHAT["silu"], (FP32, FP32), 2880, TOKEN_TARGETS[2], "sm_120a"),
            (WHAT["swiglu"], (FP16, FP16), 7168, TOKEN_TARGETS[0], "sm_100a"),
            (WHAT["swiglu"], (BF16, BF16), 65_536, TOKEN_TARGETS[1], "sm_90a"),
        ),
    )
)
"""Cases of NVFP4 rows with a scale per row."""

WITH_PLUS_ONE = tuple(
    itertools.starmap(
        Case,
        (
            (WHAT["norm1"], (BF16, BF16), 7168, ("nvfp4", "linear"), "sm_120a"),
            (WHAT["norm1"], (BF16, FP32), 3072, ("block128", "column"), "sm_100a"),
            (WHAT["norm1-norm"], (BF16, FP32), 7168, ("nvfp4", "linear"), "sm_100a"),
            (WHAT["add1"], (BF16, BF16), 7168, ("nvfp4-g", "128x4"), "sm_90a"),
            (WHAT["add1"], (FP32, FP32), 16_384, ROUNDED, "sm_90a"),
            (WHAT["add1-linear-norm"], (FP16, FP32), 8192, ("mxfp4", "128x4"), "sm_90a"),
        ),
    )
)
"""Cases of norms that multiply by 1 + weight."""

WITH_GELU = tuple(
    Case(what, *rest)
    for what, rest in itertools.product(
        GELUS,
        (
            ((BF16, BF16), 7168, ("nvfp4", "128x4"), "sm_90a"),
            ((BF16, BF16), 2880, ("mxfp4", "linear"), "sm_120a"),
            ((FP16, FP16), 7168, ("block128", "column"), "sm_90a"),
            ((FP32, FP32), 16_384, ("token", "row"), "sm_100a"),
            ((BF16, BF16), 15_360, ROUNDED, "sm_90a"),
        ),
    )
)
"""Cases of gates with GELU."""

WITH_RELU = (
    Case(RELU, (BF16, BF16), 7168, ("nvfp4", "128x4"), "sm_90a"),
    Case(RELU, (FP32, FP32), 16_384, ("token", "row"), "sm_120a"),
)
"""Cases of gates with squared ReLU."""

GENERAL_NORMS = tuple(
    itertools.starmap(
        Case,
        (
            (WHAT["layer"], (BF16, BF16), 7168, ("nvfp4-g", "128x4"), "sm_90a"),
            (WHAT["layer"], (BF16, BF16), 7168, ("nvfp4", "linear"), "sm_120a"),
            (WHAT["layer"], (BF16, FP32), 3072, ("block128", "column"), "sm_100a"),
            (WHAT["layer"], (BF16, BF16), 4096, ("token", "row"), "sm_90a"),
            (WHAT["layer"], (FP32, FP32), 65_536, ROUNDED, "sm_90a"),
            (WHAT["layer"], (BF16, BF16), 4096, TOKEN_TARGETS[1], "sm_90a"),
            (WHAT["layer-norm"], (BF16, FP32), 7168, ("nvfp4", "linear"), "sm_100a"),
            (WHAT["layer-bare"], (BF16, BF16), 3072, ("tensor", "row"), "sm_90a"),
            (WHAT["layer-bare"], (FP16, FP16), 16_384, ("mxfp4", "linear"), "sm_120a"),
            (WHAT["norm-bare"], (BF16, BF16), 7168, ("nvfp4", "128x4"), "sm_90a"),
            (WHAT["norm-bias"], (BF16, BF16), 8192, ("token", "row"), "sm_100a"),
            (WHAT["add-layer"], (BF16, BF16), 7168, ("nvfp4-g", "128x4"), "sm_90a"),
            (WHAT["add-wider"], (BF16, BF16), 7168, ("nvfp4", "128x4"), "sm_90a"),
            (WHAT["add-wider"], (BF16, BF16), 16_384, ("block128", "column"), "sm_120a"),
            (WHAT["add-wider-linear-norm"], (FP16, FP32), 8192, ("mxfp4", "128x4"), "sm_90a"),
            (WHAT["add-wider-layer-norm"], (BF16, FP32), 7168, ("nvfp4", "linear"), "sm_100a"),
        ),
    )
)
"""Cases of the norms in ``GENERAL``."""

WITH_POWERS = tuple(
    itertools.starmap(
        Case,
        (
            (WHAT["quantize"], (BF16, BF16), 7168, POWER_TARGETS[1], "sm_90a"),
            (WHAT["norm"], (BF16, FP32), 3072, POWER_TARGETS[0], "sm_100a"),
            (WHAT["add"], (BF16, BF16), 7168, POWER_TARGETS[1], "sm_90a"),
            (WHAT["swiglu"], (FP16, FP16), 7168, POWER_TARGETS[1], "sm_120a"),
            (WHAT["layer"], (BF16, BF16), 4096, POWER_TARGETS[1], "sm_100a"),
            (WHAT["quantize"], (BF16, BF16), 7168, POWER_TARGETS[3], "sm_90a"),
            (WHAT["quantize"], (FP32, FP32), 65_536, POWER_TARGETS[2], "sm_120a"),
            (WHAT["norm"], (BF16, BF16), 7168, POWER_TARGETS[3], "sm_100a"),
            (WHAT["norm"], (FP16, FP32), 4096, POWER_TARGETS[4], "sm_90a"),
            (WHAT["add"], (BF16, BF16), 7168, POWER_TARGETS[3], "sm_90a"),
            (WHAT["add"], (BF16, BF16), 16_384, POWER_TARGETS[2], "sm_120a"),
            (WHAT["silu"], (BF16, BF16), 14_336, POWER_TARGETS[3], "sm_100a"),
            (WHAT["layer"], (FP16, FP16), 16_384, POWER_TARGETS[2], "sm_90a"),
        ),
    )
)
"""Cases of FP8 rows whose block scales are powers of two."""

FOUR_OVER_SIX = tuple(
    itertools.starmap(
        Case,
        (
            (WHAT["quantize"], (BF16, BF16), 7168, SIX_TARGETS[4], "sm_90a"),
            (WHAT["quantize"], (BF16, BF16), 48, SIX_TARGETS[0], "sm_90a"),
            (WHAT["quantize"], (FP32, FP32), 65_536, SIX_TARGETS[4], "sm_90a"),
            (WHAT["quantize"], (BF16, BF16), 7168, SIX_TARGETS[4], "sm_100a"),
            (WHAT["quantize"], (FP16, FP16), 4096, SIX_TARGETS[2], "sm_100a"),
            (WHAT["quantize"], (BF16, BF16), 8192, SIX_TARGETS[3], "sm_120a"),
            (WHAT["quantize"], (FP32, FP32), 2880, SIX_TARGETS[1], "sm_120a"),
        ),
    )
)
"""Cases of NVFP4 rows with the better of two scales per block."""

WITH_TENSOR_AMAX = (
    Case(WHAT["quantize"], (BF16, BF16), 7168, DYNAMIC_TENSOR, "sm_90a"),
    Case(WHAT["quantize"], (FP32, FP32), 2880, DYNAMIC_TENSOR, "sm_100a", interleaved=True),
    Case(WHAT["quantize"], (FP16, FP16), 65_536, DYNAMIC_TENSOR, "sm_120a"),
)
"""Cases of FP8 rows with one scale that is computed from the tensor."""

MORE = (
    *INTERLEAVED,
    *WITH_POWERS,
    *WITH_TENSOR_AMAX,
    *FOUR_OVER_SIX,
    *ROW_SCALED,
    *WITH_PLUS_ONE,
    *WITH_GELU,
    *WITH_RELU,
    *GENERAL_NORMS,
)
"""Cases that are not part of the grid."""


def every_case() -> Iterator[Case]:
    """Yield every valid case of the grid, and ``MORE``."""
    yield from grid_cases()
    yield from MORE


def grid_cases() -> Iterator[Case]:
    """Yield every valid case of the grid."""
    choices = itertools.product(WHATS, DTYPES, WIDTHS, TARGETS, ARCHS)
    yield from (case for case in itertools.starmap(Case, choices) if case.is_valid)


@cache
def covering_cases() -> tuple[Case, ...]:
    """Return a selection of the grid, plus ``TIGHT`` and ``MORE``.

    The selection contains each pair of choices. For the widths in ``WIDE``, it also contains each triple of operation,
    width and architecture. It is greedy: for each pair that is still missing, it adds the case that contains the most
    missing pairs.
    """
    having = defaultdict(list)
    for case in grid_cases():
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
    return *chosen, *(case for case in TIGHT if case not in chosen), *MORE
