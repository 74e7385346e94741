"""File of tuned choices: content, damaged files, failed writes, and writers that are killed."""

import errno
import json
import os
import random
import time

import pytest
import torch
import torch.multiprocessing as mp
from support.processes import kill_at_random
from support.tuner_model import A, B, C, Clock, empty_file, key_of, warnings_in

from torch_cute_ops.runtime import compiler, files, locks, settings, tuner, tuning_file
from torch_cute_ops.runtime.tuner import Candidate, Key
from torch_cute_ops.runtime.tuning_file import Tuned, TuningFile

file = pytest.fixture(autouse=True)(empty_file)


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


def test_an_outdated_choice_is_tuned_again(file):
    TuningFile(file).add(key_of(), Tuned(Candidate("gone", (7,)), 1.0))
    assert Clock({A: 3.0, B: 2.0, C: 5.0}).tune() == B
    assert [tuned.candidate for tuned in TuningFile(file).read().values()] == [B]


def test_other_choices_stay(file):
    """Check that choices for other versions and devices stay, and so do choices that another process wrote
    meanwhile."""
    others = [key_of(versions='{"torch":"1"}'), key_of(device="old GPU")]
    tuner.lookup(key_of())  # this reads the file
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
    "endless seconds": GOOD % json.dumps({**RECORD, "tactic": []}).replace("null", "1e999"),
    "more seconds than fit a float": GOOD % json.dumps({**RECORD, "tactic": [], "seconds": 10**400}),
    "choices that are no list": '{"torch_cute_ops tuning": 1, "choices": 7}',
    "a choice that is no object": GOOD % "7",
    "binary": "\x00\udcff",
    "deep": "[" * 100_000,
    "a deep choice": GOOD % json.dumps({**RECORD, "tactic": [], "static": 0}).replace("0", "[" * 100_000),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_an_invalid_file(name, file, caplog):
    """Check that an invalid file is ignored with one warning and not overwritten, and that choices stay in memory."""
    content = BAD_FILES[name].encode("utf-8", "surrogateescape")
    file.write_bytes(content)
    tuner.forget()
    assert Clock({A: 3.0, B: 2.0, C: 5.0}).tune() == B
    assert Clock({A: 3.0, B: 2.0, C: 5.0}, bucket=16).tune() == B
    (warning,) = warnings_in(caplog)
    assert str(file) in warning and "is not a tuning file" in warning and "stay in memory" in warning
    assert file.read_bytes() == content


UNREADABLE = {
    "a FIFO": os.mkfifo,
    "a folder": os.mkdir,
    "a device": lambda path: path.symlink_to("/dev/null"),
    "huge": lambda path: (path.touch(), os.truncate(path, 2**40)),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_other_kinds_of_files_are_refused(kind, file, caplog):
    """Check that a FIFO, folder, device or huge file is refused at once and not changed."""
    UNREADABLE[kind](file)
    before, started = file.lstat(), time.monotonic()
    tuner.forget()
    assert Clock({A: 3.0, B: 2.0, C: 5.0}).tune() == B
    assert time.monotonic() - started < 5
    (warning,) = warnings_in(caplog)
    assert str(file) in warning and "is not a tuning file" in warning
    assert file.lstat()[:7] == before[:7]


def test_a_link_to_the_file_stays(file, monkeypatch):
    """Check that choices are added to the target of a link, and that the lock is next to the target, so that all links
    share it."""
    locked, real = [], locks.one_process
    monkeypatch.setattr(tuning_file, "one_process", lambda path, patience: locked.append(path) or real(path, patience))
    target = file.parent / "folder" / "choices.json"
    target.parent.mkdir()
    file.symlink_to("folder/choices.json")
    for bucket in (8, 16):
        assert TuningFile(file).add(key_of(bucket), Tuned(A, 1.0))
    assert file.is_symlink() and not target.is_symlink()
    assert locked == [target.with_name("choices.json.lock")] * 2
    assert [key.bucket for key in TuningFile(target).read()] == [8, 16]
    assert sorted(path.name for path in target.parent.iterdir()) == ["choices.json", "choices.json.lock"]
    assert sorted(path.name for path in file.parent.iterdir()) == sorted(["folder", file.name])


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_a_failed_write_affects_one_choice(file, number, monkeypatch, caplog):
    """Check that each kind of error is logged once, and that later choices are written."""
    choices = TuningFile(file)
    choices.add(key_of(8), Tuned(A, 1.0))
    with monkeypatch.context() as patch:

        def fsync(descriptor):
            raise OSError(number, os.strerror(number))

        patch.setattr(os, "fsync", fsync)
        for bucket in (16, 24):
            assert not choices.add(key_of(bucket), Tuned(A, 1.0))
    (warning,) = warnings_in(caplog)
    assert os.strerror(number) in warning and "stay in memory" in warning
    assert choices.add(key_of(32), Tuned(A, 1.0))
    assert [key.bucket for key in choices.read()] == [8, 32]
    assert list(file.parent.glob("*.tmp")) == []


@pytest.mark.parametrize("times", [1, 2, 3])
def test_an_unreadable_file_is_not_replaced(file, times, monkeypatch, caplog):
    """Check that a single read error has no effect, and that repeated errors do not destroy existing choices."""
    TuningFile(file).add(key_of(8), Tuned(A, 1.0))
    real, left = files.read, times

    def read(path, limit):
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, limit)

    monkeypatch.setattr(files, "read", read)
    assert TuningFile(file).add(key_of(16), Tuned(A, 1.0)) is (times == 1)
    left = 0
    assert [key.bucket for key in TuningFile(file).read()] == ([8, 16] if times == 1 else [8])
    assert len(warnings_in(caplog)) == (times > 1)


def test_a_good_record_is_read(file):
    file.write_text(GOOD % json.dumps({**RECORD, "tactic": [1, "x"]}))
    assert TuningFile(file).read() == {Key("f", "{}", 8, "G", "{}"): Tuned(Candidate("b", (1, "x")), None)}


def test_an_unwritable_folder(tmp_path, monkeypatch, caplog):
    """Check that choices stay in memory if a file is in the place of the folder."""
    (tmp_path / "in the way").write_text("")
    monkeypatch.setattr(settings, "TUNING", tmp_path / "in the way" / "tuning.json")
    for bucket in (8, 16):
        assert Clock({A: 3.0, B: 2.0, C: 5.0}, bucket=bucket).tune() == B
    assert len(warnings_in(caplog)) == 1 and "stay in memory" in caplog.text


def test_path_of_the_file(tmp_path, monkeypatch):
    assert tuner.path() == settings.TUNING
    monkeypatch.setattr(settings, "TUNING", None)
    monkeypatch.setattr(settings, "CACHE_DIR", tmp_path)
    assert tuner.path() == tmp_path / "tuning-v1.json"
    assert compiler.store().root.parent == tmp_path
    monkeypatch.setattr(settings, "CACHE", False)
    assert tuner.path() is None
    monkeypatch.setattr(settings, "CACHE", True)
    monkeypatch.setattr(settings, "CACHE_DIR", None)
    monkeypatch.setattr(settings, "_user_cache_folder", lambda: None)
    assert tuner.path() is None
    assert Clock({A: 3.0, B: 2.0, C: 5.0}).tune() == B and list(tmp_path.glob("*.json")) == []


def test_versions_contain_sources_and_compiler(monkeypatch):
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


@pytest.mark.slow  # runs early: a process with compiled kernels takes ten times as long to fork
def test_killed_writers_leave_a_file_that_can_be_read(file, caplog):
    add_choices(file, 5000, 1)
    for _ in range(15):
        kill_at_random(add_for_ever, file, processes=2, longest=0.03)
        assert key_of(5000) in TuningFile(file).read()
    for left in file.parent.glob("*.tmp"):
        os.utime(left, (1000, 1000))
    started = time.monotonic()
    add_choices(file, 6000, 1)
    assert time.monotonic() - started < 5
    assert {key_of(5000), key_of(6000)} <= TuningFile(file).read().keys()
    assert list(file.parent.glob("*.tmp")) == [] and not warnings_in(caplog)
