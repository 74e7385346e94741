"""How the ranks of ``torch.distributed`` decide something together, without waiting for ever for one that failed."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger("torch_cute_ops")

LONGEST_PAUSE = 0.2
"""Seconds between two looks at the store."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of the default process group, and its store.

    Attributes:
        store: the default store.
        rank: of this process.
        world: how many there are.
    """

    store: Any
    rank: int
    world: int

    def post(self, name: str, text: str) -> None:
        """Tell the others this rank's ``text`` on ``name``."""
        self.store.set(_post(name, self.rank), text)


def ranks() -> Ranks | None:
    """Those of the default process group; ``None`` if there is none, or this process is alone in it."""
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
    """What all ranks decide on ``name``: the same text on each of them.

    Every rank posts its ``text``, whatever became of its part of the work. Rank 0 waits for the posts of the others,
    ``timeout_s`` at most, applies ``decide`` to those that came, and writes the result. The others wait for the result,
    twice as long at most: rank 0 may come that much later, and wait as long again. Where none came by then, a rank does
    what rank 0 should have done. The store lets the first write win (compare and set), and all take what is written:
    so ranks that come late, or give up on rank 0 at the same time, still agree, and a rank that died or went another
    way costs the others one wait and no error.

    Args:
        ranks: who decides.
        name: what is decided; the same on every rank, and new.
        text: this rank's post.
        decide: makes the decision out of posts by rank; its own is always among them.
        timeout_s: seconds that rank 0 waits; 0: it takes what is there.
        absent: ranks for which no time is spent, as they did not come before; those that do not come are added.

    Raises:
        RuntimeError: if the store cannot be reached, as where the process that has it died: then nothing is known of
            the other ranks.
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


def _collect(ranks: Ranks, name: str, patience: float, absent: set[int]) -> dict[int, str]:
    """The posts that came, after waiting for those of ranks that were not absent before."""
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
    """Whether all keys are set, within so many seconds.

    Looks again and again instead of ``store.wait``, which holds the store's lock against other threads of the process,
    such as the watchdog of a process group.
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
