"""Locks between processes. They save work and protect nothing that must hold: where there are none, do without.

A lock is an advisory one (``flock``) on a file, so it ends with the process that holds it. Whoever releases it removes
its file first; so whoever gets a lock makes sure that the file is still the one at that path.
"""

import contextlib
import errno
import fcntl
import logging
import os
import platform
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from torch_cute_ops.runtime.files import make_folder

log = logging.getLogger("torch_cute_ops")

QUIET_SECONDS = 3.0
"""How long to wait before the log says for whom."""
LONGEST_PAUSE = 0.2
"""Seconds between two attempts."""

_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@contextlib.contextmanager
def one_process(path: Path, patience: float) -> Iterator[None]:
    """Run the block in one process at a time.

    Runs it at the same time as another process where the file system has no locks, where ``path`` cannot be written, or
    after the other one has held the lock for ``patience`` seconds.

    Args:
        path: the lock's file; its folder is made.
        patience: seconds.
    """
    descriptor = _acquire(path, patience)
    try:
        yield
    finally:
        if descriptor is not None:
            _release(path, descriptor)


def sweep(folder: Path) -> None:
    """Remove the files of locks that nobody holds: their holders died."""
    with contextlib.suppress(OSError):
        for path in folder.glob("*.lock"):
            descriptor = _try(path)
            if descriptor is not None:
                _release(path, descriptor)


def _acquire(path: Path, patience: float) -> int | None:
    """The descriptor of the locked file; ``None``: go on without a lock."""
    started, pause, silent = time.monotonic(), 0.01, True
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
            log.warning("%s has held %s for %.0f s; this process goes on without it", _holder(path), path, waited)
            return None
        if silent and waited >= QUIET_SECONDS:
            silent = False
            log.info("waiting, for %.0f s at most, for %s, which holds %s", patience, _holder(path), path)
        time.sleep(max(0.0, min(pause, patience - waited)))
        pause = min(1.5 * pause, LONGEST_PAUSE)


def _try(path: Path) -> int | None:
    """The descriptor of the locked file; ``None``: another process holds the lock, or has just removed its file.

    Raises:
        OSError: where there can be no lock.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(path, descriptor):
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
            return descriptor
    except (BlockingIOError, PermissionError):  # some file systems say the latter
        pass
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            with contextlib.suppress(OSError):
                path.unlink()  # it cannot be anybody's lock
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _release(path: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        if _is_at(path, descriptor):
            path.unlink()
    # Not only closed: a child that was forked meanwhile has the file open too.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    """Who holds a lock, as its file says."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return "another process"
    try:
        text = os.read(descriptor, 200).decode("ascii", "replace")
    except OSError:
        text = ""
    finally:
        os.close(descriptor)
    return text if text.isprintable() and text else "another process"
