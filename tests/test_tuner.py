"""The tuner: what is tried, what wins, what is kept, and how ranks agree; with made-up clocks."""

import json
import logging
import os
import random
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cases import arguments, op_cases
from expected._fp4_product import assert_results, results

import torch_cute_ops
from torch_cute_ops import mm_backends, registry
from torch_cute_ops.cli.main import main
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.mm_backends import _tune
from torch_cute_ops.mm_backends._base import Backend, Product, Target
from torch_cute_ops.mm_backends.reference import Reference
from torch_cute_ops.runtime import compiler, settings, timing, tuner, tuning
from torch_cute_ops.runtime.agreement import Ranks, agree
from torch_cute_ops.runtime.tuner import Candidate, Key, Problem
from torch_cute_ops.runtime.tuning_file import Tuned, TuningFile
from torch_cute_ops.testing.samples import mm_fp4, mm_fp4_weight_only

PRODUCTS = {"mm_fp4": mm_fp4.PRODUCT, "mm_fp4_weight_only": mm_fp4_weight_only.PRODUCT}
by_op = pytest.mark.parametrize("op", [case for case in op_cases() if case.id in PRODUCTS])
A, B, C, LAST = Candidate("a", (1,)), Candidate("a", (2, "x")), Candidate("b", ()), Candidate("last", ())
ESTIMATES = {A: 1.0, B: 2.0, C: 4.0, LAST: float("inf")}


def key_of(bucket=8, static='{"n":64}', device="GPU", versions='{"torch":"2"}'):
    return Key("family", static, bucket, device, versions)


class Clock:
    """Candidates whose calls last as long as ``seconds`` says; remembers what it was asked."""

    def __init__(self, seconds, wrong=(), estimates=ESTIMATES, **key):
        self.seconds, self.wrong = seconds, dict.fromkeys(wrong, "off by 3") if not isinstance(wrong, dict) else wrong
        self.checked, self.timed = [], []
        self.problem = Problem("some_op", key_of(**key), estimates, self.check, self.time)

    def check(self, candidate):
        self.checked.append(candidate)
        answer = self.wrong.get(candidate)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def time(self, candidates):
        self.timed.append(list(candidates))
        if isinstance(self.seconds, BaseException):
            raise self.seconds
        return {candidate: self.seconds[candidate] for candidate in candidates}

    def tune(self, **block):
        with tuning.autotune(**block):
            tuner.tune(self.problem)
        return tuner.lookup(self.problem.key)


@pytest.fixture(autouse=True)
def file(request, tmp_path, monkeypatch):
    """An empty file of choices, for this test alone; no stream captures, without asking CUDA."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    path = tmp_path / "tuning.json"
    monkeypatch.setattr(settings, "TUNING", path)
    tuner.forget()
    yield path
    tuner.forget()


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# What is tried, and what wins


def test_the_fastest_wins():
    clock = Clock({A: 3.0, B: 2.0, C: 5.0})
    assert clock.tune() == B
    assert clock.timed == [[A, B, C]] and LAST not in clock.checked


def test_nothing_is_tuned_unless_told():
    clock = Clock({A: 1.0})
    tuner.tune(clock.problem)
    assert tuner.lookup(clock.problem.key) is None and not clock.checked
    assert not tuning.is_on()


def test_once_a_block_and_not_again():
    """What is tuned is not timed in a later block; what failed is tried again there, once."""
    clock = Clock({A: 3.0, B: 2.0, C: 5.0})
    for _ in range(2):
        with tuning.autotune():
            tuner.tune(clock.problem)
            tuner.tune(clock.problem)
    assert len(clock.timed) == 1
    failing = Clock(RuntimeError("out of memory"), bucket=16)
    for block in (1, 2):
        with tuning.autotune():
            tuner.tune(failing.problem)
            tuner.tune(failing.problem)
        assert len(failing.timed) == block


def test_hopeless_candidates_are_not_tried():
    """Beyond four times the best estimate, unless those that are better are wrong."""
    estimates = {A: 1.0, B: 4.0, C: 4.1, LAST: float("inf")}
    seconds = {A: 4.0, B: 3.0, C: 1.0, LAST: 1.0}
    clock = Clock(seconds, estimates=estimates)
    assert clock.tune() == B and clock.checked == [A, B]
    clock = Clock(seconds, wrong=[A, B], estimates=estimates, bucket=16)
    assert clock.tune() == C and clock.checked == [A, B, C] and clock.timed == []
    clock = Clock(seconds, wrong=[A, B, C], estimates=estimates, bucket=24)
    assert clock.tune() == LAST
    assert list(tuner.shortlists({LAST: float("inf")})) == [[LAST]]


def test_one_candidate_needs_no_choice():
    clock = Clock({LAST: 1.0}, estimates={LAST: float("inf")})
    assert clock.tune() is None and not clock.checked


def test_a_wrong_candidate_is_excluded_and_reported(caplog):
    """However fast it is; and so is one that raises."""
    clock = Clock({A: 3.0, B: 0.1, C: 0.1}, wrong={B: "9 of 64 sums are off", C: RuntimeError("no\nkernel")})
    assert clock.tune() == A
    assert warnings_in(caplog) == [
        "cute::some_op: backend 'a', tactic [2, 'x'] is not used: 9 of 64 sums are off",
        "cute::some_op: backend 'b', tactic [] is not used: fails: RuntimeError: no",
    ]


def test_where_tuning_fails(caplog, file):
    """Calls go on with the best estimate, and nothing is written."""
    assert Clock(RuntimeError("out of memory")).tune() == A
    assert warnings_in(caplog) == [
        "cute::some_op: tuning failed: RuntimeError: out of memory",
        "cute::some_op: nothing is tuned; calls use a [1], as estimated",
    ]
    caplog.clear()
    assert Clock({}, wrong=ESTIMATES, bucket=16).tune() == A
    assert "no candidate gives the right result" in caplog.text
    assert not file.exists()


def test_nothing_is_tuned_in_a_capture(monkeypatch):
    """But after it, in the same block."""
    clock = Clock({A: 3.0, B: 2.0, C: 5.0})
    with tuning.autotune():
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            tuner.tune(clock.problem)
        assert not clock.checked and tuner.lookup(clock.problem.key) is None
        tuner.tune(clock.problem)
    assert tuner.lookup(clock.problem.key) == B


def test_other_threads_are_not_tuned():
    clock, on = Clock({A: 1.0, B: 2.0, C: 3.0}), []
    with tuning.autotune():
        thread = threading.Thread(target=lambda: (on.append(tuning.is_on()), tuner.tune(clock.problem)))
        thread.start()
        thread.join()
        assert tuning.is_on()
    assert on == [False] and not clock.checked


def test_the_generation_changes():
    """When a block begins, and with every choice: what was kept before is asked for again."""
    seen = [tuning.generation]
    with tuning.autotune():
        seen.append(tuning.generation)
        tuner.tune(Clock({A: 3.0, B: 2.0, C: 5.0}).problem)
        seen.append(tuning.generation)
    tuner.forget()
    seen.append(tuning.generation)
    assert len(set(seen)) == 4
    tuner.lookup(key_of())
    assert tuning.generation == seen[-1]


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_a_timeout_is_a_time(seconds):
    with pytest.raises(ValueError, match=r"timeout_s=.*; use a number of seconds"), tuning.autotune(timeout_s=seconds):
        pass


# The file


def test_a_later_process_reads_the_choice(file):
    assert Clock({A: 3.0, B: 2.0, C: 5.0}).tune() == B
    record = json.loads(file.read_text())["choices"]
    assert record == [
        {
            "device": "GPU",
            "family": "family",
            "static": {"n": 64},
            "bucket": 8,
            "backend": "a",
            "tactic": [2, "x"],
            "seconds": 2.0,
            "versions": {"torch": "2"},
        }
    ]
    tuner.forget()
    assert tuner.lookup(key_of()) == B
    for other in ({"bucket": 16}, {"static": '{"n":65}'}, {"device": "GPU 2"}, {"versions": '{"torch":"3"}'}):
        assert tuner.lookup(key_of(**other)) is None


def test_the_file_is_read_once(file, monkeypatch):
    reads = []
    real = TuningFile.read
    monkeypatch.setattr(TuningFile, "read", lambda self: reads.append(1) or real(self))
    for bucket in (8, 16, 24):
        tuner.lookup(key_of(bucket))
    assert len(reads) == 1


def test_a_choice_that_is_no_candidate_any_more_is_tuned_again(file):
    TuningFile(file).add(key_of(), Tuned(Candidate("gone", (7,)), 1.0))
    assert Clock({A: 3.0, B: 2.0, C: 5.0}).tune() == B
    assert [tuned.candidate for tuned in TuningFile(file).read().values()] == [B]


def test_choices_of_others_stay(file):
    """Other versions and devices, and what another process has written since."""
    others = [key_of(versions='{"torch":"1"}'), key_of(device="old GPU")]
    tuner.lookup(key_of())  # reads
    for other in others:
        TuningFile(file).add(other, Tuned(C, None))
    Clock({A: 3.0, B: 2.0, C: 5.0}).tune()
    assert TuningFile(file).read() == {**dict.fromkeys(others, Tuned(C, None)), key_of(): Tuned(B, 2.0)}


def test_the_oldest_choices_go_first(file, monkeypatch):
    monkeypatch.setattr("torch_cute_ops.runtime.tuning_file.LIMIT", 3)
    for bucket in (8, 16, 24, 8, 32):
        TuningFile(file).add(key_of(bucket), Tuned(A, 1.0))
    assert [key.bucket for key in TuningFile(file).read()] == [24, 8, 32]


GOOD = '{"torch_cute_ops tuning": 1, "choices": [%s]}'
RECORD = {"device": "G", "family": "f", "static": {}, "bucket": 8, "backend": "b", "versions": {}, "seconds": None}
BAD_FILES = {
    "empty": "",
    "cut short": '{"torch_cute_ops tuning": 1, "choices": [',
    "a list": "[]",
    "other JSON": '{"name": "something"}',
    "of another format": '{"torch_cute_ops tuning": 2, "choices": []}',
    "no choices": '{"torch_cute_ops tuning": 1}',
    "a choice without tactic": GOOD % json.dumps(RECORD),
    "a tactic of floats": GOOD % json.dumps({**RECORD, "tactic": [1.5]}),
    "a bucket that is text": GOOD % json.dumps({**RECORD, "tactic": [], "bucket": "8"}),
    "seconds that are text": GOOD % json.dumps({**RECORD, "tactic": [], "seconds": "fast"}),
    "binary": "\x00\udcff",
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_read(name, file, caplog):
    """Is ignored with one warning, and not overwritten; choices stay in memory."""
    content = BAD_FILES[name].encode("utf-8", "surrogateescape")
    file.write_bytes(content)
    tuner.forget()
    assert Clock({A: 3.0, B: 2.0, C: 5.0}).tune() == B
    assert Clock({A: 3.0, B: 2.0, C: 5.0}, bucket=16).tune() == B
    (warning,) = warnings_in(caplog)
    assert str(file) in warning and "is no tuning file" in warning and "stay in memory" in warning
    assert file.read_bytes() == content


def test_a_good_record_is_read(file):
    file.write_text(GOOD % json.dumps({**RECORD, "tactic": [1, "x"]}))
    assert TuningFile(file).read() == {Key("f", "{}", 8, "G", "{}"): Tuned(Candidate("b", (1, "x")), None)}


def test_where_nothing_can_be_written(tmp_path, monkeypatch, caplog):
    """A file where the folder should be."""
    (tmp_path / "in the way").write_text("")
    monkeypatch.setattr(settings, "TUNING", tmp_path / "in the way" / "tuning.json")
    for bucket in (8, 16):
        assert Clock({A: 3.0, B: 2.0, C: 5.0}, bucket=bucket).tune() == B
    assert len(warnings_in(caplog)) == 1 and "stay in memory" in caplog.text


def test_where_the_file_is(tmp_path, monkeypatch):
    assert tuner.path() == settings.TUNING
    monkeypatch.setattr(settings, "TUNING", None)
    monkeypatch.setattr(settings, "CACHE_DIR", tmp_path)
    assert tuner.path() == tmp_path / "tuning-v1.json"
    assert compiler.store().root.parent == tmp_path
    monkeypatch.setattr(settings, "CACHE", False)
    assert tuner.path() is None
    assert Clock({A: 3.0, B: 2.0, C: 5.0}).tune() == B and list(tmp_path.glob("*.json")) == []


def test_versions_tell_sources_and_compiler(monkeypatch):
    versions = json.loads(tuner.versions())
    assert versions["torch"] == torch.__version__ and versions["cuda"] == torch.version.cuda
    assert versions["compiler"] == list(compiler.compiler_versions()) and len(versions["sources"]) == 64


def add_choices(path, first, count):
    for bucket in range(first, first + count):
        TuningFile(path).add(key_of(bucket), Tuned(A, float(bucket)))


def test_processes_that_write_at_once_lose_nothing(file):
    workers, count = 4, 15
    mp.start_processes(add_at_once, args=(file, count), nprocs=workers, start_method="fork")
    assert {key.bucket: tuned.seconds for key, tuned in TuningFile(file).read().items()} == {
        bucket: float(bucket) for bucket in range(workers * count)
    }
    assert list(file.parent.glob("*.tmp")) == []


def add_at_once(rank, path, count):
    add_choices(path, rank * count, count)


def add_for_ever(path):
    while True:
        add_choices(path, random.randrange(1000), 5)


def test_killed_writers_leave_a_file_that_can_be_read(file, caplog):
    add_choices(file, 5000, 1)
    for _ in range(25):
        processes = [mp.get_context("fork").Process(target=add_for_ever, args=(file,)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            time.sleep(random.uniform(0, 0.03))
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        assert key_of(5000) in TuningFile(file).read()
    for left in file.parent.glob("*.tmp"):
        os.utime(left, (1000, 1000))
    started = time.monotonic()
    add_choices(file, 6000, 1)
    assert time.monotonic() - started < 5
    assert {key_of(5000), key_of(6000)} <= TuningFile(file).read().keys()
    assert list(file.parent.glob("*.tmp")) == [] and not warnings_in(caplog)


# Products, on made-up backends

CPU = Target(torch.device("cpu"), None, 1, "GPU of test")


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


def call_of(op, m=5, **kwargs):
    return PRODUCTS[op.name].sample("", m, 24, 64, NVFP4, "128x4", torch.device("cpu"), **kwargs)


def used(op, backend, sample):
    """The tactic that a call runs, and that its result is right."""
    before = len(backend.runs)
    given = arguments(op, sample)
    assert_results((op.cuda(*sample.args, **sample.kwargs),), results(given), given)
    return backend.runs[-1] if len(backend.runs) > before else None


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
    a = {"a_dtype": "uint8", "a_layout": "128x4"} if op.name == "mm_fp4" else {"a_dtype": "bfloat16", "a_layout": None}
    out = {"has_alpha": False, "out_dtype": "bfloat16"}
    assert record["static"] == {"n": 24, "k": 64, "fmt": "nvfp4", "b_layout": "128x4", **a, **out}
    tuner.forget()
    assert used(op, made_up, sample) == (32,)


@by_op
def test_calls_that_name_a_backend_are_not_tuned(op, made_up, file):
    sample = call_of(op, backend="sized")
    with torch_cute_ops.autotune():
        assert used(op, made_up, sample) == (16,)
        op.cuda(*call_of(op, 0).args)
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
    torch_cute_ops.warmup(op.name, tune=True, n=24, k=64, m=5, device="cpu")
    assert used(op, made_up, call_of(op)) == (32,)
    monkeypatch.setattr(registry, "cuda_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr("torch_cute_ops.ops._fp4_product.cuda_device", lambda device: torch.device("cpu"))
    assert main(["tune", op.name, "--n", "24", "--k", "64", "--m", "9", "17", "33"]) == 0
    shown = capsys.readouterr()
    assert f"3 calls are done, 0 failed; choices are kept in {file}" in shown.out and "3/3" in shown.err
    assert [key.bucket for key in TuningFile(file).read()] == [8, 16, 24, 40]
    assert main(["tune", op.name, "--n", "24", "--k", "64", "--scale-layout", "tiled"]) == 1
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
    given = arguments(op, sample)
    assert_results((got,), results(given), given)
    assert not file.exists()
    product = Product(64, 64, NVFP4, torch.uint8, SCALE_LAYOUTS["8x4"], SCALE_LAYOUTS["128x4"], False, torch.bfloat16)
    assert mm_backends.key_of(product, 8, mm_backends.target_of(torch.device("cpu"))) is None


def products():
    for fmt in (NVFP4, MXFP4):
        for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
            for a_dtype, layout in ((torch.uint8, "8x4"), (torch.uint8, "linear"), (torch.bfloat16, None)):
                a_layout = SCALE_LAYOUTS[layout] if layout else None
                b_layout = SCALE_LAYOUTS["linear" if layout == "linear" else "128x4"]
                has_alpha = out_dtype == torch.float32
                yield Product(40, 96, fmt, a_dtype, a_layout, b_layout, has_alpha, out_dtype)


@pytest.mark.parametrize("product", [*products()], ids=lambda product: "-".join(map(str, product.described().values())))
def test_checks(product, made_up, monkeypatch):
    """Sums in fp32 in any order pass; one that lacks a term, is not written, or is rounded twice to 8 bits does not."""
    monkeypatch.setattr(_tune, "CHUNK", 96 * 7)
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
    factor = 0.7 if product.has_alpha else 1.0
    torch.testing.assert_close(want.double(), factor * (a @ b.t()), rtol=1e-6, atol=1e-6)
    limit = factor * (a.abs() @ b.abs().t()) * 96 * 2**-24
    assert (allowed >= 0.999 * limit).all()
    assert (allowed <= 1.01 * limit + 1.01 * want.abs() * torch.finfo(product.out_dtype).eps + 1e-4).all()

    got = (factor * (a.float() @ b.float().t())).to(product.out_dtype)
    assert _tune.difference(got, want, allowed) is None
    lacking = (factor * (a[:, 1:] @ b[:, 1:].t())).to(product.out_dtype)
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
@by_op
def test_on_a_gpu(op, file):
    """Real candidates are timed; afterwards a call can be captured, and a new process has the choice."""
    sample = PRODUCTS[op.name].sample("", 16, 512, 1024, NVFP4, "128x4", torch.device("cuda"))
    given = arguments(op, sample)
    with torch_cute_ops.autotune():
        got = op.function(**given)
    assert_results((got,), results(given), given)
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
        "has_alpha": False,
        "out_dtype": torch.bfloat16,
    }


# Ranks

TIMEOUT = 20.0
"""Seconds for which nobody is to wait."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(world, function, folder, store="tcp"):
    """What ``function(rank)`` returns on each rank, and what it logs."""
    method = f"tcp://127.0.0.1:{free_port()}" if store == "tcp" else f"file://{folder}/store"
    mp.start_processes(rank_main, args=(world, function, folder, method), nprocs=world, start_method="fork")
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(world)]


def rank_main(rank, world, function, folder, method):
    settings.TUNING = folder / f"tuning{rank}.json"
    tuner.forget()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("torch_cute_ops").addHandler(handler)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world)
    started = time.monotonic()
    answer = function(rank)
    seconds = time.monotonic() - started
    (folder / f"rank{rank}").write_text(json.dumps({"answer": answer, "seconds": seconds, "log": lines}))
    if method.startswith("tcp"):
        # The store lives in rank 0: it stays until all have what they need.
        while not all((folder / f"rank{other}").exists() for other in range(world)):
            time.sleep(0.01)
    dist.destroy_process_group()


def agreed(clock, **block):
    return [*clock.tune(**{"timeout_s": TIMEOUT, **block})]


def by_sum(rank):
    """B is the fastest on rank 0, C on rank 1, A in all; B is wrong on rank 2."""
    seconds = ({A: 3.0, B: 1.0, C: 9.0}, {A: 3.0, B: 9.0, C: 2.0}, {A: 3.0, B: 0.1, C: 9.0})[rank]
    first = Clock(seconds, wrong=[B] if rank == 2 else [])
    answers = [agreed(first), agreed(first), len(first.timed)]
    # Rank 1 has a choice from earlier: all take it, and it does no timing.
    second = Clock(seconds, bucket=16)
    if rank == 1:
        TuningFile(settings.TUNING).add(second.problem.key, Tuned(C, 1.0))
        tuner.forget()
    answers += [agreed(second), len(second.timed) if rank == 1 else 0]
    kept = {key.bucket: [*tuned.candidate] for key, tuned in TuningFile(settings.TUNING).read().items()}
    return [*answers, kept]


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_ranks_choose_by_the_sum_of_their_times(tmp_path, store):
    ranks = run_ranks(3, by_sum, tmp_path, store)
    a, c = ["a", [1]], ["b", []]
    assert [rank["answer"] for rank in ranks] == [[a, a, 1, c, 0, {"8": a, "16": c}]] * 3
    assert max(rank["seconds"] for rank in ranks) < TIMEOUT


def one_fails(rank):
    """Rank 1 raises; in another choice all do; in the last one an interrupt ends the call, and none waits for it."""
    seconds = {A: 3.0, B: 2.0, C: 9.0}
    error = RuntimeError("out of memory on this rank")
    answers = [agreed(Clock(error if rank == 1 else seconds))]
    for _ in range(2):
        answers.append(agreed(Clock(error, bucket=16)))
    answers.append(agreed(Clock(seconds, bucket=16)))
    clock = Clock(KeyboardInterrupt() if rank == 1 else {A: 2.0, B: 3.0, C: 9.0}, bucket=24)
    try:
        answers.append(agreed(clock))
    except KeyboardInterrupt:
        answers.append("interrupted")
    return answers


def test_a_rank_that_fails_holds_up_nobody(tmp_path):
    ranks = run_ranks(2, one_fails, tmp_path)
    a, b = ["a", [1]], ["a", [2, "x"]]
    assert [rank["answer"] for rank in ranks] == [[b, a, a, b, a], [b, a, a, b, "interrupted"]]
    assert max(rank["seconds"] for rank in ranks) < TIMEOUT
    log = "\n".join(ranks[0]["log"])
    assert "cute::some_op: tuning failed on rank 1: RuntimeError: out of memory on this rank" in log
    assert "nothing is tuned; calls use a [1], as estimated" in log
    assert "tuning failed on rank 1: KeyboardInterrupt" in log


def last_is_late(rank):
    """Rank 2 comes when the others have decided without it, and would have decided otherwise."""
    if rank == 2:
        time.sleep(4.0)
    clock = Clock({A: 0.1, B: 9.0, C: 9.0} if rank == 2 else {A: 3.0, B: 2.0, C: 9.0})
    return agreed(clock, timeout_s=1.0)


def first_never_comes(rank):
    """Rank 0 makes no such call; the others wait for it once in a block, twice the time, and agree without it."""
    if rank == 0:
        return None
    seconds = {A: 3.0, B: 2.0, C: 9.0} if rank == 1 else {A: 3.0, B: 2.5, C: 1.0}
    with tuning.autotune(timeout_s=1.0):
        tuner.tune(Clock(seconds).problem)
        first = time.monotonic()
        tuner.tune(Clock({A: 1.0, B: 2.0, C: 9.0}, bucket=16).problem)
        assert time.monotonic() - first < 1.0
    return [[*tuner.lookup(key_of(bucket))] for bucket in (8, 16)]


def test_ranks_do_not_wait_for_ever_for_the_last(tmp_path):
    ranks = run_ranks(3, last_is_late, tmp_path)
    assert [rank["answer"] for rank in ranks] == [["a", [2, "x"]]] * 3
    assert all(0.9 < rank["seconds"] < 3.9 for rank in ranks[:2])
    assert any("ranks [2] did not come in time" in line for line in ranks[0]["log"])


def test_ranks_do_not_wait_for_ever_for_the_first(tmp_path):
    ranks = run_ranks(3, first_never_comes, tmp_path)
    assert ranks[1]["answer"] == ranks[2]["answer"] == [["a", [2, "x"]], ["a", [1]]]
    assert all(1.9 < rank["seconds"] < 4.0 for rank in ranks[1:])


def test_ranks_that_decide_at_once_take_one_decision():
    """Both have given up on rank 0, and come to different results."""
    store, barrier, answers = dist.HashStore(), threading.Barrier(2), {}

    def decide(posts):
        barrier.wait()
        return min(posts.values()) if rank_of[threading.get_ident()] == 1 else max(posts.values())

    rank_of = {}

    def run(rank):
        rank_of[threading.get_ident()] = rank
        absent = set()
        answers[rank] = agree(Ranks(store, rank, 3), "name", f"post {rank}", decide, 0.05, absent)
        assert absent == {0}

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[1] == answers[2] in ("post 1", "post 2")


def the_store_dies(rank):
    ready = settings.TUNING.with_name("ready")
    if rank == 0:
        while not ready.exists():
            time.sleep(0.01)
        os._exit(0)
    ready.touch()
    try:
        agreed(Clock({A: 3.0, B: 2.0, C: 9.0}), timeout_s=1.0)
    except RuntimeError as error:
        return str(error)
    return "agreed with nobody"


def test_a_store_that_is_gone_is_an_error(tmp_path):
    method = f"tcp://127.0.0.1:{free_port()}"
    context = mp.get_context("fork")
    ranks = [
        context.Process(target=rank_main, args=(rank, 2, the_store_dies, tmp_path, method), daemon=True)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "rank1").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()
        rank.join()
    answer = json.loads((tmp_path / "rank1").read_text())["answer"]
    assert answer.startswith("rank 1 cannot agree with the others on tune/family/")
