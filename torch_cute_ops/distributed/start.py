"""Detect ranks that do not match at the start, or die during a run, and name them in an error. Without these checks the
program would hang."""

import contextlib
import json
import logging
import os
import platform
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from torch_cute_ops._version import __version__
from torch_cute_ops.distributed.compare import Group, compare
from torch_cute_ops.runtime.agreement import Ranks, ranks
from torch_cute_ops.runtime.provenance import source_digest

log = logging.getLogger("torch_cute_ops")

LONGEST_WAIT: Final = 5.0
"""Seconds that the end of a ``watched_ranks`` block waits for a pending call to the store, which may be unreachable."""
_blocks = 0
"""Number of ``watched_ranks`` blocks so far. All ranks enter the same blocks in the same order, so the number
identifies a block on all ranks."""


def check_ranks(
    model: nn.Module | None = None, *, group: Group | None = None, timeout_s: float = 60.0, **facts: Any
) -> None:
    """Compare the ranks of a process group before their first collective.

    Every rank must call this function. It compares the versions of torch, Python, CUDA and this package; a digest of
    the package's sources; the names, classes, shapes and dtypes of the model's tensors; and how the model's layers are
    divided. If ranks differed, a collective would hang or return wrong numbers. Without a process group, or with a
    single rank, the function does nothing.

    Args:
        model: model whose tensors, including shards of divided layers, have equal shapes on all ranks; or ``None``.
        group: process group; ``None`` for the default group.
        timeout_s: seconds to wait for other ranks.
        facts: additional JSON-serialisable values that must be equal on all ranks, such as ``batch=64``.

    Raises:
        RuntimeError: on every rank, if a rank differs or is late. The message names the rank and the differences.
    """
    facts = {**versions(), **facts, **({} if model is None else facts_of(model))}
    compare("check_ranks", facts, group, timeout_s)


def versions() -> dict[str, Any]:
    """Return the versions that must be equal on all ranks."""
    return {
        "torch_cute_ops": __version__,
        "sources": source_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }


def facts_of(model: nn.Module) -> dict[str, Any]:
    """Return the properties of a sharded model that must be equal on all ranks: class, shape and dtype of each tensor
    by name, and how each module is sharded."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        divided = getattr(module, "divided", None)
        if divided is not None:
            found[name or "model"] = str(divided)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found[f"{name}.{key}".lstrip(".")] = f"{type(module).__name__} {tuple(tensor.shape)} {tensor.dtype}"
    return found


# Dead ranks


@contextlib.contextmanager
def watched_ranks(*, timeout_s: float = 30.0) -> Iterator[None]:
    """Watch for dead ranks during a block, so that errors on the other ranks name the dead ranks.

    Every rank must enter the block. Each rank regularly writes a heartbeat to the store of the default process
    group. If a rank writes no heartbeat for ``timeout_s``, or ends with an error, the other ranks log its number, host
    and process. With gloo, a collective that waits for the dead rank raises an error at once. The block raises this
    error again and adds the name of the dead rank. With NCCL, the watchdog ends the process after the group's time-out.
    ``timeout_s`` must be shorter than the time-out of the process group.

    Args:
        timeout_s: seconds without a heartbeat after which a rank counts as dead.

    Raises:
        RuntimeError: from an error in the block, if other ranks are dead.
    """
    everyone = ranks()
    if everyone is None:
        yield
        return
    global _blocks
    _blocks += 1
    watch = _Watch(everyone, timeout_s, f"torch_cute_ops/watched_ranks/{_blocks}")
    watch.start()
    try:
        yield
    except BaseException as error:
        gone = watch.gone_after(error) if isinstance(error, RuntimeError) else ""
        watch.stop(f"ended with {type(error).__name__}: {error}" if not gone else f"ended, because {gone}")
        if gone:
            raise RuntimeError(f"rank {everyone.rank}: {gone}; the error on this rank: {error}") from error
        raise
    watch.stop("done")


class _Watch:
    """Thread that writes and reads the heartbeats in a ``watched_ranks`` block."""

    def __init__(self, everyone: Ranks, timeout_s: float, prefix: str) -> None:
        self.prefix = prefix
        self.store = everyone.store
        # Use a separate connection if the store supports this, because another thread that waits can block the group's
        # connection.
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            self.store = everyone.store.clone()
        self.rank, self.world, self.timeout_s = everyone.rank, everyone.world, timeout_s
        self.pause = min(1.0, timeout_s / 10)
        self.me = f"host {socket.gethostname()}, process {os.getpid()}"
        self.beats = 0
        self.seen: dict[int, tuple[str, float]] = {}
        self.reported: set[int] = set()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watched_ranks", daemon=True)

    def start(self) -> None:
        self._beat()
        self.thread.start()

    def stop(self, state: str) -> None:
        self.ended.set()
        self.thread.join(LONGEST_WAIT)
        with contextlib.suppress(RuntimeError):
            self.store.set(self._key(self.rank), json.dumps([state, self.me]))

    def gone_after(self, error: BaseException) -> str:
        """Return a description of the dead ranks, whose heartbeats no longer change, or an empty string if there are
        none."""
        try:
            before = self._states()
            time.sleep(max(4 * self.pause, 1.0))
            after = self._states()
        except RuntimeError as lost:
            return (
                "the store of the process group is gone, so the process that hosts it is dead: rank 0, or under "
                f"torchrun its agent ({lost})"
            )
        texts = []
        for rank, (state, who) in after.items():
            if rank == self.rank or state == "done" or state.startswith("ended, because"):
                continue
            if state.startswith("ended with"):
                texts.append(f"rank {rank} ({who}) {state}")
            elif before.get(rank) == (state, who):
                texts.append(f"rank {rank} ({who}) is gone")
        return "; ".join(texts)

    def _run(self) -> None:
        while not self.ended.wait(self.pause):
            try:
                self._beat()
                self._look()
            except RuntimeError as error:
                if not self.ended.is_set():
                    log.error("rank %d cannot reach the store of the process group: %s", self.rank, error)
                return

    def _beat(self) -> None:
        self.beats += 1
        self.store.set(self._key(self.rank), json.dumps([f"beat {self.beats}", self.me]))

    def _look(self) -> None:
        now = time.monotonic()
        for rank, (state, who) in self._states().items():
            old = self.seen.get(rank)
            if old is None or old[0] != state:
                self.seen[rank] = (state, now)
            is_silent = state.startswith("beat") and now - self.seen[rank][1] > self.timeout_s
            if (is_silent or state.startswith("ended with")) and rank not in self.reported:
                self.reported.add(rank)
                found = f"gave no sign for {self.timeout_s:g} s" if is_silent else state
                log.error("rank %d (%s) %s; collectives with it will not end", rank, who, found)

    def _states(self) -> dict[int, tuple[str, str]]:
        """Return, for each rank that has written a heartbeat, its state and a string with its host and process."""
        found = {}
        for rank in range(self.world):
            if self.store.check([self._key(rank)]):
                state, who = json.loads(self.store.get(self._key(rank)))
                found[rank] = (state, who)
        return found

    def _key(self, rank: int) -> str:
        return f"{self.prefix}/{rank}"
