"""Ranks that fit together, and ranks that are gone: errors that name them, in place of a hang."""

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
"""Seconds that the end of a block waits for a call to a store that may be gone."""
_blocks = 0
"""How often ranks were watched: all in the same order, so that the numbers name what they post."""


def check_ranks(
    model: nn.Module | None = None, *, group: Group | None = None, timeout_s: float = 60.0, **facts: Any
) -> None:
    """Compare the ranks of a process group before their first collective.

    Every rank calls it. Versions of torch, Python, CUDA and this package, digests of its sources, names, classes,
    shapes and dtypes of a model's tensors, and how its layers are divided have to be the same on all; a collective of
    ranks that differ would hang, or give wrong numbers. Without a process group, or alone in it, a rank has nothing to
    compare.

    Args:
        model: that all ranks hold with the same shapes: parts of layers that are divided are equal.
        group: whose ranks are compared; ``None``: all of the default group.
        timeout_s: how long the others are waited for, seconds.
        facts: whatever else has to be the same, as ``batch=64``; what ``json`` can hold.

    Raises:
        RuntimeError: on every rank: naming a rank that differs, and in what, or a rank that did not come in time.
    """
    facts = {**_versions(), **facts, **({} if model is None else facts_of(model))}
    compare("check_ranks", facts, group, timeout_s)


def _versions() -> dict[str, Any]:
    return {
        "torch_cute_ops": __version__,
        "sources": source_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }


def facts_of(model: nn.Module) -> dict[str, Any]:
    """What ranks that hold parts of one model have in common: of each tensor class, shape and dtype, by name; and how
    modules are divided."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        divided = getattr(module, "divided", None)
        if divided is not None:
            found[name or "model"] = str(divided)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found[f"{name}.{key}".lstrip(".")] = f"{type(module).__name__} {tuple(tensor.shape)} {tensor.dtype}"
    return found


# Ranks that are gone


@contextlib.contextmanager
def watched_ranks(*, timeout_s: float = 30.0) -> Iterator[None]:
    """A block in which a rank that dies is named by the others.

    Every rank enters it. Each leaves a sign of life in the store of the default process group. Where a rank gives none
    for ``timeout_s``, or ends with an error, the others log it, with host and process. An error that a collective
    raises for it (gloo: at once; NCCL: its watchdog ends the process after the group's own time-out) is raised again
    as one that names the rank. So ``timeout_s`` is shorter than the time-out of the process group.

    Args:
        timeout_s: seconds without a sign after which a rank is gone.

    Raises:
        RuntimeError: from an error in the block, where other ranks are gone.
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
            raise RuntimeError(f"rank {everyone.rank}: {gone}; what this rank saw of it: {error}") from error
        raise
    watch.stop("done")


class _Watch:
    """The thread of a ``watched_ranks`` block."""

    def __init__(self, everyone: Ranks, timeout_s: float, prefix: str) -> None:
        self.prefix = prefix
        self.store = everyone.store
        # A connection of its own, where the store has such: a thread that waits may lock the group's.
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
        """Which ranks are gone, by signs that no longer change; an empty string: none is."""
        try:
            before = self._states()
            time.sleep(max(4 * self.pause, 1.0))
            after = self._states()
        except RuntimeError as lost:
            return (
                "the store of the process group is gone, and with it the process that holds it: rank 0, or under "
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
                what = f"has given no sign for {self.timeout_s:g} s" if is_silent else state
                log.error("rank %d (%s) %s; collectives with it will not end", rank, who, what)

    def _states(self) -> dict[int, tuple[str, str]]:
        """State and place of each rank that has given a sign."""
        found = {}
        for rank in range(self.world):
            if self.store.check([self._key(rank)]):
                state, who = json.loads(self.store.get(self._key(rank)))
                found[rank] = (state, who)
        return found

    def _key(self, rank: int) -> str:
        return f"{self.prefix}/{rank}"
