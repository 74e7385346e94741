"""Process groups by name, and the state of the memory that GPUs share."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from torch_cute_ops.runtime import groups


@pytest.fixture
def group() -> Iterator[Any]:
    """Create a group of one rank."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=7))
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_group_by_name(group: Any) -> None:
    assert groups.group_of(group.group_name) is group
    assert groups.ranks_of(group.group_name) == 1
    assert groups.timeout_of(group, torch.device("cuda", 0)) == 7.0
    x = torch.ones(3)
    assert groups.sum_over_ranks(x, group.group_name) is x


def test_names_without_a_group() -> None:
    assert groups.ranks_of("") == 1
    assert groups.ranks_of(groups.name_without_group(6)) == 6
    with pytest.raises(ValueError, match="group is '7', which names no process group of this process; pass group_name"):
        groups.ranks_of("7")
    with pytest.raises(ValueError, match="names no process group"):
        groups.sum_over_ranks(torch.ones(3), "6 ranks")


@pytest.mark.parametrize(
    ("members", "of_host", "reason"),
    [
        (range(8), "", None),
        (range(9), "", "group 'g' has 9 ranks; expected at most 8"),
        (range(4, 8), "4", None),
        (range(2, 6), "4", "the ranks of group 'g' are on several hosts"),
    ],
)
def test_reasons(members: Any, of_host: str, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check which groups the Inductor pass leaves to other collectives."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", of_host)
    monkeypatch.setattr(groups, "group_of", lambda name: name)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [*members])
    assert groups.reason_unsupported("g") == reason


@pytest.mark.parametrize(("report", "ranks"), [([0, 1, 0], "rank 2"), ([1, 0, 1], "ranks 0, 3")], ids=["one", "two"])
def test_missing_ranks_are_named(report: list[int], ranks: str) -> None:
    """Check the error of the call after a launch on rank 1 of four that waited in vain."""
    memory = object.__new__(groups.SharedMemory)
    memory.name, memory.rank, memory.ranks, memory.timeout_s = "tp", 1, 4, 30.0
    memory._report, memory._nothing = np.array(report, np.int32), bytes(12)
    with pytest.raises(RuntimeError, match=rf"^{ranks} of group 'tp' sent no rows within 30 s in an earlier call"):
        memory.enter()
