"""Locks between processes that save work, and do without where they cannot be had."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("torch_cute_ops")


@contextlib.contextmanager
def one_process(path: Path, patience: float) -> Iterator[None]:
    """One process at a time; where locks do not work, or the other one holds it for ``patience`` seconds, all may."""
    from filelock import FileLock, Timeout

    lock = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, timeout=patience)
        lock.acquire()
    except (OSError, NotImplementedError, Timeout) as error:
        log.debug("no lock %s (%s)", path, error)
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
