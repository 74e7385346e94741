"""Tests of ``pytest --gpu-record``: the record, and runs that must not be recorded."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from support import gpu_record
from torch_cute_ops.runtime.provenance import source_digest

pytest_plugins = ["pytester"]

HERE = Path(__file__).parents[1]
TESTS = """
import pytest

def test_good():
    pass

def test_bad():
    assert False

@pytest.mark.skip(reason="not today")
def test_skipped():
    pass

@pytest.mark.xfail
def test_expected_to_fail():
    assert False
"""


GROUPS = """
import os
import pytest

samples = pytest.mark.parametrize("sample", [f"op-sample-{i}" for i in range(12)])

@samples
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one(sample, device):
    with open("ran", "a") as file:
        file.write(f"{os.getpid()} {sample}\\n")

@samples
def test_another(sample):
    test_one(sample, None)
"""

DRAWS = """
import random, torch

def test_first():
    print("drew", torch.rand(()).item(), random.random())
    assert False

def test_second():
    print("drew", torch.rand(()).item(), random.random())
    assert False
"""


@pytest.fixture
def project(pytester, monkeypatch):
    """Return a pytest project with our conftest, on a machine that pretends to have a GPU."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    for name in ("TEST_SEED", "TEST_GPUS"):  # monkeypatch restores these variables, which the inner pytest changes
        monkeypatch.setenv(name, os.environ.get(name, ""))
    # The conftest written below replaces these attributes to pretend that a GPU is present. Set them here, so that
    # monkeypatch restores them at the end of the test.
    monkeypatch.setattr(torch.cuda, "get_device_name", torch.cuda.get_device_name)
    monkeypatch.setattr(gpu_record, "GPU_MISSING", None)
    conftest = (HERE / "conftest.py").read_text()
    real = "from support.devices import DEVICES, GPU_MISSING\n"
    pretend = "DEVICES, GPU_MISSING = ('cpu',), None\ntorch.cuda.get_device_name = lambda *args: 'GPU of test'\n"
    pretend += "import support.gpu_record\nsupport.gpu_record.GPU_MISSING = None\n"
    assert real in conftest
    pytester.makepyfile(**{"tests/test_it": TESTS})
    (pytester.path / "tests" / "conftest.py").write_text(conftest.replace(real, pretend))
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\ntestpaths = ['tests']\nmarkers = ['gpu']\n")
    paths = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return pytester


# --max-worker-restart 0, because a worker that is restarted with --dist loadgroup waits forever (pytest-xdist 3.8,
# issue 1323).
DISTRIBUTED = ["-n", "2", "--dist", "loadgroup", "--max-worker-restart", "0"]
ONE_WORKER = ["-n", "1", *DISTRIBUTED[2:]]
DISTRIBUTIONS = {"one-process": [], "distributed": ONE_WORKER}
distributed = pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)


def run_pytest(project, *arguments):
    """Run pytest in this process, which saves the time to start an interpreter and import torch."""
    return project.runpytest_inprocess(*arguments)


def skip_without_xdist(distribution):
    if distribution:
        pytest.importorskip("xdist")


COUNTS = {"passed": 1, "failed": 1, "skipped": 1, "xfailed": 1}


def test_record(project):
    result = run_pytest(project, "--gpu-record", "record.json", "--seed", "7")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    record = json.loads((project.path / "record.json").read_text())
    assert {key: record[key] for key in (*COUNTS, "seed", "gpu")} == {**COUNTS, "seed": 7, "gpu": "GPU of test"}
    assert record["skip_reasons"] == {"not today": 1}
    assert record["source_digest"] == source_digest()
    assert record["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"date", "driver", "cuda", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi"} <= set(record)


def test_distributed(project):
    """Check that the results of workers are recorded, that the tests of a sample run on one worker, and that seeds
    decide the data."""
    skip_without_xdist(DISTRIBUTED)
    project.makepyfile(**{"tests/test_groups": GROUPS, "tests/test_draws": DRAWS})
    conftest = project.path / "tests" / "conftest.py"
    conftest.write_text(conftest.read_text().replace('if "device" in metafunc.fixturenames', "if False"))
    result = run_pytest(project, "--gpu-record", "record.json", "--seed", "7", *DISTRIBUTED)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    record = json.loads((project.path / "record.json").read_text())
    assert {key: record[key] for key in COUNTS} == {**COUNTS, "passed": 1 + 36, "failed": 1 + 2}
    assert (record["seed"], record["skip_reasons"]) == (7, {"not today": 1})
    ran = (project.path / "ran").read_text().splitlines()
    assert len(ran) == 36
    assert len(set(ran)) == 12
    assert len({line.split()[0] for line in ran}) == 2
    alone = run_pytest(project, "--seed", "7", "tests/test_draws.py")
    assert len(drawn(alone)) == 2 and sorted(drawn(alone)) == sorted(drawn(result))


STOP = """
import os, signal, time

def stop():
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.5)
        os._exit(0)  # or the controller would wait for it
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
"""
STOPS = """
import pytest

@pytest.mark.parametrize("i", range(6))
def test_number(i):
    with open("ran", "a") as file:
        file.write(f"{i}\\n")
    if i == 3 and not os.path.exists("again"):
        stop()
"""


@pytest.fixture(params=DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def stopped(request, project, monkeypatch):
    """Return a run that was stopped once in the middle: its project, its command line and its record."""
    skip_without_xdist(request.param)
    project.makepyfile(**{"tests/test_it": TESTS, "tests/test_stops": STOP + STOPS})
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    arguments = ("--gpu-record=record.json", *request.param)
    assert project.runpytest_subprocess(*arguments).ret == pytest.ExitCode.INTERRUPTED
    (project.path / "again").touch()
    return project, arguments, (project.path / "record.json").read_text()


def test_a_run_that_is_stopped_goes_on(stopped):
    """Check that, after a run was stopped, the next run keeps the results of finished tests and does not run them
    again, and that all other tests count as not run. A run that is stopped while collecting changes neither record nor
    journal."""
    project, arguments, record = stopped
    before = json.loads(record)
    assert {key: before[key] for key in (*COUNTS, "not_run")} == {**COUNTS, "passed": 1 + 3, "not_run": 3}
    module = project.path / "tests" / "test_stops.py"
    whole = module.read_text()
    module.write_text(f"{STOP}\nstop()\n{STOPS}")
    result = project.runpytest_subprocess(*arguments)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*wrote nothing: it was stopped before all tests were collected*"])
    assert (project.path / "record.json").read_text() == record
    module.write_text(whole)
    result = run_pytest(project, *arguments)
    assert result.ret == pytest.ExitCode.TESTS_FAILED  # a test failed in the first run
    after = json.loads((project.path / "record.json").read_text())
    assert {key: after[key] for key in COUNTS} == {**COUNTS, "passed": 1 + 6}
    assert "not_run" not in after and after["seed"] == before["seed"]
    assert (project.path / "ran").read_text().split() == ["0", "1", "2", "3", "3", "4", "5"]
    assert not (project.path / "record.jsonl").exists()


def test_only_the_same_run_goes_on(tmp_path):
    """Check that a journal is continued only with the same sources, GPU and seed, and that an incomplete last line is
    ignored."""
    path = tmp_path / "run.jsonl"
    one = {"gpu": "one", "seed": None}
    journal = gpu_record.Journal(path)
    seed = journal.resume(one)["seed"]
    journal.add("a", gpu_record.Outcome("passed"))
    journal.add("b", gpu_record.Outcome("skipped", "why"))
    journal.close(is_whole=False)
    path.write_text(path.read_text() + '["c[1]')
    for facts, resumes in ((one, True), ({**one, "seed": seed}, True), ({**one, "seed": seed + 1}, False)):
        journal = gpu_record.Journal(path)
        content = path.read_text()
        assert (journal.resume(facts)["seed"] == seed) == resumes
        assert list(journal.outcomes.values()) == [("passed", None), ("skipped", "why")] * resumes
        journal.close(is_whole=False)
        path.write_text(content)
    journal = gpu_record.Journal(path)
    assert journal.resume({"gpu": "two", "seed": None})["gpu"] == "two" and not journal.outcomes
    journal.close(is_whole=True)
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-k", "good"], "drop keyword"),
        (["-x"], "drop maxfail"),
        (["tests/test_it.py"], "drop paths tests/test_it.py"),
    ],
)
def test_a_part_of_the_suite_is_not_recorded(project, arguments, reason):
    result = project.runpytest_inprocess("--gpu-record", "record.json", *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--gpu-record records the whole suite; {reason}*"])
    assert not (project.path / "record.json").exists()


@distributed
def test_a_broken_collection_is_not_recorded(project, distribution):
    skip_without_xdist(distribution)
    (project.path / "tests" / "test_broken.py").write_text("import no_such_module")
    arguments = ("--gpu-record", "record.json", "--continue-on-collection-errors", *distribution)
    result = run_pytest(project, *arguments)
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*--gpu-record wrote nothing: *test_broken.py could not be collected*"])
    assert not (project.path / "record.json").exists()


def test_a_lost_worker(project):
    """Check that, if a worker crashes, its current test counts as failed and its remaining tests as not run."""
    skip_without_xdist(ONE_WORKER)
    project.makepyfile(**{"tests/test_fatal": "import os\n\ndef test_fatal():\n    os._exit(1)\n"})
    result = run_pytest(project, "--gpu-record", "record.json", *ONE_WORKER)
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*--gpu-record wrote *; 4 tests have not run, *"])
    record = json.loads((project.path / "record.json").read_text())
    assert (record["failed"], record["passed"], record["not_run"]) == (1, 0, 4)


# Seeds


def test_seeds(project):
    """Check that each run draws fresh data, and that ``--seed`` with the printed seed draws the same data, whichever
    tests run before."""
    project.makepyfile(**{"tests/test_it": DRAWS})

    def run(*arguments):
        result = run_pytest(project, *arguments)
        return drawn(result), set(re.findall(r"^--seed (\d+)$", result.stdout.str(), re.M))

    first, (seed,) = run()
    assert len(set(first)) == 2
    again, _ = run("--seed", seed)
    assert again == first
    alone, _ = run("--seed", seed, "-k", "second")
    assert alone == first[1:]
    fresh, _ = run()
    assert not set(fresh) & set(first)


def drawn(result):
    """Return the lines with random numbers that the failing tests of DRAWS printed."""
    return re.findall(r"^drew .*", result.stdout.str(), re.M)
