"""Run the samples of every op under compute-sanitizer, in processes of some samples each, or tests, a process each, and
report what each found.

    python tools/sanitize.py                                  # all ops, all tools
    python tools/sanitize.py mm_fp4 --tools racecheck         # part of it
    python tools/sanitize.py mm_fp4 --only wgmma              # by one backend
    python tools/sanitize.py --tests tests/gemm/test_fp8_fp4_gemm_gpu.py::test_every_tactic

First each runs without a tool, which fills the kernel cache: compiling under a tool takes long. Exits with 1 if any run
failed or found something.
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
"""Instruments our kernels alone; PyTorch's are what takes the time."""
WITHOUT_CUBLAS = ("--without", "cublas")
TOOLS = {
    # Where something is compiled under the tool, the DSL asks the driver for functions that it lacks, and each answer
    # would count as an error. Calls of ours that fail raise anyhow.
    "memcheck": ((*OURS, "--report-api-errors", "no"), ()),
    # Whatever the filter names, a plain torch.mm ends in the tool's "failed to handle a hardware exception".
    "racecheck": (OURS, WITHOUT_CUBLAS),
    "synccheck": (OURS, ()),
    # It has to see what PyTorch's kernels write, and does not see what cuBLAS stores in bulk: a plain torch.mm whose
    # result is read shows 65,436 errors.
    "initcheck": ((), WITHOUT_CUBLAS),
}
"""By tool: its own options, and those of the program."""


class Run(NamedTuple):
    """A program to sanitise: what it is called in the report and its log; whether it is ``run_samples.py``, and so has
    options of its own; and the command."""

    name: str
    is_samples: bool
    command: tuple[str, ...]


def main() -> None:
    """Run what was asked for; print a line for each run, with the last of its output."""
    parser = argparse.ArgumentParser(description=__doc__.split(".")[0] if __doc__ else None)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--parts", type=int, default=4, help="processes that share the samples of an op (default: 4)")
    parser.add_argument("--logs", type=Path, default=Path("sanitizer-logs"), help="directory of the whole output")
    parser.add_argument(
        "--only",
        choices=sorted({backend.name for backend in BACKENDS}),
        metavar="BACKEND",
        help="with this backend alone",
    )
    parser.add_argument("--tests", nargs="+", metavar="TEST", help="these tests, as pytest takes them, and no samples")
    parser.add_argument("ops", nargs="*", metavar="OP", help="these ops alone")
    given = parser.parse_args()
    if given.parts < 1:
        parser.error(f"--parts is {given.parts}; expected a positive number")
    if given.tests and (given.ops or given.only):
        parser.error("--tests goes with neither ops nor --only")
    given.logs.mkdir(parents=True, exist_ok=True)
    runs = runs_of_tests(given.tests) if given.tests else runs_of_ops(given.ops or OPS, given.parts, given.only)
    failed = 0
    for tool in (None, *given.tools):
        with ThreadPoolExecutor(given.jobs) as pool:
            for line, is_good in pool.map(lambda run, tool=tool: sanitize(run, tool, given.logs), runs):
                print(line, flush=True)
                failed += not is_good
    sys.exit(f"{failed} runs failed" if failed else 0)


def runs_of_ops(ops: Iterable[str], parts: int, only: str | None) -> list[Run]:
    """The samples of ops, in so many parts each."""
    runs = []
    for op, part in itertools.product(ops, range(1, parts + 1)):
        command = sys.executable, str(SAMPLES), op, "--part", f"{part}/{parts}", *(("--only", only) if only else ())
        runs.append(Run(f"{f'{op}.{only}' if only else op} {part}/{parts}", True, command))
    return runs


def runs_of_tests(named: Sequence[str]) -> list[Run]:
    """Each of the tests that pytest finds by these names."""
    pytest = sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no"
    found = subprocess.run([*pytest, "--collect-only", *named], stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode != 0:
        sys.exit(found.stdout)
    tests = [line.partition("::") for line in found.stdout.splitlines() if "::" in line]
    return [Run(f"{Path(file).name}::{test}", False, (*pytest, f"{file}::{test}")) for file, _, test in tests]


def sanitize(run: Run, tool: str | None, logs: Path) -> tuple[str, bool]:
    """Run a program under a tool, or alone; what came of it in a line, and whether that is good."""
    command = list(run.command)
    if tool is not None:
        own, program = TOOLS[tool]
        options = "compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *own
        command = [*options, *command, *(program if run.is_samples else ())]
    start = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    file = re.sub(r"[^\w.-]+", "-", run.name).strip("-")
    (logs / f"{file}.{tool or 'alone'}.log").write_text(done.stdout)
    last = (done.stdout.strip().splitlines() or [""])[-1].strip("= ")
    line = f"{run.name:60} {tool or 'alone':10} {time.monotonic() - start:5.0f} s  {last}"
    # A test that is skipped, for want of a GPU say, shows nothing.
    return line, done.returncode == 0 and " skipped in " not in last


if __name__ == "__main__":
    main()
