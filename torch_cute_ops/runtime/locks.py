"""Locks between processes. The locks only avoid duplicate work: callers must be correct even if a lock fails.

A lock is an advisory lock (``flock``) on an empty file. The system releases the lock when its process ends; the file
stays.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from torch_cute_ops.runtime.files import make_folder

log = logging.getLogger("torch_cute_ops")

LONGEST_PAUSE: Final = 0.2
"""Longest pause between two attempts, seconds."""


@contextlib.contextmanager
def one_process(path: Path, patience: float) -> Iterator[None]:
    """Hold a lock between processes while the ``with`` block runs.

    The block also runs without the lock if the file system does not support locks, if ``path`` cannot be written, or if
    another process holds the lock for longer than ``patience`` seconds.

    Args:
        path: file of the lock; its folder is created.
        patience: longest wait, seconds.
    """
    with contextlib.ExitStack() as held:
        try:
            make_folder(path.parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o644)
            held.callback(os.close, descriptor)
            _wait(path, descriptor, patience)
            # Unlock explicitly: a child that was forked meanwhile has inherited the descriptor, so closing the
            # descriptor in this process would not release the lock.
            held.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
        except OSError as error:
            log.debug("no lock %s (%s)", path, error)
        yield


def _wait(path: Path, descriptor: int, patience: float) -> None:
    """Acquire the lock, or log a warning after ``patience`` seconds.

    Raises:
        OSError: if the file system does not support locks.
    """
    started, pause = time.monotonic(), 0.01
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except (BlockingIOError, PermissionError):  # some file systems raise PermissionError
            waited = time.monotonic() - started
        if waited >= patience:
            log.warning("another process has held %s for %.0f s; this process goes on without it", path, waited)
            return
        time.sleep(max(0.0, min(pause, patience - waited)))
        pause = min(1.5 * pause, LONGEST_PAUSE)
