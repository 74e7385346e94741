"""The benchmarks without a GPU: bytes, sizes, the checks of results, and a whole run with a made-up clock."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import torch_cute_ops  # noqa: F401  registers the ops
from benchmarks import __main__ as cli
from benchmarks import compositions, host, ops, peers, report, rows, runner
from benchmarks.case import Case, mismatch
from benchmarks.measure import Settings
from benchmarks.ops.fp4_quantize import Fp4Quantize

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_quack(monkeypatch):
    monkeypatch.setattr(peers, "quack_rmsnorm", lambda: "not on a CPU")


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ops.names())
def test_the_formula_is_the_bytes_of_the_tensors(op):
    benchmark = ops.load(op)
    case = Case({"M": 256, "H": 2048})  # no padding in a 128x4 layout, so that every byte of every tensor is moved
    tensors = benchmark.make_set(case, CPU)
    assert benchmark.bytes_moved(case) == sum(t.numel() * t.element_size() for t in tensors.values())


def test_the_formula_does_not_count_padding():
    assert ops.load("rmsnorm_fp4quant").bytes_moved(Case({"M": 1, "H": 1536})) == 3072 + 3072 + 768 + 96
    assert ops.load("fp4_quantize").bytes_moved(Case({"M": 3, "H": 32})) == 3 * (64 + 16 + 2)
    assert ops.load("rmsnorm_fp4quant_with_norm").bytes_moved(Case({"M": 1, "H": 16})) == 32 + 32 + 8 + 1 + 32


# --- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ops.names())
def test_sizes_hold_every_mark(op):
    quick, full = ({tuple(c.sizes.items()) for c in ops.load(op).cases(sizes)} for sizes in ("quick", "full"))
    assert quick < full and len(quick) == len(ops.load(op).cases("quick"))
    sizes = {tuple(dict(case).values()) for case in quick}
    assert {
        (9363, 7168),
        (4 * 9363, 7168),
        (2048, 32768),
        (32768, 2048),
        (16384, 8192),
        (1, 7168),
        (128, 7168),
    } <= sizes
    everything = {tuple(dict(case).values()) for case in full}
    assert {(1, 1536), (65536, 1536), (65536, 32768)} <= everything
    assert all(m * h >= 2**26 or h == 7168 for m, h in sizes)


# --- correctness checks ---------------------------------------------------------------------------


def test_mismatch_counts_codes_scales_and_ulps():
    packed = torch.tensor([0x12, 0x34], dtype=torch.uint8)
    assert mismatch([packed], [torch.tensor([0x12, 0x35], dtype=torch.uint8)]) == 0.25
    scales = torch.tensor([1.0, 2.0, 0.0, 4.0]).to(torch.float8_e4m3fn)
    assert mismatch([packed, scales], [packed, torch.tensor([1.0, 2, 3, 4]).to(torch.float8_e4m3fn)]) == 0.25
    norm = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert mismatch([norm], [norm * (1 + 2**-7)]) == 0.0  # one ulp
    assert mismatch([norm], [norm * 1.1]) == 1.0
    assert mismatch([torch.full_like(norm, float("nan"))], [norm]) == 1.0
    with pytest.raises(ValueError, match="expected"):
        mismatch([packed], [packed[:1]])


@pytest.mark.parametrize("op", ops.names())
@pytest.mark.parametrize("sizes", [{"M": 1, "H": 1536}, {"M": 130, "H": 96}])
def test_the_op_agrees_with_the_composition(op, sizes):
    benchmark, case = ops.load(op), Case(sizes)
    sets = [benchmark.make_set(case, CPU)]
    expected = benchmark.expected(case, sets[0])
    poisoned = mismatch(benchmark.outputs(sets[0]), expected)
    assert poisoned > 0.5
    assert mismatch(benchmark.ours(case, sets).call(0), expected) <= benchmark.tolerance


# --- a whole run ----------------------------------------------------------------------------------


def measured(fake_backend):
    return runner.run(
        ops.load("rmsnorm_fp4quant"),
        [Case({"M": 256, "H": 2048}), Case({"M": 1, "H": 7168})],
        device=CPU,
        backend=fake_backend([10.0, 8.0]),  # ours, copy
        settings=Settings(max_sets=3),
        l2_bytes=2**20,
        peak_tbps=1.0,
    )


def test_a_run_on_the_cpu_with_a_made_up_clock(fake_backend):
    result = measured(fake_backend)
    row = result[0]
    assert row["correct"] is True and row["variants"]["ours"]["mismatch"] <= 1e-3
    assert row["variants"]["ours"]["us"] == 10.0 and row["variants"]["copy"]["us"] == 8.0
    size = 256 * 2048 * 2 + 2048 * 2 + 256 * 2048 // 2 + 256 * 2048 // 16
    assert row["bytes"] == size
    assert row["variants"]["ours"]["tbps"] == pytest.approx(size / 10e-6 / 1e12)
    assert row["variants"]["ours"]["of_copy"] == pytest.approx(0.8)
    assert row["absent"]["inductor"] == "not compiled at this size"
    assert row["absent"]["quack"] == "not on a CPU"


def test_a_wrong_kernel_is_seen(monkeypatch, fake_backend):
    benchmark = ops.load("fp4_quantize")
    monkeypatch.setattr(type(benchmark), "run", lambda self, tensors: None)  # leaves the poison
    arguments = {"device": CPU, "backend": fake_backend([1.0]), "settings": Settings(max_sets=2), "l2_bytes": 1}
    row = runner.run_case(benchmark, Case({"M": 4, "H": 64}), peak_tbps=1.0, with_peers=False, **arguments)
    assert row["correct"] is False
    assert "WRONG" in report.results_table([row])


class Accumulate(Fp4Quantize):
    """Stands for an op that updates an input in place, as the `add_` ops do."""

    def run(self, tensors):
        tensors["input"] += 1
        for output, value in zip(self.outputs(tensors), compositions.fp4_quantize(tensors["input"]), strict=True):
            output.copy_(value)

    def composition(self):
        return lambda x: compositions.fp4_quantize(x + 1)


def test_the_check_gives_every_variant_the_same_inputs():
    benchmark, case = Accumulate(), Case({"M": 4, "H": 64})
    sets = [benchmark.make_set(case, CPU)]
    before = sets[0]["input"].clone()
    variants = {name: benchmark.ours(case, sets) for name in ("ours", "again")}
    assert runner.check(benchmark, case, sets, variants) == {"ours": 0.0, "again": 0.0}
    assert torch.equal(sets[0]["input"], before)


def test_host_calls_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_cute_ops.testing", None)  # its raw call needs a GPU
    timed, absent = host.calls(CPU, with_peers=False)
    assert {host.OP, host.OP_OUT, host.FUNCTION, host.FUNCTION_OUT, host.RMS_NORM} <= set(timed)
    assert list(absent) == [host.RAW]
    for call in timed.values():
        call()


# --- the command line -----------------------------------------------------------------------------


def test_every_op_file_is_found():
    assert {"rmsnorm_fp4quant", "rmsnorm_fp4quant_with_norm", "fp4_quantize"} <= set(ops.names())
    assert cli.parse(["all"]).what == [*ops.names(), "host"]
    assert cli.parse(["host", "fp4_quantize", "host"]).what == ["host", "fp4_quantize"]
    assert cli.parse(["fp4_quantize", "--sizes", "full"]).sizes == "full"


@pytest.mark.parametrize("what", ["rmsnorm_fp4quant", "host"])
def test_without_a_gpu_one_clear_line_and_status_2(what, tmp_path):
    command = [sys.executable, "-m", "benchmarks", what, "--output", str(tmp_path / "results")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=300)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "needs a CUDA GPU" in done.stderr
    assert not (tmp_path / "results").exists()


def test_an_op_is_measured_and_reported(tmp_path, monkeypatch, capsys, fake_backend):
    monkeypatch.setattr(cli, "CudaGraphs", lambda: fake_backend([10.0, 8.0]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=2**20))
    benchmark = ops.load("fp4_quantize")
    monkeypatch.setattr(type(benchmark), "cases", lambda self, sizes: [Case({"M": m, "H": 2048}) for m in (256, 64)])
    options = cli.parse(["fp4_quantize", "--output", str(tmp_path), "--no-plot"])
    assert cli.run_op(benchmark, options, CPU, 4.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp4_quantize.json", "fp4_quantize.md"]
    read = json.loads((tmp_path / "fp4_quantize.json").read_text())
    assert [r["sizes"]["M"] for r in read["rows"]] == [64, 256] and read["environment"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert (tmp_path / "fp4_quantize.md").read_text() in printed
    assert "M=256 H=2048: ours 10.0, copy 8.00 µs; 0.800 of copy" in printed


def test_the_scale_shape_is_the_layouts():
    assert rows.scale_shape_128x4(1, 1536) == (128, 96)
    assert rows.scale_shape_128x4(129, 80) == (256, 8)
