"""What the ranks of a group have to have in common, compared by their hosts through the store: no collective is called,
and nothing waits for a device."""

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from torch_cute_ops.runtime.agreement import Ranks, posts, ranks

log = logging.getLogger("torch_cute_ops")

Group = dist.ProcessGroup

SHOWN: Final = 4
"""Differences that a message lists."""
PATIENCE_S: Final = 10.0
"""Seconds after which a rank that waits for others with its rows says so."""
DEFAULT_TIMEOUT: Final = timedelta(minutes=5)
"""Of a store that has none."""


class Members(NamedTuple):
    """The ranks of a group.

    Attributes:
        ranks: as they are numbered in the group.
        numbers: of each in the default group, by which messages call it.
    """

    ranks: Ranks
    numbers: list[int]

    @property
    def timeout_s(self) -> float:
        """That of the process group, for which its collectives would wait too."""
        return float(getattr(self.ranks.store, "timeout", DEFAULT_TIMEOUT).total_seconds())

    def post(self, name: str, text: str, timeout_s: float) -> dict[int, str]:
        """What each rank posts for ``name``, of those that come in time.

        Raises:
            RuntimeError: if the store cannot be reached.
        """
        try:
            return posts(self.ranks, name, text, timeout_s)
        except RuntimeError as error:
            me = self.numbers[self.ranks.rank]
            raise RuntimeError(f"{name.partition('/')[0]}: rank {me} cannot reach the store: {error}") from error

    def missing(self, found: Mapping[int, str]) -> str:
        """The ranks that have posted nothing, in words; an empty string: all have."""
        absent = [number for rank, number in enumerate(self.numbers) if rank not in found]
        return ", ".join(map(str, absent)) and f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"


def members(group: Group | None = None) -> Members | None:
    """Those of a group, or of the default group; ``None``: there is nobody to compare with."""
    everyone = ranks()
    if everyone is None or dist.get_backend(group) == "fake":  # one process stands for all: nobody answers
        return None
    if group is None:
        return Members(everyone, [*range(everyone.world)])
    numbers = dist.get_process_group_ranks(group)
    if len(numbers) == 1:
        return None
    store = dist.distributed_c10d.PrefixStore(f"torch_cute_ops/{group.group_name}/{numbers}", everyone.store)
    return Members(Ranks(store, numbers.index(everyone.rank), len(numbers)), numbers)


_comparisons: Counter[object] = Counter()
"""How often ranks of a group were compared: all in the same order, so that the numbers name what they post."""


def compare(name: str, facts: Mapping[str, Any], group: Group | None = None, timeout_s: float | None = None) -> None:
    """Compare facts of the ranks of a group; each of them calls it, in the same order.

    Args:
        name: of what asks, for messages.
        facts: what ``json`` can hold.
        group: ``None``: the default group.
        timeout_s: how long the others are waited for; ``None``: as long as collectives would wait for them.

    Raises:
        RuntimeError: on every rank: naming a rank that differs, and in what, or one that did not come in time.
    """
    who = members(group)
    if who is None:
        return
    key = (name, None if group is None else group.group_name)
    _comparisons[key] += 1
    limit = who.timeout_s if timeout_s is None else timeout_s
    found = who.post(f"{name}/{_comparisons[key]}", json.dumps(facts), limit)
    missing = who.missing(found)
    if missing:
        raise RuntimeError(f"{name}: {missing} did not come within {limit:g} s")
    first = json.loads(found[0])
    for rank in range(1, who.ranks.world):
        other = json.loads(found[rank])
        differing = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if differing:
            shown = "; ".join(
                f"{key} is {other.get(key)!r}, on rank {who.numbers[0]} {first.get(key)!r}" for key in differing[:SHOWN]
            )
            more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
            raise RuntimeError(f"{name}: rank {who.numbers[rank]} differs: {shown}{more}")


# Rows


@dataclass
class _Rows:
    """What the ranks of a group last had: the leading dimensions, and how often all have compared theirs."""

    lead: tuple[int, ...] = ()
    comparisons: int = 0


_rows: dict[str, _Rows] = {}
"""By the names of groups: a group itself would live on here."""


def agree_on_rows(name: str, lead: tuple[int, ...], group: Group) -> None:
    """Refuse to call a collective whose ranks have different numbers of rows.

    A call with as many rows as the last one costs a comparison of numbers. Where they change, which they have to do on
    all ranks in the same call, the ranks compare them through the store, before the collective. Compiled code compares
    nothing, and neither does the replay of a CUDA graph, whose capture did.

    Args:
        name: of the layer, for messages.
        lead: the leading dimensions of this rank's rows.
        group: whose collective follows.

    Raises:
        RuntimeError: naming what each rank has, or the ranks whose rows did not change within the time-out of the
            process group.
    """
    if torch.compiler.is_compiling():
        return
    state = _rows.get(group.group_name)
    if state is not None and state.lead == lead:
        return
    state = _rows.setdefault(group.group_name, _Rows())
    who = members(group)
    if who is not None:
        _compare_rows(name, lead, state, who)
    state.lead = lead


def _compare_rows(name: str, lead: tuple[int, ...], state: _Rows, who: Members) -> None:
    topic, text, limit = f"{name}/rows/{state.comparisons}", json.dumps(lead), who.timeout_s
    before = f", had {_counted(state.lead)} before," if state.lead else ""
    waits = f"rank {who.numbers[who.ranks.rank]} has {_counted(lead)}{before} and waits for "
    found = who.post(topic, text, min(PATIENCE_S, limit))
    if who.missing(found) and limit > PATIENCE_S:
        log.warning("%s: %s%s, which may be late, or have other rows", name, waits, who.missing(found))
        found = who.post(topic, text, limit - PATIENCE_S)
    if who.missing(found):
        raise RuntimeError(
            f"{name}: {waits}{who.missing(found)}, which did not come within {limit:g} s, or have as many rows as "
            "before; expected equally many on all ranks"
        )
    state.comparisons += 1  # of rows that differ too, or the next call would read what was said here
    counts = {who.numbers[rank]: tuple(json.loads(each)) for rank, each in found.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"rank {number} has {_counted(each)}" for number, each in sorted(counts.items()))
        raise RuntimeError(f"{name}: {shown}; expected equally many rows on all ranks")


def _counted(lead: tuple[int, ...]) -> str:
    return f"{lead[0]} rows" if len(lead) == 1 else f"rows {lead}"
