"""Python's search for garbage in cycles, which waits while many objects are made that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """No search for cycles meanwhile. To parse or decode a program makes a hundred thousand objects, all of which stay,
    and each 700 of them start a search, some through all that torch and the compiler made: that took two thirds of the
    time to decode."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
