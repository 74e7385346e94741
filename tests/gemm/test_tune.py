"""Tuning of GEMMs: with simulated backends, and on a GPU."""

import importlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from expected import assert_same, gated
from expected._fp4_gemm import decoded
from expected._fp8_fp4 import fp4_weight
from expected._fp8_gemm import Weight, fp8_weight, numbers
from samples import grouped_mm_fp8, grouped_mm_fp8_fp4, mm_fp8, mm_fp8_block, mm_fp8_fp4
from support import spec
from support.cases import arguments, compiled_op_cases, defined, expected_of, op_cases
from support.fake_device import FakeDevice
from support.gemm_problems import CPU, fp4_problem, fp8_problem, gated_problems, mx_problem, problem_id, problems
from support.tuner_model import empty_file, warnings_in

import torch_cute_ops
from torch_cute_ops import registry
from torch_cute_ops.cli.main import main
from torch_cute_ops.formats import NVFP4
from torch_cute_ops.gemm import error_bounds, select, tune
from torch_cute_ops.gemm.backend import Backend
from torch_cute_ops.gemm.backends.reference import Reference
from torch_cute_ops.kernels.common.fp8.layouts import ExpertLayout
from torch_cute_ops.runtime import timing, tuner
from torch_cute_ops.runtime.tuner import Candidate
from torch_cute_ops.runtime.tuning_file import TuningFile

file = pytest.fixture(autouse=True)(empty_file)

by_op = pytest.mark.parametrize("op", [case for case in op_cases() if case.values[0].has_backends])


class Sized(Backend):
    """Simulated backend with two tactics. If ``factor`` is not 1, the second tactic gives a wrong last element."""

    name = "sized"
    computes_prologue = True
    factor = 1.0
    runs: list = []  # noqa: RUF012

    def handles(self, problem):
        return True

    def reason_unsupported(self, problem, target):
        return None

    def tactics(self, problem, m, target):
        return (16,), (32,)

    def estimate(self, problem, m, tactic, target):
        return 1e-6 * tactic[0]

    def kernels(self, problem, tactic, arch):
        return ()

    def launcher(self, problem, tactic, target):
        reference = Reference().launcher(problem, tactic, target)

        def multiply(operands, out):
            self.runs.append(tactic)
            reference(operands, out)
            if tactic == (32,) and self.factor != 1:
                y = out if problem.gate is None else out[0]
                if problem.gate is None:
                    y[..., -1, -1] *= self.factor
                elif problem.quantised is None:
                    y[-1, -1] += y.abs().max()
                else:
                    y[-1, -1] ^= 0x44  # changes the code by four steps

        return multiply


class Timed(FakeDevice, timing.CudaGraphs):
    """Simulated device on which a call takes 5 µs with the first candidate and 3 µs with the second."""

    def __init__(self):
        super().__init__([5.0, 3.0])


@pytest.fixture
def made_up(monkeypatch):
    """Replace the backends by ``Sized`` and the reference, and treat the CPU as a GPU.

    The second tactic of ``Sized`` has a longer estimate, but a shorter measured time, than the first tactic.
    """
    backend = Sized()
    backend.runs = []
    monkeypatch.setattr(select, "BACKENDS", [backend, Reference()])
    monkeypatch.setattr(select, "target_of", lambda device: CPU)
    for op in registry.OPS.values():
        if op.has_backends:
            monkeypatch.setattr(op.path, "launchers", {})
    monkeypatch.setattr(timing, "CudaGraphs", Timed)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=20_000))
    return backend


def call_of(op, m=5, n=None, k=None, device="cpu", **kwargs):
    where, n, k = torch.device(device), n or properties_of(op)["n"], k or properties_of(op)["k"]
    if op.name in ("mm_fp8", "mm_fp8_block"):
        samples = mm_fp8 if op.name == "mm_fp8" else mm_fp8_block
        return samples.sample("", m, n, k, where, **kwargs)
    counts = [m // 2, 0, m - m // 2, 0]
    if op.name == "grouped_mm_fp8":
        return grouped_mm_fp8.contiguous("", counts, n, k, where, alignment=1, **kwargs)
    if op.name == "mm_fp8_fp4":
        return mm_fp8_fp4.sample("", m, n, k, NVFP4, "128x4", where, **kwargs)
    if op.name == "grouped_mm_fp8_fp4":
        return grouped_mm_fp8_fp4.contiguous("", NVFP4, "128x4", counts, n, k, where, alignment=1, **kwargs)
    if op.name.startswith("moe_fc1"):
        kwargs = {"alpha": None, **kwargs}
    samples = importlib.import_module(f"samples.{op.name}").SAMPLES
    return samples.sample("", m, n, k, NVFP4, "128x4", where, **kwargs)


def properties_of(op):
    """Return the static properties of the calls that ``call_of`` makes: 64 elements of K, or 64 columns, per expert."""
    if op.name.startswith("moe_fc1"):
        return {"n": 256, "k": 256, "experts": 4}
    experts = {"experts": 4} if op.name.startswith(("moe_fc2", "grouped")) else {}
    return {"n": 24, "k": 256, **experts}


def used(op, backend, sample):
    """Check the result of a call. Return the tactic with which ``backend`` ran, or None if another backend ran."""
    before = len(backend.runs)
    assert_right(op, sample, op.cuda(*sample.args, **sample.kwargs))
    return backend.runs[-1] if len(backend.runs) > before else None


def assert_right(op, sample, got):
    given, expected = arguments(op, sample), expected_of(op)
    got = got if isinstance(got, tuple) else (got,)
    expected.assert_results(defined(op, sample, got), expected.results(given), given)


@by_op
def test_calls_in_a_block_are_tuned(op, made_up, file):
    """Check that calls in and after an ``autotune`` block use the fastest tactic, but only in the bucket that was
    tuned.

    Calls before the block, and calls in other buckets, use the tactic with the shortest estimate.
    """
    sample = call_of(op)
    assert used(op, made_up, sample) == (16,)
    with torch_cute_ops.autotune():
        assert used(op, made_up, sample) == (32,)
        runs = len(made_up.runs)
        assert used(op, made_up, sample) == (32,)
        assert len(made_up.runs) == runs + 1
    for m, tactic in ((1, (16,)), (2, (32,)), (8, (32,)), (9, (16,))):
        assert used(op, made_up, call_of(op, m)) == tactic
    (record,) = json.loads(file.read_text())["choices"]
    assert record["bucket"] == 8 and record["device"] == "GPU of test" and record["seconds"] == pytest.approx(3e-6)

    def operand(format_, layout=None):
        flags = dict.fromkeys(("is_prepared", "is_interleaved", "scales_by_row"), False)
        return {"format": format_, "scale_layout": layout, **flags}

    static, scaled = record["static"], operand("nvfp4", "128x4")
    if op.name == "mm_fp8":
        assert static["a"] == static["b"] == operand("token") and not static["fast_accum"]
    elif "mm_fp8" in op.name:
        assert static["a"] == operand("block128", "column")
    else:
        assert static["a"] == (operand("bfloat16") if op.path.a == "16-bit" else scaled)
    if op.name != "mm_fp8":
        assert static["b"] == (scaled if "fp4" in op.name else operand("block128"))
    assert (static["n"], static["k"]) == (properties_of(op)["n"], 256)
    epilogue = {"out_dtype": "bfloat16", "alpha": None, "bias_dtype": None, "has_row_scale": False}
    assert static["epilogue"] == epilogue
    assert static["grouping"]["experts"] == properties_of(op).get("experts", 1)
    tuner.forget()
    assert used(op, made_up, sample) == (32,)


@by_op
def test_calls_that_name_a_backend_are_not_tuned(op, made_up, file):
    sample = call_of(op, backend="sized")
    with torch_cute_ops.autotune():
        assert used(op, made_up, sample) == (16,)
        empty = call_of(op, 0)
        op.cuda(*empty.args, **empty.kwargs)
    assert not file.exists()


@by_op
def test_calls_in_a_capture_are_not_tuned(op, made_up, monkeypatch):
    """Check that a captured call uses the tactic that was chosen before the capture."""
    sample = call_of(op)
    assert used(op, made_up, sample) == (16,)
    with torch_cute_ops.autotune():
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            assert used(op, made_up, sample) == (16,)
        assert used(op, made_up, sample) == (32,)


@by_op
def test_a_wrong_backend_does_not_win(op, made_up, caplog):
    """Check that a tactic with a single wrong element is not chosen, and that a warning reports it."""
    made_up.factor = 1.05
    sample = call_of(op)
    with torch_cute_ops.autotune():
        assert used(op, made_up, sample) == (16,)
    (warning,) = warnings_in(caplog)
    what, where = "1 of 192 sums are off", "first at (7, 23)"
    if op.name == "moe_fc1_fp4":
        what, where = "2 codes are off by more than 1", "the worst by"
    elif op.name == "moe_fc1_fp4_weight_only":
        what, where = "1 of 2048 sums are off", "first at (7, 255)"
    assert warning.startswith(f"cute::{op.name}: backend 'sized', tactic [32] is not used: {what}")
    assert where in warning


@by_op
def test_a_tuned_choice_that_is_not_possible_is_ignored(op, made_up, monkeypatch):
    """Check that a stored choice is ignored if its backend no longer exists, refuses the problem, or no longer offers
    the tactic."""
    sample = call_of(op)
    with torch_cute_ops.autotune():
        used(op, made_up, sample)
    monkeypatch.setattr(made_up, "tactics", lambda *args: ((16,), (64,)))
    tuner.forget()
    assert used(op, made_up, sample) == (16,)
    monkeypatch.setattr(made_up, "reason_unsupported", lambda *args: "of a test")
    tuner.forget()
    assert used(op, made_up, sample) is None
    select.BACKENDS.remove(made_up)
    tuner.forget()
    assert used(op, made_up, sample) is None


@by_op
def test_tuning_draws_no_random_numbers(op, made_up):
    sample = call_of(op)
    before = torch.get_rng_state()
    with torch_cute_ops.autotune():
        op.cuda(*sample.args, **sample.kwargs)
    assert torch.equal(torch.get_rng_state(), before)


@by_op
def test_warmup_tunes(op, made_up, monkeypatch, file, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    torch_cute_ops.warmup(op.name, tune=True, m=5, device="cpu", **properties_of(op))
    assert used(op, made_up, call_of(op)) == (32,)
    monkeypatch.setattr(registry, "cuda_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr("torch_cute_ops.ops._call.cuda_device", lambda device: torch.device("cpu"))
    properties = [word for name, value in properties_of(op).items() for word in (f"--{name}", str(value))]
    assert main(["tune", op.name, *properties, "--m", "9", "17", "33"]) == 0
    shown = capsys.readouterr()
    assert f"3 calls tuned, 0 failed; choices are kept in {file}" in shown.out and "3/3" in shown.err
    assert [key.bucket for key in TuningFile(file).read()] == [8, 16, 24, 40]
    assert main(["tune", op.name, *properties, "--bias-dtype", "int8"]) == 2
    assert 'bias_dtype = "int8": expected a dtype' in capsys.readouterr().err


def test_the_command_line_refuses(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments_, text in (
        (["tune"], "name an op and its properties, or a file"),
        (
            ["tune", "fp4_quantize", "--hidden", "64"],
            "the ops with several backends are fp4quant_mm_fp4, grouped_mm_fp8, grouped_mm_fp8_fp4, mm_fp4",
        ),
        (["tune", "mm_fp4", "--n", "64", "--k", "64"], "tuning needs a CUDA device"),
    ):
        assert main(arguments_) == 2
        assert text in capsys.readouterr().err


def test_without_a_gpu_a_block_does_nothing(file):
    """Check that an ``autotune`` block on a CPU runs the reference and writes no file."""
    op = registry.OPS["mm_fp4"]
    sample = call_of(op)
    with torch_cute_ops.autotune():
        got = op.function(*sample.args, **sample.kwargs)
    assert_right(op, sample, got)
    assert not file.exists()
    assert select.key_of(fp4_problem(), 8, select.target_of(torch.device("cpu"))) is None


@pytest.mark.parametrize("problem", [*problems()], ids=problem_id)
def test_checks(problem, made_up, monkeypatch):
    """Check the error bounds with which tuning checks results: fp32 sums in any order pass; missing terms and unwritten
    results fail."""
    monkeypatch.setattr(error_bounds, "MAX_DECODED", problem.k * 7)
    bench = tune.Bench(problem, 24, CPU)
    assert bench.check(Candidate("sized", (16,))) is None and bench.check(Candidate("reference", ())) is None
    want, allowed = bench._expected
    assert want.isfinite().all() and want.abs().max() > 1
    (operands, (out,)), roundings = bench._exact, 0 if problem.a.is_fp8 else problem.k
    if problem.prologue_quant is not None:
        scale = operands.a_scale
        assert scale is None if problem.prologue_quant == "plain" else scale.tolist() == [3.0]
    if problem.grouping.over == "k":
        # Each token uses 8 of 12 experts, so a term is rounded in up to 64 sums, one product and 8 sums over experts.
        alpha = operands.alpha
        assert torch.equal((alpha > 0).sum(1), torch.full((24,), 8))
        assert len({tuple(row) for row in (alpha > 0).tolist()}) > 12
        torch.testing.assert_close(alpha.sum(1), torch.ones(24))
        roundings = 64 + 1 + 8
    rows = out.numel() // problem.n
    experts = problem.experts if problem.grouping.over == "rows" else 1
    for expert in range(experts):
        part = slice(expert * rows // experts, (expert + 1) * rows // experts)
        a, b, factor, bias = by_hand(problem, operands, rows, expert, part)
        exact = (a @ b.t()) * factor + bias
        torch.testing.assert_close(want[part].double(), exact, rtol=1e-6, atol=1e-6)
        limit = (a.abs() @ b.abs().t()) * factor.abs() * roundings * 2**-24
        assert (allowed[part] >= 0.999 * limit).all()
        size = exact.abs() + bias.abs() + ((a @ b.t()) * factor).abs()
        most = 1.01 * limit + size * (1.01 * torch.finfo(problem.out_dtype).eps + 2**-22) + 1e-4
        if problem.prologue_gate:  # make activations, or amaxes, lie nearly halfway between two representable numbers
            low, high = (made_by_hand(problem, operands, error)[part] for error in (-(2**-17), 2**-17))
            assert (low != high).double().mean() < 0.1
            off = torch.maximum((low - a).abs(), (high - a).abs())
            most += 1.01 * (off @ b.abs().t()) * factor.abs()
        assert (allowed[part] <= most).all()
        got = exact.float().to(problem.out_dtype)
        assert error_bounds.difference(got, want[part], allowed[part]) is None
        lacking = ((a[:, 1:] @ b[:, 1:].t()) * factor + bias).to(problem.out_dtype)
        assert "sums are off" in error_bounds.difference(lacking, want[part], allowed[part])
        for value in (torch.nan, torch.inf):
            one = got.clone()
            one[3, 5] = value
            shown = error_bounds.difference(one, want[part], allowed[part])
            assert f"1 of {one.numel()} sums are off, by up to inf times" in shown


@pytest.mark.parametrize(
    "rows",
    [ExpertLayout(has_offsets=True), ExpertLayout(has_offsets=True, has_counts=True), ExpertLayout(has_counts=True)],
    ids=["packed", "counted", "masked"],
)
def test_checks_of_experts_in_mxfp8(rows):
    """Check that operands of experts in MXFP8 can be made: the reference passes, and results fail if they are zero."""
    bench = tune.Bench(mx_problem(64, 128, rows=rows, experts=2), 8, CPU)
    assert bench.check(Candidate("reference", ())) is None
    assert bench._exact[0].b_scale.shape == (2, 64, 4)
    want, allowed = bench._expected
    assert "sums are off" in error_bounds.difference(torch.zeros_like(want), want, allowed)


@pytest.mark.parametrize("problem", [*gated_problems()], ids=problem_id)
def test_checks_of_gates(problem, made_up):
    """Check the error bounds with which tuning checks the results of GEMMs with a gate.

    The reference's results pass. Results fail if a term of the sums is missing, if they are unwritten, or if one
    element or one scale is wrong.
    """
    bench = tune.GatedBench(problem, 24, CPU)
    assert bench.check(Candidate("reference", ())) is None
    operands, results = bench._random
    assert torch.equal((operands.routing != 0).sum(1), torch.full((24,), 8))
    right = [None if result is None else result.clone() for result in results]
    written = operands.routing.nonzero()[7].tolist()

    def checked(change):
        def launch(given, out):
            for result, value in zip(out, right, strict=True):
                if result is not None:
                    result.copy_(value)
            change(given, *out)

        bench._launchers[Candidate("changed", ())] = launch
        return bench.check(Candidate("changed", ()))

    def one_is_wrong(_, y, scale):
        row, expert = written
        place = (row, expert * y.shape[1] // 12)
        if scale is None:
            y[place] += 0.05 * y.abs().max()
        else:
            y[place] ^= 0x04

    def lacking(given, *out):
        a = given.a.clone()
        a[:, :1] = 0
        Reference().launcher(problem, (), CPU)(given._replace(a=a), out)

    assert checked(lambda *_: None) is None
    assert checked(one_is_wrong) is not None
    assert checked(lambda _, y, scale: y.view(torch.uint8).fill_(0xFF)) is not None
    assert checked(lacking) is not None
    if problem.quantised is not None and problem.quantised.scale_layout.is_linear:
        place = written[0], written[1] * results[1].shape[1] // 12
        assert "1 scales are off" in checked(lambda _, y, scale: scale.view(torch.uint8)[place].sub_(2))
    elif problem.quantised is not None and problem.quantised.scale_layout.name == "128x4":
        # The last bytes of the scales are padding, since the result has only 24 rows.
        assert "1 scales are off" in checked(lambda _, y, scale: scale.view(torch.uint8)[-1, -1, -1, -1, -1].fill_(9))


def made_by_hand(problem, operands, error=0.0):
    """Return the GEMM's activations in float64. Gated values are multiplied by ``1 + error`` before they are
    rounded."""
    value, block = operands.a.float().numpy(), problem.b.format.block_size
    if problem.prologue_gate:
        value = gated(value, {"gate": problem.prologue_gate}) * np.float32(1 + error)
    if problem.prologue_quant is not None:
        blocks = spec.quantise(value, block, 3.0 if problem.prologue_quant == "scaled" else None)
        return torch.from_numpy(spec.dequantise(blocks.codes, blocks.scales)).double().reshape(value.shape)
    a = torch.from_numpy(value).to(operands.a.dtype)
    return (a.bfloat16() if block == 32 else a).double()


def by_hand(problem, operands, rows, expert, part):
    """Return the float64 operands of one expert's rows, or of all rows: ``a``, ``b`` (N, K), the factor and the
    bias."""
    a, b, a_scale, b_scale, alpha, bias, *_ = operands
    if problem.a.is_fp8:
        grouped = problem.grouping.over == "rows"
        a_scale = a_scale.reshape(rows, -1).double()
        if not problem.a.has_fp8_blocks:
            a_scale = a_scale.expand(rows, -(-problem.k // 128))
        a = torch.from_numpy(numbers(a.reshape(rows, -1))) * a_scale.repeat_interleave(128, 1)[:, : problem.k]
        if problem.b.is_fp4:
            codes = b.mT.flatten(0, 1) if grouped else b.mT
            weight = fp4_weight(codes, b_scale, problem.b.scale_layout.name, problem.b.format.block_size)
            own = slice(expert * problem.n, (expert + 1) * problem.n)
        elif not problem.b.has_fp8_blocks:
            columns = (b_scale[expert].reshape(-1) if grouped else b_scale).double().numpy()[:, None]
            factors = columns.repeat(problem.n // len(columns), 0).repeat(-(-problem.k // 128), 1)
            weight, own = Weight(numbers(b[expert].mT if grouped else b.mT), factors), slice(None)
        else:
            weight = fp8_weight(*((b[expert].mT, b_scale[expert]) if grouped else (b.mT, b_scale)))
            own = slice(None)
        factors = torch.from_numpy(weight.factors[own]).repeat_interleave(128, 1)[:, : problem.k]
        b = torch.from_numpy(weight.numbers[own]) * factors
    else:
        block = problem.b.format.block_size
        b = torch.from_numpy(decoded(b.t(), b_scale, problem.b.scale_layout.name, block))
        if problem.a.is_fp4:
            a = torch.from_numpy(decoded(a, a_scale, problem.a.scale_layout.name, block))
        else:
            a = made_by_hand(problem, operands)
    if problem.grouping.over == "k":
        added = torch.zeros(()) if bias is None else alpha.double() @ bias.double()
        return a * alpha.double().repeat_interleave(problem.expert_k, 1), b, torch.ones(()), added
    of_expert = {"expert": lambda value: value[expert], "expert_column": lambda value: value[expert]}
    pick = of_expert.get(problem.epilogue.alpha, lambda value: value)
    factor = torch.ones(()) if alpha is None else pick(alpha).double()
    added = torch.zeros(()) if bias is None else (bias[expert] if bias.dim() == 2 else bias).double()
    return a[part], b, factor, added


def test_packed_rows_belong_to_random_experts():
    """Check that timed calls draw the experts' row counts at random, and that checked calls give each expert 10 rows.

    For problems with counts, timed calls give all experts equal numbers of rows.
    """
    for layout, is_random in ((ExpertLayout(True, False), True), (ExpertLayout(True, True), False)):
        bench = tune.Bench(fp8_problem(64, 128, layout, 8), 80, CPU)
        counts = bench._random[0].offsets.diff()
        assert counts.sum() == 80 and counts.min() >= 0
        assert (len(counts.unique()) > 1) == is_random
        assert bench._exact[0].offsets.tolist() == list(range(0, 81, 10))


def test_copies_exceed_the_cache(made_up, monkeypatch):
    """Check that the copies of the operands are three times as large as the L2 cache, and that every candidate uses all
    copies."""
    problem = next(problems())
    bench = tune.Bench(problem, 8, CPU)
    operands, (out,) = bench._random
    size = sum(tensor.nbytes for tensor in (*operands, out) if tensor is not None)
    seen = []
    launcher = lambda problem, tactic, target: lambda operands, out: seen.append(operands.b.data_ptr())  # noqa: E731
    monkeypatch.setattr(made_up, "launcher", launcher)
    bench.time([Candidate("sized", (16,)), Candidate("sized", (32,))])
    assert len(set(seen)) * size >= 3 * 20_000 > (len(set(seen)) - 1) * size
    assert len(seen) == 2 * len(set(seen))


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("op", [case for case in compiled_op_cases() if case.values[0].has_backends])
def test_on_a_gpu(op, file):
    """Check that real candidates are timed, that the choice is stored, and that a call with the stored choice can be
    captured."""
    sample = call_of(op, 16, 512, 1024, "cuda")
    given = arguments(op, sample)
    with torch_cute_ops.autotune():
        got = op.function(**given)
    assert_right(op, sample, got)
    (record,) = json.loads(file.read_text())["choices"]
    assert record["backend"] != "reference" and record["device"] == torch.cuda.get_device_name()
    assert record["seconds"] is None or 1e-6 < record["seconds"] < 1e-3
    tuner.forget()
    problem = op.path.problem(op.bind(*sample.args, **sample.kwargs))
    key = select.key_of(problem, 16, select.target_of(torch.device("cuda")))
    assert tuner.lookup(key) == (record["backend"], tuple(record["tactic"]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op.function(**given)
    graph.replay()
    assert_same(*(defined(op, sample, each if isinstance(each, tuple) else (each,)) for each in (captured, got)))
