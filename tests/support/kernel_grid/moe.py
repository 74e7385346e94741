"""Cases of the kernels before and after the experts' GEMMs: routing, permutation, gate, and the weighted sum. Also
cases of the kernels that quantise blocks of 128 × 128 elements and fold MXFP8, whose ``plan`` takes no architecture
either."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import dataclass
from typing import Any

import torch

from support.kernel_grid.common import ARCHS, BF16, FP16, FP32, KernelCase
from torch_cute_ops.formats import SCALE_LAYOUTS
from torch_cute_ops.kernels import row_quant
from torch_cute_ops.kernels.common.experts.layouts import ExpertChoice
from torch_cute_ops.runtime.arch import ARCHS as GPU_ARCHS


@dataclass(frozen=True)
class MoeCase(KernelCase):
    """A kernel of an expert layer other than its GEMMs, ``fp8_square_blocks``, or ``mxfp8_fold``.

    Attributes:
        family: kernel family, or ``moe_swiglu`` for experts' rows of ``row_quant``.
        plan_arguments: arguments of the family's ``plan``. For a kernel that chooses experts: the fields of
            ``ExpertChoice`` except ``is_finite``, the other argument, and ``is_finite`` if it is true. For
            ``moe_swiglu``: the width of a row, the dtype, whether offsets, counts and the general gate are used, the
            number of experts if it is not the usual number, and then the gate and the scale format if they are not
            the default.
        arch: architecture to compile for.
    """

    family: str
    plan_arguments: tuple[Any, ...]
    arch: str = "sm_90a"

    @property
    def id(self) -> str:
        return "-".join((self.family, *(str(each).removeprefix("torch.") for each in self.plan_arguments), self.arch))

    @property
    def kernel(self) -> Any:
        """Kernel with the configuration that ``plan`` chooses."""
        if self.family == "moe_swiglu":
            return _experts_rows_kernel(*self.plan_arguments, self.arch)
        family = importlib.import_module(f"torch_cute_ops.kernels.{self.family}")
        kernel = getattr(family, family.KERNEL.rpartition(".")[2])
        given = self.plan_arguments
        if self.family in ("moe_route", "moe_route_dense"):
            given = ExpertChoice(*given[:8], any(given[9:])), given[8]
        if self.family == "mxfp8_fold":
            given = given[0], SCALE_LAYOUTS[given[1]], True, *given[2:]
        return kernel(family.plan(*given))


def _experts_rows_kernel(width: int, dtype: torch.dtype, offsets: bool, counts: bool, swiglu: bool, *rest: Any) -> Any:
    *more, arch = rest
    spec = row_quant.RowQuantSpec.for_gated_experts(dtype, width, offsets, counts, swiglu, *more)
    return row_quant.RowQuantKernel(row_quant.plan(spec, GPU_ARCHS[arch]))


LARGE: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("moe_route", (BF16, 1024, 32, True, True, 32, 4, True, True), "sm_90a"),
    ("moe_route", (FP16, 896, 22, False, True, 1, 1, True, False), "sm_100a"),
    ("moe_route", (FP32, 1024, 8, False, False, 1, 1, False, False, True), "sm_120a"),
    ("moe_route", (BF16, 510, 16, False, True, 17, 4, False, False, True), "sm_90a"),
    # Cases that have spilled registers
    ("moe_route", (BF16, 1020, 32, False, True, 17, 4, True, False), "sm_90a"),
    ("moe_route", (FP32, 1020, 32, False, True, 17, 9, False, False, True), "sm_100a"),
    ("moe_route", (FP16, 1023, 22, False, True, 3, 2, True, True, True), "sm_120a"),
    ("moe_route", (BF16, 1023, 32, False, True, 31, 8, False, True), "sm_120a"),
    ("moe_route", (FP16, 1000, 22, False, True, 5, 1, False, True, True), "sm_120a"),
    ("moe_route", (BF16, 1020, 8, False, True, 12, 10, True, False), "sm_120a"),
    ("moe_route_dense", (BF16, 1024, 32, True, True, 1, 1, True, True), "sm_90a"),
    ("moe_route_dense", (FP16, 1020, 9, True, True, 17, 4, True, False, True), "sm_120a"),
    ("moe_route_ids", (1024, False), "sm_120a"),
    ("moe_finalize", (BF16, 4096, 32, True), "sm_90a"),
    ("moe_finalize", (FP32, 7168, 27, True), "sm_120a"),
    ("moe_permute", (BF16, 7168, 32), "sm_90a"),
    ("moe_permute", (FP32, 2880, 23), "sm_120a"),
    ("moe_permute", (BF16, 7168, 8, "ue8m0"), "sm_90a"),
    ("fp8_square_blocks", (BF16, None), "sm_90a"),
    ("fp8_square_blocks", (FP32, None), "sm_90a"),
    ("fp8_square_blocks", (BF16, "ue8m0"), "sm_100a"),
    ("fp8_square_blocks", (FP32, None), "sm_120a"),
    ("fp8_square_blocks", (FP16, "ue8m0"), "sm_120a"),
    ("mxfp8_fold", (4096, "linear"), "sm_90a"),
    ("mxfp8_fold", (64, "128x4"), "sm_100a"),
    ("mxfp8_fold", (2112, "linear"), "sm_120a"),
    ("mxfp8_fold", (7168, "128x4", True), "sm_90a"),
    ("mxfp8_fold", (128, "linear", True), "sm_90a"),
    ("moe_swiglu", (2048, BF16, True, True, False, 1024), "sm_90a"),
    ("moe_swiglu", (7168, FP32, False, True, True, 1024), "sm_120a"),
    ("moe_swiglu", (2048, BF16, True, True, False, 256, "silu", "ue8m0"), "sm_100a"),
)
"""Cases with more than 512 experts, cases with more than 16 experts per token, a choice with ``is_finite``, blocks of
128 × 128 elements, and folded MXFP8."""


def moe_cases() -> list[MoeCase]:
    """Return cases with the largest and with smaller ``topk``, and with narrow and wide rows. Dtypes alternate from
    case to case."""
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
    # moe_route_dense chooses experts as moe_route does. Instead of a layout of rows, its last argument says whether
    # experts have factors.
    dense = [(*plan_arguments[:-1], i % 2 == 0) for i, plan_arguments in enumerate(route)]
    cases = {
        "moe_route": route,
        "moe_route_ids": ids,
        "moe_route_dense": dense,
        "moe_finalize": finalize,
        "moe_permute": permute,
        "moe_swiglu": swiglu,
    }
    usual = [MoeCase(family, plan_arguments, next(archs)) for family, some in cases.items() for plan_arguments in some]
    return [*usual, *(MoeCase(family, plan_arguments, arch) for family, plan_arguments, arch in LARGE)]
