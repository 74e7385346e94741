"""Warnings that a process gives once, however often their cause comes up."""

import logging
import threading
from collections.abc import Hashable, Iterable

log = logging.getLogger("torch_cute_ops")

_lock = threading.Lock()
_given: set[Hashable] = set()


def warn(cause: Hashable, message: str, *args: object) -> None:
    """Log a warning, unless one was logged for the same ``cause``."""
    with _lock:
        if cause in _given:
            return
        _given.add(cause)
    log.warning(message, *args)


def given() -> frozenset[Hashable]:
    """The causes that this process has warned about."""
    with _lock:
        return frozenset(_given)


def adopt(causes: Iterable[Hashable]) -> None:
    """Leave out the warnings that the parent of this process has given."""
    with _lock:
        _given.update(causes)
