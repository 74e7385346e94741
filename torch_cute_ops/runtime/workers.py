"""Worker processes that end when their work ends, or when the parent process ends for any reason.

The workers are forked from a *template*: a new interpreter that has imported what the workers need. Imports take
seconds, and longer if many processes import at the same time. The calling process itself cannot be forked, because it
may have initialised CUDA. Unlike ``multiprocessing``, the template does not run the caller's main module again, so a
script can start workers without ``if __name__ == "__main__"``. Daemonic processes can start workers, too.
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, reduction
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, NoReturn, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
_CLOSED_ERRORS = EOFError, BrokenPipeError, ConnectionResetError
PATIENCE_SECONDS: Final = 10.0
"""Time in seconds to wait for the template to end, after all workers are idle or killed."""
# Without garbage collection, the template's imports take 2.0 s instead of 2.5 s.
_PROGRAM = (
    "import gc, sys; gc.disable(); sys.path[:] = {path!r}; from {module} import serve; serve({control}, {parent})"
)


@dataclass(frozen=True)
class Died:
    """Result of a task whose worker process died before the task was finished.

    Attributes:
        status: exit status of the process; if negative, minus the number of the signal that ended it.
    """

    status: int | None


class _Worker(NamedTuple):
    pid: int
    pipe: "connection.Connection[Any, Any]"
    task: Any


class Workers(Generic[Task, Result]):
    """Pool of processes that apply a function to tasks. All processes have ended when the ``with`` block ends.

    The workers ignore Ctrl-C; the parent receives it and leaves the block. If the parent is killed, the workers exit.

    Args:
        function: function of an importable module. The function, its tasks and its results are pickled.
        count: maximum number of processes.
        prepare: function of an importable module. The template calls this function before it forks workers.

    Attributes:
        pids: ids of all started workers.
    """

    def __init__(
        self, function: Callable[[Task], Result], count: int, prepare: Callable[[], None] | None = None
    ) -> None:
        self.pids: list[int] = []
        self._functions, self._count = (function, prepare), count
        self._busy: list[_Worker] = []
        self._template: _Template | None = None
        # No one writes to this pipe. When this process ends, nobody holds ``_alive`` open, and the reading end reports
        # the end of the file. (A process that this process forks meanwhile inherits ``_alive``, and delays the report.)
        self._parent, self._alive = os.pipe()

    def __enter__(self) -> "Workers[Task, Result]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _interrupts_held():
            for worker in self._busy:
                with contextlib.suppress(ProcessLookupError):  # if the template died, the worker may be gone, too
                    os.kill(worker.pid, signal.SIGKILL)
                worker.pipe.close()
            self._busy.clear()
            if self._template is not None:
                self._template.end(may_wait=bool(self.pids))
            os.close(self._parent)
            os.close(self._alive)

    def map(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Result | Died]]:
        """Yield each task with its result, in the order of completion."""
        waiting = list(tasks)[::-1]
        if waiting and self._count < 1:
            raise ValueError(f"{self._count} processes cannot run {len(waiting)} tasks")
        while waiting or self._busy:
            while waiting and len(self._busy) < self._count:
                yield from self._start(waiting.pop())
            if not self._busy:  # the template has died
                return
            ready = connection.wait([worker.pipe for worker in self._busy])
            for worker in [worker for worker in self._busy if worker.pipe in ready]:
                self._busy.remove(worker)
                result: Result | Died
                try:
                    result = worker.pipe.recv()
                except (EOFError, OSError):
                    worker.pipe.close()
                    assert self._template is not None
                    result = Died(self._template.status_of(worker.pid))
                else:
                    self._go_on(worker, waiting)
                yield worker.task, result

    def begin(self) -> None:
        """Start the template now, so that its imports, which take seconds, are done when ``map`` needs it.

        Raises:
            OSError: if the process or a pipe cannot be created.
        """
        if self._template is None:
            with _interrupts_held():
                self._template = _Template(self._parent)
            self._template.send(self._functions)

    def _start(self, task: Task) -> Iterator[tuple[Task, Died]]:
        """Start a worker with a task. Yield the task as failed if the template has died."""
        self.begin()
        assert self._template is not None
        pipe, theirs = connection.Pipe()
        pid = None
        try:
            with theirs:
                pid = self._template.fork(theirs)
        finally:
            if pid is None:
                pipe.close()
        if pid is None:
            yield task, Died(self._template.status())
            return
        self.pids.append(pid)
        self._busy.append(_Worker(pid, pipe, task))
        with contextlib.suppress(OSError):  # if the process has ended, map() notices it
            pipe.send((task,))

    def _go_on(self, worker: _Worker, waiting: list[Task]) -> None:
        """Send a worker its next task, or end the worker if no task is left."""
        if not waiting:
            with contextlib.suppress(OSError), worker.pipe as pipe:
                pipe.send(())
            return
        self._busy.append(worker._replace(task=waiting.pop()))
        with contextlib.suppress(OSError):
            worker.pipe.send((self._busy[-1].task,))


class _Template:
    """Handle with which the parent controls the template process. The template leads a separate session, to which all
    workers belong.

    Args:
        parent: file descriptor that is closed when this process ends.
    """

    def __init__(self, parent: int) -> None:
        self._control, theirs = connection.Pipe()
        program = _PROGRAM.format(path=sys.path, module=__name__, control=theirs.fileno(), parent=parent)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), parent),
                start_new_session=True,
            )

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # if the template has ended, fork() notices it
            self._control.send(message)

    def fork(self, pipe: "connection.Connection[Any, Any]") -> int | None:
        """Fork a worker that receives tasks from a pipe. Return its id, or None if the template has died."""
        with contextlib.suppress(*_CLOSED_ERRORS):
            self._control.send(None)
            reduction.send_handle(self._control, pipe.fileno(), self._process.pid)
            return int(self._control.recv())
        return None

    def status_of(self, pid: int) -> int | None:
        """Return the exit status of a worker that has ended."""
        with contextlib.suppress(*_CLOSED_ERRORS):
            self._control.send(pid)
            return int(self._control.recv())
        return self.status()

    def status(self) -> int:
        """Wait until the template has ended, and return its exit status."""
        return self._process.wait()

    def end(self, may_wait: bool) -> None:
        """End the template, and wait until it has ended. All workers are idle or killed.

        If ``may_wait``, let the template end by itself, after all workers. Kill it if this takes longer than
        ``PATIENCE_SECONDS``.
        """
        self._control.close()
        try:
            self._process.wait(PATIENCE_SECONDS if may_wait else 0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block interrupts in this thread, and in processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(control: int, parent: int) -> None:
    """Run the fork server, which the parent calls the template process: fork workers on request until ``control`` is
    closed. The process starts with interrupts blocked, and unblocks only SIGTERM.

    Args:
        control: file descriptor of the connection that sends the functions of ``Workers``, and then requests: None,
            followed by the file descriptor of a worker's pipe, to fork a worker; or the id of a worker that has ended,
            for its exit status.
        parent: file descriptor that is closed when the parent ends.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    with connection.Connection(control) as requests:
        function, prepare = requests.recv()
        if prepare is not None:
            prepare()
        gc.freeze()  # otherwise each worker's first collection visits all imported objects, which takes 0.2 s
        while (ended := _received(requests)) is not _CLOSED:
            if ended is not None:
                requests.send(os.waitstatus_to_exitcode(os.waitpid(ended, 0)[1]))
                continue
            pipe = reduction.recv_handle(requests)
            with warnings.catch_warnings():
                # Python warns because the child lacks the threads of libraries, and these threads may hold locks.
                # NumPy's BLAS, the only library with threads in this process, is prepared for forks.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                requests.close()
                _work(function, pipe, parent)
            os.close(pipe)
            requests.send(pid)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _work(function: Callable[[Any], Any], pipe: int, parent: int) -> NoReturn:
    """Run tasks in a worker until its pipe sends an empty message or closes. Then end the worker."""
    status = 1
    try:
        gc.enable()
        threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
        with connection.Connection(pipe) as tasks:
            while (message := _received(tasks)) not in ((), _CLOSED):
                result = function(*message)
                with contextlib.suppress(OSError):
                    tasks.send(result)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


_CLOSED = object()


def _received(messages: "connection.Connection[Any, Any]") -> Any:
    """Return the next message of a connection, or ``_CLOSED``."""
    try:
        return messages.recv()
    except (EOFError, OSError):
        return _CLOSED


def _end_with_parent(parent: int) -> None:
    os.read(parent, 1)  # returns (end of file) when the parent process exits
    os._exit(1)
