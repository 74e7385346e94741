"""State of ``autotune`` blocks. This module is separate from the tuner because ops import it even if nothing is
tuned."""

import contextlib
import numbers
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

generation = 0
"""Version of the tuner's state. The version changes whenever ``lookup`` or ``tune`` may behave differently, so that
callers who keep a choice can detect that it is outdated."""

blocks = 0
"""Number of active ``autotune`` blocks in all threads. If the number is 0, callers need not look for a block."""


class Block:
    """State of one ``autotune`` block.

    Attributes:
        timeout_s: longest wait for other ranks, seconds.
        settled: keys that were already tuned in this block.
        absent: ranks that did not vote in time.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.settled: set[Any] = set()
        self.absent: set[int] = set()


_block: ContextVar[Block | None] = ContextVar("torch_cute_ops.autotune", default=None)
_changing = threading.Lock()


@contextlib.contextmanager
def autotune(*, timeout_s: float = 300.0) -> Iterator[None]:
    """Tune calls inside the block: choose their backend and tactic by timing, if there are several candidates.

    The first call with new static properties, or with an M in another bucket, compares the candidates' results with the
    reference, times the correct candidates with a cold L2, and stores the fastest candidate, in memory and in a file
    for later processes. Besides compiling the candidates, this takes about a second of GPU time, and memory for copies
    of the operands. Candidates with a wrong result are logged and not used. Nothing is tuned in a CUDA-graph capture,
    for calls that name a backend, on a CPU, or in threads other than the block's. If tuning fails, calls use the
    candidate with the shortest estimate, and a warning gives the reason.

    If ``torch.distributed`` is initialised, all ranks of the default process group must make the same calls in the
    block, and get the same choices. If a rank knows an earlier choice, all ranks use it. Otherwise the ranks compare
    the candidates that all ranks without a failure have timed, and choose the candidate with the shortest total time. A
    rank whose tuning fails tells the other ranks, which do not wait for it. The ranks wait ``timeout_s`` for a missing
    rank, or twice as long for rank 0. Then the ranks decide without the missing rank; if this rank arrives later, it
    uses their decision.

    Example:
        >>> with torch_cute_ops.autotune():
        ...     model(tokens)

    Args:
        timeout_s: longest wait for a rank, seconds; 0 to wait for none.

    Raises:
        RuntimeError: in a call, if the store of ``torch.distributed`` cannot be reached.
        TypeError: if ``timeout_s`` is not a number.
        ValueError: if ``timeout_s`` is negative or NaN.
    """
    if not isinstance(timeout_s, numbers.Real) or isinstance(timeout_s, bool):
        raise TypeError(f"timeout_s={timeout_s!r} is a {type(timeout_s).__name__}; use a number of seconds, 0 or more")
    if not timeout_s >= 0:
        raise ValueError(f"timeout_s={timeout_s!r}; use a number of seconds, 0 or more")
    changed(+1)
    token = _block.set(Block(timeout_s))
    try:
        yield
    finally:
        _block.reset(token)
        changed(-1)


def is_on() -> bool:
    """Return True inside an ``autotune`` block."""
    return _block.get() is not None


def block() -> Block | None:
    """Return the innermost enclosing ``autotune`` block, or None."""
    return _block.get()


def changed(more_blocks: int = 0) -> None:
    """Invalidate the choices that callers have cached, and add ``more_blocks`` to the number of open blocks."""
    global generation, blocks
    with _changing:
        generation += 1
        blocks += more_blocks
