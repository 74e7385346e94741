"""Warnings that are logged once per process and cause."""

import logging
import threading
from collections.abc import Hashable

log = logging.getLogger("torch_cute_ops")

_lock = threading.Lock()
_given: set[Hashable] = set()


def warn(cause: Hashable, message: str, *args: object) -> None:
    """Log a warning, unless a warning was already logged for ``cause``."""
    with _lock:
        if cause in _given:
            return
        _given.add(cause)
    log.warning(message, *args)
