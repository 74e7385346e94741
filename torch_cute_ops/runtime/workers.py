"""Worker processes that end when their work ends, or when the parent process ends for any reason."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Died:
    """Result of a task whose worker process died before the task was finished.

    Attributes:
        status: exit status of the process; if negative, minus the number of the signal that ended it.
    """

    status: int | None


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: "connection.Connection[Any, Any]"
    task: Any


class Workers(Generic[Task, Result]):
    """Pool of processes that apply a function to tasks. All processes have ended when the ``with`` block ends.

    The workers ignore Ctrl-C; the parent receives it and leaves the block. If the parent is killed, the workers exit.

    Args:
        function: function of an importable module. The function, its tasks and its results are pickled.
        count: maximum number of processes.

    Attributes:
        pids: ids of all started processes.
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
        """Yield each task with its result, in the order of completion."""
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
        # Spawn instead of fork: a process that has initialised CUDA must not be forked.
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self._function), daemon=True)
        # Start multiprocessing's resource tracker before interrupts are blocked. Otherwise the first process.start()
        # would start the tracker, which unblocks interrupts in this thread.
        resource_tracker.ensure_running()
        with _interrupts_held(), theirs:
            process.start()
            self._busy.append(_Worker(process, pipe, task))
            self.pids.append(process.pid or 0)
        with contextlib.suppress(OSError):  # the worker has already ended; map() notices this
            pipe.send(task)

    def _go_on(self, worker: _Worker, waiting: list[Task]) -> None:
        """Send a worker its next task, or end the worker if no task is left."""
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
    """Block interrupts in this thread, and in processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: "connection.Connection[Any, Any]", function: Callable[[Any], Any]) -> None:
    """Run tasks until the pipe closes. The process starts with interrupts blocked, and unblocks only SIGTERM."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):  # no more tasks
            return
        result = function(task)
        with contextlib.suppress(OSError):
            pipe.send(result)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
