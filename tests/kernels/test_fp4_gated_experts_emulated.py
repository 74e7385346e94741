"""The kernels of the gated FP4 GEMM over experts, executed thread for thread by the PTX emulator."""

from typing import Any, NamedTuple

import pytest
import torch
from ptx import run_kernel
from support.emulated import CPU, HOPPER, POISON, poisoned
from support.kernel_grid import BF16, FP16, FP32, GatedExpertsCase

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.formats.scale_layout import from_linear
from torch_cute_ops.kernels import fp4_gated_experts
from torch_cute_ops.reference.fp4_dequantize import fp4_dequantize
from torch_cute_ops.reference.fp4_quantize import quantize_rows
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.testing.samples._fp4_gemm import POWERS, random_matrix

LINEAR, TILED, SMALL = SCALE_LAYOUTS["linear"], SCALE_LAYOUTS["128x4"], SCALE_LAYOUTS["8x4"]
HALF = (0.0, 0.75, 20.0)
"""A gate whose sigmoid is 1/2, so that results are exact; its clamps are reached."""


class Gated(NamedTuple):
    """A launch of a case's kernels; ``columns`` are those of an expert."""

    case: GatedExpertsCase
    m: int
    k: int
    experts: int
    columns: int
    routing: str
    workers: int
    seed: int | None = 0
    gate: tuple[float, float, float] = HALF

    @property
    def id(self) -> str:
        return f"{self.case.id}-{self.m}x{self.k}-{self.experts}of{self.columns}-{self.routing}"


def routed(routing: str, m: int, experts: int) -> torch.Tensor:
    """Which pairs are computed, by any number but zero: NaN, and zero of either sign, are among them."""
    if routing == "none":
        return torch.zeros(m, experts)
    weights = torch.randn(m, experts)
    if routing == "one":
        weights = weights * (torch.arange(experts) == 1)
    if routing == "few":
        chosen = torch.zeros(m, experts).scatter(1, torch.rand(m, experts).topk(min(2, experts)).indices, 1.0)
        weights = weights * chosen
        weights[0] = torch.where(chosen[0] > 0, torch.nan, -0.0)
    return weights


def run(one: Gated, edit: Any = None) -> tuple[torch.Tensor, ...]:
    """What the kernels leave in their outputs; what is expected of numbers, before the rounding: (M, E, I), NaN where a
    token is not routed; and the global scale of each expert."""
    torch.manual_seed(one.k + one.m)
    case, finish = one.case, fp4_gated_experts.Finish(*one.case.finish)
    kernel = case.kernel_for(one.k)
    m, k, experts, columns = one.m, one.k, one.experts, one.columns
    routing = routed(one.routing, m, experts)
    a_scale = None
    if case.a_layout is None:
        a = torch.randint(-4, 5, (m, k)).to(case.a_dtype or case.dtype)
        numbers = a.double()
    else:
        a, a_scale = random_matrix(m, k, case.format, case.a_layout, CPU, POWERS[case.format.scale_format])
        numbers = decoded(a, a_scale, case.format, case.a_layout)
    powers = POWERS[case.format.scale_format]
    b, b_scale = random_matrix(experts * 2 * columns, k, case.format, case.layout, CPU, powers)
    weight = decoded(b, b_scale, case.format, case.layout).view(experts, 2 * columns, k)
    sums = torch.einsum("mk,enk->men", numbers, weight).float()
    alpha = bias = scale = None
    if finish.alpha is not None:
        alpha = torch.randint(1, 8, (experts,) if finish.alpha == "expert" else (experts, 2)) / 64
        sums = sums * alpha.view(experts, -1).expand(experts, 2).repeat_interleave(columns, 1)
    if finish.bias_dtype is not None:
        bias = (torch.randn(experts, 2 * columns) * 8).to(finish.bias_dtype)
        sums = sums + bias.float()
    if finish.global_scale is not None:
        scale = torch.randint(1, 5, (experts,) if finish.global_scale == "expert" else (1,)) / 4
    gate = one.gate if finish.swiglu else (None,) * 3
    want = silu_mul_rows(sums, *one.gate) if finish.swiglu else silu_mul_rows(sums)
    want = torch.where((routing != 0)[:, :, None], want, torch.nan)
    y_scale = None
    if isinstance(finish.out, FP4Format):
        y = poisoned(m, experts * columns // 2, dtype=torch.uint8)
        assert finish.out_layout is not None
        linear = torch.empty(m, experts * columns // finish.out.block_size, dtype=torch.uint8)
        y_scale = torch.full_like(from_linear(linear, finish.out_layout), POISON).view(finish.out.scale_dtype)
    else:
        y = poisoned(m, experts * columns, dtype=finish.out)
    workspace = poisoned(kernel.config.workspace_bytes(m, experts), dtype=torch.uint8)
    given = fp4_gated_experts.Arguments(
        a=a,
        a_scale=None if a_scale is None else a_scale.view(case.format.scale_dtype),
        b=b.t(),
        b_scale=b_scale.view(case.format.scale_dtype),
        routing=routing.t().contiguous().t(),
        alpha=alpha,
        bias=bias,
        global_scale=scale,
        y=y,
        scale=y_scale,
        workspace=workspace,
        swiglu_alpha=gate[0],
        swiglu_beta=gate[1],
        swiglu_limit=gate[2],
        workers=one.workers,
    )
    run_kernel(kernel, ARCHS[case.arch], *given, seed=one.seed, strict=not kernel.config.by_warp, edit=edit)
    scales = torch.ones(experts) if scale is None else scale.expand(experts)
    return y, y_scale, want, scales


def decoded(codes: torch.Tensor, scale: torch.Tensor, fmt: FP4Format, layout: str) -> torch.Tensor:
    return fp4_dequantize(codes, scale, None, fmt.block_size, fmt.scale_format, layout, FP32).double()


def expected(one: Gated, want: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The outputs bit for bit: where no token is routed they are as they were, but padding of scales is zero."""
    finish = fp4_gated_experts.Finish(*one.case.finish)
    unrouted = want.isnan()
    if not isinstance(finish.out, FP4Format):
        y = want.to(finish.out)
        return torch.where(unrouted, poisoned(1, dtype=finish.out), y).flatten(1), None
    parts = [
        quantize_rows(want[:, e], finish.out, scales[e] if finish.global_scale else None, "linear")
        for e in range(one.experts)
    ]
    codes = torch.stack([part[0] for part in parts], 1)
    linear = torch.stack([part[1].view(torch.uint8) for part in parts], 1)
    codes = torch.where(unrouted[:, :, ::2], POISON, codes).flatten(1)
    linear = torch.where(unrouted[:, :, :: finish.out.block_size], POISON, linear).flatten(1)
    assert finish.out_layout is not None
    return codes, from_linear(linear.to(torch.uint8), finish.out_layout)


def check(one: Gated, edit: Any = None) -> None:
    y, y_scale, want, scales = run(one, edit)
    codes, scale = expected(one, want, scales)
    assert torch.equal(y.view(torch.uint8), codes.to(y.dtype).view(torch.uint8))
    if y_scale is not None:
        assert torch.equal(y_scale.view(torch.uint8), scale)


def gated(*case: Any, finish: tuple[Any, ...], a_dtype: Any = None) -> GatedExpertsCase:
    return GatedExpertsCase(*case, finish, HOPPER, a_dtype)


GATED = [
    # More experts than a warp has lanes, and one whose columns end inside a tile of scales; chunks that are not whole
    Gated(
        gated(FP16, NVFP4, "128x4", "128x4", 64, 8, 16, finish=(NVFP4, TILED, "expert_half", FP32, "expert", True)),
        *(5, 1120, 3, 64, "few", 3),
    ),
    Gated(
        gated(FP16, NVFP4, "128x4", "8x4", 32, 8, 16, finish=(NVFP4, SMALL, "expert", None, None, True)),
        *(3, 2080, 35, 64, "few", 5, 1),
    ),
    Gated(
        gated(BF16, NVFP4, "128x4", None, 128, 16, 16, finish=(BF16, None, "expert", BF16, None, True)),
        *(18, 800, 2, 128, "dense", 2, 2),
    ),
    Gated(
        gated(BF16, MXFP4, "128x4", "128x4", 128, 24, 64, finish=(MXFP4, TILED, "expert_half", FP32, None, True)),
        *(33, 576, 3, 64, "few", 2, 3),
    ),
    Gated(
        gated(FP16, NVFP4, "linear", "linear", 64, 24, 32, finish=(NVFP4, LINEAR, None, FP32, "one", True)),
        *(27, 1280, 2, 192, "one", 2, 4),
    ),
    Gated(
        gated(BF16, MXFP4, "128x4", None, 64, 8, 128, finish=(BF16, None, None, None, None, True), a_dtype=FP16),
        *(12, 256, 4, 64, "few", 4, None),
    ),
    Gated(
        gated(FP16, NVFP4, "128x4", "128x4", 128, 32, 512, finish=(NVFP4, TILED, None, None, None, True)),
        *(40, 288, 2, 64, "one", 1, 5),
    ),
    Gated(
        gated(FP16, NVFP4, "128x4", "128x4", 64, 16, 16, finish=(NVFP4, TILED, None, None, None, True)),
        *(3, 320, 2, 64, "none", 2, 6),
    ),
]


@pytest.mark.parametrize("one", [pytest.param(one, id=one.id) for one in GATED])
def test_gated_gemm(one: Gated) -> None:
    """Bit for bit where all before the rounding is exact, or rounded as the reference does."""
    check(one)
