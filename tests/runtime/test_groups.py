"""Process groups by name, and the state of the memory that GPUs share."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from torch_cute_ops.kernels.all_reduce_rows import config, instructions
from torch_cute_ops.registry import OPS
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
    """Check the error of a call on rank 1 of four, after a launch in which this rank waited in vain for other ranks."""
    memory = object.__new__(groups.SharedMemory)
    memory.name, memory.rank, memory.ranks, memory.timeout_s = "tp", 1, 4, 30.0
    memory._report, memory._nothing = np.array(report, np.int32), bytes(12)
    with pytest.raises(RuntimeError, match=rf"^{ranks} of group 'tp' sent no rows within 30 s in an earlier call"):
        memory.enter()


class Stream:
    """Stand-in for ``torch.cuda.Stream``, for which ``stream != None`` is also False."""

    def __init__(self, handle: int, is_capturing: bool = False) -> None:
        self.cuda_stream, self.is_capturing = handle, is_capturing
        self.waited: list[int] = []

    def __eq__(self, other: object) -> bool:
        return other is None or (isinstance(other, Stream) and other.cuda_stream == self.cuda_stream)

    def __hash__(self) -> int:
        return self.cuda_stream

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.cuda_stream)


def test_launches_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a launch waits for the last launch on another stream, of any group of the device, but that a launch
    inside a capture waits only for launches of the same capture."""
    current = Stream(0)
    monkeypatch.setattr(groups, "_last_streams", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current.is_capturing)
    monkeypatch.setattr(groups, "_is_capturing", lambda stream: stream.is_capturing)
    streams = [Stream(1), Stream(2), Stream(3, is_capturing=True), Stream(4, is_capturing=True)]
    device = torch.device("cuda", 0)
    for i in (0, 0, 1, 1, 0, 2, 3, 1):
        current = streams[i]
        groups.follow_last_launch(device)
    assert [stream.waited for stream in streams] == [[2], [1, 1], [], [3]]
    streams[3].is_capturing = False  # the capture has ended
    current = Stream(5, is_capturing=True)
    groups.follow_last_launch(device)
    assert current.waited == []
    current = Stream(6)
    groups.follow_last_launch(torch.device("cuda", 1))
    assert current.waited == []


def test_torch_streams_are_not_unequal_to_none() -> None:
    """Check that ``stream != None`` is False in torch, which is why ``follow_last_launch`` compares handles."""
    stream = torch.Stream(stream_id=0, device_index=0, device_type=1)
    assert (stream != None) is False  # noqa: E711


def test_memory_of_a_group_that_was_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a new group with the name of an old group gets new memory, which is created once."""
    made: list[Any] = []

    class Memory:
        def __init__(self, name: str, device: int) -> None:
            self.group = groups.group_of(name)
            made.append(self)

        def reset(self) -> None:
            made.append("reset")

    group = object()
    monkeypatch.setattr(groups, "_shared", {})
    monkeypatch.setattr(groups, "SharedMemory", Memory)
    monkeypatch.setattr(groups, "group_of", lambda name: group)
    first = groups.shared_memory("0", 0)
    assert groups.shared_memory("0", 0) is first and made == [first]
    group = object()
    groups.reset_all_reduce("0")  # the old group is gone
    assert made == [first]
    second = groups.shared_memory("0", 0)
    assert second is not first and second.group is group
    groups.reset_all_reduce("0")
    assert made == [first, second, "reset"]
    with pytest.raises(
        RuntimeError, match="a call of 2 ranks was planned without a group, so it cannot run; pass group="
    ):
        groups.shared_memory(groups.name_without_group(2), 0)


def test_key_contains_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that launchers of a group of one rank are not used after the group was made again with two ranks."""
    path = OPS["all_reduce_add_rmsnorm"].path
    call = OPS["all_reduce_add_rmsnorm"].bind(torch.ones(1, 64), torch.ones(1, 64), torch.ones(64), "0")
    keys = []
    for ranks in (1, 2):
        monkeypatch.setattr(groups, "ranks_of", lambda name, ranks=ranks: ranks)
        keys.append(path.key(call, 0))
    assert keys[0] != keys[1]


def test_memory_has_the_form_that_the_kernel_expects() -> None:
    """Check the numbers that the host code repeats, because it must not import kernels."""
    assert groups.MAX_RANKS == config.MAX_RANKS and groups._CONTROL_WORDS == config.CONTROL_WORDS
    assert groups._ABSENT % 2**32 == instructions.ABSENT
