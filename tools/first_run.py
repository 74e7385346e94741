"""Run the suite, the sanitizer and the benchmarks on a GPU model on which they have never run, and pack logs and
results.

    python tools/first_run.py                  # all steps, in the folder first-run; about an hour
    python tools/first_run.py suite benchmarks # some steps

Each step writes a log. A failed step does not stop the others. Attach the final archive to an issue. The exit status is
1 if any step failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable


def steps(folder: Path) -> dict[str, list[str]]:
    """Return the commands of all steps, keyed by name, in the order in which they run."""
    each = ["-n", str(min(os.cpu_count() or 1, 16)), "--dist", "loadgroup", "--max-worker-restart", "0"]
    results = str(folder / "results")
    return {
        "machine": ["nvidia-smi", "-q"],
        "info": [PYTHON, "-m", "torch_cute_ops", "info"],
        "suite": [PYTHON, "-m", "pytest", *each, "--tb=short", f"--gpu-record={folder / 'gpu_record.json'}"],
        "sanitizer": [PYTHON, "tools/sanitize.py", "--logs", str(folder / "sanitizer")],
        "benchmarks": [PYTHON, "-m", "benchmarks", "all", "--sizes", "marks", "--no-plot", "--output", results],
    }


def main() -> None:
    """Run the steps that the command line names, and print a line about each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("first-run"), help="folder of logs and results")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(steps(Path())))
    given = parser.parse_args()
    unknown = sorted({*given.steps} - {*steps(Path())})
    if unknown:
        parser.error(f"unknown steps: {', '.join(unknown)}")
    folder: Path = given.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    every = steps(folder)
    done = {name: run(name, every[name], folder) for name in given.steps or every}
    (folder / "steps.json").write_text(json.dumps(done, indent=2) + "\n", encoding="utf-8")
    archive = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, arcname=folder.name)
    print(f"{archive}: attach it to an issue")
    failed = [name for name, step in done.items() if step["status"] != 0]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def run(name: str, command: list[str], folder: Path) -> dict[str, object]:
    """Run a step and write its output to a log.

    Returns:
        Command, exit status (or the reason that it did not start), and seconds.
    """
    print(f"{name}: {' '.join(command)}", flush=True)
    started = time.monotonic()
    with (folder / f"{name}.log").open("wb") as log:
        status: int | str
        try:
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, check=False).returncode
        except OSError as error:
            status = str(error)
    seconds = round(time.monotonic() - started, 1)
    print(f"{name}: {'done' if status == 0 else f'status {status}'} after {seconds} s", flush=True)
    return {"command": command, "status": status, "seconds": seconds}


if __name__ == "__main__":
    main()
