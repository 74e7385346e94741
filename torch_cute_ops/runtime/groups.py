"""Process groups by name, and the memory that the GPUs of a group share.

``torch.distributed`` names each group. Ops take the name, as torch's functional collectives do, because a compiled
graph can hold a string.
"""

import os
import threading
from collections.abc import Iterator
from typing import Any, Final

import torch

from torch_cute_ops.runtime.arch import sm_count

SLOT_BYTES: Final = 32 << 20
"""Bytes of the rows that all peers together can send to a GPU in one launch."""
MIN_SLOT_BYTES: Final = 8 << 20
"""Smallest number of bytes that each peer can send to a GPU in one launch."""
MAX_RANKS: Final = 8
_CONTROL_WORDS: Final = 1028
_ABSENT: Final = -1
_NO_GROUP: Final = " ranks"

_shared: dict[tuple[str, int], "SharedMemory"] = {}
_last_streams: dict[tuple[int, bool], torch.cuda.Stream] = {}
"""Stream of the last launch of any group, keyed by (index of the device, True if a CUDA graph was being captured)."""
_creating = threading.Lock()


def group_of(name: str) -> Any:
    """Return the process group with this name.

    Raises:
        ValueError: if there is no such group in this process.
    """
    from torch.distributed import distributed_c10d

    resolve: Any = getattr(distributed_c10d, "_resolve_process_group")  # noqa: B009, not exported
    try:
        return resolve(name)
    except (RuntimeError, ValueError, LookupError) as error:
        raise ValueError(
            f"group is {name!r}, which names no process group of this process; pass group_name of a group, such as "
            "torch.distributed.group.WORLD.group_name, or '' for this process alone"
        ) from error


def name_without_group(ranks: int) -> str:
    """Return a name that stands for any group of this many ranks, to plan a kernel without a group."""
    return f"{ranks}{_NO_GROUP}"


def ranks_of(name: str) -> int:
    """Return the number of ranks of the group with this name, which may come from ``name_without_group``. The empty
    name stands for this process alone.

    Raises:
        ValueError: if there is no such group in this process.
    """
    if not name:
        return 1
    count = name.removesuffix(_NO_GROUP)
    return int(count) if count != name and count.isdecimal() else int(group_of(name).size())


def reason_unsupported(name: str) -> str | None:
    """Return the reason why the GPUs of a group cannot exchange rows through their memory, or None. The GPUs of one
    host are assumed to have access to each other's memory."""
    from torch.distributed import get_process_group_ranks

    members = get_process_group_ranks(group_of(name))
    if len(members) > MAX_RANKS:
        return f"group {name!r} has {len(members)} ranks; expected at most {MAX_RANKS}"
    _, of_host = layout()
    hosts = {rank // of_host for rank in members} if of_host else set()
    return f"the ranks of group {name!r} are on several hosts" if len(hosts) > 1 else None


def layout() -> tuple[int, int]:
    """Return the number of ranks of the default group, and the number of ranks per host that the launcher reports. A
    number is 0 if it is unknown."""
    import torch.distributed as dist

    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
    return ranks, int(os.environ.get("LOCAL_WORLD_SIZE") or 0)


def sum_over_ranks(input: torch.Tensor, name: str) -> torch.Tensor:
    """Return the sum of the ranks' tensors: added in fp32, in the order of the ranks, and rounded once to their dtype.

    With a single rank, return ``input`` itself.
    """
    if ranks_of(name) == 1:
        return input
    group = group_of(name)
    import torch.distributed as dist

    own = input.contiguous()
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    total = gathered[0].float()
    for other in gathered[1:]:
        total = total + other.float()
    return total.to(input.dtype)


class SharedMemory:
    """One GPU's part of the memory through which the GPUs of a group exchange rows (``kernels.all_reduce_rows``).

    All ranks create it at the same time.

    Attributes:
        arguments: arguments ``rank`` to ``timeout_ms`` of the kernel.
        slot_bytes: bytes that each peer can send in one launch.

    Raises:
        RuntimeError: if a CUDA graph is being captured, or the GPUs differ.
    """

    def __init__(self, name: str, device: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"group {name!r} has no shared memory yet, which cannot be created while a CUDA graph is captured; "
                "call the op once on all ranks before the capture"
            )
        self.name, self.group, self.device = name, group_of(name), torch.device("cuda", device)
        self.rank, self.ranks = int(self.group.rank()), int(self.group.size())
        self.timeout_s = timeout_of(self.group, self.device)
        with torch.cuda.device(self.device):
            self._check_equal("SMs", sm_count(device))
            self._allocate()
        self.reset()

    def _allocate(self) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        peers = self.ranks - 1
        self.slot_bytes = max(SLOT_BYTES // peers, MIN_SLOT_BYTES) // 128 * 128
        words = self.slot_bytes // 4
        # Allocate all memory at once and outside of PyTorch's memory pools, because the first call may use a pool of
        # CUDA graphs.
        every = symmetric.empty(2 * peers * words + _CONTROL_WORDS, dtype=torch.int32, device=self.device)
        self.staging, self.control = every[:-_CONTROL_WORDS].view(2, peers, words), every[-_CONTROL_WORDS:]
        name: Any = self.name
        self.handle = symmetric.rendezvous(every, name)
        slots = []
        for peer in self._peers():
            buffer = self.handle.get_buffer(peer, (2, peers, words), torch.int32)
            slots.append(buffer[:, self.rank - (self.rank > peer)])
        self._pinned = torch.zeros(peers, dtype=torch.int32, pin_memory=True)
        self._report, self._nothing = self._pinned.numpy(), bytes(4 * peers)
        report = torch.as_tensor(_Mapped(self._pinned))
        if report.device != self.device or report.data_ptr() != self._pinned.data_ptr():
            raise RuntimeError(f"pinned memory was mapped to {report.device}, not to {self.device}")
        milliseconds = min(int(self.timeout_s * 1000), 2**31 - 1)
        unused = (None,) * (MAX_RANKS - self.ranks)
        self.arguments = self.rank, self.staging, *slots, *unused, self.control, report, milliseconds

    def reset(self) -> None:
        """Wait for all work of all ranks, and reset the memory to its initial state. All ranks call this method."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            self._gathered(None)
            self.staging.fill_(_ABSENT)
            self.control.zero_()
            self._report[:] = 0
            torch.cuda.synchronize()
            self._gathered(None)

    def enter(self) -> None:
        """Prepare a launch on the current stream: let it follow the last launch, which may have been on another stream.

        This method does not see replays of CUDA graphs. The caller must order them.

        Raises:
            RuntimeError: if the rows of a peer did not arrive in time in an earlier launch.
        """
        if self._report.tobytes() != self._nothing:
            missing = [peer for peer, found in zip(self._peers(), self._report, strict=True) if found]
            names = ", ".join(map(str, missing))
            raise RuntimeError(
                f"{'ranks' if len(missing) > 1 else 'rank'} {names} of group {self.name!r} sent no rows within "
                f"{self.timeout_s:g} s in an earlier call; its results and those of later calls are wrong. Start the "
                "ranks again, or call torch_cute_ops.distributed.reset_all_reduce(group) on all ranks"
            )
        follow_last_launch(self.device)

    def _peers(self) -> Iterator[int]:
        return (rank for rank in range(self.ranks) if rank != self.rank)

    def _check_equal(self, what: str, value: int) -> None:
        values = self._gathered(value)
        if len(set(values)) > 1:
            shown = ", ".join(f"{found} on rank {rank}" for rank, found in enumerate(values))
            raise RuntimeError(f"the GPUs of group {self.name!r} have different numbers of {what}: {shown}")

    def _gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, after all ranks have called this method."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self.group)
        return values


class _Mapped:
    """Pinned CPU tensor that presents itself as GPU memory. The GPU can access the tensor at the same address."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": "<i4",
            "data": (pinned.data_ptr(), False),
            "version": 2,
        }


def follow_last_launch(device: torch.device) -> None:
    """Let the current stream wait for the last launch of ``all_reduce_rows`` on this device, by any group.

    These kernels wait for the peers' kernels, so all ranks must execute these kernels one at a time, in the order of
    the calls.
    """
    stream, is_capturing = torch.cuda.current_stream(device), torch.cuda.is_current_stream_capturing()
    last = _last_streams.get((device.index, is_capturing))
    # Compare the handles, because ``stream != None`` is False for torch's streams.
    if last is not None and last.cuda_stream != stream.cuda_stream and (not is_capturing or _is_capturing(last)):
        stream.wait_stream(last)
    _last_streams[device.index, is_capturing] = stream


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return bool(torch.cuda.is_current_stream_capturing())


def timeout_of(group: Any, device: torch.device) -> float:
    """Return the time-out of a process group in seconds."""
    for each in (device, torch.device("cpu")):
        try:
            return float(group._get_backend(each).options._timeout.total_seconds())
        except (RuntimeError, AttributeError):
            continue
    return 600.0


def shared_memory(name: str, device: int) -> SharedMemory:
    """Return the memory that the GPUs of a group share. The first call on all ranks creates it.

    Raises:
        RuntimeError: if the name comes from ``name_without_group``, because nothing can be launched without a group.
    """
    if name.endswith(_NO_GROUP):
        raise RuntimeError(
            f"a call of {name} was planned without a group, so it cannot run; pass group=..., or compile its kernels "
            "with torch_cute_ops.precompile"
        )
    found = _current_memory(name, device)
    if found is None:
        with _creating:
            found = _current_memory(name, device) or SharedMemory(name, device)
            _shared[name, device] = found
    return found


def _current_memory(name: str, device: int) -> SharedMemory | None:
    """Return the memory of the group with this name. Drop the memory of an earlier group with the same name."""
    found = _shared.get((name, device))
    if found is not None and found.group is not group_of(name):
        del _shared[name, device]
        return None
    return found


def reset_all_reduce(name: str) -> None:
    """Reset the memory that the GPUs of a group share to its initial state. All ranks call this function."""
    for each, device in tuple(_shared):
        memory = _current_memory(name, device) if each == name else None
        if memory is not None:
            memory.reset()
