"""Test the benchmarks of the second expert GEMM without a GPU: routings, bytes, sizes, checks, peers, and the
comparison with targets."""

import pytest
import torch
from test_fp4_gemms import sets_of

from benchmarks import expert_gemms, ops

OPS = ["moe_fc2_fp4", "moe_fc2_fp4_weight_only"]
by_op = pytest.mark.parametrize("op", OPS)
by_routing = pytest.mark.parametrize("name", ["top-8", "Zipf", "dense"])


# --- routings -------------------------------------------------------------------------------------


@by_routing
def test_routings(name):
    """Check the experts of each token and their weights, and that a routing is the same in every call and buffer
    set."""
    alpha = expert_gemms.routing(name, 512, 256)
    count = 256 if name == "dense" else 8
    assert alpha.shape == (512, 256) and alpha.dtype == torch.float32
    assert torch.equal(alpha.count_nonzero(1), torch.full((512,), count))
    assert set(alpha.unique().tolist()) - {0.0} == {0.5, 0.25, 0.125, 0.0625}
    assert torch.equal(expert_gemms.routing.__wrapped__(name, 512, 256), alpha)
    assert expert_gemms.routing(name, 3, 4).count_nonzero() == 12


def test_how_likely_experts_are():
    """Check how popular the experts are: all equally, or by Zipf's law, in which the less popular half of the experts
    gets at most 1/4 of the pairs."""
    pair = (expert_gemms.routing(name, 512, 256).count_nonzero(0) for name in ("top-8", "Zipf"))
    even, uneven = (counts.sort(descending=True).values for counts in pair)
    assert 20 < even[0] < 45 and even[-1] > 2
    assert uneven[0] > 300 and 150 < uneven[1] < uneven[0] and uneven[128:].sum() < 0.25 * 8 * 512


# --- bytes and sizes ------------------------------------------------------------------------------


def test_bytes_by_hand():
    """Check the bytes moved for two tokens that are routed to all of four experts with 64 elements each."""
    fp4, weight_only = (ops.load(op) for op in OPS)
    case = fp4.case(2, 32, 256, 4)
    rest = 32 * (128 + 16) + 2 * 4 * 4 + 2 * 32 * 2
    assert fp4.bytes_moved(case) == rest + 2 * (128 + 16)
    assert weight_only.bytes_moved(case) == rest + 2 * 512
    for benchmark in (fp4, weight_only):
        assert benchmark.flops(case) == 2 * 2 * 32 * 256
        assert benchmark.peer_bytes("cublas_bf16", case) == 2 * (2 * 256 + 32 * 256 + 2 * 32)


@by_op
@by_routing
def test_bytes_are_those_of_what_is_routed(op, name):
    """Check that one token reads the weights of 8 of 256 experts, or of all experts in a dense GEMM."""
    benchmark = ops.load(op)
    for m in expert_gemms.ROWS:
        case = benchmark.case(m, name=name)
        alpha = expert_gemms.routing(name, m, 256)
        weight = int((alpha != 0).any(0).sum()) * 256 * 7168 * 9 // 16
        pairs = int((alpha != 0).sum())
        a = pairs * (144 if op == "moe_fc2_fp4" else 512)
        assert benchmark.bytes_moved(case) == weight + a + 4 * m * 256 + 2 * m * 7168
        assert benchmark.flops(case) == pairs * 2 * 256 * 7168
        if name == "dense":
            assert (weight, pairs) == (7168 * 65536 * 9 // 16, m * 256)


@by_op
def test_the_package_s_estimate_is_near(op):
    """Compare the bytes with the package's estimate, which counts the expected number of experts instead of reading
    alpha."""
    benchmark = ops.load(op)
    for m in expert_gemms.ROWS:
        case = benchmark.case(m)
        assert benchmark.problem(case).bytes_moved(m) == pytest.approx(benchmark.bytes_moved(case), rel=0.05)
        assert benchmark.problem(case).flops(m) == benchmark.flops(case)


# --- checks and peers -----------------------------------------------------------------------------


@by_op
@by_routing
def test_the_op_agrees_with_float64(op, name):
    benchmark = ops.load(op)
    case = benchmark.case(9, 136, 16 * 64, 16, name)
    sets = sets_of(benchmark, case, 1)
    expected = benchmark.expected(case, sets[0])
    assert benchmark.mismatch((sets[0]["out"],), expected) == 1.0  # 1.0: all elements are poison
    assert benchmark.mismatch(benchmark.ours(case, sets).call(0), expected) == 0.0
    assert expected[0].abs().mean() > 0.1
    sets[0]["alpha"][4] = sets[0]["alpha"][4].roll(1)
    other = benchmark.expected(case, sets[0])[0]
    rows = (other != expected[0]).any(1).nonzero()[:, 0].tolist()
    assert rows == [4]


# --- a whole run ----------------------------------------------------------------------------------
