"""What all tests share: the device they run on, fresh random data with a printed seed, and the record of a GPU run."""

from __future__ import annotations

import datetime
import gc
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import random
import re
import secrets
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before NumPy and torch load their libraries, here and in processes that tests start: matrices are small, and a second
# thread waits actively. It added two fifths to the time of the float64 sums that GEMMs are compared with.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch
from support.devices import DEVICES, GPU_MISSING
from support.parts import part_of

# How long an example takes says more about the machine than about the code.
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
    group.addoption(
        "--fuzz-examples", type=int, default=50, metavar="N", help="calls of each op that the fuzz test makes"
    )
    group.addoption("--gpu-record", type=Path, metavar="FILE", help="write a record of this run on a GPU, as JSON")
    group.addoption("--part", type=part_of, metavar="I/N", help="run one of N parts; parts add up in the record")


def pytest_configure(config: pytest.Config) -> None:
    # Tensors are small here; a second thread costs more than it brings, and much more on a busy machine.
    torch.set_num_threads(1)
    # pytest gives each logger that does not propagate its handlers, for each phase of each test. torch has 48.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    # A worker of pytest-xdist is told its controller's seed, and leaves the record to the controller.
    controller = getattr(config, "workerinput", None)
    seed = config.getoption("seed") if controller is None else controller["seed"]
    config.stash[BASE_SEED] = secrets.randbelow(2**31) if seed is None else seed
    os.environ["TEST_SEED"] = str(config.stash[BASE_SEED])  # for cases.py
    if controller is None and not GPU_MISSING:
        every = ",".join(map(str, range(torch.cuda.device_count())))
        os.environ["TEST_GPUS"] = os.environ.get("CUDA_VISIBLE_DEVICES", every)  # for workers, in devices.py
    if controller is not None:
        # Workers are as many as processors already, and Inductor in each would start as many processes.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if controller is None and config.getoption("gpu_record") is not None:
        refuse_record(config)
        config.pluginmanager.register(GpuRecord(config), "gpu-record")


def pytest_report_header(config: pytest.Config) -> list[str]:
    kernels = f"kernels do not run: {GPU_MISSING}" if GPU_MISSING else f"kernels run on {torch.cuda.get_device_name()}"
    return [f"torch {torch.__version__}, {kernels}", f"random data: --seed {config.stash[BASE_SEED]}"]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist the seed."""
    node.workerinput["seed"] = node.config.stash[BASE_SEED]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadgroup`` the tests of an op's sample go to one worker, which compiles its kernel once.

    Not by marking groups, because pytest 9.2 lets pytest-xdist 3.8 lose them (pytest-xdist's issue 1386).
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # the order of the collection: pytest_collection_modifyitems
    workers = len(config.getvalue("tx"))

    class BySample(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid, workers)

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            # After each test all groups of a worker are counted; those that have finished are thousands.
            work, group = self.assigned_work[node], self._split_scope(self.registered_collections[node][item_index])
            if all(work[group].values()):
                del work[group]

    return BySample(config, log)


BY_INDUCTOR = ("test_inductor", "test_inductor_updates_the_residual_in_place", "test_residual_inside_the_program")
WORKERS_OF_A_GROUP = 8
KEEPS_KERNELS = re.compile(r"/kernels/test_(\w+_emulated|overlap)\.py$")


def group_of(nodeid: str, workers: int = 1) -> str:
    """A test's parameters but for the device: op and sample. A test without parameters is on its own.

    What Inductor compiles for the CPU is a group for every 8 workers: each worker precompiles PyTorch's headers first,
    for a minute, and one alone would be at it after all others have finished. So is a file whose tests compile the same
    kernels, and keep them: the longest takes two minutes by itself.
    """
    name, _, parameters = nodeid.partition("[")
    file = name.partition("::")[0]
    some = digest_of(parameters) % -(-workers // WORKERS_OF_A_GROUP)
    if KEEPS_KERNELS.search(file):
        return f"{file}-{some}"
    if parameters.startswith("cpu-") and name.rpartition("::")[2] in BY_INDUCTOR:
        return f"inductor-cpu-{some}"
    return re.sub("^(cpu|cuda)-", "", parameters) or nodeid


def digest_of(text: str) -> int:
    """The same number in every process."""
    return zlib.crc32(text.encode())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sample, part = config.getoption("sample"), config.getoption("part")
    if sample is not None:
        keep_cases(config, items, sample)
    if part is not None:
        # The tests of a sample share its kernels, and so a part.
        items[:] = [one for one in items if digest_of(group_of(one.nodeid)) % part[1] == part[0] - 1]
    # What takes long begins first, so that no worker is left with it; what measures time comes when others are done.
    items.sort(key=lambda item: bool(item.get_closest_marker("timing")) - takes_long(item))
    for item in items:
        if GPU_MISSING and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=GPU_MISSING))


def takes_long(item: pytest.Item) -> bool:
    """Whether a test is marked so, or belongs to a group that takes long as a whole."""
    return bool(item.get_closest_marker("slow") or KEEPS_KERNELS.search(item.nodeid.partition("::")[0]))


def pytest_collection_finish() -> None:
    """Have the garbage collector pass over what is here by now, torch and thousands of items: it lives as long as the
    run. Walking it again and again took a seventh of the time of tests that compile programs, and a copy of its pages
    in every process that is forked."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def keep_cases(config: pytest.Config, items: list[pytest.Item], pattern: str) -> None:
    """Deselect what has no case that ``--sample`` asks for."""
    chunks = [item.callspec.params.get("chunk") if hasattr(item, "callspec") else None for item in items]
    kept = [chunk is not None and bool(chunk.selected(pattern)) for chunk in chunks]
    config.hook.pytest_deselected(items=[item for item, keeps in zip(items, kept, strict=True) if not keeps])
    items[:] = [item for item, keeps in zip(items, kept, strict=True) if keeps]


# The device


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument ``device`` runs on the CPU, and on the GPU where there is one."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES)


# Random data

BASE_SEED = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each test has its own seed, made from the base seed and the test's name, whatever runs before it."""
    seed_for(item.config, item.nodeid)


@pytest.fixture
def seed_case(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """A function that gives a case of a chunk its own seed, as if it were a test."""
    chunk = request.node.callspec.params["chunk"].id
    return lambda case: seed_for(request.config, request.node.nodeid.replace(chunk, case))


def seed_for(config: pytest.Config, name: str) -> None:
    """Seed all random data from the base seed and a name."""
    digest = hashlib.sha256(f"{config.stash[BASE_SEED]} {name}".encode()).digest()
    seed = int.from_bytes(digest[:4], "little")
    random.seed(seed)
    # Not torch.manual_seed: without a GPU it keeps a stack trace for each kind of GPU, 0.1 ms a test.
    torch.default_generator.manual_seed(seed)
    if not GPU_MISSING:
        torch.cuda.manual_seed_all(seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.failed:
        report.sections.append(("random data", f"--seed {item.config.stash[BASE_SEED]}"))
    return report


# The record of a GPU run


def refuse_record(config: pytest.Config) -> None:
    """Refuse to record a run that is not the whole suite on a GPU."""
    if GPU_MISSING:
        raise pytest.UsageError(f"--gpu-record: {GPU_MISSING}")
    parts = ("sample", "keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf")
    options = (*parts, "stepwise", "collectonly", "maxfail")
    given = [option for option in options if config.getoption(option, None)]
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        given.append(f"paths {' '.join(config.args)}")
    if given:
        raise pytest.UsageError(f"--gpu-record records the whole suite; drop {', '.join(given)}")


SAME_IN_PARTS = (
    *("gpu", "driver", "cuda", "python", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "source_digest"),
    *("seed", "parts"),
)
"""What the parts of a recorded run have in common."""


class GpuRecord:
    """Counts outcomes and writes the record at the end; with pytest-xdist, those that the workers report."""

    def __init__(self, config: pytest.Config) -> None:
        self.path: Path = config.getoption("gpu_record")
        self.part: tuple[int, int] | None = config.getoption("part")
        self.outcome: dict[str, str] = {}
        self.skips: Counter[str] = Counter()
        self.incomplete: list[str] = []
        self.collected: int | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Every worker collects all tests, and each test runs on one."""
        self.collected = len(ids)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        if items:
            self.incomplete.append(f"{len(items)} tests were deselected")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.incomplete.append(f"{report.nodeid} could not be collected")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcome[report.nodeid] = "failed"
        elif report.skipped:
            self.outcome[report.nodeid] = "xfailed" if hasattr(report, "wasxfail") else "skipped"
            if isinstance(report.longrepr, tuple):
                self.skips[report.longrepr[2].removeprefix("Skipped: ")] += 1
        elif report.when == "call":
            self.outcome.setdefault(report.nodeid, "passed")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        collected = session.testscollected if self.collected is None else self.collected
        if len(self.outcome) != collected:
            self.incomplete.append(f"{collected - len(self.outcome)} tests did not run")
        record = self.record(session.config)
        if self.part is not None:
            record = self.with_other_parts(record, *self.part)
        if self.incomplete:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
            return
        self.path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    def with_other_parts(self, record: dict[str, Any], number: int, count: int) -> dict[str, Any]:
        """The record of a part and of those in the file already. The first part begins anew."""
        record["parts"] = count
        record["missing_parts"] = [part for part in range(1, count + 1) if part != number]
        if number == 1:
            return record
        if not self.path.exists():
            self.incomplete.append(f"there is no {self.path} to add to; part 1 begins it")
            return record
        before = json.loads(self.path.read_text(encoding="utf-8"))
        differing = [key for key in SAME_IN_PARTS if before.get(key) != record[key]]
        if differing or number not in before.get("missing_parts", ()):
            what = ", ".join(differing) if differing else "parts"
            self.incomplete.append(f"{self.path} is of a run with other {what}")
            return record
        for key in ("passed", "failed", "skipped", "xfailed"):
            record[key] += before[key]
        record["skip_reasons"] = dict((Counter(before["skip_reasons"]) + self.skips).most_common())
        record["missing_parts"] = [part for part in before["missing_parts"] if part != number]
        if not record["missing_parts"]:
            del record["parts"], record["missing_parts"]
        return record

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.incomplete:
            terminalreporter.line(f"ERROR: --gpu-record wrote nothing: {'; '.join(self.incomplete)}", red=True)
        else:
            terminalreporter.line(f"--gpu-record wrote {self.path}")

    def record(self, config: pytest.Config) -> dict[str, Any]:
        """What ran, on what, and how it ended."""
        from torch_cute_ops.runtime.provenance import source_digest

        counts = Counter(self.outcome.values())
        return {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "gpu": torch.cuda.get_device_name(),
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: importlib.metadata.version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")},
            "source_digest": source_digest(),
            "seed": config.stash[BASE_SEED],
            "passed": counts["passed"],
            "failed": counts["failed"],
            "skipped": counts["skipped"],
            "xfailed": counts["xfailed"],
            "skip_reasons": dict(self.skips.most_common()),
        }


def driver_version() -> str:
    """The NVIDIA driver's version."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"
