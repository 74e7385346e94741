"""Run the samples of every op, or tests, under compute-sanitizer, and report its findings.

Each process runs some samples of an op, or one test.

    python tools/sanitize.py                                  # all ops, all tools
    python tools/sanitize.py mm_fp4 --tools racecheck         # part of it
    python tools/sanitize.py mm_fp4 --only wgmma              # by one backend
    python tools/sanitize.py mm_fp4 --parts 60 --take 7 33    # two of sixty parts of the samples
    python tools/sanitize.py --tests tests/gemm/test_fp8_fp4_gemm_gpu.py::test_every_tactic

Each process first runs without a sanitizer tool, to fill the kernel cache: compiling under a tool is slow. The exit
status is 1 if any run failed or a tool reported an error.

``racecheck`` reports false hazards in kernels in which lane 0 of a warp arrives at an mbarrier for the whole warp. The
warp barrier before the arrival orders the other lanes' accesses, but ptxas removes it if the warp is converged, because
a converged warp issues its instructions in order. ``racecheck`` then misses that order for lanes 1 to 31. If the kernel
itself lacked synchronisation, lane 0's accesses would be reported too. So a run passes if lane 0 made none of the
earlier accesses of the reported hazards; the report gives the number of hazards.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from torch_cute_ops.gemm.select import BACKENDS
from torch_cute_ops.registry import OPS

SAMPLES = Path(__file__).with_name("run_samples.py")
OURS = ("--kernel-name", "kns=torch_cute_ops")
"""Option to instrument only our kernels. Instrumenting PyTorch's kernels, too, would take most of the time."""
WITHOUT_CUBLAS = ("--without", "cublas")
TOOLS = {
    # When the DSL compiles under the tool, it asks the driver for functions that the driver lacks, and the tool would
    # count each failed query as an error. Our own failed API calls raise exceptions anyway.
    "memcheck": ((*OURS, "--report-api-errors", "no"), ()),
    # Leave out cuBLAS: with any kernel filter, the tool fails on a plain torch.mm with "failed to handle a hardware
    # exception".
    "racecheck": ((*OURS, "--racecheck-report", "all", "--print-limit", "0"), WITHOUT_CUBLAS),
    "synccheck": (OURS, ()),
    # Use no kernel filter: initcheck must see the writes of PyTorch's kernels. It does not see bulk stores of cuBLAS:
    # reading the result of a plain torch.mm gives 65,436 errors.
    "initcheck": ((), WITHOUT_CUBLAS),
}
"""Options of each tool, and options of ``run_samples.py`` under that tool."""


FOUND = 9
"""Exit status that the sanitizer is told to use if it finds an error."""
HAZARD = re.compile(
    r"Potential (RAW|WAR|WAW) hazard detected at .*\n"
    r"=+ +(\w+) Thread \((\d+),.*\n"
    r"=+ +(\w+) Thread \((\d+),"
)
"""A reported hazard: its kind, and for each of its two accesses ``Read`` or ``Write`` and the thread's x index. The x
index identifies a thread, because our blocks extend along x only."""
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards?")
RACE = "Race reported between"


class Run(NamedTuple):
    """A program to run under the tools.

    Attributes:
        name: name in the report and of the log.
        is_samples: True if the program is ``run_samples.py``, which takes additional options.
        command: command line.
    """

    name: str
    is_samples: bool
    command: tuple[str, ...]


def main() -> None:
    """Run the named ops or tests; print a line for each run, with the last line of its output."""
    parser = argparse.ArgumentParser(description=__doc__.split(".")[0] if __doc__ else None)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--parts", type=int, default=4, help="processes that share the samples of an op (default: 4)")
    parser.add_argument("--take", type=int, nargs="+", metavar="I", help="run only these parts, from 1 (default: all)")
    parser.add_argument("--logs", type=Path, default=Path("sanitizer-logs"), help="directory of the logs")
    parser.add_argument(
        "--only",
        choices=sorted({backend.name for backend in BACKENDS}),
        metavar="BACKEND",
        help="run only this backend",
    )
    parser.add_argument("--tests", nargs="+", metavar="TEST", help="run these tests, named as for pytest, not samples")
    parser.add_argument("ops", nargs="*", metavar="OP", help="run only these ops")
    given = parser.parse_args()
    if given.parts < 1:
        parser.error(f"--parts is {given.parts}; expected a positive number")
    take = given.take or range(1, given.parts + 1)
    if not set(take) <= {*range(1, given.parts + 1)}:
        parser.error(f"--take is {' '.join(map(str, take))}; expected numbers from 1 to {given.parts}")
    if given.tests and (given.ops or given.only):
        parser.error("--tests cannot be combined with ops or --only")
    given.logs.mkdir(parents=True, exist_ok=True)
    runs = runs_of_tests(given.tests) if given.tests else runs_of_ops(given.ops or OPS, given.parts, given.only, take)
    failed = 0
    for tool in (None, *given.tools):
        with ThreadPoolExecutor(given.jobs) as pool:
            for line, is_good in pool.map(lambda run, tool=tool: sanitize(run, tool, given.logs), runs):
                print(line, flush=True)
                failed += not is_good
    sys.exit(f"{failed} runs failed" if failed else 0)


def runs_of_ops(ops: Iterable[str], parts: int, only: str | None, take: Iterable[int]) -> list[Run]:
    """Return the runs that execute the ops' samples. The samples of each op are divided into ``parts`` runs; return
    the runs whose numbers, from 1, are in ``take``."""
    runs = []
    for op, part in itertools.product(ops, take):
        command = sys.executable, str(SAMPLES), op, "--part", f"{part}/{parts}", *(("--only", only) if only else ())
        runs.append(Run(f"{f'{op}.{only}' if only else op} {part}/{parts}", True, command))
    return runs


def runs_of_tests(named: Sequence[str]) -> list[Run]:
    """Return one run for each test that pytest finds under these names."""
    pytest = sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no"
    found = subprocess.run([*pytest, "--collect-only", *named], stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode != 0:
        sys.exit(found.stdout)
    tests = [line.partition("::") for line in found.stdout.splitlines() if "::" in line]
    return [Run(f"{Path(file).name}::{test}", False, (*pytest, f"{file}::{test}")) for file, _, test in tests]


def sanitize(run: Run, tool: str | None, logs: Path) -> tuple[str, bool]:
    """Run a program under a sanitizer tool, or without a tool if ``tool`` is None.

    Returns:
        A line for the report, and True if the run passed.
    """
    command = list(run.command)
    if tool is not None:
        own, program = TOOLS[tool]
        options = "compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND), *own
        command = [*options, *command, *(program if run.is_samples else ())]
    start = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    file = re.sub(r"[^\w.-]+", "-", run.name).strip("-")
    (logs / f"{file}.{tool or 'alone'}.log").write_text(done.stdout)
    last = (done.stdout.strip().splitlines() or [""])[-1].strip("= ")
    passed = done.returncode == 0
    if tool == "racecheck" and done.returncode == FOUND:
        last, passed = judge_hazards(done.stdout)
    line = f"{run.name:60} {tool or 'alone':10} {time.monotonic() - start:5.0f} s  {last}"
    # A skipped test does not count as passed: for example, it may need a GPU that is absent.
    return line, passed and " skipped in " not in last


def judge_hazards(report: str) -> tuple[str, bool]:
    """Count the hazards that a ``racecheck`` report lists.

    Returns:
        A line for the report, and True if all hazards are false because ptxas removed a warp barrier; see the module's
        docstring.
    """
    hazards = HAZARD.findall(report)
    # In a WAW hazard, either access is the earlier write
    earlier = {"RAW": "Write", "WAR": "Read", "WAW": "Write"}
    by_lane_0 = sum(
        any(access == earlier[kind] and int(thread) % 32 == 0 for access, thread in zip(accesses, threads, strict=True))
        for kind, accesses, threads in ((kind, sides[::2], sides[1::2]) for kind, *sides in hazards)
    )
    # The tool also counts its summaries of hazards at the same two instructions.
    counted = sum(map(int, SUMMARY.findall(report))) - report.count(RACE)
    line = f"{len(hazards)} hazards, {by_lane_0} of them after an access by lane 0"
    if counted > len(hazards):
        line += f"; {counted} in the summary"
    return line, bool(hazards) and not by_lane_0 and counted <= len(hazards)


if __name__ == "__main__":
    main()
