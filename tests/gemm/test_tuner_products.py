"""Tuned products: on made-up backends, and on a GPU."""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch
from support.cases import arguments, compiled_op_cases, expected_of, is_for_experts, op_cases
from support.gemm_problems import CPU, products
from support.tuner_model import empty_file, warnings_in

import torch_cute_ops
from torch_cute_ops import mm_backends, registry
from torch_cute_ops.cli.main import main
from torch_cute_ops.formats import NVFP4, SCALE_LAYOUTS
from torch_cute_ops.mm_backends import _tune
from torch_cute_ops.mm_backends._base import Backend, Product
from torch_cute_ops.mm_backends.reference import Reference
from torch_cute_ops.runtime import timing, tuner
from torch_cute_ops.runtime.tuner import Candidate
from torch_cute_ops.runtime.tuning_file import TuningFile

file = pytest.fixture(autouse=True)(empty_file)

by_op = pytest.mark.parametrize("op", [case for case in op_cases() if case.values[0].backends is not None])


class Sized(Backend):
    """Right, with two tactics; the factor of its second is wrong where ``factor`` is not 1."""

    name = "sized"
    factor = 1.0
    runs: list = []  # noqa: RUF012

    def reason_unsupported(self, product, target):
        return None

    def tactics(self, product, m, target):
        return (16,), (32,)

    def estimate(self, product, m, tactic, target):
        return 1e-6 * tactic[0]

    def kernels(self, product, tactic, arch):
        return ()

    def launcher(self, product, tactic, target):
        reference = Reference().launcher(product, tactic, target)

        def multiply(*operands):
            self.runs.append(tactic)
            reference(*operands)
            if tactic == (32,):
                operands[-1][-1, -1] *= self.factor

        return multiply


class Timed(timing.CudaGraphs):
    """A device on which the variants that are captured last so long, one after the other (µs a call)."""

    costs = (5.0, 3.0)

    def __init__(self):
        self.now, self.captured = 0.0, 0

    def capture(self, call, n_sets, calls):
        cost = self.costs[self.captured % len(self.costs)]
        self.captured += 1
        for i in range(n_sets):
            call(i)

        def replay():
            self.now += cost * calls

        return replay

    def mark(self):
        return self.now

    def elapsed_us(self, start, end):
        return end - start

    def synchronize(self):
        pass


@pytest.fixture
def made_up(monkeypatch):
    """Two backends on the CPU, which is taken for a GPU; the second tactic of one is faster than was thought."""
    backend = Sized()
    backend.runs = []
    monkeypatch.setattr(mm_backends, "BACKENDS", {"sized": backend, "reference": Reference()})
    monkeypatch.setattr(_tune, "BACKENDS", mm_backends.BACKENDS)
    monkeypatch.setattr(mm_backends, "target_of", lambda device: CPU)
    monkeypatch.setattr(timing, "CudaGraphs", Timed)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=20_000))
    return backend


def call_of(op, m=5, n=24, k=None, device="cpu", **kwargs):
    samples = importlib.import_module(f"torch_cute_ops.testing.samples.{op.name}").PRODUCT
    return samples.sample("", m, n, k or facts_of(op)["k"], NVFP4, "128x4", torch.device(device), **kwargs)


def facts_of(op):
    """Of the calls of ``call_of``: experts have 64 elements each."""
    return {"n": 24, "k": 256, "experts": 4} if is_for_experts(op) else {"n": 24, "k": 64}


def used(op, backend, sample):
    """The tactic that a call runs, and that its result is right."""
    before = len(backend.runs)
    assert_right(op, sample, op.cuda(*sample.args, **sample.kwargs))
    return backend.runs[-1] if len(backend.runs) > before else None


def assert_right(op, sample, got):
    given, expected = arguments(op, sample), expected_of(op)
    expected.assert_results((got,), expected.results(given), given)


@by_op
def test_calls_in_a_block_are_tuned(op, made_up, file):
    """A call before has the least estimate, those in the block and after it what was faster; for the bucket alone."""
    sample = call_of(op)
    assert used(op, made_up, sample) == (16,)
    with torch_cute_ops.autotune():
        assert used(op, made_up, sample) == (32,)
        runs = len(made_up.runs)
        assert used(op, made_up, sample) == (32,)
        assert len(made_up.runs) == runs + 1
    for m, tactic in ((1, (32,)), (8, (32,)), (9, (16,))):
        assert used(op, made_up, call_of(op, m)) == tactic
    (record,) = json.loads(file.read_text())["choices"]
    assert record["bucket"] == 8 and record["device"] == "GPU of test" and record["seconds"] == pytest.approx(3e-6)
    in_fp4 = not op.name.endswith("_weight_only")
    a = {"a_dtype": "uint8", "a_layout": "128x4"} if in_fp4 else {"a_dtype": "bfloat16", "a_layout": None}
    rest = {"has_alpha": is_for_experts(op), "out_dtype": "bfloat16", "experts": None, **facts_of(op)}
    assert record["static"] == {"fmt": "nvfp4", "b_layout": "128x4", **a, **rest}
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
    """They take what was chosen before."""
    sample = call_of(op)
    assert used(op, made_up, sample) == (16,)
    with torch_cute_ops.autotune():
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            assert used(op, made_up, sample) == (16,)
        assert used(op, made_up, sample) == (32,)


@by_op
def test_a_wrong_backend_does_not_win(op, made_up, caplog):
    """One wrong sum of all is enough."""
    made_up.factor = 1.05
    sample = call_of(op)
    with torch_cute_ops.autotune():
        assert used(op, made_up, sample) == (16,)
    (warning,) = warnings_in(caplog)
    assert warning.startswith(f"cute::{op.name}: backend 'sized', tactic [32] is not used: 1 of 192 sums are off")
    assert "first at (7, 23)" in warning


@by_op
def test_a_tuned_choice_that_is_not_possible_is_ignored(op, made_up, monkeypatch):
    """The backend is gone, refuses, or has other tactics."""
    sample = call_of(op)
    with torch_cute_ops.autotune():
        used(op, made_up, sample)
    monkeypatch.setattr(made_up, "tactics", lambda *args: ((16,), (64,)))
    tuner.forget()
    assert used(op, made_up, sample) == (16,)
    monkeypatch.setattr(made_up, "reason_unsupported", lambda *args: "of a test")
    tuner.forget()
    assert used(op, made_up, sample) is None
    mm_backends.BACKENDS.pop("sized")
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
    torch_cute_ops.warmup(op.name, tune=True, m=5, device="cpu", **facts_of(op))
    assert used(op, made_up, call_of(op)) == (32,)
    monkeypatch.setattr(registry, "cuda_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr("torch_cute_ops.ops._fp4_product.cuda_device", lambda device: torch.device("cpu"))
    facts = [word for name, value in facts_of(op).items() for word in (f"--{name}", str(value))]
    assert main(["tune", op.name, *facts, "--m", "9", "17", "33"]) == 0
    shown = capsys.readouterr()
    assert f"3 calls are done, 0 failed; choices are kept in {file}" in shown.out and "3/3" in shown.err
    assert [key.bucket for key in TuningFile(file).read()] == [8, 16, 24, 40]
    assert main(["tune", op.name, *facts, "--scale-layout", "tiled"]) == 1
    assert "1 failed" in capsys.readouterr().out


def test_the_command_line_refuses(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments_, text in (
        (["tune"], "name an op and its facts, or a file"),
        (["tune", "fp4_quantize", "--hidden", "64"], "the ops with backends are mm_fp4, mm_fp4_weight_only"),
        (["tune", "mm_fp4", "--n", "64", "--k", "64"], "tuning needs a CUDA device"),
    ):
        assert main(arguments_) == 2
        assert text in capsys.readouterr().err


def test_without_a_gpu_a_block_does_nothing(file):
    """On a CPU the ops run their reference."""
    op = registry.OPS["mm_fp4"]
    sample = call_of(op)
    with torch_cute_ops.autotune():
        got = op.function(*sample.args, **sample.kwargs)
    assert_right(op, sample, got)
    assert not file.exists()
    product = Product(64, 64, NVFP4, torch.uint8, SCALE_LAYOUTS["8x4"], SCALE_LAYOUTS["128x4"], False, torch.bfloat16)
    assert mm_backends.key_of(product, 8, mm_backends.target_of(torch.device("cpu"))) is None


@pytest.mark.parametrize("product", [*products()], ids=lambda product: "-".join(map(str, product.described().values())))
def test_checks(product, made_up, monkeypatch):
    """Sums in fp32 in any order pass; one that lacks a term, is not written, or is rounded twice to 8 bits does not."""
    monkeypatch.setattr(_tune, "CHUNK", product.k * 7)
    bench = _tune.Bench(product, 24, CPU)
    assert bench.check(Candidate("sized", (16,))) is None and bench.check(Candidate("reference", ())) is None
    want, allowed = bench._expected
    assert want.isfinite().all() and want.abs().max() > 1
    operands = bench._operands
    layouts = product.a_layout, product.b_layout
    a, b = (
        torch.from_numpy(decoded_by_hand(codes, scale, layout, product)) if layout else codes.double()
        for codes, scale, layout in zip((operands.a, operands.b.t()), operands[1:4:2], layouts, strict=True)
    )
    if product.experts is None:
        factor, roundings = torch.full((24, 1), 0.7 if product.has_alpha else 1.0), 96
    else:
        # Eight of twelve experts, and 64 sums, one product and eight additions of each result.
        assert torch.equal((operands.alpha > 0).sum(1), torch.full((24,), 8))
        assert len({tuple(row) for row in (operands.alpha > 0).tolist()}) > 12
        torch.testing.assert_close(operands.alpha.sum(1), torch.ones(24))
        factor, roundings = operands.alpha.repeat_interleave(64, 1), 64 + 1 + 8
    a = factor.double() * a
    torch.testing.assert_close(want.double(), a @ b.t(), rtol=1e-6, atol=1e-6)
    limit = (a.abs() @ b.abs().t()) * roundings * 2**-24
    assert (allowed >= 0.999 * limit).all()
    assert (allowed <= 1.01 * limit + 1.01 * want.abs() * torch.finfo(product.out_dtype).eps + 1e-4).all()

    got = (a.float() @ b.float().t()).to(product.out_dtype)
    assert _tune.difference(got, want, allowed) is None
    lacking = (a[:, 1:] @ b[:, 1:].t()).to(product.out_dtype)
    assert "sums are off" in _tune.difference(lacking, want, allowed)
    for value in (torch.nan, torch.inf):
        one = got.clone()
        one[3, 5] = value
        assert "1 of 960 sums are off, by up to inf times" in _tune.difference(one, want, allowed)


def decoded_by_hand(codes, scale, layout, product):
    from expected._fp4_product import decoded

    return decoded(codes, scale, layout.name, product.fmt.block_size)


def test_copies_exceed_the_cache(made_up, monkeypatch):
    """Three times the L2 cache between two uses of an operand, and every candidate sees all of them."""
    product = next(products())
    bench = _tune.Bench(product, 8, CPU)
    size = sum(tensor.nbytes for tensor in bench._operands if tensor is not None)
    seen = []
    launcher = lambda product, tactic, target: lambda *operands: seen.append(operands[2].data_ptr())  # noqa: E731
    monkeypatch.setattr(made_up, "launcher", launcher)
    bench.time([Candidate("sized", (16,)), Candidate("sized", (32,))])
    assert len(set(seen)) * size >= 3 * 20_000 > (len(set(seen)) - 1) * size
    assert len(seen) == 2 * len(set(seen))


@pytest.mark.gpu
@pytest.mark.parametrize("op", [case for case in compiled_op_cases() if case.values[0].backends is not None])
def test_on_a_gpu(op, file):
    """Real candidates are timed; afterwards a call can be captured, and a new process has the choice."""
    sample = call_of(op, 16, 512, 1024, "cuda")
    given = arguments(op, sample)
    with torch_cute_ops.autotune():
        got = op.function(**given)
    assert_right(op, sample, got)
    (record,) = json.loads(file.read_text())["choices"]
    assert record["backend"] != "reference" and record["device"] == torch.cuda.get_device_name()
    assert record["seconds"] is None or 1e-6 < record["seconds"] < 1e-3
    tuner.forget()
    key = mm_backends.key_of(Product(**product_of(given)), 16, mm_backends.target_of(torch.device("cuda")))
    assert tuner.lookup(key) == (record["backend"], tuple(record["tactic"]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op.function(**given)
    graph.replay()
    assert torch.equal(captured, got)


def product_of(given):
    layout = SCALE_LAYOUTS["128x4"]
    return {
        "n": 512,
        "k": 1024,
        "fmt": NVFP4,
        "a_dtype": given["a"].dtype,
        "a_layout": layout if "a_scale" in given else None,
        "b_layout": layout,
        "has_alpha": "w" in given,
        "out_dtype": torch.bfloat16,
        "experts": given["alpha"].shape[1] if "w" in given else None,
    }
