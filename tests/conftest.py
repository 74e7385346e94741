"""Pytest configuration of all tests: the devices, random data with a printed seed, distribution over workers, and the
record of a GPU run."""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import os
import platform
import random
import re
import secrets
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

# One OpenMP thread, here and in processes that tests start: matrices are small, and a second thread busy-waits. With
# two threads, the float64 sums with which GEMMs are compared took 40 % longer. NumPy and torch read the variable when
# they are loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor uses the vector instructions that the processor lists. Without the variable, it first compiles and loads a
# program for each instruction set, which took 6 s once and 1 s in each process. A compiler that knows C++20, which
# PyTorch's headers need, knows AVX2 and AVX-512.
if platform.machine() == "x86_64":
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Inductor precompiles no headers: with them, a kernel takes as long to compile, and they take 5 s and 130 MB.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

import hypothesis
import pytest
import torch
from support import unchanged
from support.devices import DEVICES, GPU_MISSING
from support.gpu_record import GpuRecord

# No deadline: the time of an example depends more on the machine than on the code.
hypothesis.settings.register_profile("torch_cute_ops", deadline=None)
hypothesis.settings.load_profile("torch_cute_ops")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torch_cute_ops")
    group.addoption("--sample", metavar="NAME", help="run tests of samples for those alone of this name, or pattern")
    group.addoption("--seed", type=int, help="base seed of the random data; without it, a fresh one")
    group.addoption("--every-kernel", action="store_true", help="compile all kernels of the grid, not a covering part")
    group.addoption(
        "--more-emulated", action="store_true", help="run all cases and faults in the emulator, not a covering part"
    )
    group.addoption("--unchanged", action="store_true", help="run tests of kernels that have not changed, too")
    group.addoption("--record-unchanged", action="store_true", help="write which tests of kernels passed")
    group.addoption(
        "--fuzz-examples", type=int, default=30, metavar="N", help="calls of each op that the fuzz test makes"
    )
    group.addoption(
        "--gpu-record",
        type=Path,
        metavar="FILE",
        help="write a record of this run on a GPU, as JSON, or go on with one",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Collect garbage rarely: with Python's default thresholds, this took a third of the time of importing the tests.
    gc.set_threshold(20_000, 20, 20)
    # One thread: with small tensors a second thread costs more than it saves, and much more on a busy machine.
    torch.set_num_threads(1)
    # Make all loggers propagate: in each phase of each test, pytest adds its handlers to each logger that does not
    # propagate, and torch creates 48 such loggers.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    # A worker of pytest-xdist gets the seed from its controller. Only the controller writes the record.
    controller = getattr(config, "workerinput", None)
    seed = config.getoption("seed") if controller is None else controller["seed"]
    if controller is None and config.getoption("gpu_record") is not None:
        record = GpuRecord(config)
        config.pluginmanager.register(record, "gpu-record")
        seed, config.stash[DONE] = record.facts["seed"], record.done
    if controller is None and config.getoption("record_unchanged"):
        config.pluginmanager.register(unchanged.Recorder(), "unchanged")
    config.stash[BASE_SEED] = secrets.randbelow(2**31) if seed is None else seed
    os.environ["TEST_SEED"] = str(config.stash[BASE_SEED])  # for cases.py
    if controller is None and not GPU_MISSING:
        every = ",".join(map(str, range(torch.cuda.device_count())))
        os.environ["TEST_GPUS"] = os.environ.get("CUDA_VISIBLE_DEVICES", every)  # for workers, in devices.py
    if controller is not None:
        # Each processor already runs one worker, and each worker's Inductor would start a process per processor.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_report_header(config: pytest.Config) -> list[str]:
    kernels = f"kernels do not run: {GPU_MISSING}" if GPU_MISSING else f"kernels run on {torch.cuda.get_device_name()}"
    return [f"torch {torch.__version__}, {kernels}", f"random data: --seed {config.stash[BASE_SEED]}"]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the seed, and the names of tests that already ran, to a worker of pytest-xdist."""
    node.workerinput["seed"] = node.config.stash[BASE_SEED]
    node.workerinput["done"] = sorted(node.config.stash.get(DONE, ()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Send all tests of a sample to the same worker with ``--dist loadgroup``, so that each kernel is compiled once.

    Groups are computed from test names instead of marks, because pytest-xdist 3.8 loses marks with pytest 9.2 (its
    issue 1386).
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # keep the order of pytest_collection_modifyitems
    workers = len(config.getvalue("tx"))

    class BySample(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid, workers)

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            # Delete finished groups: after each test, xdist counts all groups of a worker, which would grow to
            # thousands.
            work, group = self.assigned_work[node], self._split_scope(self.registered_collections[node][item_index])
            if all(work[group].values()):
                del work[group]

    return BySample(config, log)


WORKERS_OF_A_GROUP = 8
KEEPS_KERNELS = re.compile(r"/kernels/test_(\w+_emulated|overlap)\.py$")


def group_of(nodeid: str, workers: int = 1) -> str:
    """Return the name of a test's group, whose tests run on one worker: the op and sample, or else the test's name
    without parameters.

    Some tests are grouped differently. The tests of a file form one group per 8 workers if they compile the same
    kernels, which takes up to two minutes. Tests that need a GPU are not grouped, so that the tests of a backend run in
    parallel; some launch kernels for a minute.
    """
    name, _, parameters = nodeid.partition("[")
    file = name.partition("::")[0]
    some = digest_of(parameters) % -(-workers // WORKERS_OF_A_GROUP)
    if file.endswith("_gpu.py"):
        return nodeid
    if KEEPS_KERNELS.search(file):
        return f"{file}-{some}"
    return re.sub("^(cpu|cuda)-", "", parameters) or nodeid


def digest_of(text: str) -> int:
    """Return a hash of the text that is the same number in every process."""
    return zlib.crc32(text.encode())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sample = config.getoption("sample")
    if sample is not None:
        keep_cases(config, items, sample)
    done = config.stash.get(DONE, ()) if not hasattr(config, "workerinput") else set(config.workerinput["done"])
    items[:] = [item for item in items if item.nodeid not in done]
    # Tests on the GPU come first, so that an interrupted run contains their results. Long tests come next, so that no
    # worker runs a long test after the others are done. Tests that measure time come last, when the machine is idle.
    items.sort(key=lambda item: (bool(item.get_closest_marker("timing")), not runs_on_gpu(item), not takes_long(item)))
    for item in items:
        if GPU_MISSING and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=GPU_MISSING))


def runs_on_gpu(item: pytest.Item) -> bool:
    """Return True if the test uses a GPU and one is present."""
    device = item.callspec.params.get("device") if hasattr(item, "callspec") else None
    return not GPU_MISSING and (device == "cuda" or bool(item.get_closest_marker("gpu")))


def takes_long(item: pytest.Item) -> bool:
    """Return True if the test is marked as slow, or belongs to a group that takes long as a whole."""
    return bool(item.get_closest_marker("slow") or KEEPS_KERNELS.search(item.nodeid.partition("::")[0]))


def pytest_collection_finish() -> None:
    """Exclude all existing objects (torch, thousands of test items) from garbage collection, because they live until
    the run ends. Collecting them repeatedly took a seventh of the time of tests that compile programs, and copied their
    pages in every forked process."""
    gc.collect()
    gc.freeze()


TESTS_PER_FREEZE = 300


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exclude the objects of later imports and caches, too: the objects grow to millions, and some tests and libraries
    collect garbage after each call. Kernels that the tests of a file share stay collectable."""
    item.config.stash[TESTS_RUN] = tests = item.config.stash.get(TESTS_RUN, 0) + 1
    if tests % TESTS_PER_FREEZE == 0 and not (nextitem is not None and KEEPS_KERNELS.search(nextitem.path.as_posix())):
        gc.collect()
        gc.freeze()


def keep_cases(config: pytest.Config, items: list[pytest.Item], pattern: str) -> None:
    """Deselect tests that check none of the cases selected by ``--sample``."""
    chunks = [item.callspec.params.get("chunk") if hasattr(item, "callspec") else None for item in items]
    kept = [chunk is not None and bool(chunk.selected(pattern)) for chunk in chunks]
    config.hook.pytest_deselected(items=[item for item, keeps in zip(items, kept, strict=True) if not keeps])
    items[:] = [item for item, keeps in zip(items, kept, strict=True) if keeps]


# Devices of tests


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with an argument ``device`` on the CPU, and on the GPU if one is present."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES)


# Python's stack


def _call(function: Callable[..., Any], **given: Any) -> Any:
    return function(**given)


with_room = types.FunctionType(_call.__code__.replace(co_stacksize=1 << 16), globals(), "with_room")
"""Call a function from a frame so large that all inner frames fit into the same piece of memory. Python gets memory for
frames in pieces of 16 KB, and frees a piece as soon as it is empty. If a loop calls functions across the end of a
piece, each call maps memory. In some files of kernel tests, these mappings took a twelfth of the time."""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function):
    """Call the test through ``with_room``, so that loops in the test do not map memory at each call."""
    test = pyfuncitem.obj
    pyfuncitem.obj = functools.partial(with_room, test)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


# Random data

BASE_SEED = pytest.StashKey[int]()
TESTS_RUN = pytest.StashKey[int]()
DONE = pytest.StashKey[frozenset[str]]()
"""Key of the names of tests that an earlier session of ``--gpu-record`` has already run."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed each test from the base seed and the test's name, so that its data does not depend on other tests."""
    seed_for(item.config, item.nodeid)


@pytest.fixture
def seed_case(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return a function that seeds a case of a chunk (see ``support.chunks``) as if the case were a separate test."""
    chunk = request.node.callspec.params["chunk"].id
    return lambda case: seed_for(request.config, request.node.nodeid.replace(chunk, case))


def seed_for(config: pytest.Config, name: str) -> None:
    """Seed all random generators from the base seed and a name."""
    digest = hashlib.sha256(f"{config.stash[BASE_SEED]} {name}".encode()).digest()
    seed = int.from_bytes(digest[:4], "little")
    random.seed(seed)
    # torch.manual_seed stores a stack trace for each absent kind of GPU, which takes 0.1 ms per test.
    torch.default_generator.manual_seed(seed)
    if not GPU_MISSING:
        torch.cuda.manual_seed_all(seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.failed:
        report.sections.append(("random data", f"--seed {item.config.stash[BASE_SEED]}"))
    return report
