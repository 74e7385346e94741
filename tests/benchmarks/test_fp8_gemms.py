"""Test the benchmarks of FP8 GEMMs without a GPU: bytes, sizes, checks, and the comparison with targets."""

import pytest
import torch

from benchmarks import fp8_gemms, ops
from benchmarks.case import Case

CPU = torch.device("cpu")
SMALL = [
    ("mm_fp8", Case({"M": 5, "N": 136, "K": 256}, choices={"sums": "promoted"})),
    ("mm_fp8", Case({"M": 5, "N": 136, "K": 256}, choices={"sums": "fast"})),
    ("mm_fp8_block", Case({"M": 5, "N": 136, "K": 256})),
    ("mm_fp8_block", Case({"M": 5, "N": 136, "K": 256}, choices={"scales": "block32"})),
    ("grouped_mm_fp8", Case({"M": 3, "N": 136, "K": 256, "E": 2}, choices={"layout": "contiguous"})),
    ("grouped_mm_fp8", Case({"M": 3, "N": 136, "K": 256, "E": 2}, choices={"layout": "masked"})),
    ("grouped_mm_fp8", Case({"M": 4, "N": 136, "K": 256, "E": 16}, choices={"layout": "routed"})),
]
WITH_FP4 = [
    ("mm_fp8_fp4", Case({"M": 5, "N": 136, "K": 256}, choices={"weight": "mxfp4", "scales": "blocks"})),
    ("mm_fp8_fp4", Case({"M": 5, "N": 136, "K": 256}, choices={"weight": "nvfp4", "scales": "blocks"})),
    *(("grouped_mm_fp8_fp4", Case(case.sizes, choices={**case.choices, "weight": "nvfp4"})) for _, case in SMALL[4:]),
]
WITH_TOKENS = [
    ("mm_fp8_fp4", Case({"M": 5, "N": 136, "K": 256}, choices={"weight": weight, "scales": scales}))
    for weight, scales in (("mxfp4", "tokens"), ("nvfp4", "tokens_fast"))
]
by_any = pytest.mark.parametrize(("op", "case"), SMALL + WITH_FP4 + WITH_TOKENS)


@by_any
def test_the_formula_is_the_bytes_of_the_tensors(op, case):
    """Check that the formula for bytes moved equals the total size of all tensors except offsets and counts."""
    benchmark = ops.load(op)
    tensors = benchmark.make_set(case, CPU)
    padding = 0
    if tensors["b"].dtype == torch.uint8 and tensors["b_scale"].dim() > 3:  # an FP4 weight with tiled scales
        block = benchmark.problem(case).b.format.block_size
        padding = tensors["b_scale"].nbytes - tensors["b"].nbytes * 2 // block
    moved = sum(t.nbytes for t in tensors.values() if t.dtype != torch.int32)
    assert benchmark.bytes_moved(case) == moved - padding


@by_any
def test_ours_passes_the_check_and_others_do_not(op, case):
    benchmark = ops.load(op)
    sets = [benchmark.make_set(case, CPU)]
    got = benchmark.ours(case, sets).call(0)
    expected = benchmark.expected(case, sets[0])
    assert benchmark.mismatch(got, expected, case) == 0.0
    wrong = got[0].clone()
    # Add a large absolute error: an error of 50 % in a small element is within the tolerance.
    wrong.view(-1)[7] += wrong.abs().max()
    assert 0 < benchmark.mismatch((wrong,), expected) < 0.01
    assert benchmark.mismatch((got[0].fill_(torch.nan),), expected) == 1.0


@pytest.mark.parametrize(("op", "case"), WITH_FP4)
def test_fp8_weights_beside_fp4_ones(op, case):
    """Check that the variant with FP8 weights reads twice the weight bytes, and that its results are not compared with
    the FP4 variant's."""
    benchmark = ops.load(op)
    sets = [benchmark.make_set(case, CPU)]
    other = benchmark.peer("fp8_weight", case, sets)
    assert not other.checked
    assert benchmark.mismatch(other.call(0), benchmark.expected(case, sets[0])) > 0.5
    n, k, experts = case["N"], case["K"], benchmark.problem(case).experts
    more = n * k // 2 - n * k // benchmark.problem(case).b.format.block_size + 4 * -(-n // 128) * (k // 128)
    assert other.bytes - benchmark.bytes_moved(case) == experts * more


def test_random_routing_gives_experts_unequal_rows():
    """Route 64 tokens to 8 of 32 experts each, 16 rows per expert on average, and check that rows are ordered by
    expert. Only the weights of experts with rows count as bytes moved."""
    benchmark = ops.load("grouped_mm_fp8")
    assert "M=16 N=4096 K=7168 E=32 routed" in map(str, benchmark.cases("quick"))
    case = benchmark.case(32, 16, 136, 256, "routed")
    tensors = benchmark.make_set(case, CPU)
    counts = tensors["offsets"].diff()
    assert len(tensors["a"]) == counts.sum() == 32 * 16 and counts.min() < 16 < counts.max()
    few = benchmark.case(64, 1, 136, 256, "routed")
    used = int((benchmark.make_set(few, CPU)["offsets"].diff() > 0).sum())
    assert 8 < used < 64
    assert benchmark.bytes_moved(few) == 64 * (256 + 2 * 4 + 136 * 2) + used * (136 * 256 + 4 * 2 * 2)
    assert benchmark.flops(few) == 2 * 64 * 136 * 256


def test_the_expected_gemm_is_that_of_the_decoded_numbers():
    a, b = (fp8_gemms.codes(3, 256, CPU) for _ in range(2))
    a_scale, b_scale = fp8_gemms.scales(3, 2, device=CPU), fp8_gemms.scales(1, 2, device=CPU)
    want = sum(
        (a[:, at].double() * a_scale[:, i, None].double()) @ (b[:, at].double() * b_scale[0, i].double()).t()
        for i, at in enumerate((slice(0, 128), slice(128, 256)))
    )
    assert torch.equal(fp8_gemms.decoded_gemm(a, b, a_scale, b_scale), want.bfloat16())
