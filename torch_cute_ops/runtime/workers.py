"""Work in processes of their own, which end when the work does, or when this process does, in whatever way."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from torch_cute_ops.runtime import once

Task = TypeVar("Task")
Result = TypeVar("Result")

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Died:
    """What comes of a task whose process ended before the task did.

    Attributes:
        status: the process's exit status; negative: the signal that ended it.
    """

    status: int | None


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: "connection.Connection[Any, Any]"
    task: Any


class Workers(Generic[Task, Result]):
    """Processes that apply a function to tasks; they are gone when the ``with`` block ends.

    An interrupt from the keyboard does not reach them: this process hears it, and leaves the block. Should it be
    killed, they end by themselves.

    Args:
        function: of a module that can be imported. It, its tasks and its results travel by pickle.
        count: how many processes there are at most.

    Attributes:
        pids: of all processes that were started.
    """

    def __init__(self, function: Callable[[Task], Result], count: int) -> None:
        self.pids: list[int] = []
        self._function, self._count = function, count
        self._busy: list[_Worker] = []

    def __enter__(self) -> "Workers[Task, Result]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _interrupts_held():
            for worker in self._busy:
                worker.process.kill()
            for worker in self._busy:
                _end(worker)
            self._busy.clear()

    def map(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Result | Died]]:
        """Each task with what came of it, as they end."""
        waiting = list(tasks)[::-1]
        while waiting or self._busy:
            while waiting and len(self._busy) < self._count:
                self._start(waiting.pop())
            ready = connection.wait([worker.pipe for worker in self._busy])
            for worker in [worker for worker in self._busy if worker.pipe in ready]:
                self._busy.remove(worker)
                result: Result | Died
                try:
                    result = worker.pipe.recv()
                except (EOFError, OSError):
                    _end(worker)
                    result = Died(worker.process.exitcode)
                else:
                    self._go_on(worker, waiting)
                yield worker.task, result

    def _start(self, task: Task) -> None:
        # Spawned: a process that has initialised CUDA must not be forked.
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self._function, once.given()), daemon=True)
        # Else started with the first process, and it would leave this thread, and so that process, hearing interrupts.
        resource_tracker.ensure_running()
        with _interrupts_held(), theirs:
            process.start()
            self._busy.append(_Worker(process, pipe, task))
            self.pids.append(process.pid or 0)
        with contextlib.suppress(OSError):  # where it has ended already, receiving says so
            pipe.send(task)

    def _go_on(self, worker: _Worker, waiting: list[Task]) -> None:
        """Give a worker that is done its next task; without one, it ends."""
        if not waiting:
            _end(worker)
            return
        self._busy.append(worker._replace(task=waiting.pop()))
        with contextlib.suppress(OSError):
            worker.pipe.send(self._busy[-1].task)


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.pipe.close()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Have this thread, and the processes that it starts, deaf to interrupts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: "connection.Connection[Any, Any]", function: Callable[[Any], Any], warned: frozenset[Hashable]) -> None:
    """A worker's life. It was started deaf to interrupts, and stays so but for the one that is meant for it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    once.adopt(warned)
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):  # that was all
            return
        result = function(task)
        with contextlib.suppress(OSError):
            pipe.send(result)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
