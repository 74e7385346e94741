"""Expected results of GEMMs in fp32, and bounds on the errors of computed results."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from torch_cute_ops.formats import FP8_BLOCK128, MXFP8, SCALE_LAYOUTS, FP4Format, FP8Format
from torch_cute_ops.formats.fp4 import decode_ue8m0
from torch_cute_ops.formats.interleave import INTERLEAVED_K, deinterleave_k
from torch_cute_ops.formats.scale_layout import to_linear
from torch_cute_ops.gemm.backends._fp8 import has_tokens_and_fp4
from torch_cute_ops.gemm.backends.reference import round_activations, unrounded_activations, weight_of_rows
from torch_cute_ops.gemm.operands import GatedOperands, Operands
from torch_cute_ops.gemm.problem import GemmProblem, Operand
from torch_cute_ops.reference.fp4_dequantize import decode_rows
from torch_cute_ops.reference.mm_fp8_block import factors_of_columns, fold_mxfp8, linear_mx_scales
from torch_cute_ops.reference.mm_fp8_fp4 import fp8_weight
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows

EPS = 2.0**-24
"""Relative error of one rounding in fp32."""
GATE_EPS = 2.0**-17
"""Relative error of a gate, whose exponential is computed in fp32."""
MOST_SLOPE = 1.13
"""Upper bound of the slopes of SiLU and GELU."""
MAX_DECODED = 2**24
"""Largest number of elements of an operand that are decoded at once. These elements take 0.4 GB."""

Tensor = torch.Tensor


def expected(problem: GemmProblem, operands: Operands, rows: int, fp8_sums: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the expected result (rows, N) in fp32, and the largest allowed error of each element.

    The error accounts for the rounding of the sum of K terms, of a gate in the prologue, of the epilogue, and of the
    result to its dtype. With MXFP8, it accounts for the rounding of elements whose scale is below the largest scale of
    128 activations, or of a weight row (``fold_mxfp8``). If each expert owns a range of K, the error also accounts for
    four roundings per expert: the expert's sum, the addition of its bias, the multiplication by its factor, and the
    addition to the other experts' sums.

    Args:
        problem, operands: problem and tensors of the call.
        rows: number of rows of the result.
        fp8_sums: error of sums in FP8 tensor cores, relative to the sum of the terms' magnitudes, or 0 for operands
            whose sums are exact.
    """
    a, a_scale, alpha, bias = operands.a, operands.a_scale, operands.alpha, operands.bias
    n, k, over = problem.n, problem.k, problem.grouping.over
    info = torch.finfo(problem.out_dtype)
    left_operand, off = problem.a, None
    if isinstance(problem.a.format, torch.dtype) and isinstance(problem.b.format, FP4Format):
        if problem.has_prologue:
            left_operand = problem.without_prologue.a
            value, global_scale = unrounded_activations(problem, a), a_scale
            a, a_scale = round_activations(problem, value, global_scale)
            if problem.prologue_gate is not None:
                off = _off_by_gate(problem, value, global_scale, a, a_scale)
        a = a if left_operand.is_fp4 else a.to(problem.b.format.operand_dtype(problem.a.format))
    want, allowed = (torch.empty((rows, n), dtype=torch.float32, device=a.device) for _ in range(2))
    factors = _linear_scales(problem, operands.b_scale)
    roundings = k if over != "k" else problem.expert_k + 1 + problem.topk
    relative = fp8_sums if problem.a.is_fp8 else roundings * EPS
    weight = operands.b.mT if over == "rows" else operands.b.mT[None]
    if problem.b.format == MXFP8:
        assert a_scale is not None
        a_bytes = linear_mx_scales(a_scale, rows, k)
        weight_bytes = linear_mx_scales(operands.b_scale, len(weight) * n, k).unflatten(0, (len(weight), n))
    for expert, of_expert in enumerate(_rows_of_experts(problem, rows)):
        for part in _slices(of_expert, k):
            left = _decoded(left_operand, a.reshape(rows, -1), a_scale, part, rows, k)
            if over == "k" and alpha is not None:
                factor = alpha[part].double().repeat_interleave(problem.expert_k, 1)
                left = torch.where(factor == 0, 0.0, left * factor)  # the activations of unrouted tokens may be NaN
            off_left = None if off is None else off[part]
            if problem.b.format == MXFP8:
                off_left = _off_by_folding(a.reshape(rows, -1)[part], a_bytes[part])
            for columns in _slices(slice(0, n), k):
                right = _decoded_weight(problem, weight, factors, expert, columns).t()
                if over == "k":  # skip experts without a routed token: their operands may be NaN
                    right = torch.where((left != 0).any(0)[:, None], right, 0.0)
                total = left @ right
                lost = (left.abs() @ right.abs()) * relative
                if off_left is not None:
                    lost = lost + off_left @ right.abs()
                if problem.b.format == MXFP8:
                    assert off_left is not None
                    codes, scale = weight[expert, columns], weight_bytes[expert, columns]
                    off_right = _off_by_folding(codes, scale, by_row=True).t()
                    lost = lost + (left.abs() + off_left) @ off_right
                if operands.row_scale is not None:
                    factor = operands.row_scale[part, None].double()
                    total, lost = total * factor, (lost + total.abs() * EPS) * factor.abs()
                if over != "k" and alpha is not None:
                    factor = _of_columns(alpha, expert, columns, n, over == "rows").double()
                    total, lost = total * factor, (lost + total.abs() * EPS) * factor.abs()
                if bias is not None and over == "k":
                    assert alpha is not None
                    own, added = alpha[part].double(), bias[:, columns].double()
                    added = torch.where((own != 0).any(0)[:, None], added, 0.0)
                    total = total + own @ added
                    lost = lost + (own.abs() @ added.abs()) * ((problem.topk + 2) * EPS)
                elif bias is not None:
                    added = _of_columns(bias, expert, columns, n, over == "rows").double()
                    total = total + added
                    lost = lost + (total.abs() + added.abs()) * EPS
                want[part, columns] = total.float()
                allowed[part, columns] = (lost + total.abs() * info.eps + info.smallest_normal).float()
    return want, allowed


def expected_gated(problem: GemmProblem, operands: GatedOperands) -> tuple[Tensor, Tensor]:
    """Return the expected result of the gate, (M, E·I) in fp32, and the largest allowed error before rounding. Pairs
    that are not routed are zero.

    The error covers one rounding per term of a sum, and the error of the exponential. Both errors pass through the
    gate, whose slope is at most ``MOST_SLOPE``.
    """
    a, b, alpha, bias, routing = operands.a, operands.b.mT, operands.alpha, operands.bias, operands.routing
    m = a.shape[0]
    fmt, experts, lines, k = problem.b.format, problem.experts, b.shape[1], problem.k
    assert isinstance(fmt, FP4Format) and problem.b.scale_layout is not None
    if isinstance(problem.a.format, torch.dtype):
        a = a.to(fmt.operand_dtype(problem.a.format))
    scales = to_linear(operands.b_scale, problem.b.scale_layout, experts * lines, k // fmt.block_size)
    scales = scales.view(experts, lines, -1)
    alpha_of_gate, beta, limit = 1.0, 0.0, None
    if operands.swiglu_alpha is not None and operands.swiglu_beta is not None:
        alpha_of_gate, beta, limit = operands.swiglu_alpha, operands.swiglu_beta, operands.swiglu_limit
    assert problem.gate is not None
    activation = "silu" if problem.gate == "swiglu" else problem.gate
    want, allowed = (torch.zeros(m, experts, lines // 2, dtype=torch.float32, device=a.device) for _ in range(2))
    every = _decoded(problem.a, a, operands.a_scale, slice(0, m), m, k)
    for expert in range(experts):
        rows = routing[:, expert].nonzero()[:, 0]
        right = decode_rows(b[expert], scales[expert], fmt, SCALE_LAYOUTS["linear"]).double().t()
        total = every[rows] @ right
        lost = (every[rows].abs() @ right.abs()) * (k * EPS)
        if operands.row_scale is not None:
            factor = operands.row_scale[rows, None].double()
            total, lost = total * factor, (lost + total.abs() * EPS) * factor.abs()
        if alpha is not None:
            factor = alpha[expert].double().repeat_interleave(lines // alpha[expert].numel())
            total, lost = total * factor, (lost + total.abs() * EPS) * factor.abs()
        if bias is not None:
            total = total + bias[expert].double()
            lost = lost + total.abs() * EPS
        want[rows, expert] = silu_mul_rows(total.float(), alpha_of_gate, beta, limit, activation)
        (gates, ups), (lost_gates, lost_ups) = (each.chunk(2, 1) for each in (total.abs(), lost))
        ups = ups + lost_ups + abs(beta)
        slopes: Tensor | float = MOST_SLOPE
        values = gates
        if activation == "relu2":
            slopes, values = 2 * (gates + lost_gates), gates.square()
        off = slopes * lost_gates * ups + values * lost_ups + values * ups * GATE_EPS
        allowed[rows, expert] = off.float()
    return want.flatten(1), allowed.flatten(1)


def block_difference(
    got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], masks: tuple[Tensor, Tensor], fmt: FP4Format
) -> str | None:
    """Return a description of the blocks that differ from the expected blocks, or None if none differs. Only the codes
    and scales that ``masks`` marks as written are compared.

    If the values come from an exponential, at most one scale in 1,000 and one code in 1,000 may differ, each by one
    step.
    """
    (codes, scales), (want_codes, want_scales) = ([each.view(torch.uint8) for each in pair] for pair in (got, want))
    off = torch.where(masks[1], (scales.to(torch.int16) - want_scales.to(torch.int16)).abs(), 0)
    halves = [torch.stack((each & 15, each >> 4), -1).to(torch.int16) for each in (codes, want_codes)]
    values = [torch.where(half >= 8, 8 - half, half) for half in halves]
    steps = torch.where(masks[0].unsqueeze(-1), (values[0] - values[1]).abs(), 0)
    most = 2 if fmt.scale_format == "ue8m0" else 1
    for name, distance, limit, whole in (("scales", off, 1, 1), ("codes", steps, most, fmt.block_size)):
        wrong, count = int((distance > limit).sum()), int((distance > 0).sum())
        if wrong:
            return f"{wrong} {name} are off by more than {limit}, the worst by {int(distance.max())}"
        if count > whole + distance.numel() // 1000:
            return f"{count} of {distance.numel()} {name} differ"
    return None


def difference(got: Tensor, want: Tensor, allowed: Tensor) -> str | None:
    """Return a description of the elements of ``got`` that differ from ``want`` by more than ``allowed``, or None."""
    error = (got.float() - want).abs()
    wrong = ~(error <= allowed)  # also wrong if NaN
    count = int(wrong.sum())
    if count == 0:
        return None
    i, j = wrong.nonzero()[0].tolist()
    ratio = (error / allowed).nan_to_num(math.inf, posinf=math.inf)[wrong].max().item()
    return (
        f"{count} of {got.numel()} sums are off, by up to {ratio:.3g} times the allowed error; first at ({i}, {j}): "
        f"{got[i, j].item():.6g}, expected {want[i, j].item():.6g} ± {allowed[i, j].item():.2g}"
    )


def _rows_of_experts(problem: GemmProblem, rows: int) -> list[slice]:
    if problem.grouping.over != "rows":
        return [slice(0, rows)]
    experts = problem.experts
    return [slice(e * rows // experts, (e + 1) * rows // experts) for e in range(experts)]


def _of_columns(value: Tensor, expert: int, columns: slice, n: int, is_grouped: bool) -> Tensor:
    """Return the elements of an ``alpha`` or a bias that apply to some columns of one expert."""
    if value.dim() == 2 or (is_grouped and value.shape[0] > 1):
        value = value[expert]
    value = value.reshape(-1)
    return value[columns] if len(value) == n and n > 1 else value[:1]


def _off_by_gate(
    problem: GemmProblem, value: Tensor, global_scale: Tensor | None, a: Tensor, a_scale: Tensor | None
) -> Tensor:
    """Return the error, in fp64, that gated activations may have because implementations of the exponential function
    differ.

    Args:
        problem: problem with a gate in its prologue.
        value: activations before they are rounded.
        global_scale: global scale of quantised activations, or None.
        a, a_scale: activations after they are rounded.
    """
    operand, fmt = problem.without_prologue.a, problem.b.format
    assert isinstance(fmt, FP4Format)

    def numbers(a: Tensor, scale: Tensor | None) -> Tensor:
        if scale is None:
            return a.to(fmt.operand_dtype(a.dtype)).double()
        assert operand.scale_layout is not None
        return decode_rows(a, scale, fmt, operand.scale_layout).double()

    exact = numbers(a, a_scale)
    off = (numbers(*round_activations(problem, value * (1 + error), global_scale)) for error in (-GATE_EPS, GATE_EPS))
    return torch.maximum(*((each - exact).abs() for each in off))


def _off_by_folding(codes: Tensor, scale: Tensor, by_row: bool = False) -> Tensor:
    """Return the errors of MXFP8 elements (rows, K), in fp64, if one scale is chosen for each 128 elements, or for each
    row. ``scale`` (rows, K/32) contains bytes."""
    k = codes.shape[1]
    folded, powers = fold_mxfp8(codes, scale, by_row)
    exact = codes.double() * decode_ue8m0(scale).double().repeat_interleave(MXFP8.block_size, 1)
    factors = powers.double().repeat_interleave(k if by_row else FP8_BLOCK128.block_size, 1)[:, :k]
    return (folded.double() * factors - exact).abs()


def _decoded(operand: Operand, a: Tensor, scale: Tensor | None, part: slice, rows: int, k: int) -> Tensor:
    """Return some rows of an operand, decoded to fp64."""
    if isinstance(operand.format, FP4Format):
        assert scale is not None and operand.scale_layout is not None
        linear = to_linear(scale, operand.scale_layout, rows, k // operand.format.block_size)
        return decode_rows(a[part], linear[part], operand.format, SCALE_LAYOUTS["linear"]).double()
    if isinstance(operand.format, FP8Format):
        assert scale is not None
        if operand.is_interleaved:
            a = deinterleave_k(a.reshape(rows, -1, INTERLEAVED_K), k)
        if operand.format == MXFP8:
            scale = decode_ue8m0(linear_mx_scales(scale, rows, k))
        factors = scale.expand(rows, 1) if scale.dim() == 1 else scale.reshape(rows, -1)
        factors = factors[part].double().repeat_interleave(operand.format.block_size or k, 1)
        return a[part].double() * factors[:, :k]
    return a[part].double()


def _linear_scales(problem: GemmProblem, scale: Tensor) -> Tensor:
    """Return the scales of the weight's rows: linear scales (E, N, blocks), or prepared scales (E, …). The rows are in
    the second to last dimension."""
    experts = problem.experts if problem.grouping.over == "rows" else 1
    if problem.b.is_prepared:
        return scale.view(experts, *scale.shape[-3:])
    if isinstance(problem.b.format, FP4Format):
        assert problem.b.scale_layout is not None
        rows, blocks = experts * problem.n, problem.k // problem.b.format.block_size
        return to_linear(scale, problem.b.scale_layout, rows, blocks).view(experts, problem.n, blocks)
    if problem.b.has_fp8_blocks:
        return factors_of_columns(scale, problem.n).reshape(experts, problem.n, -1)
    if problem.b.format == MXFP8:
        return decode_ue8m0(linear_mx_scales(scale, experts * problem.n, problem.k)).unflatten(0, (experts, -1))
    return scale.reshape(experts, -1, 1).expand(experts, problem.n, 1)


def _decoded_weight(problem: GemmProblem, weight: Tensor, scales: Tensor, expert: int, columns: slice) -> Tensor:
    """Return the rows ``columns`` of an expert's weight in fp64, after decoding to the dtype in which the GEMM
    multiplies."""
    codes, factors = weight[expert, columns], scales[expert, ..., columns, :]
    if has_tokens_and_fp4(problem):
        operand = problem.b if problem.b.is_prepared else replace(problem.b, scale_layout=SCALE_LAYOUTS["linear"])
        numbers, powers = weight_of_rows(codes, factors, operand)
        return numbers.double() * powers.double()[:, None]
    if isinstance(problem.b.format, FP4Format):
        if not problem.a.is_fp8:
            return decode_rows(codes, factors, problem.b.format, SCALE_LAYOUTS["linear"]).double()
        codes, factors = fp8_weight(codes, factors, problem.b.format, SCALE_LAYOUTS["linear"])
    elif problem.b.has_fp8_tokens:
        return codes.double() * factors.double()
    block_size = MXFP8.block_size if problem.b.format == MXFP8 else FP8_BLOCK128.block_size
    return codes.double() * factors.double().repeat_interleave(block_size, 1)[:, : problem.k]


def _slices(within: slice, k: int) -> Iterator[slice]:
    """Divide ``within`` into slices of rows that are small enough to be decoded at once. A row contains ``k``
    elements."""
    step = max(1, MAX_DECODED // k)
    return (slice(start, min(start + step, within.stop)) for start in range(within.start, within.stop, step))
