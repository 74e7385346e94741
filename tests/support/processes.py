"""Observe other processes through /proc, and kill processes."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def children_of(process: int) -> set[int]:
    """Return the ids of a process's running descendants."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # the process has ended meanwhile
            continue
        if state not in "ZX":
            parents[int(path.parent.name)] = int(parent)
    found, new = set(), {process}
    while new := {child for child, parent in parents.items() if parent in new} - found:
        found |= new
    return found


def workers_of(process: int) -> set[int]:
    """Return the descendants that ``runtime/workers.py`` started."""
    return {child for child in children_of(process) if any("import serve" in text for text in _command_line(child))}


def _command_line(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().split("\0")
    except OSError:
        return []


def is_alive(process: int) -> bool:
    """Return True if a process is running. A zombie does not count."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Wait until a condition is true. Return False if it is still false after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def kill_at_random(target: Callable[..., None], *args: Any, processes: int, longest: float) -> None:
    """Fork processes that run ``target`` repeatedly, and kill each at a random time within ``longest`` seconds."""
    started = [multiprocessing.get_context("fork").Process(target=target, args=args) for _ in range(processes)]
    for process in started:
        process.start()
    for process in started:
        time.sleep(random.uniform(0, longest))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
