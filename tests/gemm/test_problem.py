"""``GemmProblem``: bytes, operations, and keys of tuned choices."""

import json
import pickle
from typing import get_args

import pytest
import torch
from support.gemm_problems import BF16, FP32, fp4_problem, fp8_problem, gated_problem, gated_problems, problems

from torch_cute_ops.kernels.common.core import layouts
from torch_cute_ops.kernels.common.fp8.layouts import ExpertLayout
from torch_cute_ops.ops import _signature


def test_fp4():
    """Check bytes and operations against figures computed by hand: 4-bit codes, one scale byte per block, 16-bit
    results."""
    problem = fp4_problem(24, 64)
    assert problem.bytes_moved(10) == (24 + 10) * (32 + 4) + 10 * 24 * 2
    assert fp4_problem(24, 64, a_dtype=BF16).bytes_moved(10) == 24 * 36 + 10 * 128 + 480
    assert problem.flops(10) == 2 * 10 * 24 * 64


def test_fp4_with_experts_over_k():
    """Check figures computed by hand for 16 experts that each own 64 elements of K, and 10 tokens that each use 8
    experts."""
    problem = fp4_problem(24, 16 * 64, experts=16)
    touched = 1 - 0.5**10
    weight, a = 24 * 16 * (32 + 4) * touched, 10 * 8 * (32 + 4)
    assert problem.bytes_moved(10) == pytest.approx(weight + a + 10 * 16 * 4 + 10 * 24 * 2, abs=1)
    assert problem.flops(10) == 2 * 10 * 24 * 64 * 8
    few = fp4_problem(24, 5 * 64, a_dtype=BF16, experts=5)
    assert few.bytes_moved(10) == 24 * 5 * 36 + 10 * 320 * 2 + 10 * 5 * 4 + 480
    assert few.flops(10) == 2 * 10 * 24 * 320


@pytest.mark.parametrize("a_dtype", [None, BF16])
def test_fp4_with_a_gate(a_dtype):
    """Check figures computed by hand for 16 experts that each own 64 columns (128 weight rows), and 10 tokens that each
    use 8 experts."""
    problem = gated_problem(16 * 64, 96, a_dtype=a_dtype, experts=16)
    assert (problem.expert_n, problem.weight_rows, problem.expert_k) == (64, 2 * 16 * 64, 96)
    weight = 16 * 128 * (48 + 6) * (1 - 0.5**10)
    a, out = (10 * 54, 10 * 8 * (32 + 4)) if a_dtype is None else (10 * 192, 10 * 8 * 128)
    assert problem.bytes_moved(10) == pytest.approx(weight + a + out + 10 * 16 * 4, abs=1)
    assert problem.flops(10) == 2 * 10 * 8 * 128 * 96
    assert problem.out_dtype == (torch.uint8 if a_dtype is None else BF16)


def test_fp8():
    """Check figures computed by hand: 8-bit elements, one fp32 scale per 128 elements of a row and per 128 × 128
    elements of the weight.

    K is two and a half blocks.
    """
    problem = fp8_problem(136, 320, out_dtype=FP32)
    assert problem.bytes_moved(10) == 10 * (320 + 3 * 4) + 136 * 320 + 2 * 3 * 4 + 10 * 136 * 4
    assert problem.flops(10) == 2 * 10 * 136 * 320


def test_fp8_grouped_by_rows():
    """Check figures computed by hand: 3 contiguous rows use at most 3 of 4 experts; in the masked layout, all 4 experts
    have 3 rows each."""
    weight = 136 * 256 + 2 * 2 * 4
    contiguous = fp8_problem(136, 256, ExpertLayout(True, True), 4)
    assert contiguous.bytes_moved(3) == 3 * (256 + 2 * 4) + 3 * weight + 3 * 136 * 2
    assert contiguous.flops(3) == 2 * 3 * 136 * 256
    masked = fp8_problem(136, 256, ExpertLayout(False, True), 4)
    assert masked.bytes_moved(3) == 4 * (3 * (256 + 2 * 4) + weight + 3 * 136 * 2)
    assert masked.flops(3) == 4 * 2 * 3 * 136 * 256


def test_descriptions_differ():
    """Check that the JSON descriptions of different problems differ."""
    every = [*problems(), *gated_problems()]
    texts = [json.dumps(problem.described(), sort_keys=True) for problem in every]
    assert len(set(texts)) == len(set(every)) == len(every)
    assert json.loads(texts[0])["b"] == {
        "format": "nvfp4",
        "scale_layout": "128x4",
        "is_prepared": False,
        "scales_by_row": False,
        "is_interleaved": False,
    }
    assert all(pickle.loads(pickle.dumps(problem)) == problem for problem in every)


def test_kinds_of_alpha():
    """Check that the ops' and the kernels' names for kinds of alpha, which are defined separately, agree."""
    kinds = dict.fromkeys((*get_args(_signature.AlphaKind), *get_args(_signature.GatedAlphaKind)))
    assert tuple(kinds) == get_args(layouts.AlphaKind)
