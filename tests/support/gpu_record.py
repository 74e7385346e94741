"""Record of a run of the whole test suite on a GPU. A run may consist of several sessions of pytest."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import platform
import secrets
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import pytest
import torch

from support.devices import GPU_MISSING
from torch_cute_ops.runtime.provenance import source_digest

TESTS = Path(__file__).parents[1]


class Outcome(NamedTuple):
    """Result of a test, ``"passed"``, ``"failed"``, ``"skipped"`` or ``"xfailed"``, and the reason of a skip."""

    kind: str
    reason: str | None = None


class Journal:
    """File with the results of a run's tests, one per line, after a line with the *facts* of the run.

    If a run is stopped, its journal stays next to the record. The next run with the same facts continues the journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[str, Outcome] = {}
        self._file: TextIO | None = None

    @classmethod
    def beside(cls, record: Path) -> Journal:
        """Return the journal of a record: ``record.jsonl`` for ``record.json``."""
        return cls(record.with_name(f"{record.name}l"))

    def resume(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Continue the journal of an earlier run if its facts equal ``facts``, in which None matches any value.
        Otherwise start a new journal. Return the facts of the run; a seed of None becomes a random number."""
        try:
            first, *lines = self.path.read_text(encoding="utf-8").splitlines()
            found = json.loads(first)
        except (OSError, ValueError):
            found, lines = {}, []
        if found.keys() == facts.keys() and all(value in (None, found[key]) for key, value in facts.items()):
            facts = found
            for line in lines:
                with contextlib.suppress(ValueError):  # a line is incomplete if the run was killed while writing
                    name, *outcome = json.loads(line)
                    self.outcomes[name] = Outcome(*outcome)
        elif facts["seed"] is None:
            facts = {**facts, "seed": secrets.randbelow(2**31)}
        lines = [facts, *([name, *outcome] for name, outcome in self.outcomes.items())]
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        fresh.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        return facts

    def add(self, name: str, outcome: Outcome) -> None:
        """Add a test's result."""
        assert self._file is not None
        self.outcomes[name] = outcome
        self._file.write(json.dumps([name, *outcome]) + "\n")
        self._file.flush()

    def close(self, *, is_whole: bool) -> None:
        """Close the file. After a complete run, delete it."""
        assert self._file is not None
        self._file.close()
        if is_whole:
            self.path.unlink()


class GpuRecord:
    """Pytest plugin that writes each test's result to the journal, and the record at the end. With pytest-xdist the
    plugin collects the results of all workers.

    Attributes:
        facts: facts of the run: GPU, versions, digest of the package's sources, seed.
        done: names of tests that earlier sessions ran and that this session skips.
    """

    def __init__(self, config: pytest.Config) -> None:
        refuse_what_is_not_whole(config)
        self.path: Path = config.getoption("gpu_record")
        self.journal = Journal.beside(self.path)
        self.facts = self.journal.resume(facts(config))
        self.done = frozenset(self.journal.outcomes)
        self.ended: dict[str, Outcome] = {}
        self.refused: list[str] = []
        self.collected: int | None = None  # number of tests; None until all tests are collected
        # Raise an exception on SIGTERM, with which ``timeout`` and job schedulers stop a run, so that the results are
        # still written.
        self.before = signal.signal(signal.SIGTERM, signal.default_int_handler)

    def pytest_unconfigure(self) -> None:
        signal.signal(signal.SIGTERM, self.before)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Store the number of tests. Every worker reports the same number, because each worker collects all tests."""
        self.collected = len(ids)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Store the number of tests if there are no workers. The hook ``pytest_collection_finish`` would be wrong,
        because pytest also calls it if the collection was interrupted."""
        self.collected = len(items)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        if items:
            self.refused.append(f"{len(items)} tests were deselected")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.refused.append(f"{report.nodeid} could not be collected")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        if report.failed:
            self.ended[name] = Outcome("failed")
        elif report.skipped and hasattr(report, "wasxfail"):
            self.ended[name] = Outcome("xfailed")
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self.ended[name] = Outcome("skipped", reason.removeprefix("Skipped: "))
        elif report.when == "call":
            self.ended.setdefault(name, Outcome("passed"))
        if report.when == "teardown" and name in self.ended:
            self.journal.add(name, self.ended.pop(name))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for name, outcome in self.ended.items():
            if outcome.kind == "failed":  # the test failed and then its worker crashed
                self.journal.add(name, outcome)
        if self.collected is None:
            self.refused.append("it was stopped before all tests were collected")
        not_run = (self.collected or 0) + len(self.done) - len(self.journal.outcomes)
        self.journal.close(is_whole=not not_run and not self.refused)
        if self.refused:
            session.exitstatus = session.exitstatus or pytest.ExitCode.USAGE_ERROR
            return
        record = self.record(not_run)
        self.path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if record["failed"] and session.exitstatus == pytest.ExitCode.OK:  # in an earlier session
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.refused:
            terminalreporter.line(f"ERROR: --gpu-record wrote nothing: {'; '.join(self.refused)}", red=True)
        else:
            not_run = json.loads(self.path.read_text(encoding="utf-8")).get("not_run")
            rest = f"; {not_run} tests have not run, and do if it is called again" if not_run else ""
            terminalreporter.line(f"--gpu-record wrote {self.path}{rest}", red=bool(not_run))

    def record(self, not_run: int) -> dict[str, Any]:
        """Return the facts of the run and the counts of its results."""
        counts = Counter(outcome.kind for outcome in self.journal.outcomes.values())
        skips = Counter(outcome.reason for outcome in self.journal.outcomes.values() if outcome.kind == "skipped")
        return {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **self.facts,
            **{kind: counts[kind] for kind in ("passed", "failed", "skipped", "xfailed")},
            **({"not_run": not_run} if not_run else {}),
            "skip_reasons": dict(skips.most_common()),
        }


def refuse_what_is_not_whole(config: pytest.Config) -> None:
    """Refuse options that select only a part of the suite, and machines without the required GPU."""
    if GPU_MISSING:
        raise pytest.UsageError(f"--gpu-record: {GPU_MISSING}")
    parts = ("sample", "keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf")
    options = (*parts, "stepwise", "collectonly", "maxfail")
    given = [option for option in options if config.getoption(option, None)]
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        given.append(f"paths {' '.join(config.args)}")
    if given:
        raise pytest.UsageError(f"--gpu-record records the whole suite; drop {', '.join(given)}")


def facts(config: pytest.Config) -> dict[str, Any]:
    """Return the facts that identify a run: versions, digests of the package's and the tests' sources, and options that
    add tests."""
    options = ("every_kernel", "more_emulated", "fuzz_examples")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: importlib.metadata.version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")},
        "source_digest": source_digest(),
        "tests_digest": source_digest(TESTS),
        "gpus": torch.cuda.device_count(),
        **{option: config.getoption(option) for option in options},
        "seed": config.getoption("seed"),
    }


def driver_version() -> str:
    """Return the NVIDIA driver's version."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"
