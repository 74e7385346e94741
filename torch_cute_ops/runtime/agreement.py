"""Decisions that the ranks of ``torch.distributed`` make together, without waiting for ever for one that failed."""

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
    """The ranks of the default process group, and its store.

    Attributes:
        store: the store of the default process group.
        rank: this process's.
        world: the number of ranks.
    """

    store: Any
    rank: int
    world: int

    def post(self, name: str, text: str) -> None:
        """Publish this rank's ``text`` for the decision ``name``."""
        self.store.set(_post(name, self.rank), text)


def ranks() -> Ranks | None:
    """The ranks of the default process group; ``None`` if there is no group, or only this process in it."""
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
    """The decision on ``name``, the same text on every rank.

    Every rank posts its ``text``, even if its part of the work failed. Rank 0 waits up to ``timeout_s`` for the other
    posts, applies ``decide`` to those that came, and publishes the result. The other ranks wait for the result up to
    twice as long, since rank 0 may arrive that much later and then wait itself; after that, a rank decides in rank 0's
    place. The first decision to be written wins (compare and set), and all ranks take it: so ranks that arrive late, or
    give up on rank 0 at the same time, still agree. A rank that died, or never asks for this decision, costs the others
    one wait and no error.

    Args:
        ranks: who decides.
        name: what is decided; the same on every rank, and used once.
        text: this rank's post.
        decide: makes the decision from the posts by rank; this rank's is always among them.
        timeout_s: seconds that rank 0 waits; 0: it takes the posts that are there.
        absent: ranks that are not waited for, because they did not come before. Those that do not come now are added,
            and those that do are removed.

    Raises:
        RuntimeError: if the store cannot be reached, for example because the process that hosts it died: then nothing
            is known of the other ranks.
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
            f"rank {ranks.rank} cannot agree with the others on {name}: the store of torch.distributed fails: {error}"
        ) from error


def posts(ranks: Ranks, name: str, text: str, timeout_s: float) -> dict[int, str]:
    """What each rank posts for ``name``, of those that come within ``timeout_s`` seconds.

    Args:
        ranks: who posts.
        name: what is posted for; the same on every rank, and used once.
        text: this rank's post.
        timeout_s: seconds that the others are waited for.

    Raises:
        RuntimeError: if the store cannot be reached.
    """
    ranks.post(name, text)
    keys = [_post(name, rank) for rank in range(ranks.world)]
    _came(ranks.store, keys, timeout_s)
    return {rank: _text(ranks.store.get(key)) for rank, key in enumerate(keys) if ranks.store.check([key])}


def _collect(ranks: Ranks, name: str, patience: float, absent: set[int]) -> dict[int, str]:
    """The posts that came within ``patience`` seconds from ranks that were not absent before, and any from those."""
    everyone = range(ranks.world)
    _came(ranks.store, [_post(name, rank) for rank in everyone if rank not in absent], patience)
    present = [rank for rank in everyone if ranks.store.check([_post(name, rank)])]
    missing = set(everyone) - set(present)
    if missing - absent:
        log.warning("ranks %s did not come in time; %s is decided without them", sorted(missing), name)
    absent.clear()
    absent.update(missing)
    return {rank: _text(ranks.store.get(_post(name, rank))) for rank in present}


def _came(store: Any, keys: list[str], patience: float) -> bool:
    """Whether all keys are set within ``patience`` seconds.

    Polls, because ``store.wait`` holds the store's lock against other threads of the process, such as a process group's
    watchdog.
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
