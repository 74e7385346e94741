"""``grouped_mm_fp8``: results may differ from float64 sums by the error bound of tensor cores, and must be zero in rows
of padding."""

import itertools

import numpy as np
import torch

from expected._epilogue import EPS, of_rows
from expected._fp8_gemm import Bounded, assert_close, fp8_weight, gemm, mx_factors, mx_gemm, token_gemm

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? offsets=None, Tensor? counts=None, "
    "Tensor? alpha=None, Tensor? bias=None, ScalarType? out_dtype=None, str backend='auto', bool static_weight=False, "
    "bool fast_accum=False"
)
SCHEMA = f"cute::grouped_mm_fp8({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::grouped_mm_fp8.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()"


def ranges(given):
    """Yield the indices of each expert's rows among all rows, flattened to one dimension."""
    experts = given["b"].shape[0]
    space = given["a"].shape[:-1].numel() // experts
    in_parts = [expert * space for expert in range(experts)]
    begins = in_parts if given["offsets"] is None else given["offsets"].tolist()
    if given["counts"] is None:
        return list(itertools.pairwise(begins))
    return [(begin, begin + count) for begin, count in zip(begins, given["counts"].tolist(), strict=False)]


def results(given):
    if given["b_scale"].dtype != torch.float32:
        return (of_mxfp8(given),)
    if given["b_scale"].dim() < 3:
        return (of_tokens(given),)

    def weight_of(expert):
        return fp8_weight(given["b"][expert].mT, given["b_scale"][expert])

    return (of_blocks(given, weight_of),)


def of_mxfp8(given):
    """Return the sums of all rows and their error bounds for a call with MXFP8 matrices."""
    a, (experts, k, n) = given["a"], given["b"].shape
    factors = mx_factors(given["b_scale"], experts * n, k).reshape(experts, n, k // 32)

    rows = mx_factors(given["a_scale"], a.shape[:-1].numel(), k)

    def multiply(own, within, expert, *rest):
        return mx_gemm(own, given["b"][expert].mT, rows[within], factors[expert], *rest)

    return grouped(given, multiply)


def of_blocks(given, weight_of):
    """Return the sums of all rows and their error bounds for a call with block scales of 128 elements. ``weight_of``
    returns an expert's weight."""
    a_scale = given["a_scale"].reshape(-1, -(-given["a"].shape[-1] // 128))

    def multiply(own, within, expert, *rest):
        return gemm(own, weight_of(expert), a_scale[within], *rest)

    return grouped(given, multiply)


def grouped(given, multiply):
    """Return the scaled sums over K for all rows, with their error bounds. ``multiply`` computes them for the rows of
    an expert, given the rows, their slice, the expert, alpha, bias and the type of the device."""
    n, k = given["b"].shape[2], given["a"].shape[-1]
    a = given["a"].reshape(-1, k)
    total, bound = np.zeros((len(a), n)), np.zeros((len(a), n))
    device = given["a"].device.type
    for expert, (begin, end) in enumerate(ranges(given)):
        rows = slice(begin, end)
        epilogue = (of_rows(given[name], expert) for name in ("alpha", "bias"))
        one = multiply(a[rows], rows, expert, *epilogue, device)
        total[rows], bound[rows] = one
    shape = (*given["a"].shape[:-1], n)
    return Bounded(total.reshape(shape), bound.reshape(shape))


def of_tokens(given):
    """Return the sums of all rows and their error bounds for a call with per-token scales."""
    n, k = given["b"].shape[2], given["a"].shape[-1]
    a, device = given["a"].reshape(-1, k), given["a"].device.type
    a_scale = given["a_scale"].reshape(-1, 1).expand(len(a), 1)
    total, bound = np.zeros((len(a), n)), np.zeros((len(a), n))
    for expert, (begin, end) in enumerate(ranges(given)):
        rows, scale = slice(begin, end), given["b_scale"][expert].reshape(-1).double()
        alpha, bias = given["alpha"], of_rows(given["bias"], expert)
        if alpha is not None:
            alpha = alpha.double().reshape(-1) if alpha.numel() == 1 else alpha.double()[expert].reshape(-1)
            scale = scale * alpha
        one = token_gemm(a[rows], given["b"][expert].mT, a_scale[rows], scale, bias, given["fast_accum"], device)
        total[rows], bound[rows] = one
        # The product alpha · b_scale adds one more rounding.
        bound[rows] += np.abs(one.total) * 2 * EPS + np.abs(0 if bias is None else bias) * 2 * EPS
    shape = (*given["a"].shape[:-1], n)
    return Bounded(total.reshape(shape), bound.reshape(shape))


def assert_results(actual, expected, given):
    (got,), (want,) = actual, expected
    assert_close(got, want, given["out_dtype"] or torch.bfloat16)


def rows_alone(given, outputs):
    """Yield calls in which only one row of one expert is used, with the expected results."""
    of_experts = ranges(given)
    lengths = torch.tensor([end - begin for begin, end in of_experts], dtype=torch.int32)
    flat = outputs[0].flatten(0, -2)
    for expert in {0, len(of_experts) // 2, len(of_experts) - 1}:
        for count in {lengths[expert].item(), min(1, lengths[expert].item())}:
            counts = torch.zeros_like(lengths)
            counts[expert] = count
            begin = of_experts[expert][0]
            want = torch.zeros_like(flat)
            want[begin : begin + count] = flat[begin : begin + count]
            yield given | {"counts": counts.to(flat.device)}, (want.view_as(outputs[0]),)
