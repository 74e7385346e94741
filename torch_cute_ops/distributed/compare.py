"""Compare settings and sizes among the ranks of a group through the group's store, without collectives or device
synchronisation."""

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
"""Maximum number of differences in a message."""
PATIENCE_S: Final = 10.0
"""Seconds after which a rank that waits for other ranks' numbers of rows logs a warning."""
DEFAULT_TIMEOUT: Final = timedelta(minutes=5)
"""Time-out to use if a store defines none."""


class Members(NamedTuple):
    """Ranks of a process group.

    Attributes:
        ranks: the group's ranks, numbered as in the group.
        numbers: numbers of the same ranks in the default group, for messages.
    """

    ranks: Ranks
    numbers: list[int]

    @property
    def timeout_s(self) -> float:
        """Time-out of the group's collectives, seconds."""
        return float(getattr(self.ranks.store, "timeout", DEFAULT_TIMEOUT).total_seconds())

    def post(self, name: str, text: str, timeout_s: float) -> dict[int, str]:
        """Post ``text`` under ``name`` and return the texts of all ranks that post in time.

        Raises:
            RuntimeError: if the store cannot be reached.
        """
        try:
            return posts(self.ranks, name, text, timeout_s)
        except RuntimeError as error:
            me = self.numbers[self.ranks.rank]
            raise RuntimeError(f"{name.partition('/')[0]}: rank {me} cannot reach the store: {error}") from error

    def missing(self, found: Mapping[int, str]) -> str:
        """Return the ranks that are missing in ``found`` as text, or an empty string if all ranks posted."""
        absent = [number for rank, number in enumerate(self.numbers) if rank not in found]
        return ", ".join(map(str, absent)) and f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"


def members(group: Group | None = None) -> Members | None:
    """Return the ranks of a group, or of the default group for None. Return None if the group has only one rank."""
    everyone = ranks()
    if everyone is None or dist.get_backend(group) == "fake":  # the backend "fake" simulates all ranks in one process
        return None
    if group is None:
        return Members(everyone, [*range(everyone.world)])
    numbers = dist.get_process_group_ranks(group)
    if len(numbers) == 1:
        return None
    store = dist.distributed_c10d.PrefixStore(f"torch_cute_ops/{group.group_name}/{numbers}", everyone.store)
    return Members(Ranks(store, numbers.index(everyone.rank), len(numbers)), numbers)


_comparisons: Counter[object] = Counter()
"""Number of comparisons so far, keyed by name and group. All ranks make the same comparisons in the same order, so the
number identifies a comparison on all ranks."""


def compare(name: str, facts: Mapping[str, Any], group: Group | None = None, timeout_s: float | None = None) -> None:
    """Check that all ranks of a group pass equal ``facts``. Every rank must make the same calls of ``compare`` in the
    same order.

    Args:
        name: name of the caller, for messages.
        facts: values to compare, by name; JSON-serialisable.
        group: process group; ``None`` for the default group.
        timeout_s: seconds to wait for other ranks; ``None`` for the time-out of the collectives.

    Raises:
        RuntimeError: on every rank, if a rank differs or is late. The message names the rank and the differences.
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


# Numbers of rows


@dataclass
class _Rows:
    """State of one group: the leading dimensions that all ranks last had, and the number of comparisons so far."""

    lead: tuple[int, ...] = ()
    comparisons: int = 0


_rows: dict[str, _Rows] = {}
"""State of each group, keyed by the group's name. A group as key would never be freed."""


def agree_on_rows(name: str, lead: tuple[int, ...], group: Group) -> None:
    """Before a collective, check that all ranks pass the same number of rows.

    A rank whose number of rows is the same as in its last call exchanges nothing. If the number has changed, it must
    have changed on all ranks, which then compare it through the store. In compiled code this check does not run; in a
    CUDA graph it runs only during capture.

    Args:
        name: name of the layer, for messages.
        lead: leading dimensions of this rank's rows.
        group: group of the collective that follows.

    Raises:
        RuntimeError: if the numbers differ (the message shows each rank's rows), or if the rows of some ranks did not
            change within the process group's time-out.
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
        log.warning("%s: %s%s; it may be late, or have another number of rows", name, waits, who.missing(found))
        found = who.post(topic, text, limit - PATIENCE_S)
    if who.missing(found):
        raise RuntimeError(
            f"{name}: {waits}{who.missing(found)}, which did not come within {limit:g} s or kept its number of rows; "
            "expected equally many rows on all ranks"
        )
    state.comparisons += 1  # count failed comparisons too: the next comparison must not read these posts
    counts = {who.numbers[rank]: tuple(json.loads(each)) for rank, each in found.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"rank {number} has {_counted(each)}" for number, each in sorted(counts.items()))
        raise RuntimeError(f"{name}: {shown}; expected equally many rows on all ranks")


def _counted(lead: tuple[int, ...]) -> str:
    return f"{lead[0]} rows" if len(lead) == 1 else f"rows {lead}"
