"""The kernel configurations that compile in tests, and how one of them is compiled in a process of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format

WIDTHS = (16, 32, 48, 128, 1536, 2048, 2880, 4096, 7168, 8192, 16_384, 32_768, 65_536)
WIDE = (4096, 7168, 8192, 65_536)
"""Widths at which threads hold the most values."""
ARCHS = ("sm_90a", "sm_100a", "sm_120a")
FORMATS = (("nvfp4", False), ("nvfp4", True), ("mxfp4", False))
"""Format, and whether there is a global scale."""
LAYOUTS = tuple(SCALE_LAYOUTS)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NORMS = ((BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32))
KINDS = (
    *(("quantize", dtype, None, False) for dtype in (BF16, FP16, FP32)),
    *(("norm", *dtypes, writes_norm) for dtypes in NORMS for writes_norm in (False, True)),
    *(("dequantize", dtype, None, False) for dtype in (BF16, FP16, FP32)),
)
"""What the kernel does, dtype of the input (or of what it writes) and of the weight, whether it writes the norm."""


@dataclass(frozen=True)
class Case:
    """One configuration and the architecture to compile it for."""

    kind: tuple[str, torch.dtype, torch.dtype | None, bool]
    width: int
    fmt: tuple[str, bool]
    layout: str
    arch: str

    @property
    def id(self) -> str:
        what, dtype, weight, writes_norm = self.kind
        names = {BF16: "bf16", FP16: "fp16", FP32: "fp32", None: ""}
        kind = f"{what}-{names[dtype]}{names[weight]}{'-norm' if writes_norm else ''}"
        return f"{kind}-{self.width}-{self.fmt[0]}{'-g' if self.fmt[1] else ''}-{self.layout}-{self.arch}"

    @property
    def is_valid(self) -> bool:
        return self.width % self.format.block_size == 0

    @property
    def format(self) -> FP4Format:
        return {"nvfp4": NVFP4, "mxfp4": MXFP4}[self.fmt[0]]

    @property
    def choices(self) -> tuple[Any, ...]:
        """One choice for each factor of the grid."""
        return self.kind, self.width, self.fmt, self.layout, self.arch


def every_case() -> Iterator[Case]:
    """The whole grid."""
    cases = (Case(*choices) for choices in itertools.product(KINDS, WIDTHS, FORMATS, LAYOUTS, ARCHS))
    return (case for case in cases if case.is_valid)


def covering_cases() -> list[Case]:
    """A part of the grid in which any two choices meet, and kind, architecture and a wide row all three."""
    cases: dict[Case, None] = {}

    def add(kind: int, width: int, arch: int, turn: int) -> None:
        # Formats and layouts take turns; a format that the width does not fit makes way for the next.
        for fmt in range(3):
            case = Case(KINDS[kind], width, FORMATS[(turn + fmt) % 3], LAYOUTS[(turn // 3 + kind) % 3], ARCHS[arch])
            if case.is_valid:
                cases[case] = None
                return

    for kind, (i, width) in itertools.product(range(len(KINDS)), enumerate(WIDTHS)):
        if width in WIDE:
            for arch in range(3):
                add(kind, width, arch, kind + i + arch)
        else:
            add(kind, width, (kind + i) % 3, kind // 3 + i * 2)
    return list(cases)


def kernel_of(case: Case) -> Any:
    """The kernel that ``plan`` chooses.

    Raises:
        ValueError: from ``plan``, if it supports none.
    """
    from torch_cute_ops.kernels import fp4_dequant, row_quant
    from torch_cute_ops.runtime.arch import ARCHS as FACTS

    what, dtype, weight, writes_norm = case.kind
    layout, global_scale = SCALE_LAYOUTS[case.layout], case.fmt[1]
    if what == "dequantize":
        config = fp4_dequant.plan(dtype, case.width, case.format, layout, global_scale)
        return fp4_dequant.FP4DequantKernel(config)
    problem = row_quant.Problem(
        "rows", dtype, weight, case.width, case.width, case.format, layout, False, global_scale, writes_norm
    )
    return row_quant.RowQuantKernel(row_quant.plan(problem, FACTS[case.arch]))


def in_process(work: Callable[[Case], Any], case: Case) -> Any:
    """``work(case)``, or the text of its exception: exceptions of the DSL cannot all travel between processes."""
    try:
        return work(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def resources_of(case: Case) -> Any:
    """Compile the case's kernel: its ``Resources``."""
    from torch_cute_ops.runtime.arch import ARCHS as FACTS
    from torch_cute_ops.testing.resources import compile_for

    return compile_for(kernel_of(case), FACTS[case.arch])[1]
