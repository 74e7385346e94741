"""Processes of `python -m benchmarks vllm`: one for each start of an engine."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_cute_ops.runtime.store import DESCRIPTION

from .engine import Plan
from .outputs import weights_gib

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}
"""Environment variables of every engine: no network, a log that contains the memory of the weights, and permission to
pass the function that inspects the model to vLLM's own processes."""
CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_CUTE_OPS_CACHE_DIR": "torch_cute_ops",
    "CUDA_CACHE_PATH": "cuda",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "HUMMING_CACHE_DIR": "humming",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "XDG_CACHE_HOME": "other",
}
"""Folders of caches that processes fill while an engine starts, by environment variable."""
DROPPED = ("TORCH_CUTE_OPS_VLLM", "TORCH_CUTE_OPS_TUNING", "VLLM_BATCH_INVARIANT")
"""Environment variables that are removed, because they would change the choice of kernels."""
TAIL = 30


@dataclass(frozen=True)
class Outcome:
    """Results of one process.

    Attributes:
        events: results in the order in which they were written.
        error: description of a failure, or an empty string.
        log: output of the process and of vLLM.
    """

    events: Sequence[Mapping[str, Any]]
    error: str
    log: str

    def of(self, event: str) -> list[Mapping[str, Any]]:
        """Return the results with this name."""
        return [each for each in self.events if each["event"] == event]

    @property
    def weights_gib(self) -> float | None:
        """Memory of the model's weights in GiB."""
        return weights_gib(self.log)


def environment_of(caches: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an engine's process: no network, and caches in the folder `caches`.

    If FlashInfer is not installed, vLLM is told to sample without FlashInfer.
    """
    made = {name: value for name, value in given.items() if name not in DROPPED} | SETTINGS
    made |= {name: str(caches / folder) for name, folder in CACHES.items()}
    made["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), given.get("PYTHONPATH"))))
    if importlib.util.find_spec("flashinfer") is None:
        made.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return made


def run(command: Sequence[str], environment: Mapping[str, str], log: Path, timeout_s: float) -> str:
    """Run a Python program in a group of processes, and end the whole group afterwards.

    Args:
        command: arguments of the Python interpreter.
        environment: environment variables of the program.
        log: file for the output.
        timeout_s: longest duration in seconds.

    Returns:
        Description of a failure, or an empty string.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            env=dict(environment),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"did not end within {timeout_s:.0f} s"
        finally:
            end_group(process)
    return "" if status == 0 else f"ended with status {status}"


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all processes of its group, such as vLLM's engine process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def measure(plan: Plan, folder: Path, name: str, caches: Path, timeout_s: float) -> Outcome:
    """Start an engine in a process, run the plan, and return the results.

    Args:
        plan: measurements.
        folder: folder for the files of this process.
        name: start of the files' names.
        caches: folder of the caches.
        timeout_s: longest duration in seconds.
    """
    caches.mkdir(parents=True, exist_ok=True)
    file, results, log = (folder / f"{name}.{ending}" for ending in ("plan.json", "jsonl", "log"))
    plan.write(file)
    results.unlink(missing_ok=True)
    command = ("-m", "benchmarks.engines.engine", str(file), str(results))
    error = run(command, environment_of(caches, os.environ), log, timeout_s)
    events = read_events(results)
    if not error and (not events or events[-1]["event"] != "end"):
        error = "ended without results"
    return Outcome(events, error, log.read_text(encoding="utf-8", errors="replace"))


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file. A line that was cut off is ignored."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return events


def tail(log: str) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.splitlines()[-TAIL:])


def compiled(caches: Path) -> int:
    """Return the number of this package's kernels in the caches."""
    return sum(1 for _ in (caches / CACHES["TORCH_CUTE_OPS_CACHE_DIR"]).rglob(DESCRIPTION))
