"""Whether calls are tuned: all of the tuner that an op has to import before anybody asks for it."""

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

generation = 0
"""Changes whenever the tuner may answer otherwise, or do more, than before: whoever keeps a choice keeps this number
with it."""

blocks = 0
"""How many ``autotune`` blocks there are in all threads: without any, nobody has to ask whether this is inside one."""


class Block:
    """An ``autotune`` block: each key is settled in it once.

    Attributes:
        timeout_s: seconds to wait for other ranks.
        settled: the keys.
        absent: ranks that did not come in time.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.settled: set[Any] = set()
        self.absent: set[int] = set()


_block: ContextVar[Block | None] = ContextVar("torch_cute_ops.autotune", default=None)
_changing = threading.Lock()


@contextlib.contextmanager
def autotune(*, timeout_s: float = 300.0) -> Iterator[None]:
    """Have calls inside the block choose their backend and tactic by timing, where there is something to choose.

    The first call with new static properties, or with an M of another bucket, checks the candidates' results against
    the reference, times those that are right, with a cold L2, and keeps the fastest: in this process and in a file for
    later ones, which then use it without tuning. It takes the time of compiling the candidates, about a second of the
    GPU, and memory for copies of the operands. A candidate with a wrong result is reported in the log and not used.
    Nothing is tuned in a CUDA-graph capture, for calls that name a backend, on a CPU, or in other threads than the one
    that has entered the block. Where tuning fails, calls use the choice that they would have had, and a warning says
    why.

    With ``torch.distributed`` initialised all ranks of the default process group have to make the same calls in the
    block, and end up with the same choices: a rank with a choice from earlier passes it on; else the sum over ranks of
    the times decides, among candidates that all ranks have timed that did not fail. A rank that fails says so, and the
    others go on at once. For a rank that does not come they wait ``timeout_s``, or twice that where it is rank 0, and
    then decide without it; when it comes, it takes what they decided.

    Example:
        >>> with torch_cute_ops.autotune():
        ...     model(tokens)

    Args:
        timeout_s: seconds to wait for a rank; 0: to wait for none.

    Raises:
        RuntimeError: in a call, if the store of ``torch.distributed`` cannot be reached.
        ValueError: if ``timeout_s`` is negative or not a number.
    """
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
    """Whether this is inside an ``autotune`` block."""
    return _block.get() is not None


def block() -> Block | None:
    """The innermost block that this is inside of."""
    return _block.get()


def changed(more_blocks: int = 0) -> None:
    """Have everybody ask again; there are so many more ``autotune`` blocks than before."""
    global generation, blocks
    with _changing:
        generation += 1
        blocks += more_blocks
