"""Pytest configuration of all tests: their devices, fresh random data with a printed seed, and the record of a GPU
run."""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import os
import random
import re
import secrets
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Set before NumPy and torch load their libraries, here and in processes that tests start: matrices are small, and a
# second thread busy-waits. It lengthened float64 sums that GEMMs are compared with by two fifths.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch
from support import unchanged
from support.devices import DEVICES, GPU_MISSING
from support.gpu_record import GpuRecord

# The time of an example depends on the machine more than on the code.
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
        "--fuzz-examples", type=int, default=50, metavar="N", help="calls of each op that the fuzz test makes"
    )
    group.addoption(
        "--gpu-record",
        type=Path,
        metavar="FILE",
        help="write a record of this run on a GPU, as JSON, or go on with one",
    )


def pytest_configure(config: pytest.Config) -> None:
    # With small tensors a second thread costs more than it saves, and much more on a busy machine.
    torch.set_num_threads(1)
    # pytest adds its handlers, in each phase of each test, to each logger that does not propagate. torch has 48 of
    # them.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    # A worker of pytest-xdist receives its controller's seed, and leaves the record to the controller.
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
        # One worker runs per processor, and Inductor would start a further process per processor in each.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_report_header(config: pytest.Config) -> list[str]:
    kernels = f"kernels do not run: {GPU_MISSING}" if GPU_MISSING else f"kernels run on {torch.cuda.get_device_name()}"
    return [f"torch {torch.__version__}, {kernels}", f"random data: --seed {config.stash[BASE_SEED]}"]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the seed and the names of tests that ran before to a worker of pytest-xdist."""
    node.workerinput["seed"] = node.config.stash[BASE_SEED]
    node.workerinput["done"] = sorted(node.config.stash.get(DONE, ()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Send the tests of an op's sample to one worker with ``--dist loadgroup``, so that it compiles each kernel once.

    Groups are not marked, because pytest 9.2 lets pytest-xdist 3.8 lose the marks (pytest-xdist's issue 1386).
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
            # xdist counts all groups of a worker after each test. Finished groups would number thousands.
            work, group = self.assigned_work[node], self._split_scope(self.registered_collections[node][item_index])
            if all(work[group].values()):
                del work[group]

    return BySample(config, log)


BY_INDUCTOR = ("test_inductor", "test_inductor_updates_the_residual_in_place", "test_residual_inside_the_program")
WORKERS_OF_A_GROUP = 8
KEEPS_KERNELS = re.compile(r"/kernels/test_(\w+_emulated|overlap)\.py$")


def group_of(nodeid: str, workers: int = 1) -> str:
    """Return the group of a test, whose tests run on one worker: its op and sample, or the test itself without
    parameters.

    Some tests are grouped differently. Inductor's tests on the CPU form one group per 8 workers: each worker first
    precompiles PyTorch's headers, which takes a minute, but a single worker would finish after all others. So do the
    tests of a file that compile and keep the same kernels; the longest file takes two minutes by itself. Tests for GPUs
    only, some of which launch kernels for a minute, are not grouped, so that tests of a backend run in parallel.
    """
    name, _, parameters = nodeid.partition("[")
    file = name.partition("::")[0]
    some = digest_of(parameters) % -(-workers // WORKERS_OF_A_GROUP)
    if file.endswith("_gpu.py"):
        return nodeid
    if KEEPS_KERNELS.search(file):
        return f"{file}-{some}"
    if parameters.startswith("cpu-") and name.rpartition("::")[2] in BY_INDUCTOR:
        return f"inductor-cpu-{some}"
    return re.sub("^(cpu|cuda)-", "", parameters) or nodeid


def digest_of(text: str) -> int:
    """Return a number for a text that is the same in every process."""
    return zlib.crc32(text.encode())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sample = config.getoption("sample")
    if sample is not None:
        keep_cases(config, items, sample)
    done = config.stash.get(DONE, ()) if not hasattr(config, "workerinput") else set(config.workerinput["done"])
    items[:] = [item for item in items if item.nodeid not in done]
    # Tests of the GPU begin first, so that a run that is stopped contains them, and then long tests, so that no worker
    # ends up with them; tests that measure time run after all others.
    items.sort(key=lambda item: (bool(item.get_closest_marker("timing")), not runs_on_gpu(item), not takes_long(item)))
    for item in items:
        if GPU_MISSING and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=GPU_MISSING))


def runs_on_gpu(item: pytest.Item) -> bool:
    """Return whether a test uses a GPU, and one is present."""
    device = item.callspec.params.get("device") if hasattr(item, "callspec") else None
    return not GPU_MISSING and (device == "cuda" or bool(item.get_closest_marker("gpu")))


def takes_long(item: pytest.Item) -> bool:
    """Return whether a test is marked as slow, or belongs to a group that takes long as a whole."""
    return bool(item.get_closest_marker("slow") or KEEPS_KERNELS.search(item.nodeid.partition("::")[0]))


def pytest_collection_finish() -> None:
    """Exclude all objects so far, torch and thousands of items, from garbage collection: they live as long as the run.
    Collecting them repeatedly took a seventh of the time of tests that compile programs, and copied their pages in
    every forked process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def keep_cases(config: pytest.Config, items: list[pytest.Item], pattern: str) -> None:
    """Deselect tests without a case that ``--sample`` asks for."""
    chunks = [item.callspec.params.get("chunk") if hasattr(item, "callspec") else None for item in items]
    kept = [chunk is not None and bool(chunk.selected(pattern)) for chunk in chunks]
    config.hook.pytest_deselected(items=[item for item, keeps in zip(items, kept, strict=True) if not keeps])
    items[:] = [item for item, keeps in zip(items, kept, strict=True) if keeps]


# The device


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with an argument ``device`` on the CPU, and on the GPU if one is present."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES)


# Python's stack


def _call(function: Callable[..., Any], **given: Any) -> Any:
    return function(**given)


with_room = types.FunctionType(_call.__code__.replace(co_stacksize=1 << 16), globals(), "with_room")
"""Calls a function from a frame so large that all further frames fit into the same piece of memory. Python gets memory
for frames in pieces of 16 KB and frees a piece as soon as it is empty, so that a loop of calls across the end of a
piece maps memory each time. In some files of kernel tests this took a twelfth of the time."""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function):
    """Call the test through ``with_room``."""
    test = pyfuncitem.obj
    pyfuncitem.obj = functools.partial(with_room, test)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


# Random data

BASE_SEED = pytest.StashKey[int]()
DONE = pytest.StashKey[frozenset[str]]()
"""Tests that an earlier session of ``--gpu-record`` has run."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed each test from the base seed and its name, whatever runs before it."""
    seed_for(item.config, item.nodeid)


@pytest.fixture
def seed_case(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return a function that seeds a case of a chunk as if it were a test."""
    chunk = request.node.callspec.params["chunk"].id
    return lambda case: seed_for(request.config, request.node.nodeid.replace(chunk, case))


def seed_for(config: pytest.Config, name: str) -> None:
    """Seed all random data from the base seed and a name."""
    digest = hashlib.sha256(f"{config.stash[BASE_SEED]} {name}".encode()).digest()
    seed = int.from_bytes(digest[:4], "little")
    random.seed(seed)
    # torch.manual_seed keeps a stack trace for each kind of GPU if none is present, which takes 0.1 ms per test.
    torch.default_generator.manual_seed(seed)
    if not GPU_MISSING:
        torch.cuda.manual_seed_all(seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.failed:
        report.sections.append(("random data", f"--seed {item.config.stash[BASE_SEED]}"))
    return report
