"""The benchmarks of the FP4 GEMMs without a GPU: bytes, sizes, checks, stand-ins for the peers, marks."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import torch_cute_ops
from benchmarks import __main__ as cli
from benchmarks import compositions, fp4_gemms, fp4_peers, measure, ops, report, runner
from benchmarks.measure import Ceilings, Settings

CPU = torch.device("cpu")
OPS = ["mm_fp4", "mm_fp4_weight_only"]
CEILINGS = Ceilings(4.0, 4.5, 600.0)
by_op = pytest.mark.parametrize("op", OPS)


def sets_of(benchmark, case, count=2):
    return [benchmark.make_set(case, CPU) for _ in range(count)]


# --- stand-ins ------------------------------------------------------------------------------------


class FakeLayer(torch.nn.Module):
    """humming's layer, as far as the benchmark uses it."""

    def __init__(self, shape_n, shape_k, weight_config, torch_dtype):
        super().__init__()
        assert weight_config == {"quant_method": "modelopt", "quant_algo": "nvfp4"} and torch_dtype == torch.bfloat16
        self.shapes = {"weight": (shape_n, shape_k // 2), "weight_scale": (shape_n, shape_k // 16)}
        self.humming_config = None

    def load_from_tensors(self, tensors):
        assert {name: tensor.shape for name, tensor in tensors.items()} == {**self.shapes, "weight_scale_2": (1,)}
        self.tensors = tensors

    def transform(self):
        decoded = compositions.nvfp4_dequantize(self.tensors["weight"], self.tensors["weight_scale"], torch.float32)
        self.weight, self.humming_config = decoded * self.tensors["weight_scale_2"], "a layer's"

    def forward(self, inputs, outputs, tuning_config):
        assert tuning_config == {"block_shape": inputs.shape[0]}
        return outputs.copy_(inputs.float() @ self.weight.t())


def module(name, **members):
    made = ModuleType(name)
    vars(made).update(members)
    return made


@pytest.fixture
def stand_ins(monkeypatch):
    """Peers with the interfaces of humming's and QuACK's; QuACK's `gemm_w4a16` can be replaced in the module."""

    def heuristic(config, shape_m, device):
        assert config == "a layer's" and device == CPU
        return {"block_shape": shape_m}

    def gemm(a, codes, scale, tensor_scale, out, wformat):
        assert wformat == "nvfp4" and isinstance(tensor_scale, float)
        return out.copy_(a.float() @ compositions.nvfp4_dequantize(codes, scale, torch.float32).t() * tensor_scale)

    quack = module("quack.gemm_w4", gemm_w4a16=gemm, prepare_w4_weight=lambda codes, scale, wformat: (codes, scale))
    for made in (
        module("humming"),
        module("humming.layer", HummingLayer=FakeLayer),
        module("humming.tune", get_heuristics_config=heuristic),
        module("quack"),
        quack,
    ):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    return quack


@pytest.fixture
def no_peers(monkeypatch):
    for name in ("humming", "quack", "humming.layer", "quack.gemm_w4"):
        monkeypatch.setitem(sys.modules, name, None)


# --- bytes and sizes ------------------------------------------------------------------------------


def test_bytes_by_hand():
    """16 rows, 32 columns, sums of 64: 4-bit codes and a byte for 16 of them; 16-bit results."""
    weight, out = 32 * (32 + 4), 16 * 32 * 2
    fp4, weight_only = (ops.load(op) for op in OPS)
    case = fp4.case(16, 32, 64)
    assert fp4.bytes_moved(case) == weight + out + 16 * (32 + 4)
    assert weight_only.bytes_moved(case) == weight + out + 16 * 128
    for benchmark in (fp4, weight_only):
        assert benchmark.flops(case) == 2 * 16 * 32 * 64
        assert benchmark.peer_bytes("humming", case) == weight_only.bytes_moved(case)
        assert benchmark.peer_bytes("cublas_bf16", case) == 2 * (16 * 64 + 32 * 64 + 16 * 32)
    large = fp4.case(1, 16384, 16384)
    assert fp4.bytes_moved(large) == 16385 * 9216 + 32768 == 151_036_928


@by_op
def test_the_formula_is_the_bytes_of_the_tensors(op):
    benchmark = ops.load(op)
    case = benchmark.case(128, 256, 512)  # no padding
    (tensors,) = sets_of(benchmark, case, 1)
    assert benchmark.bytes_moved(case) == sum(t.nbytes for name, t in tensors.items() if name != "alpha")


@by_op
def test_sizes(op):
    benchmark = ops.load(op)
    sizes = {name: [tuple(case.sizes.values()) for case in benchmark.cases(name)] for name in fp4_gemms.SIZES}
    marks, quick, full = (set(sizes[name]) for name in ("marks", "quick", "full"))
    assert marks < quick < full
    assert [len(cases) for cases in sizes.values()] == [len(marks), len(quick), len(full)] == [16, 55, 126]
    weights = [(4096, 4096), (8192, 8192), (16384, 16384), (8192, 28672), (28672, 8192), (10240, 8192)]
    weights += [(6144, 4096), (28672, 4096), (4096, 14336)]
    assert full == {(2**i, n, k) for i in range(14) for n, k in weights}
    assert {size[1:] for size in quick} == set(weights)
    for m in (1, 16, 64, 256, 1024, 2048):
        assert (m, 16384, 16384) in marks
    case = benchmark.cases("marks")[-1]
    assert str(case) == "M=64 N=8192 K=28672" and benchmark.panel(case) == "N = 8,192, K = 28,672"
    assert benchmark.panel(benchmark.case(1, 4096, 4096)) == "N = K = 4,096"
    assert str(benchmark.smallest(case)) == str(case)


def test_rates_limit_how_often_a_large_gemm_runs(monkeypatch):
    """By its bytes alone a graph of the largest would hold 12 calls of 7 ms."""
    plans = []
    monkeypatch.setattr(runner, "plan", lambda *args, **kwargs: plans.append(measure.plan(*args, **kwargs)) or 1 / 0)
    benchmark = ops.load("mm_fp4")
    arguments = {"device": CPU, "backend": None, "settings": Settings(), "l2_bytes": 60 * 2**20}
    with pytest.raises(ZeroDivisionError):
        runner.run_case(benchmark, benchmark.case(8192, 16384, 16384), ceilings=CEILINGS, **arguments)
    assert (plans[0].n_sets, plans[0].calls, plans[0].rounds) == (2, 2, 7)


# --- checks ---------------------------------------------------------------------------------------


def test_decoding_is_the_package_s():
    codes, scale = fp4_gemms.random_nvfp4(200, 96, CPU)
    linear = compositions.from_128x4(scale, 200, 6)
    assert torch.equal(compositions.to_128x4(linear).view(torch.uint8), scale.view(torch.uint8))
    want = torch_cute_ops.fp4_dequantize(codes, scale, out_dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert torch.equal(compositions.nvfp4_dequantize(codes, linear, dtype), want.to(dtype))
    assert want.abs().max() > 6 and 0.5 <= linear.float().min() < linear.float().max() <= 2


@by_op
@pytest.mark.parametrize("sizes", [(1, 128, 64), (5, 136, 160)])
def test_the_op_agrees_with_float64(op, sizes):
    benchmark = ops.load(op)
    case = benchmark.case(*sizes)
    sets = sets_of(benchmark, case, 1)
    expected = benchmark.expected(case, sets[0])
    assert benchmark.mismatch((sets[0]["out"],), expected) == 1.0  # poison
    assert benchmark.mismatch(benchmark.ours(case, sets).call(0), expected) == 0.0
    assert expected[0].abs().mean() > 0.1


def test_mismatch_allows_rounded_partial_sums_and_no_more():
    benchmark = ops.load("mm_fp4")
    want = torch.randn(64, 64).bfloat16()
    assert benchmark.mismatch((want,), (want,)) == 0.0
    assert benchmark.mismatch(((want.float() + 2**-9).bfloat16(),), (want,)) == 0.0
    assert benchmark.mismatch(((want.float() * 1.03).bfloat16(),), (want,)) > 0.5
    assert benchmark.mismatch((want.flip(0),), (want,)) > 0.9
    with pytest.raises(ValueError, match="expected"):
        benchmark.mismatch((want[:1],), (want,))


# --- peers ----------------------------------------------------------------------------------------


@by_op
def test_absent_peers_have_reasons(op, no_peers):
    benchmark = ops.load(op)
    case = benchmark.case(3, 128, 64)
    variants, absent = runner.collect_variants(benchmark, case, sets_of(benchmark, case), with_peers=True)
    assert list(variants) == ["ours", "cublas_bf16"]
    assert list(absent) == [*benchmark.ways, "humming", "quack", "marlin"]
    assert "reference" not in benchmark.ways and {"mma_sync", "cublas"} <= set(benchmark.ways)
    no_gpu = "needs a CUDA device; the tensors are on cpu"
    assert {name: absent[name] for name in benchmark.ways} == dict.fromkeys(benchmark.ways, no_gpu)
    assert absent["humming"].startswith("humming cannot be imported (ModuleNotFoundError: ")
    assert absent["quack"].startswith("QuACK cannot be imported (ModuleNotFoundError: ")
    assert "Marlin" in absent["marlin"]


@by_op
def test_peers_take_the_same_weight_and_are_checked(op, stand_ins):
    benchmark = ops.load(op)
    case = benchmark.case(5, 136, 160)
    sets = sets_of(benchmark, case)
    variants, _ = runner.collect_variants(benchmark, case, sets, with_peers=True)
    assert list(variants) == ["ours", "humming", "quack", "cublas_bf16"]
    for tensors in sets:
        tensors["out"].fill_(float("nan"))
    assert runner.check(benchmark, case, sets, variants) == dict.fromkeys(variants, 0.0)
    assert all(tensors["out"].isnan().all() for tensors in sets)
    for name, variant in variants.items():
        (got,) = variant.call(1)
        assert got.data_ptr() == sets[1]["out"].data_ptr(), name
        assert benchmark.mismatch((got,), benchmark.expected(case, sets[1])) == 0.0, name
        assert variant.note == ("bfloat16 activations" if (op, name != "ours") == ("mm_fp4", True) else "")


@by_op
def test_a_backend_by_name_is_ours_with_it(op, monkeypatch):
    """On a CPU that is the reference; it runs without peers, too, and before they are imported."""
    benchmark = ops.load(op)
    monkeypatch.setattr(type(benchmark), "ways", ("reference",))
    used, run = [], type(benchmark).run
    monkeypatch.setattr(
        type(benchmark),
        "run",
        lambda self, tensors, backend="auto": (used.append(backend), run(self, tensors, backend)),
    )
    case = benchmark.case(3, 128, 64)
    runner.warm_up(benchmark, [case, case, benchmark.case(4, 128, 64)], CPU)
    assert used == ["reference", "auto"] * 2
    variants, absent = runner.collect_variants(benchmark, case, sets_of(benchmark, case), with_peers=False)
    assert list(variants) == ["ours", "reference"] and not absent
    assert variants["reference"].bytes == benchmark.bytes_moved(case)


class Fails(RuntimeError):
    pass


@pytest.mark.parametrize("when", ["packed", "called", "captured"])
def test_a_peer_that_fails_does_not_end_the_run(when, stand_ins, monkeypatch, fake_backend):
    """When it is made, on its first call, or when it is captured."""
    calls, gemm = [], stand_ins.gemm_w4a16

    def fail(*args, **kwargs):
        calls.append(args)
        # The first calls are that of `collect_variants` and that of `check`.
        if when != "captured" or len(calls) > 2:
            raise Fails("of the peer\nand more")
        return gemm(*args, **kwargs)

    monkeypatch.setattr(stand_ins, "prepare_w4_weight" if when == "packed" else "gemm_w4a16", fail)
    row = measured(fake_backend)[0]
    assert list(row["variants"]) == ["ours", "humming", "cublas_bf16", "copy"]
    reason = "cannot be captured" if when == "captured" else "failed"
    assert row["absent"]["quack"] == f"{reason} (Fails: of the peer)"


def test_ours_that_cannot_be_captured_fails_the_case(fake_backend, monkeypatch):
    backend = fake_backend([1.0])
    monkeypatch.setattr(backend, "capture", lambda *args: 1 / 0)
    benchmark = ops.load("mm_fp4")
    with pytest.raises(ZeroDivisionError):
        runner.run_case(
            benchmark,
            benchmark.case(3, 128, 64),
            device=CPU,
            backend=backend,
            settings=Settings(max_sets=2),
            l2_bytes=1,
            ceilings=CEILINGS,
            with_peers=False,
        )


# --- a whole run ----------------------------------------------------------------------------------


def measured(fake_backend, costs=(10.0, 12.0, 14.0, 20.0, 8.0), op="mm_fp4_weight_only"):
    """Rows of two cases; the costs are those of ours, humming, QuACK, cuBLAS and the copy."""
    benchmark = ops.load(op)
    return runner.run(
        benchmark,
        [benchmark.case(16, 128, 64), benchmark.case(2, 128, 64)],
        device=CPU,
        backend=fake_backend(list(costs)),
        settings=Settings(max_sets=2),
        l2_bytes=1,
        ceilings=CEILINGS,
    )


@by_op
def test_a_run_on_the_cpu_with_a_made_up_clock(op, stand_ins, fake_backend, monkeypatch):
    prepared = []
    monkeypatch.setattr(fp4_peers, "prepare_humming", lambda sizes, device: prepared.append((sizes, device)) or 1 / 0)
    row = measured(fake_backend, op=op)[0]
    assert prepared == [([(16, 128, 64), (2, 128, 64)], CPU)]
    assert {name: v["us"] for name, v in row["variants"].items()} == {
        **{"ours": 10.0, "humming": 12.0, "quack": 14.0, "cublas_bf16": 20.0, "copy": 8.0}
    }
    assert row["correct"] is True and all(v["correct"] for name, v in row["variants"].items() if name != "copy")
    assert row["flops"] == 2 * 16 * 128 * 64 and row["bytes"] == ops.load(op).bytes_moved(
        ops.load(op).case(16, 128, 64)
    )
    ours, bf16 = row["variants"]["ours"], row["variants"]["cublas_bf16"]
    assert ours["tbps"] == pytest.approx(row["bytes"] / 10e-6 / 1e12)
    assert (ours["of_read"], ours["of_peak"]) == pytest.approx((ours["tbps"] / 4.5, ours["tbps"] / 4.0))
    assert ours["tflops"] == pytest.approx(row["flops"] / 10e-6 / 1e12)
    assert bf16["tflops"] == pytest.approx(ours["tflops"] / 2) and bf16["of_bf16"] == pytest.approx(
        bf16["tflops"] / 600
    )
    assert set(row["absent"]) == {*ops.load(op).ways, "marlin"}


def test_a_wrong_peer_is_reported_and_sets_no_mark(stand_ins, fake_backend, monkeypatch, tmp_path, capsys):
    """Even one that writes nothing, after others that wrote the right result there."""
    monkeypatch.setattr(stand_ins, "gemm_w4a16", lambda *args, out, **kwargs: out)
    monkeypatch.setattr(cli, "CudaGraphs", lambda: fake_backend([10.0, 12.0, 2.0, 20.0, 8.0]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1))
    benchmark = ops.load("mm_fp4")
    monkeypatch.setattr(type(benchmark), "cases", lambda self, sizes: [self.case(m, 128, 64) for m in (16, 256)])
    options = cli.parse(["mm_fp4", "--output", str(tmp_path), "--no-plot"])
    assert cli.run_op(benchmark, options, CPU, CEILINGS)
    read = json.loads((tmp_path / "mm_fp4.json").read_text())
    assert read["rows"][0]["variants"]["quack"]["correct"] is False
    marks = {mark["name"]: mark["value"] for mark in read["marks"]}
    assert marks["M ≤ 64: times as fast as the fastest FP4 peer"] == pytest.approx(1.2)
    text = (tmp_path / "mm_fp4.md").read_text()
    assert "- QuACK: up to 100.0% of the elements differ, at M=16 N=128 K=64; M=256 N=128 K=64" in text
    assert "4.50 TB/s" in text and "the fraction of cuBLAS" in text and "600 TFLOP/s" in " ".join(text.split())
    assert (
        "M=256 N=128 K=64: ours 10.0, humming 12.0, QuACK 2.00, cuBLAS bf16 20.0, copy 8.00 µs"
        in capsys.readouterr().out
    )
    lines = report.results_table(read["rows"]).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:9]] == [
        *("M", "N", "K", "ours µs", "humming µs", "QuACK µs", "cuBLAS bf16 µs", "copy µs")
    ]
    assert "of read | TFLOP/s | of bf16 | humming / ours" in " ".join(lines[0].split())


def test_without_ceilings_there_are_no_fractions(stand_ins, fake_backend):
    row = {**measured(fake_backend)[0], "absent": {}}
    for variant in row["variants"].values():
        variant |= {"of_read": None, "of_bf16": None}
    assert "(–)" in report.rates_table([row]) and "–" in report.results_table([row])


def test_ceilings(fake_backend, monkeypatch):
    """Reads: the faster of two ways; a ceiling that cannot be measured is None."""
    monkeypatch.setattr(measure, "peak_copy_tbps", lambda backend, device: 4.2)
    peaks = {name: getattr(measure, name) for name in ("peak_read_tbps", "peak_bf16_tflops")}
    read = peaks["peak_read_tbps"](fake_backend([100.0, 50.0]), CPU, mib=1)
    assert read == pytest.approx(2**20 / 50e-6 / 1e12)
    assert peaks["peak_bf16_tflops"](fake_backend([10.0]), CPU, size=64) == pytest.approx(2 * 64**3 / 10e-6 / 1e12)
    monkeypatch.setattr(measure, "peak_read_tbps", lambda backend, device: 4.6)
    monkeypatch.setattr(measure, "peak_bf16_tflops", lambda backend, device: 1 / 0)
    assert measure.ceilings(None, CPU) == Ceilings(4.2, 4.6, None)


# --- marks ----------------------------------------------------------------------------------------


def row(m, n, k, wrong=(), **us):
    """A row with these times, µs."""
    variants = {}
    for name, value in us.items():
        rates = {"of_read": 0.5, "tflops": 2 * m * n * k / value * 1e-6, "of_bf16": 0.5} if name != "copy" else {}
        variants[name] = {"us": value, "p20": value, "p80": value, "tbps": 1.0, "of_copy": 0.5, "of_peak": 0.5, **rates}
        variants[name] |= {"correct": name not in wrong, "mismatch": 0.5 if name in wrong else 0.0}
    return {
        "sizes": {"M": m, "N": n, "K": k},
        "choices": {},
        "variants": variants,
        "absent": {},
        "correct": True,
        "panel": f"N = {n}, K = {k}",
        "bytes": n * k,
        "flops": 2 * m * n * k,
        "rotation_over_l2": 3.1,
    }


ROWS = [
    row(
        1, 16384, 16384, ours=40.0, mma_sync=40.0, cublas=400.0, humming=52.0, quack=68.0, cublas_bf16=125.0, copy=40.0
    ),
    row(
        16, 16384, 16384, ours=44.0, mma_sync=40.0, cublas=400.0, humming=60.0, quack=50.0, cublas_bf16=123.0, copy=40.0
    ),
    row(16, 4096, 4096, ours=9.0, mma_sync=9.0, cublas=40.0, humming=9.9, cublas_bf16=10.0, copy=5.0),
    row(64, 8192, 8192, ours=20.0, mma_sync=25.0, cublas=20.0, cublas_bf16=37.0, copy=10.0),
    row(
        256, 4096, 4096, ours=20.0, cublas=20.0, wrong=("quack",), humming=22.0, quack=10.0, cublas_bf16=16.0, copy=5.0
    ),
    row(2048, 4096, 4096, ours=100.0, cublas=70.0, humming=99.0, quack=101.0, cublas_bf16=98.0, copy=10.0),
]


def test_marks_of_one_row():
    """Above the time of the bytes at the rate of reads, half of the time here; and by size."""
    rows = [row(1, n, 4096, ours=us) for n, us in ((6144, 6.0), (28672, 8.0))]
    rows += [row(m, 4096, 4096, ours=us) for m, us in ((1, 6.5), (16, 7.5), (64, 9.0))]
    rows[0]["variants"]["ours"]["of_read"] = 0.25
    got = {mark.name: (mark.value, mark.passed) for mark in ops.load("mm_fp4").marks(rows)[7:]}
    above = "above the time of its bytes"
    assert got == {
        f"M = 1, 4,096 × 4,096: {above}": (3.25, True),
        f"M = 1, 6,144 × 4,096: {above}": (4.5, False),
        f"M = 1, 28,672 × 4,096: {above}": (4.0, False),
        f"M = 1, 4,096 × 14,336: {above}": (None, None),
        "M = 1, 4,096 × 14,336: time": (None, None),
        "M = 16, 4,096 × 4,096: time": (7.5, False),
        "M = 64, 4,096 × 4,096: time": (9.0, True),
        "M = 64, 4,096 × 14,336: time": (None, None),
    }


@by_op
def test_marks(op):
    marks = {mark.name: mark for mark in ops.load(op).marks(ROWS)[:7]}
    fp4, auto = "times as fast as the fastest FP4 peer", "time of auto over the fastest of our backends"
    got = {name: (mark.goal, pytest.approx(mark.value), mark.passed) for name, mark in marks.items()}
    assert got == {
        "M ≤ 16, N = K = 16,384: time": ("≤ 42 µs", 44.0, False),
        f"M ≤ 64: {fp4}": ("≥ 1.15 ×", 1.1, False),
        f"128 ≤ M ≤ 1,024: {fp4}": ("≥ 1 ×", 1.1, True),
        "M ≥ 2,048: times as fast as cuBLAS bf16": ("≥ 0.97 ×", 0.98, True),
        f"M ≥ 2,048: {fp4}": ("≥ 1 ×", 0.99, False),
        f"{auto}: median": ("≤ 1.1 ×", 1.0, True),
        f"{auto}: largest": ("≤ 1.25 ×", 100 / 70, False),
    }
    assert [mark.passed for mark in ops.load(op).marks(ROWS[:1])[:7]] == [True, True, None, None, None, True, True]
    assert {mark.value for mark in ops.load(op).marks([])} == {None}
    alone = [row(2048, 4096, 4096, ours=100.0, copy=10.0), row(16, 4096, 4096, ours=9.0, copy=5.0)]
    assert [mark.value for mark in ops.load(op).marks(alone)[:7]] == [None] * 7


def test_a_report_and_a_picture(tmp_path):
    names = ["ours", "mma_sync", "cublas", "humming", "quack", "cublas_bf16", "copy"]
    assert report.variant_names(ROWS) == names
    more = [{**ROWS[0], "variants": {"copy": {}, "wgmma": {}, "ours": {}}}]
    assert report.variant_names(more) == ["ours", "wgmma", "copy"]
    lines = report.rates_table(report.ordered(ROWS)).splitlines()
    assert len(lines) == 8 and len({len(line) for line in lines}) == 1 and "(0.500)" in lines[2]
    pytest.importorskip("matplotlib", reason="matplotlib comes with the bench extra")
    from benchmarks.plot import plot

    environment = {"gpu": "a GPU", "torch": "2", "cuda": "13", "date": "2026-01-01"}
    result = {"op": "mm_fp4", "settings": {}, "environment": environment, "peak_copy_tbps": 4.3, "rows": ROWS}
    for some in ({"bf16_tflops": 600.0}, {"bf16_tflops": None, "rows": ROWS[:1]}):
        plot({**result, **some}, tmp_path / "op.png")
        assert (tmp_path / "op.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
