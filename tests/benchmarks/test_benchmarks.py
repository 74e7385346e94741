"""Test the benchmarks without a GPU: bytes moved, sizes, checks of results, and a whole run with a simulated clock."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.interpreters import forked_module

from benchmarks import __main__ as cli
from benchmarks import fp8_rows, host, ops, peers, performance, report, runner
from benchmarks.case import Case, mismatch
from benchmarks.fp8_rows import Fp8Rows
from benchmarks.measure import Ceilings, Settings
from benchmarks.rows import RowBenchmark
from torch_cute_ops.registry import OPS

CPU = torch.device("cpu")
ROW_OPS = [name for name in ops.names() if isinstance(ops.load(name), RowBenchmark)]
FP8 = [name for name in ROW_OPS if isinstance(ops.load(name), Fp8Rows)]
EVERY_CHOICE = [(name, None) for name in ROW_OPS] + [(n, choices) for n in FP8 for choices in fp8_rows.OTHERS]


@pytest.fixture(autouse=True)
def no_quack(monkeypatch):
    monkeypatch.setattr(peers, "quack_rmsnorm", lambda: "not on a CPU")


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "choices"), EVERY_CHOICE)
def test_the_formula_is_the_bytes_of_the_tensors(op, choices):
    benchmark = ops.load(op)
    case = benchmark.case(256, 2048, choices=choices)  # without padding of 128x4 scales
    tensors = benchmark.make_set(case, CPU)
    written_too = tensors["residual"].nbytes if "residual" in tensors else 0
    assert benchmark.bytes_moved(case) == sum(t.nbytes for t in tensors.values()) + written_too


def test_the_formula_does_not_count_padding():
    assert ops.load("rmsnorm_fp4quant").bytes_moved(Case({"M": 1, "H": 1536})) == 3072 + 3072 + 768 + 96
    assert ops.load("fp4_quantize").bytes_moved(Case({"M": 3, "H": 32})) == 3 * (64 + 16 + 2)
    assert ops.load("rmsnorm_fp4quant_with_norm").bytes_moved(Case({"M": 1, "H": 16})) == 32 + 32 + 8 + 1 + 32


BYTES = {
    "add_rmsnorm_fp4quant": 9363 * (7168 * 6 + 3584 + 448) + 14336,
    "add_rmsnorm_fp4quant_with_norm": 9363 * (7168 * 8 + 3584 + 448) + 14336,
    "add_rmsnorm_fp4quant_both_layouts": 9363 * (7168 * 6 + 3584 + 448 + 448) + 14336,
    "silu_mul_fp4quant": 9363 * (7168 * 4 + 3584 + 448),
    "fp4_quantize_per_token": 9363 * (7168 * 2 + 3584 + 448 + 4),
    "rmsnorm_fp4quant_per_token": 9363 * (7168 * 2 + 3584 + 448 + 4) + 14336,
    "add_rmsnorm_fp4quant_per_token": 9363 * (7168 * 6 + 3584 + 448 + 4) + 14336,
    "silu_mul_fp4quant_per_token": 9363 * (7168 * 4 + 3584 + 448 + 4),
    "rmsnorm_fp8quant": 9363 * (7168 * 3 + 4) + 14336,
    "add_rmsnorm_fp8quant": 9363 * (7168 * 7 + 4) + 14336,
    "silu_mul_fp8quant": 9363 * (7168 * 5 + 4),
    "add_rmsnorm_fp4quant_with_norm_both_layouts": 9363 * (7168 * 8 + 3584 + 448 + 448) + 14336,
    "rmsnorm": 9363 * 7168 * 4 + 14336,
    "add_rmsnorm": 9363 * 7168 * 8 + 14336,
    "silu_mul": 9363 * 7168 * 6,
    "fp8_quantize": 9363 * (7168 * 3 + 4),
    "fp4_dequantize": 9363 * (7168 * 2 + 3584 + 448),
}


@pytest.mark.parametrize("op", BYTES)
def test_bytes_by_hand(op):
    benchmark = ops.load(op)
    assert benchmark.bytes_moved(benchmark.case(9363, 7168)) == BYTES[op]


def test_bytes_of_fp8_scales_by_hand():
    benchmark = ops.load("rmsnorm_fp8quant")
    moved = [benchmark.bytes_moved(benchmark.case(10, 256, choices=choices)) for choices in fp8_rows.OTHERS]
    assert moved == [512 + 10 * 256 * 3 + 10 * 2 * 4] * 2 + [512 + 10 * 256 * 3 + 8]


# --- sizes -----------------------------------------------------------------------------------------


# --- correctness checks ---------------------------------------------------------------------------


def test_mismatch_counts_codes_scales_and_ulps():
    packed = torch.tensor([0x12, 0x34], dtype=torch.uint8)
    assert mismatch([packed], [torch.tensor([0x12, 0x35], dtype=torch.uint8)]) == 0.25
    scales = torch.tensor([1.0, 2.0, 0.0, 4.0]).to(torch.float8_e4m3fn)
    assert mismatch([packed, scales], [packed, torch.tensor([1.0, 2, 3, 4]).to(torch.float8_e4m3fn)]) == 0.25
    norm = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert mismatch([norm], [norm * (1 + 2**-7)]) == 0.0  # a difference of one ulp is within the tolerance
    assert mismatch([norm], [norm * 1.1]) == 1.0
    assert mismatch([torch.full_like(norm, float("nan"))], [norm]) == 1.0
    fp8_scales = torch.tensor([1.0, 0.0])
    assert mismatch([fp8_scales * (1 + 2**-20)], [fp8_scales]) == 0.0
    assert mismatch([fp8_scales * (1 + 2**-16)], [fp8_scales]) == 0.5
    with pytest.raises(ValueError, match="expected"):
        mismatch([packed], [packed[:1]])


def assert_agrees(benchmark, case):
    """Check that our op and the composition of torch ops give equal outputs on fresh tensors, and that all tensors
    except the outputs stay unchanged."""
    sets = [benchmark.make_set(case, CPU)]
    made = {name: tensor.clone() for name, tensor in sets[0].items()}
    expected = benchmark.expected(case, sets[0])
    assert all(equal_bytes(tensor, made[name]) for name, tensor in sets[0].items())
    outputs = benchmark.outputs(sets[0])
    assert all(mismatch([output], [value]) > 0.5 for output, value in zip(outputs, expected, strict=False))
    got = benchmark.ours(case, sets).call(0)
    assert len(got) == len(expected) == len(outputs) + benchmark.adds
    for a, b in zip(got, expected, strict=True):
        assert mismatch([a], [b]) <= may_differ(benchmark, a)
    written = {tensor.data_ptr() for tensor in got}
    assert all(t.data_ptr() in written or equal_bytes(t, made[name]) for name, t in sets[0].items())
    if benchmark.adds:
        assert torch.equal(sets[0]["residual"], (made["residual"].float() + made["input"].float()).bfloat16())


def may_differ(benchmark, output):
    """Return the fraction of an output's elements that may differ: the benchmark's tolerance, but at least one element.

    The tolerance is a fraction, which would allow no difference in a small output. If a row is summed in another order,
    about 1 in 500,000 elements rounds differently.
    """
    return max(benchmark.tolerance, 1 / output.numel()) if benchmark.tolerance else 0.0


def equal_bytes(a, b):
    # Clone to contiguous strides: a tensor with unusual strides in a dimension of size 1 cannot be viewed as bytes.
    return torch.equal(*(each.clone(memory_format=torch.contiguous_format).view(torch.uint8) for each in (a, b)))


@pytest.mark.parametrize("op", ROW_OPS)
@pytest.mark.parametrize("sizes", [(1, 1536), (130, 96)])
def test_the_op_agrees_with_the_composition(op, sizes):
    rows, width = sizes
    width += -width % (64 if op == "fp8_quantize_block128x128" else 1)
    assert_agrees(ops.load(op), ops.load(op).case(rows, width))


@pytest.mark.parametrize("op", FP8)
@pytest.mark.parametrize("choices", fp8_rows.OTHERS, ids=lambda choices: " ".join(choices.values()))
def test_the_op_agrees_with_the_composition_in_every_granularity(op, choices):
    for m, width in ((1, 256), (130, 384)):
        assert_agrees(ops.load(op), ops.load(op).case(m, width, choices=choices))


# --- a whole run ----------------------------------------------------------------------------------


def measured(fake_backend):
    return runner.run(
        ops.load("rmsnorm_fp4quant"),
        [Case({"M": 256, "H": 2048}), Case({"M": 1, "H": 7168})],
        device=CPU,
        backend=fake_backend([10.0, 8.0]),  # costs in µs of our op and of the copy
        settings=Settings(max_sets=3),
        l2_bytes=2**20,
        ceilings=Ceilings(1.0),
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
    # Simulate a kernel that writes nothing, so that its outputs keep their poison.
    monkeypatch.setattr(type(benchmark), "run", lambda self, case, tensors: None)
    arguments = {"device": CPU, "backend": fake_backend([1.0]), "settings": Settings(max_sets=2), "l2_bytes": 1}
    row = runner.run_case(benchmark, Case({"M": 4, "H": 64}), ceilings=Ceilings(1.0), with_peers=False, **arguments)
    assert row["correct"] is False
    assert "WRONG" in report.results_table([row])


def test_the_check_gives_every_variant_the_same_inputs():
    benchmark = ops.load("add_rmsnorm_fp4quant")
    case = benchmark.case(4, 64)
    sets = [benchmark.make_set(case, CPU)]
    before = sets[0]["residual"].clone()
    variants = {name: benchmark.ours(case, sets) for name in ("ours", "again")}
    assert runner.check(benchmark, case, sets, variants) == {"ours": 0.0, "again": 0.0}
    assert torch.equal(sets[0]["residual"], before)


def test_a_residual_that_is_not_updated_is_seen(monkeypatch):
    benchmark = ops.load("add_rmsnorm_fp8quant")
    case = benchmark.case(4, 64)
    sets = [benchmark.make_set(case, CPU)]

    def run(self, case, tensors):
        residual = tensors["residual"].clone()
        type(benchmark).__mro__[1].run(self, case, tensors)
        tensors["residual"].copy_(residual)

    monkeypatch.setattr(type(benchmark), "run", run)
    assert runner.check(benchmark, case, sets, {"ours": benchmark.ours(case, sets)})["ours"] > 0.5


def test_host_calls_run():
    timed, absent = host.calls(CPU, with_peers=False)
    expected = {host.OP, host.OP_OUT, host.FUNCTION, host.FUNCTION_OUT, host.RMS_NORM}
    assert expected | {host.ADD_OP, host.ADD_FUNCTION_OUT, host.MM} <= set(timed)
    gemms = ("mm_fp4", "mm_fp4_weight_only", "mm_fp8", "mm_fp8_block", "grouped_mm_fp8", "moe_fc1_fp4")
    assert {f"{name} {way}" for name in gemms for way in ("op, functional", "function, out=")} <= set(timed)
    assert list(absent) == [host.RAW]
    for call in timed.values():
        call()


# --- the command line -----------------------------------------------------------------------------


def test_every_op_has_a_benchmark():
    # `python -m benchmarks all_reduce` measures the ops that sum over ranks, which need several GPUs.
    assert ops.names() == [name for name in OPS if not name.startswith("all_reduce_")]
    assert cli.parse(["all"]).what == [*ops.names(), "host"]
    assert cli.parse(["host", "fp4_quantize", "host"]).what == ["host", "fp4_quantize"]
    assert cli.parse(["fp4_quantize", "--sizes", "full"]).sizes == "full"


WRITES_PADDING = {"moe_permute_fp8quant", "moe_swiglu_fp8quant"}
"""Ops whose reference writes rows that belong to no token, which the kernel does not write: see test_moe_rows.py."""
SMALL = {"M": 9, "H": 256, "I": 256, "N": 64, "K": 1024, "E": 16, "D": 128}
BLOCK_OF_SMALL = 32 / (9 * 256)
"""Fraction of the codes that belong to one block. If a row is summed in another order, a block's scale may round
differently, and then all its codes."""


@pytest.mark.parametrize("op", ops.names())
def test_every_op_from_its_cases_to_reports(op, tmp_path, monkeypatch, capsys, fake_backend):
    """Measure an op for each combination of its choices, write the reports, and read the reports with the other
    commands."""
    benchmark = ops.load(op)
    small = [replace(case, sizes={name: SMALL[name] for name in case.sizes}) for case in benchmark.cases("full")]
    small = list({str(case): replace(case, inductor="") for case in small}.values())
    monkeypatch.setattr(type(benchmark), "cases", lambda self, sizes: small)
    if benchmark.tolerance:
        monkeypatch.setattr(type(benchmark), "tolerance", BLOCK_OF_SMALL)
    monkeypatch.setattr(type(benchmark), "ways", ())
    monkeypatch.setattr(cli, "CudaGraphs", lambda: fake_backend([10.0, 8.0]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1))
    options = cli.parse([op, "--output", str(tmp_path), "--no-plot", "--no-peers"])
    is_right = cli.run_op(benchmark, options, CPU, Ceilings(4.0, 4.5, 600.0))
    assert is_right is (op not in WRITES_PADDING), capsys.readouterr().err
    read = json.loads((tmp_path / f"{op}.json").read_text())
    assert [report.case_name(row) for row in read["rows"]] == [str(case) for case in small]
    assert all(row["variants"]["ours"]["us"] == 10.0 for row in read["rows"]) and not read["failed"]
    assert [mark["name"] for mark in read["marks"]] == [mark.name for mark in benchmark.marks([])]
    (tmp_path / f"{op}.json").write_text(json.dumps({**read, "environment": {**read["environment"], "gpu": "a GPU"}}))
    assert cli.main(["compare", str(tmp_path), str(tmp_path)]) == (0 if is_right else 1)
    assert f"{len(small)} cases, geometric mean 1.000" in capsys.readouterr().out
    section = performance.document(tmp_path).split(f"\n## {op}\n")[1]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    assert len(rows) == (2 + len(read["marks"]) if read["marks"] else 0)


@pytest.mark.parametrize("what", ["rmsnorm_fp4quant", "host"])
def test_without_a_gpu_one_clear_line_and_status_2(what, tmp_path):
    done = forked_module("benchmarks", what, "--output", str(tmp_path / "results"), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "needs a CUDA GPU" in done.stderr
    assert not (tmp_path / "results").exists()


def test_an_op_is_measured_and_reported(tmp_path, monkeypatch, capsys, fake_backend):
    monkeypatch.setattr(cli, "CudaGraphs", lambda: fake_backend([10.0, 8.0]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=2**20))
    benchmark = ops.load("fp4_quantize")
    monkeypatch.setattr(type(benchmark), "cases", lambda self, sizes: [Case({"M": m, "H": 2048}) for m in (256, 64)])
    options = cli.parse(["fp4_quantize", "--output", str(tmp_path), "--no-plot"])
    assert cli.run_op(benchmark, options, CPU, Ceilings(4.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp4_quantize.json", "fp4_quantize.md"]
    read = json.loads((tmp_path / "fp4_quantize.json").read_text())
    assert [r["sizes"]["M"] for r in read["rows"]] == [64, 256] and read["environment"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert (tmp_path / "fp4_quantize.md").read_text() in printed
    assert "M=256 H=2048: ours 10.0, copy 8.00 µs; 0.800 of copy" in printed
