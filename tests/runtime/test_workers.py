"""Worker processes, which are forked from one process, the template: each task gets a result, and no worker outlives
the ``with`` block or the parent process."""

import errno
import gc
import os
import signal
import subprocess
import sys
import time

import pytest
from support.interpreters import variables_of
from support.processes import children_of, is_alive, wait_until

from torch_cute_ops.runtime import workers as workers_module
from torch_cute_ops.runtime.workers import Died, Workers


def sleep(seconds):
    """Sleep for some seconds. A negative number kills the process instead."""
    if seconds < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(seconds)
    return f"slept {seconds}"


def test_no_tasks():
    with Workers(sleep, 0) as workers:
        assert list(workers.map([])) == [] and workers.pids == []


class Leave(BaseException):
    pass


def test_tasks_are_answered_until_the_block_is_left():
    """Check that a task whose process dies gets the result ``Died``, and that leaving the block ends busy workers at
    once."""
    answers = {}
    with pytest.raises(Leave), Workers(sleep, 2) as workers:
        for task, result in workers.map([-1.0, -2.0, 0.01, 600.0, 601.0]):
            answers[task] = result
            if len(answers) == 3:
                at_work = [pid for pid in workers.pids if is_alive(pid)]
                started = time.monotonic()
                raise Leave
    assert time.monotonic() - started < 20 and not any(map(is_alive, workers.pids))
    assert answers == {-1.0: Died(-signal.SIGKILL), -2.0: Died(-signal.SIGKILL), 0.01: "slept 0.01"}
    assert at_work and set(at_work) <= set(workers.pids[2:])


def mark(_):
    """Return the ids of the process that ran ``prepare`` and of this process's parent."""
    return int(os.environ["PREPARED"]), os.getppid()


def prepare():
    os.environ["PREPARED"] = str(os.getpid())


def test_a_template_is_prepared_once():
    """Check that all workers are forked from the template, which called ``prepare``."""
    with Workers(mark, 2, prepare) as workers:
        answers = {answer for _, answer in workers.map(range(5))}
    ((prepared, parent),) = answers
    assert prepared == parent != os.getpid() and len(workers.pids) == 2


def collector(_):
    """Return whether the template collected garbage, whether this worker does, and whether this worker ignores the
    template's objects."""
    return os.environ["COLLECTS"], gc.isenabled(), gc.get_freeze_count() > 10_000


def prepare_collector():
    os.environ["COLLECTS"] = str(gc.isenabled())


def test_the_template_collects_no_garbage():
    """Check that no garbage collection slows down the template's imports, and that workers collect only their own."""
    with Workers(collector, 1, prepare_collector) as workers:
        assert list(workers.map([0])) == [(0, ("False", True, True))]


def test_no_zombies():
    """Check that the workers' process ids are free after the block, because the template waited for all workers."""
    with Workers(sleep, 2) as workers:
        assert len(list(workers.map([0.0, 0.1, -1.0, 0.0]))) == 4
    for pid in workers.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_too_few_processes():
    with pytest.raises(ValueError, match="0 processes cannot run 1 tasks"), Workers(sleep, 0) as workers:
        list(workers.map([0.0]))


def test_other_errors_are_raised(monkeypatch):
    """Check that an error while a worker is started, such as too many open files, is raised."""

    def send_handle(*_):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(workers_module.reduction, "send_handle", send_handle)
    with pytest.raises(OSError, match="too many open files"), Workers(sleep, 1) as workers:
        list(workers.map([0.0]))


def end():
    os._exit(3)


def test_tasks_fail_if_the_template_dies():
    """Check that every task gets a result if the template ends before it forks a worker, or while a worker runs."""
    with Workers(sleep, 2, end) as workers:
        assert dict(workers.map([0.0, 1.0, 2.0])) == dict.fromkeys([0.0, 1.0, 2.0], Died(3))
    answers = {}
    with Workers(os.kill, 1) as workers:
        answers = dict(workers.map([0, 1]))
    assert answers == dict.fromkeys([0, 1], Died(1))  # the function raises TypeError


PARENT = """
import sys
sys.path.insert(0, sys.argv[1])
from test_workers import Workers, sleep
with Workers(sleep, 1) as workers:
    for result in workers.map([0.01, 600.0]):
        print(workers.pids, flush=True)
"""


def test_workers_end_with_their_parent(tmp_path):
    """Check that workers end even if their parent is killed, and so cannot end them. The parent's main module is not
    run again in the workers."""
    program = tmp_path / "program.py"
    program.write_text(PARENT)
    command = [sys.executable, str(program), os.path.dirname(__file__)]
    variables = variables_of(PYTHONPATH=os.pathsep.join(sys.path))
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as parent:
        (worker,) = map(int, parent.stdout.readline().strip("[]\n").split(","))
        assert worker in children_of(parent.pid)
        parent.kill()
        assert wait_until(lambda: not is_alive(worker), 20.0)  # its task lasts 600 s


def blocked(_):
    """Return the signals that are blocked in this thread."""
    return {int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])}


BLOCKED = """
import sys
sys.path.insert(0, sys.argv[1])
from test_workers import Workers, blocked
with Workers(blocked, 1) as workers:
    print(*(sorted(mask) for _, mask in workers.map([0])))
"""


def test_the_first_process_blocks_ctrl_c(tmp_path):
    """Check that the first worker blocks Ctrl-C, in a fresh interpreter without other threads or processes."""
    program = tmp_path / "program.py"
    program.write_text(BLOCKED)
    command = [sys.executable, str(program), os.path.dirname(__file__)]
    variables = variables_of(PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert done.stdout == f"[{int(signal.SIGINT)}]\n", done.stderr
