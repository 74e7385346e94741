"""The benchmarks of the second GEMM of an expert layer without a GPU: routings, bytes, sizes, checks, peers, marks."""

import pytest
import torch
from test_fp4_gemms import CEILINGS, CPU, no_peers, sets_of, stand_ins  # noqa: F401  (two are fixtures)

from benchmarks import expert_gemms, ops, report, runner, targets
from benchmarks.measure import Settings

OPS = ["moe_fc2_fp4", "moe_fc2_fp4_weight_only"]
SMALL = (5, 136, 4 * 64, 4)
"""M, N, K, E."""
by_op = pytest.mark.parametrize("op", OPS)
by_routing = pytest.mark.parametrize("name", ["top-8", "Zipf", "dense"])


# --- routings -------------------------------------------------------------------------------------


@by_routing
def test_routings(name):
    """Eight experts a token, or all; powers of two; the same when asked again, and for every buffer set."""
    alpha = expert_gemms.routing(name, 512, 256)
    count = 256 if name == "dense" else 8
    assert alpha.shape == (512, 256) and alpha.dtype == torch.float32
    assert torch.equal(alpha.count_nonzero(1), torch.full((512,), count))
    assert set(alpha.unique().tolist()) - {0.0} == {0.5, 0.25, 0.125, 0.0625}
    assert torch.equal(expert_gemms.routing.__wrapped__(name, 512, 256), alpha)
    assert expert_gemms.routing(name, 3, 4).count_nonzero() == 12


def test_how_likely_experts_are():
    """As often each, or as Zipf says: the likeliest has most tokens, half of the 256 a quarter of the pairs at most."""
    pair = (expert_gemms.routing(name, 512, 256).count_nonzero(0) for name in ("top-8", "Zipf"))
    even, uneven = (counts.sort(descending=True).values for counts in pair)
    assert 20 < even[0] < 45 and even[-1] > 2
    assert uneven[0] > 300 and 150 < uneven[1] < uneven[0] and uneven[128:].sum() < 0.25 * 8 * 512


# --- bytes and sizes ------------------------------------------------------------------------------


def test_bytes_by_hand():
    """Two tokens of four experts, of 64 elements each: all have all four."""
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
    """With one token eight experts of 256; dense, all."""
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
    """It knows no alpha, and counts the experts that are likely to be drawn."""
    benchmark = ops.load(op)
    for m in expert_gemms.ROWS:
        case = benchmark.case(m)
        assert benchmark.problem(case).bytes_moved(m) == pytest.approx(benchmark.bytes_moved(case), rel=0.05)
        assert benchmark.problem(case).flops(m) == benchmark.flops(case)


@by_op
def test_sizes(op):
    benchmark = ops.load(op)
    cases = {sizes: [str(case) for case in benchmark.cases(sizes)] for sizes in expert_gemms.SIZES}
    assert set(cases["marks"]) < set(cases["quick"]) < set(cases["full"])
    assert [len(set(cases[sizes])) for sizes in cases] == [len(cases[sizes]) for sizes in cases] == [13, 21, 24]
    assert cases["marks"][0] == "M=1 N=7168 K=65536 E=256 top-8"
    assert benchmark.panel(benchmark.cases("marks")[-1]) == "N = 7,168, K = 65,536, E = 256, dense"
    for name, goals in targets.EXPERTS_US.items():
        assert {f"M={m} N=7168 K=65536 E=256 {name}" for m in goals} <= set(cases["marks"])
    assert any("Marlin" in note and "35 (M = 8)" in note and "not from this run" in note for note in benchmark.notes)


# --- checks and peers -----------------------------------------------------------------------------


@by_op
@by_routing
def test_the_op_agrees_with_float64(op, name):
    benchmark = ops.load(op)
    case = benchmark.case(9, 136, 16 * 64, 16, name)
    sets = sets_of(benchmark, case, 1)
    expected = benchmark.expected(case, sets[0])
    assert benchmark.mismatch((sets[0]["out"],), expected) == 1.0  # poison
    assert benchmark.mismatch(benchmark.ours(case, sets).call(0), expected) == 0.0
    assert expected[0].abs().mean() > 0.1
    sets[0]["alpha"][4] = sets[0]["alpha"][4].roll(1)
    other = benchmark.expected(case, sets[0])[0]
    rows = (other != expected[0]).any(1).nonzero()[:, 0].tolist()
    assert rows == [4]


@by_op
@by_routing
def test_peers_compute_dense_gemms(op, name, stand_ins):  # noqa: F811
    """With the same result, outputs of their own set, and the bytes of all experts."""
    benchmark = ops.load(op)
    case = benchmark.case(*SMALL, name)
    sets = sets_of(benchmark, case)
    variants, absent = runner.collect_variants(benchmark, case, sets, with_peers=True)
    assert list(variants) == ["ours", "humming", "cublas_bf16"]
    assert all(absent[name] == "needs a CUDA device; the tensors are on cpu" for name in benchmark.ways)
    for tensors in sets:
        tensors["out"].fill_(float("nan"))
    assert runner.check(benchmark, case, sets, variants) == dict.fromkeys(variants, 0.0)
    for variant in variants.values():
        (got,) = variant.call(1)
        assert got.data_ptr() == sets[1]["out"].data_ptr()
        assert benchmark.mismatch((got,), benchmark.expected(case, sets[1])) == 0.0
    assert variants["humming"].note == "dense, activations times alpha"
    assert variants["humming"].bytes == 136 * 256 * 9 // 16 + 2 * 5 * 256 + 2 * 5 * 136


@by_op
def test_absent_peers_have_reasons(op, no_peers):  # noqa: F811
    benchmark = ops.load(op)
    case = benchmark.case(*SMALL)
    variants, absent = runner.collect_variants(benchmark, case, sets_of(benchmark, case), with_peers=True)
    assert list(variants) == ["ours", "cublas_bf16"] and list(absent) == [*benchmark.ways, "humming"]


# --- a whole run ----------------------------------------------------------------------------------


@by_op
def test_a_run_on_the_cpu_with_a_made_up_clock(op, no_peers, fake_backend):  # noqa: F811
    benchmark = ops.load(op)
    rows = runner.run(
        benchmark,
        [benchmark.case(*SMALL), benchmark.case(*SMALL, "dense")],
        device=CPU,
        backend=fake_backend([10.0, 20.0, 8.0]),  # ours, cuBLAS, copy
        settings=Settings(max_sets=2),
        l2_bytes=1,
        ceilings=CEILINGS,
    )
    assert [row["correct"] for row in rows] == [True, True]
    assert rows[0]["variants"]["ours"]["tflops"] == pytest.approx(rows[0]["flops"] / 10e-6 / 1e12)
    for text in (report.results_table(rows), report.rates_table(rows)):
        lines = text.splitlines()
        assert "routing" in lines[0] and "top-8" in lines[2] and "dense" in lines[3]
    assert [mark.value for mark in benchmark.marks(rows)][:13] == [None] * 13
    rows[1]["variants"]["cublas_bf16"] |= {"correct": False, "mismatch": 0.5}
    assert report.wrong_results(rows) == [
        "cuBLAS bf16: up to 50.0% of the elements differ, at M=5 N=136 K=256 E=4 dense"
    ]


@by_op
def test_marks(op):
    def row(name, m, us):
        variants = {"ours": {"us": us}, "wgmma": {"us": us}}
        sizes = {"M": m, "N": 7168, "K": 65536, "E": 256}
        return {"sizes": sizes, "choices": {"routing": name}, "variants": variants}

    marks = {mark.name: mark for mark in ops.load(op).marks([row("top-8", 8, 17.5), row("dense", 32, 80.0)])}
    assert len(marks) == 8 + 5 + 2
    measured = {name: (mark.goal, mark.value, mark.passed) for name, mark in marks.items() if mark.value is not None}
    assert measured == {
        "top-8, M = 8: time": ("≤ 18 µs", 17.5, True),
        "dense, M = 32: time": ("≤ 76 µs", 80.0, False),
        "time of auto over the fastest of our backends: median": ("≤ 1.1 ×", 1.0, True),
        "time of auto over the fastest of our backends: largest": ("≤ 1.25 ×", 1.0, True),
    }
