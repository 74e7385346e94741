"""Locks between processes. They only avoid duplicate work: code must also be correct without them.

A lock is an advisory lock (``flock``) on a file, so it ends with its process. The holder deletes the file before it
releases the lock, so a process that acquires a lock must check that the path still names the locked file.
"""

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from torch_cute_ops.runtime.files import make_folder

log = logging.getLogger("torch_cute_ops")

LONGEST_PAUSE: Final = 0.2
"""Longest pause between two attempts, seconds."""

_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@contextlib.contextmanager
def one_process(path: Path, patience: float) -> Iterator[None]:
    """Run the block in one process at a time.

    Several processes may run it at once if the file system does not support locks, if ``path`` cannot be written, or if
    a process holds the lock for longer than ``patience`` seconds.

    Args:
        path: file of the lock; its folder is created.
        patience: longest wait, seconds.
    """
    descriptor = _acquire(path, patience)
    try:
        yield
    finally:
        if descriptor is not None:
            _release(path, descriptor)


def sweep(folder: Path) -> None:
    """Delete the files of locks that no process holds, which killed processes left."""
    with contextlib.suppress(OSError):
        for path in folder.glob("*.lock"):
            descriptor = _try(path)
            if descriptor is not None:
                _release(path, descriptor)


def _acquire(path: Path, patience: float) -> int | None:
    """Return the descriptor of the locked file, or None to go on without a lock."""
    started, pause = time.monotonic(), 0.01
    while True:
        try:
            make_folder(path.parent)
            descriptor = _try(path)
        except OSError as error:
            log.debug("no lock %s (%s)", path, error)
            return None
        if descriptor is not None:
            return descriptor
        waited = time.monotonic() - started
        if waited >= patience:
            log.warning("another process has held %s for %.0f s; this process goes on without it", path, waited)
            return None
        time.sleep(max(0.0, min(pause, patience - waited)))
        pause = min(1.5 * pause, LONGEST_PAUSE)


def _try(path: Path) -> int | None:
    """Return the descriptor of the locked file, or None if another process holds the lock or just deleted the file.

    Raises:
        OSError: if no lock is possible.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(path, descriptor):
            return descriptor
    except (BlockingIOError, PermissionError):  # some file systems raise PermissionError
        pass
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            with contextlib.suppress(OSError):
                path.unlink()  # nobody can hold a lock here
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _release(path: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        if _is_at(path, descriptor):
            path.unlink()
    # Closing alone does not release the lock if a child was forked meanwhile and inherited the descriptor.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
