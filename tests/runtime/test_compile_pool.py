"""Kernels that are compiled ahead in parallel processes: their selection, their order, and failures."""

import contextlib
import errno
import logging
import os
import subprocess
import sys

import pytest
import torch

from torch_cute_ops import registry
from torch_cute_ops.runtime import compile_pool, compiler, settings
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.compile_pool import EarlyPool, Ranks, Task, compile_ahead, compile_all
from torch_cute_ops.runtime.workers import Died, Workers

SM90 = ARCHS["sm_90a"]
WIDTHS = (64, 96, 128, 160)


def kernel(width):
    (found,) = registry.kernels_of("fp4_quantize", "sm_90a", hidden=width, dtype=torch.bfloat16)
    return found


KERNELS = [kernel(width) for width in WIDTHS]


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Return the tasks that ``compile_ahead`` hands to the pool, which compiles nothing. The cache is empty."""
    tasks = []

    def compile_all(given, workers, ranks, pool):
        tasks.append((workers, [*given]))
        yield from ((task, "") for task in tasks[-1][1])

    monkeypatch.setattr(compile_pool, "compile_all", compile_all)
    monkeypatch.setattr(compile_pool.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(settings, "CACHE_DIR", tmp_path)
    return tasks


def test_each_missing_kernel_is_compiled_once(asked, monkeypatch):
    """Check that kernels in memory or on disk are left out."""
    compile_ahead([*KERNELS, KERNELS[1]], SM90, 2)
    assert asked.pop() == (2, [Task(each, "sm_90a") for each in KERNELS])
    compiler._compiled[KERNELS[0], "sm_90a"] = object()
    compile_ahead(KERNELS, SM90)
    assert asked.pop() == (None, [Task(each, "sm_90a") for each in KERNELS[1:]])
    compile_ahead(KERNELS, ARCHS["sm_100a"])
    assert len(asked.pop()[1]) == 4
    monkeypatch.setattr(compile_pool, "is_kept", lambda found, arch: found == KERNELS[1])
    compiler._compiled.clear()
    compile_ahead(KERNELS, SM90)
    assert asked.pop()[1] == [Task(KERNELS[i], "sm_90a") for i in (0, 2, 3)]


def test_no_pool_that_would_not_help(asked, monkeypatch):
    """Check that no process starts with two kernels, one processor, one worker, or no place to keep kernels."""
    compile_ahead(KERNELS[:2], SM90)
    compile_ahead(KERNELS, SM90, 1)
    with monkeypatch.context() as patch:
        patch.setattr(compile_pool.os, "sched_getaffinity", lambda _: {3})
        compile_ahead(KERNELS, SM90)
    monkeypatch.setattr(settings, "CACHE", False)
    compile_ahead(KERNELS, SM90)
    assert not asked


@pytest.mark.parametrize(
    ("failing", "tried"), [((1,), 6), ((0, 5), 6), ((0, 2, 3), 4), ((0, 1, 2, 3, 4, 5), 3)], ids=str
)
def test_failures(failing, tried, asked, monkeypatch, caplog):
    """Check that after one or two failed kernels the remaining kernels are compiled, that the third failure ends the
    pool, and that a warning names each failed kernel."""
    seen = []

    def compile_all(given, workers, ranks, pool):
        for i, task in enumerate(given):
            seen.append(task.kernel)
            yield task, "OSError: no space" if i in failing else ""

    monkeypatch.setattr(compile_pool, "compile_all", compile_all)
    kernels = [kernel(width) for width in (*WIDTHS, 192, 224)]
    with caplog.at_level(logging.INFO, "torch_cute_ops"):
        compile_ahead(kernels, SM90)
    assert seen == kernels[:tried]
    failed = [kernels[i] for i in failing if i < tried]
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    named = [text for text in warnings if text.endswith("because a worker failed: OSError: no space")]
    assert [text.partition(" is not compiled ahead")[0] for text in named] == [str(each) for each in failed]
    assert (len(warnings) > len(named)) == (len(failed) == 3)
    assert "compiling 6 kernels for sm_90a" in caplog.text
    assert f"{tried - len(failed)} of 6 kernels compiled" in caplog.text


def no_interpreter(patch):
    patch.setattr(sys, "executable", "")
    return "PermissionError"


def no_tqdm(patch):
    patch.setitem(sys.modules, "tqdm", None)
    return "ModuleNotFoundError: import of tqdm halted"


def no_process(patch):
    def popen(*args, **kwargs):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    patch.setattr(subprocess, "Popen", popen)
    return "BlockingIOError"


def no_descriptor(patch):
    def pipe():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    patch.setattr(os, "pipe", pipe)
    return "Too many open files"


@pytest.mark.parametrize(
    "spoil", [no_interpreter, no_tqdm, no_process, no_descriptor], ids=lambda spoil: spoil.__name__
)
def test_without_processes(spoil, monkeypatch, tmp_path, caplog):
    """Check that, if no process can start, nothing is compiled ahead, one warning says why, and no error is raised."""
    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(settings, "CACHE_DIR", tmp_path)
    with monkeypatch.context() as patch:
        reason = spoil(patch)
        compile_ahead(KERNELS, SM90, 2)
    (warning,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert warning.startswith("kernels cannot be compiled in parallel processes: ") and reason in warning


@pytest.fixture
def pool(monkeypatch):
    """Replace the processes by a record of their number and of the order of the tasks. A task of width 96 dies."""
    state = {}

    class Workers(contextlib.nullcontext):
        def __init__(self, function, count, prepare):
            super().__init__(self)
            state["count"] = count

        def map(self, tasks):
            state["order"] = tasks
            for task in tasks:
                yield task, Died(-9) if task.kernel == KERNELS[1] else ""

    monkeypatch.setattr(compile_pool, "Workers", Workers)
    monkeypatch.setattr(compile_pool.os, "sched_getaffinity", lambda _: set(range(12)))
    return state


def test_ranks_divide_the_processors_and_begin_at_different_kernels(pool, monkeypatch):
    tasks = [Task(each, "sm_90a") for each in KERNELS]
    found = dict(compile_all([*tasks, tasks[0]]))
    assert found == {**dict.fromkeys(tasks, ""), tasks[1]: "the process that compiled it was killed by signal 9"}
    assert pool == {"count": 4, "order": tasks}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert len(dict(compile_all(tasks))) == 4
        assert pool == {"count": 3, "order": tasks[rank:] + tasks[:rank]}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    monkeypatch.setenv("LOCAL_RANK", "99")
    dict(compile_all(tasks))
    assert pool["count"] == 1 and pool["order"] == tasks[3:] + tasks[:3]
    for own in (1, 5):  # an engine knows its ranks, whatever torchrun's variables say
        dict(compile_all(tasks, ranks=Ranks(4, own)))
        assert pool == {"count": 3, "order": tasks[1:] + tasks[:1]}


def test_the_longest_kernels_begin_first(pool):
    """Check that kernels with large output tiles, which take several times as long to compile, do not begin last.
    Kernels of equal size keep their order."""
    gemm = {"n": 28672, "k": 4096, "dtype": torch.bfloat16, "static_weight": True}
    rows = (1, 8, 2048, 16)
    kernels = [registry.kernels_of("mm_fp4_weight_only", "sm_90a", m=m, **gemm)[-1] for m in rows]
    tasks = [Task(each, "sm_90a") for each in (KERNELS[0], *kernels, KERNELS[2])]
    dict(compile_all(tasks))
    areas = [each.config.tile_m * each.config.tile_n for each in kernels]
    assert len({*areas}) == 4 and areas.index(max(areas)) == 2
    by_area = sorted(tasks[1:5], key=lambda task: -task.kernel.config.tile_m * task.kernel.config.tile_n)
    assert pool["order"] == [*by_area, tasks[0], tasks[5]]


def probe(task):
    """Compile a kernel. Return how often the DSL looked for a GPU, and whether it prepared the kernel for calls."""
    from cutlass.base_dsl import env_manager

    looked = []
    env_manager.detect_gpu_arch = lambda prefix: looked.append(prefix) or task.arch
    compiled = compiler.trace_and_compile(task.kernel.make(), ARCHS[task.arch])
    return len(looked), compiled.engine is not None


@pytest.mark.parametrize("named", [None, "sm_90a"])
def test_workers_need_no_gpu(named, monkeypatch):
    """Check that workers neither initialise CUDA nor prepare kernels for calls, with or without a GPU's name in the
    environment."""
    if named is None:
        monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
    else:
        monkeypatch.setenv("CUTE_DSL_ARCH", named)
    with Workers(probe, 1, compile_pool._import_compiler) as processes:
        assert [result for _, result in processes.map([Task(KERNELS[0], "sm_90a")])] == [(0, False)]


@pytest.fixture
def early(monkeypatch, tmp_path):
    """Replace the processes by a record of what happens to a pool. The cache is empty."""
    events = []

    class Workers:
        def __init__(self, function, count, prepare):
            events.append(count)

        def begin(self):
            events.append("begin")

        def map(self, tasks):
            events.append([task.kernel for task in tasks])
            yield from ((task, "") for task in tasks)

        def __exit__(self, *error):
            events.append("exit")

    monkeypatch.setattr(compile_pool, "Workers", Workers)
    monkeypatch.setattr(compile_pool.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(settings, "CACHE_DIR", tmp_path)
    return events


def test_a_pool_starts_when_enough_kernels_are_missing(early):
    """Check that the pool starts with the third missing kernel, and that it compiles all kernels and is closed."""
    compiler._compiled[KERNELS[3], "sm_90a"] = object()
    with EarlyPool() as pool:
        pool.expect([KERNELS[0], KERNELS[3]], SM90)
        pool.expect([KERNELS[0], KERNELS[1]], SM90)
        assert not early
        pool.expect([KERNELS[2]], SM90)
        assert early == [4, "begin"]
        pool.expect([kernel(192)], SM90)
        pool.compile_ahead([*KERNELS, kernel(192)], SM90)
    assert early == [4, "begin", [*KERNELS[:3], kernel(192)], "exit"]


def test_a_pool_that_is_not_needed(early, monkeypatch):
    """Check that a pool is closed after an error, and that no pool starts if kernels cannot be kept."""
    with pytest.raises(ZeroDivisionError), EarlyPool(3) as pool:
        pool.expect(KERNELS, SM90)
        raise ZeroDivisionError
    assert early == [3, "begin", "exit"]
    monkeypatch.setattr(settings, "CACHE", False)
    with EarlyPool() as pool:
        pool.expect(KERNELS, SM90)
    assert len(early) == 3


def test_an_early_pool_compiles(monkeypatch, tmp_path):
    """Check that kernels are compiled by the processes that started early."""
    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(settings, "CACHE_DIR", tmp_path)
    monkeypatch.setenv("TORCH_CUTE_OPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_pool.os, "sched_getaffinity", lambda _: {0, 1})
    with EarlyPool(2) as pool:
        pool.expect(KERNELS, SM90)
        workers = pool._pool
        pool.compile_ahead(KERNELS, SM90)
    assert len(workers.pids) == 2 and all(compiler.is_kept(each, SM90) for each in KERNELS)
