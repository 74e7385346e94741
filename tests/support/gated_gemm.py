"""Launches of kernels that compute the first GEMM of a mixture of experts with its gate, and their expected results."""

from typing import Any, NamedTuple

import torch
from samples._fp4_gemm import POWERS, random_matrix

from ptx_emulator.adapter import run_kernel
from support.emulated import CPU, POISON, poisoned, written_late
from support.kernel_grid import FP32, GatedExpertsCase, Tcgen05GatedCase
from torch_cute_ops.formats import FP4Format
from torch_cute_ops.formats.scale_layout import from_linear
from torch_cute_ops.kernels.common.experts.gated_layouts import Arguments, GatedEpilogue
from torch_cute_ops.reference.fp4_quantize import quantize_rows
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

fp4_dequantize = OPS["fp4_dequantize"].reference

HALF = (0.0, 0.75, 20.0)
"""Parameters with which the gate's sigmoid is 1/2, so that results are exact. Some values reach the clamps."""


class Gated(NamedTuple):
    """Launch of a case's kernels. ``columns`` is the number of result columns of an expert."""

    case: GatedExpertsCase | Tcgen05GatedCase
    m: int
    k: int
    experts: int
    columns: int
    routing: str
    num_ctas: int
    seed: int | None = 0
    gate: tuple[float, float, float] = HALF

    @property
    def id(self) -> str:
        return f"{self.case.id}-{self.m}x{self.k}-{self.experts}of{self.columns}-{self.routing}"


def routed(routing: str, m: int, experts: int) -> torch.Tensor:
    """Return a routing (M, E): every number except zero routes a token to an expert. NaN and zeros of either sign
    occur."""
    if routing == "none":
        return torch.zeros(m, experts)
    weights = torch.randn(m, experts)
    if routing == "one":
        weights = weights * (torch.arange(experts) == 1)
    if routing == "two":
        weights = weights * ((torch.arange(experts) == 1) | (torch.arange(experts) == experts - 1))
    if routing == "ends":
        weights[1:-1] = 0.0
    if routing in ("few", "hot"):
        keys = torch.rand(m, experts)
        if routing == "hot":
            keys[:, 1] = 2.0  # for each token
        chosen = torch.zeros(m, experts).scatter(1, keys.topk(min(2, experts)).indices, 1.0)
        weights = weights * chosen
        weights[0] = torch.where(chosen[0] > 0, torch.nan, -0.0)
    return weights


class Operands(NamedTuple):
    """Operands of a launch."""

    routing: torch.Tensor
    a: torch.Tensor
    a_scale: torch.Tensor | None
    b: torch.Tensor
    b_scale: torch.Tensor
    alpha: torch.Tensor | None
    bias: torch.Tensor | None
    global_scale: torch.Tensor | None
    row_scale: torch.Tensor | None = None


def operands(one: Gated, is_exact: bool = True) -> Operands:
    """Return random operands, with exact sums if ``is_exact``. The bias, factor and scale of experts without tokens are
    NaN."""
    torch.manual_seed(one.k + one.m)
    case, epilogue = one.case, GatedEpilogue(*one.case.epilogue)
    m, k, experts, columns = one.m, one.k, one.experts, one.columns
    powers = POWERS[case.format.scale_format] if is_exact else None
    routing = routed(one.routing, m, experts)
    a_scale = None
    if case.a_layout is None:
        a = (torch.randint(-4, 5, (m, k)) if is_exact else torch.randn(m, k)).to(case.a_dtype or case.dtype)
    else:
        a, a_scale = random_matrix(m, k, case.format, case.a_layout, CPU, powers)
    b, b_scale = random_matrix(experts * 2 * columns, k, case.format, case.layout, CPU, powers)
    alpha = bias = scale = None
    if epilogue.alpha is not None:
        alpha = torch.randint(1, 8, (experts,) if epilogue.alpha == "expert" else (experts, 2)) / 64
    if epilogue.bias_dtype is not None:
        bias = (torch.randn(experts, 2 * columns) * 8).to(epilogue.bias_dtype)
    if epilogue.global_scale is not None:
        scale = torch.randint(1, 5, (experts,) if epilogue.global_scale == "expert" else (1,)) / 4
    for terms in (alpha, bias, scale):
        if terms is not None and len(terms) == experts:
            terms[(routing == 0).all(0)] = torch.nan
    row_scale = None
    if epilogue.has_row_scale:
        row_scale = torch.randint(1, 8, (m,)) / 4
        row_scale[(routing == 0).all(1)] = torch.nan
    return Operands(routing, a, a_scale, b, b_scale, alpha, bias, scale, row_scale)


def launched(one: Gated, given: Operands, edit: Any = None, strict: bool = True) -> Arguments:
    """Run the kernels on poisoned outputs, and return the arguments of the launch, which include the outputs.

    A simulated previous kernel writes the operands at the last moment, and the first kernel writes the lists of tokens.
    With an odd seed, the routing is row-major, otherwise column-major.
    """
    case, epilogue = one.case, GatedEpilogue(*one.case.epilogue)
    kernel, width = case.kernel_for(one.k), one.experts * one.columns
    y_scale = None
    if isinstance(epilogue.out, FP4Format):
        assert epilogue.out_layout is not None
        y = poisoned(one.m, width // 2, dtype=torch.uint8)
        padded = from_linear(
            torch.empty(one.m, width // epilogue.out.block_size, dtype=torch.uint8), epilogue.out_layout
        )
        y_scale = torch.full_like(padded, POISON).view(epilogue.out.scale_dtype)
    else:
        y = poisoned(one.m, width, dtype=epilogue.out)
    sizes = (one.m, one.experts) if isinstance(case, Tcgen05GatedCase) else (one.m, one.experts, one.num_ctas)
    gate = one.gate if epilogue.has_gate_parameters else (None,) * 3
    b_scale = given.b_scale.view(case.format.scale_dtype)
    arguments = Arguments(
        a=given.a,
        a_scale=None if given.a_scale is None else given.a_scale.view(case.format.scale_dtype),
        b=given.b.view(one.experts, 2 * one.columns, -1).mT,
        b_scale=b_scale.view(one.experts, 2 * one.columns, -1) if case.layout == "linear" else b_scale,
        routing=given.routing if one.seed and one.seed % 2 else given.routing.t().contiguous().t(),
        alpha=given.alpha,
        bias=given.bias,
        global_scale=given.global_scale,
        row_scale=given.row_scale,
        y=y,
        scale=y_scale,
        workspace=poisoned(kernel.config.workspace_bytes(*sizes), dtype=torch.uint8),
        swiglu_alpha=gate[0],
        swiglu_beta=gate[1],
        swiglu_limit=gate[2],
        num_ctas=one.num_ctas,
    )
    late, before = written_late(arguments, Operands._fields)
    run_kernel(kernel, ARCHS[case.arch], *late, seed=one.seed, strict=strict, edit=edit, written_before=before)
    return arguments


def results(
    one: Gated, given: Operands, edit: Any = None, strict: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the kernels on poisoned outputs, and return the outputs."""
    arguments = launched(one, given, edit, strict)
    return arguments.y, arguments.scale


def decoded(codes: torch.Tensor, scale: torch.Tensor, fmt: FP4Format, layout: str) -> torch.Tensor:
    return fp4_dequantize(codes, scale, None, fmt.block_size, fmt.scale_format, layout, FP32).double()


def expected(one: Gated, given: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the expected outputs. Elements of tokens that are not routed keep their poison; padding of scales is
    zero."""
    case, epilogue = one.case, GatedEpilogue(*one.case.epilogue)
    experts, columns = one.experts, one.columns
    numbers = given.a.double()
    if given.a_scale is not None:
        assert case.a_layout is not None
        numbers = decoded(given.a, given.a_scale, case.format, case.a_layout)
    weight = decoded(given.b, given.b_scale, case.format, case.layout).view(experts, 2 * columns, one.k)
    sums = torch.einsum("mk,enk->men", numbers, weight).float()
    if given.row_scale is not None:
        sums = sums * given.row_scale[:, None, None]
    if given.alpha is not None:
        sums = sums * given.alpha.view(experts, -1).expand(experts, 2).repeat_interleave(columns, 1)
    if given.bias is not None:
        sums = sums + given.bias.float()
    gate = one.gate if epilogue.has_gate_parameters else (1.0, 0.0, None, epilogue.gate)
    value = silu_mul_rows(sums, *gate)
    is_routed = (given.routing != 0)[:, :, None]
    if not isinstance(epilogue.out, FP4Format):
        return torch.where(is_routed, value.to(epilogue.out), poisoned(1, dtype=epilogue.out)).flatten(1), None
    scale = given.global_scale
    if scale is not None:
        scale = scale.expand(experts)
    parts = [
        quantize_rows(value[:, e], epilogue.out, None if scale is None else scale[e], "linear") for e in range(experts)
    ]
    codes, scales = (
        torch.where(is_routed, torch.stack([part[i].view(torch.uint8) for part in parts], 1), POISON) for i in range(2)
    )
    assert epilogue.out_layout is not None
    return codes.to(torch.uint8).flatten(1), from_linear(scales.to(torch.uint8).flatten(1), epilogue.out_layout)


def check(one: Gated, edit: Any = None, strict: bool = True) -> None:
    """Check that the outputs are bitwise equal to the expected outputs."""
    given = operands(one)
    got, want = results(one, given, edit, strict), expected(one, given)
    for ours, theirs in zip(got, want, strict=True):
        if theirs is not None:
            assert ours is not None
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
