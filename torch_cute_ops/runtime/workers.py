"""Worker processes that end when their work ends, or when the parent process ends for any reason.

A worker is a new interpreter. In contrast to ``multiprocessing``, it does not run the parent's main module again, so a
script can start workers without ``if __name__ == "__main__"``; and daemonic processes can start workers too.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
_PROGRAM = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve({pipe}, {parent})"


@dataclass(frozen=True)
class Died:
    """Result of a task whose worker process died before the task was finished.

    Attributes:
        status: exit status of the process; if negative, minus the number of the signal that ended it.
    """

    status: int | None


class _Worker(NamedTuple):
    process: subprocess.Popen[bytes]
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
        # No one writes to this pipe. Its reading end reports the end of this process, the only holder of ``_alive``.
        self._parent, self._alive = os.pipe()

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
            os.close(self._parent)
            os.close(self._alive)

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
                    result = Died(worker.process.returncode)
                else:
                    self._go_on(worker, waiting)
                yield worker.task, result

    def _start(self, task: Task) -> None:
        pipe, theirs = connection.Pipe()
        ends = {"pipe": theirs.fileno(), "parent": self._parent}
        program = _PROGRAM.format(path=sys.path, module=__name__, **ends)
        with _interrupts_held(), theirs:
            # Not forked: a process that has initialised CUDA must not be forked.
            process = subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.DEVNULL, pass_fds=tuple(ends.values())
            )
            self._busy.append(_Worker(process, pipe, task))
            self.pids.append(process.pid)
        with contextlib.suppress(OSError):  # if the process has ended, map() notices it
            pipe.send(self._function)
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
    worker.process.wait()
    worker.pipe.close()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block interrupts in this thread, and in processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(pipe: int, parent: int) -> None:
    """Run tasks in a worker until ``pipe`` closes. The worker starts with interrupts blocked, and unblocks only
    SIGTERM.

    Args:
        pipe: file descriptor of the connection that sends the function, then tasks, and receives results.
        parent: file descriptor that is closed when the parent ends.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    with connection.Connection(pipe) as tasks:
        function = _received(tasks)
        while (task := _received(tasks)) is not _CLOSED:
            result = function(task)
            with contextlib.suppress(OSError):
                tasks.send(result)


_CLOSED = object()


def _received(tasks: "connection.Connection[Any, Any]") -> Any:
    """Return the next object of a connection, or ``_CLOSED``."""
    try:
        return tasks.recv()
    except (EOFError, OSError):
        return _CLOSED


def _end_with_parent(parent: int) -> None:
    os.read(parent, 1)  # returns at the end of the parent
    os._exit(1)
