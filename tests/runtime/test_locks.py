"""Locks between processes: they exclude, end with their holder, name their holder, and stop nobody for long."""

import errno
import fcntl
import logging
import multiprocessing
import os
import signal
import time

import pytest

from torch_cute_ops.runtime import locks
from torch_cute_ops.runtime.locks import one_process

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "locks" / "a.lock"


@pytest.fixture
def holder(path):
    """A process that holds the lock until it is killed."""
    held = FORK.Event()

    def hold():
        with one_process(path, 10.0):
            held.set()
            time.sleep(60)

    process = FORK.Process(target=hold)
    process.start()
    assert held.wait(10)
    yield process
    process.kill()
    process.join()


def count_up(path, counter, times):
    for _ in range(times):
        with one_process(path, 60.0):
            number = int(counter.read_text())
            time.sleep(0)
            counter.write_text(str(number + 1))


def test_one_at_a_time(path, tmp_path):
    """Although each holder removes the file that the next ones wait on."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    processes = [FORK.Process(target=count_up, args=(path, counter, 50)) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    assert counter.read_text() == "300"
    assert list(path.parent.iterdir()) == []


def test_a_lock_ends_with_its_holder(path, holder):
    started = time.monotonic()
    os.kill(holder.pid, signal.SIGKILL)
    with one_process(path, 30.0):
        assert time.monotonic() - started < 5
    assert not path.exists()


def test_waiting_is_bounded_and_told(path, holder, monkeypatch, caplog):
    """The log names the holder: first at level info, and where the patience is over in a warning."""
    monkeypatch.setattr(locks, "QUIET_SECONDS", 0.05)
    caplog.set_level(logging.INFO, "torch_cute_ops")
    started, entered = time.monotonic(), False
    with one_process(path, 0.4):
        entered = True
    assert entered and 0.4 <= time.monotonic() - started < 5
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    for record in caplog.records:
        assert f"process {holder.pid} on " in record.getMessage() and str(path) in record.getMessage()
    assert path.exists()  # it is the holder's still


def test_a_file_that_nobody_locks(path):
    """Such as one that a process of another time or another kind of lock has left."""
    path.parent.mkdir()
    path.write_text("1\nanother-host\n")
    started = time.monotonic()
    with one_process(path, 600.0):
        assert path.read_text().startswith(f"process {os.getpid()} on ")
    assert time.monotonic() - started < 1
    assert not path.exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK], ids=errno.errorcode.get)
def test_without_locks(path, number, monkeypatch):
    """On a file system that has none, all go on at once and leave nothing."""

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    started = time.monotonic()
    with one_process(path, 600.0), one_process(path, 600.0):
        assert not path.exists()
    assert time.monotonic() - started < 1


def make_link(path):
    (path.parent / "target").write_text("precious")
    path.symlink_to("target")


IN_THE_WAY = {"a link": make_link, "a FIFO": os.mkfifo, "a folder": os.mkdir}


@pytest.mark.parametrize("kind", IN_THE_WAY)
def test_something_else_in_the_way(path, kind):
    """It is left alone, and nobody waits for it."""
    path.parent.mkdir()
    IN_THE_WAY[kind](path)
    before = path.lstat()
    started = time.monotonic()
    with one_process(path, 600.0):
        pass
    assert time.monotonic() - started < 1
    assert path.lstat()[:7] == before[:7]
    assert kind != "a link" or path.read_text() == "precious"


def test_where_there_can_be_no_file(tmp_path):
    (tmp_path / "file").touch()
    entered = False
    with one_process(tmp_path / "file" / "a.lock", 600.0):
        entered = True
    assert entered


def test_sweep(path, holder):
    """Files of locks that nobody holds go, others stay."""
    left = path.with_name("left.lock")
    left.touch()
    unrelated = path.with_name("unrelated")
    unrelated.touch()
    locks.sweep(path.parent)
    assert sorted(path.parent.iterdir()) == [path, unrelated]
    with one_process(path, 0.0):  # it still excludes: nobody waits, and the file is not taken away
        pass
    assert path.exists()
    locks.sweep(path.parent / "nowhere")
