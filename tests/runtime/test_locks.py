"""Locks between processes. A lock excludes other processes, ends when its holder exits, and never blocks for long."""

import errno
import fcntl
import multiprocessing
import os
import signal
import time

import pytest

from torch_cute_ops.runtime.locks import one_process

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "locks" / "a.lock"


@pytest.fixture
def holder(path):
    """Start a process that holds the lock until it is killed."""
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
    counter = tmp_path / "counter"
    counter.write_text("0")
    processes = [FORK.Process(target=count_up, args=(path, counter, 50)) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    assert counter.read_text() == "300"


def test_a_lock_ends_with_its_holder(path, holder):
    started = time.monotonic()
    os.kill(holder.pid, signal.SIGKILL)
    with one_process(path, 30.0):
        assert time.monotonic() - started < 5


def test_waiting_is_bounded(path, holder, caplog):
    """Check that after the longest wait a process continues, with a warning."""
    started, entered = time.monotonic(), False
    with one_process(path, 0.4):
        entered = True
    assert entered and 0.4 <= time.monotonic() - started < 5
    (record,) = caplog.records
    assert record.levelname == "WARNING" and str(path) in record.getMessage()


def test_a_file_that_nobody_locks(path):
    """Check that a lock file that a killed process left, and that nobody holds, can be locked."""
    path.parent.mkdir()
    path.write_text("1\nanother-host\n")
    started = time.monotonic()
    with one_process(path, 600.0):
        pass
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK], ids=errno.errorcode.get)
def test_without_locks(path, number, monkeypatch):
    """Check that all processes continue at once if the file system does not support locks."""

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    started = time.monotonic()
    with one_process(path, 600.0), one_process(path, 600.0):
        pass
    assert time.monotonic() - started < 1


def make_link(path):
    (path.parent / "target").write_text("precious")
    path.symlink_to("target")


OBSTACLES = {"a link": make_link, "a FIFO": os.mkfifo, "a folder": os.mkdir}


@pytest.mark.parametrize("kind", OBSTACLES)
def test_something_else_at_the_path(path, kind):
    """Check that something else at the lock's path is not changed, and that nobody waits for it."""
    path.parent.mkdir()
    OBSTACLES[kind](path)
    before = path.lstat()
    started = time.monotonic()
    with one_process(path, 600.0):
        pass
    assert time.monotonic() - started < 1
    assert path.lstat()[:7] == before[:7]
    assert kind != "a link" or path.read_text() == "precious"


def test_a_path_that_cannot_be_created(tmp_path):
    (tmp_path / "file").touch()
    entered = False
    with one_process(tmp_path / "file" / "a.lock", 600.0):
        entered = True
    assert entered
