"""Decisions that all ranks of ``torch.distributed`` make together. The wait for a failed rank is bounded."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger("torch_cute_ops")

LONGEST_PAUSE = 0.2
"""Longest pause between two polls of the store, seconds."""


@dataclass(frozen=True)
class Ranks:
    """Ranks of the default process group.

    Attributes:
        store: key-value store of the process group.
        rank: rank of this process.
        world: number of ranks.
    """

    store: Any
    rank: int
    world: int

    def post(self, name: str, text: str) -> None:
        """Publish this rank's ``text`` for the decision ``name``."""
        self.store.set(_post(name, self.rank), text)


def ranks() -> Ranks | None:
    """Return the ranks of the default process group, or None if this process is the only rank."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None
    store = distributed.distributed_c10d._get_default_store()
    return Ranks(store, distributed.get_rank(), distributed.get_world_size())


def agree(
    ranks: Ranks,
    name: str,
    text: str,
    decide: Callable[[Mapping[int, str]], str],
    timeout_s: float,
    absent: set[int],
) -> str:
    """Make the decision ``name`` together with the other ranks. Return the same text on every rank.

    Every rank posts its ``text``, even if its work failed. Rank 0 waits up to ``timeout_s`` for the other posts,
    applies ``decide`` to the posts that arrived, and publishes the result. The other ranks wait up to twice as long for
    the result, because rank 0 may arrive up to ``timeout_s`` later than these ranks, and then wait ``timeout_s``
    itself. A rank that waits in vain decides instead of rank 0. The first decision that is written to the store wins
    (compare and set), and all ranks use it. So ranks still agree if they arrive late, or if several ranks give up on
    rank 0 at the same time. If a rank has died or never calls ``agree``, the other ranks wait for it once, without an
    error.

    Args:
        ranks: ranks that decide.
        name: unique name of the decision, the same on every rank.
        text: post of this rank.
        decide: function that maps {rank: text} to the decision. This rank's text is always present.
        timeout_s: longest wait of rank 0, seconds. With 0, rank 0 uses the posts that have already arrived.
        absent: ranks that posted nothing for earlier decisions; ``agree`` does not wait for these ranks. ``agree`` adds
            ranks that post nothing now, and removes ranks that post.

    Raises:
        RuntimeError: if the store cannot be reached, for example because the process that hosts it died. The state of
            the other ranks is then unknown.
    """
    decision = f"torch_cute_ops/{name}/decision"
    try:
        ranks.post(name, text)
        if ranks.store.check([decision]):
            return _text(ranks.store.get(decision))
        if ranks.rank != 0:
            patience = 0.0 if 0 in absent else 2 * timeout_s
            if _came(ranks.store, [decision], patience):
                absent.discard(0)
                return _text(ranks.store.get(decision))
            absent.add(0)
        posts = _collect(ranks, name, timeout_s if ranks.rank == 0 else 0.0, absent)
        return _text(ranks.store.compare_set(decision, "", decide(posts)))
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {ranks.rank} cannot agree with the others on {name}: the store of torch.distributed failed: {error}"
        ) from error


def posts(ranks: Ranks, name: str, text: str, timeout_s: float) -> dict[int, str]:
    """Exchange texts: return the posts, by rank, that arrive within ``timeout_s`` seconds.

    Args:
        ranks: ranks that post.
        name: unique name of the exchange, the same on every rank.
        text: post of this rank.
        timeout_s: longest wait for the other ranks, seconds.

    Raises:
        RuntimeError: if the store cannot be reached.
    """
    ranks.post(name, text)
    keys = [_post(name, rank) for rank in range(ranks.world)]
    _came(ranks.store, keys, timeout_s)
    return {rank: _text(ranks.store.get(key)) for rank, key in enumerate(keys) if ranks.store.check([key])}


def _collect(ranks: Ranks, name: str, patience: float, absent: set[int]) -> dict[int, str]:
    """Return the posts of all ranks, waiting up to ``patience`` seconds for ranks that are not in ``absent``.

    Update ``absent``.
    """
    everyone = range(ranks.world)
    _came(ranks.store, [_post(name, rank) for rank in everyone if rank not in absent], patience)
    present = [rank for rank in everyone if ranks.store.check([_post(name, rank)])]
    missing = set(everyone) - set(present)
    if missing - absent:
        log.warning("ranks %s did not answer in time; %s is decided without them", sorted(missing), name)
    absent.clear()
    absent.update(missing)
    return {rank: _text(ranks.store.get(_post(name, rank))) for rank in present}


def _came(store: Any, keys: list[str], patience: float) -> bool:
    """Wait until all keys are set; return False after ``patience`` seconds.

    The function polls instead of calling ``store.wait``, which would hold the store's lock. Other threads of the
    process need the lock, such as a process group's watchdog.
    """
    deadline, pause = time.monotonic() + patience, 0.001
    while not store.check(keys):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(1.5 * pause, LONGEST_PAUSE)
    return True


def _post(name: str, rank: int) -> str:
    return f"torch_cute_ops/{name}/{rank}"


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode()
