"""Run the samples of every op under compute-sanitizer, in processes of some samples each, and report what each found.

    python tools/sanitize.py                                  # all ops, all tools
    python tools/sanitize.py mm_fp4 --tools racecheck         # part of it
    python tools/sanitize.py mm_fp4 --only wgmma              # by one backend

First each runs without a tool, which fills the kernel cache: compiling under a tool takes long. Exits with 1 if any run
failed or found something.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def main() -> None:
    """Run what was asked for; print a line for each run and the end of the log of each that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
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
    parser.add_argument("ops", nargs="*", metavar="OP", help="these ops alone")
    given = parser.parse_args()
    if given.parts < 1:
        parser.error(f"--parts is {given.parts}; expected a positive number")
    given.logs.mkdir(parents=True, exist_ok=True)
    runs = [(op, f"{part}/{given.parts}") for op in given.ops or OPS for part in range(1, given.parts + 1)]
    failed = 0
    for tool in (None, *given.tools):
        with ThreadPoolExecutor(given.jobs) as pool:
            for line, is_good in pool.map(lambda run, tool=tool: sanitize(run, tool, given.only, given.logs), runs):
                print(line, flush=True)
                failed += not is_good
    sys.exit(f"{failed} runs failed" if failed else 0)


def sanitize(run: tuple[str, str], tool: str | None, only: str | None, logs: Path) -> tuple[str, bool]:
    """Run a part of an op's samples under a tool, or alone; what came of it in a line, and whether that is good."""
    op, part = run
    command = [sys.executable, str(SAMPLES), op, "--part", part, *(["--only", only] if only else [])]
    if tool is not None:
        own, program = TOOLS[tool]
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *own, *command, *program]
    start = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    what = f"{op}.{only}" if only else op
    (logs / f"{what}.{part.replace('/', '-of-')}.{tool or 'alone'}.log").write_text(done.stdout)
    last = (done.stdout.strip().splitlines() or [""])[-1].strip("= ")
    line = f"{op:36} {part:5} {tool or 'alone':10} {time.monotonic() - start:5.0f} s  {last}"
    return line, done.returncode == 0


if __name__ == "__main__":
    main()
