"""Test the benchmarks of the first expert GEMM, with its gate, without a GPU: bytes, sizes, checks, and the comparison
with targets."""

import pytest
import torch
from test_fp4_gemms import sets_of

from benchmarks import expert_gemms, gated_expert_gemms, ops, runner
from benchmarks.buffers import BYTE
from benchmarks.compositions import from_128x4

OPS = ["moe_fc1_fp4", "moe_fc1_fp4_weight_only"]
by_op = pytest.mark.parametrize("op", OPS)


def test_bytes_by_hand():
    """Check the bytes moved for two tokens that are routed to all of four experts of width 64, with K = 128."""
    fp4, weight_only = (ops.load(op) for op in OPS)
    case = fp4.case(2, 64, 128, 4)
    rest = 4 * 128 * (64 + 8) + 2 * 4 * 4 + 4 * 4
    assert fp4.bytes_moved(case) == rest + 2 * (64 + 8) + 2 * 4 * (32 + 4)
    assert weight_only.bytes_moved(case) == rest + 2 * 256 + 2 * 4 * 128
    for benchmark in (fp4, weight_only):
        assert benchmark.flops(case) == 2 * 2 * 4 * 128 * 128


@by_op
def test_the_package_s_estimate_is_near(op):
    """Compare the bytes with the package's estimate, which counts the expected number of experts instead of reading the
    routing."""
    benchmark = ops.load(op)
    for case in benchmark.cases("marks"):
        m = case["M"]
        assert benchmark.problem(case).bytes_moved(m) == pytest.approx(benchmark.bytes_moved(case), rel=0.05)
        assert benchmark.problem(case).flops(m) == benchmark.flops(case)


@by_op
@pytest.mark.parametrize("name", ["top-8", "dense"])
def test_the_op_agrees_with_float64(op, name):
    """Check the results of routed pairs. All other elements keep their poison, and padding of scales becomes zero."""
    benchmark = ops.load(op)
    case = benchmark.case(9, 64, 256, 16, name)
    (tensors,) = sets_of(benchmark, case, 1)
    expected = benchmark.expected(case, tensors)
    routed = expert_gemms.routing(name, 9, 16) != 0
    assert benchmark.mismatch(benchmark.results(tensors), expected) > 0.3  # the outputs are poison before the call
    if len(expected) == 2:
        kept = (expected[0].unflatten(1, (16, -1)) == BYTE).all(2)
        assert torch.equal(kept, ~routed)
        assert not from_128x4(expected[1], 128, 64)[9:].view(torch.uint8).any()
    assert benchmark.mismatch(benchmark.ours(case, [tensors]).call(0), expected) <= benchmark.tolerance
    wrong = tuple(each.clone() for each in expected)
    wrong[0].view(torch.uint8)[4] ^= 0x11
    assert benchmark.mismatch(wrong, expected) > benchmark.tolerance


@by_op
def test_the_dense_peer(op):
    benchmark = ops.load(op)
    case = benchmark.case(3, 64, 128, 4)
    sets = sets_of(benchmark, case)
    variants, absent = runner.collect_variants(benchmark, case, sets, with_peers=True)
    assert list(variants) == ["ours", "cublas_bf16"] and list(absent) == ["tcgen05", "routed"]
    got = variants["cublas_bf16"].call(1).double().view(3, 4, 128)
    assert not variants["cublas_bf16"].checked and variants["cublas_bf16"].bytes == 2 * (3 * 128 + 512 * 128 + 3 * 512)
    both = gated_expert_gemms.silu_mul_fp32((got * gated_expert_gemms.ALPHA).float().flatten(0, 1))
    want = benchmark.gated(sets[1] | {"w": sets[0]["w"], "w_scale": sets[0]["w_scale"]})
    assert (both.view(3, -1) - want).norm() < 0.02 * want.norm()
