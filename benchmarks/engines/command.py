"""`python -m benchmarks vllm`: times of a served model in vLLM, with this package's kernels and with vLLM's own.

The command needs no network: the model is a folder, or a Llama with random weights that the command creates.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import environment, report
from ..layers import NO_GPU, RESULTS
from . import checkpoints, outputs, processes, results
from .backends import BACKENDS, CLOSE, GAP, OURS, PEERS, Backend
from .engine import ANSWERED, Plan
from .processes import Outcome

PARTS = ("start", "decode", "prefill", "requests")
AGAINST = ("marlin", "humming", "bf16")
MORE = 256
"""Number of tokens by which vLLM's longest allowed sequence exceeds the longest measured sequence."""
STEP_TOKENS = 16384
"""Smallest number of tokens that vLLM may process in a step."""
PACKAGES = ("transformers", "flashinfer-python")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks vllm", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model",
        default="8b",
        help=f"folder of a checkpoint with quantised weights, or the size of a random Llama: "
        f"{', '.join(checkpoints.SIZES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--against",
        nargs="*",
        choices=PEERS,
        default=list(AGAINST),
        help="peers: vLLM's kernels, decoded weights",
    )
    parser.add_argument("--ours", nargs="*", choices=OURS, default=["ours"], help="this package's kernels")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="measurements (default: all)")
    parser.add_argument(
        "--batch", nargs="+", type=_positive, default=[1, 16, 64, 128], help="sequences of a decode step"
    )
    parser.add_argument("--prefill", nargs="+", type=_positive, default=[8192], help="tokens of a prompt")
    parser.add_argument("--repeat", type=_positive, default=3, help="repetitions of each time (default: %(default)s)")
    parser.add_argument(
        "--profile", action="store_true", help="also sum the GPU's time by kernel, with vLLM's profiler"
    )
    parser.add_argument("--options", type=_object, default={}, help="more arguments of vllm.LLM, as JSON")
    parser.add_argument("--memory", type=float, default=0.9, help="fraction of the GPU's memory for vLLM")
    parser.add_argument("--folder", type=Path, help="folder for checkpoints, caches and logs, which are then kept")
    parser.add_argument("--timeout", type=_positive, default=1800, help="seconds for a process (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the files written")
    parser.add_argument("--no-plot", action="store_true", help="write no PNG")
    options = parser.parse_args(arguments)
    if not options.against and not options.ours:
        parser.error("--against and --ours are empty; name a backend")
    if options.model not in checkpoints.SIZES and not Path(options.model, "config.json").is_file():
        parser.error(
            f"--model {options.model} is neither a folder with config.json nor one of {', '.join(checkpoints.SIZES)}"
        )
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def in_order(ours: Sequence[str], against: Sequence[str]) -> list[Backend]:
    """Return the backends in the order in which they run: first the peers in the order of `PEERS`, because the first
    peer that runs is the reference."""
    peers = [name for name in PEERS if name in against]
    return [BACKENDS[name] for name in (*peers, *(name for name in OURS if name in ours))]


def plan_of(options: argparse.Namespace, model: Path, profiles: Path) -> Plan:
    """Return the plan of a process that measures everything."""
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    sizes = {"batches": tuple(options.batch), "prefills": tuple(options.prefill)}
    plan = Plan(str(model), {}, vocabulary, repeat=options.repeat, **sizes)
    at_once = max(128, *options.batch)
    longest = max(*options.prefill, plan.request_prompt + plan.request_new, plan.prompt + plan.new) + MORE
    llm: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": longest,
        "max_num_seqs": at_once,
        "max_num_batched_tokens": max(STEP_TOKENS, *options.prefill),
        "enable_prefix_caching": False,
        "gpu_memory_utilization": options.memory,
        "disable_log_stats": True,
    }
    if options.profile:
        llm["profiler_config"] = {"profiler": "torch", "torch_profiler_dir": str(profiles)}
    parts = ("answers", *(part for part in PARTS if part in options.parts and part != "start"))
    parts += ("profile",) * options.profile
    return replace(plan, options=llm | options.options, parts=parts, profiles=str(profiles))


class Missing(NamedTuple):
    """Reason that a backend has no times.

    Attributes:
        where: key of the result that lists the reason: "absent" if this environment or checkpoint cannot run the
            backend's kernels, or "failed".
        reason: reason as text.
    """

    where: str
    reason: str


@dataclass
class Comparison:
    """Comparison of backends that serve the same checkpoint.

    Attributes:
        options: options of the command.
        folder: folder for checkpoints, caches and logs.
        result: content of the result file.
        save: function that writes the result. It is called after each backend, so that an aborted run loses no results.
    """

    options: argparse.Namespace
    folder: Path
    result: dict[str, Any]
    save: Callable[[], None] = lambda: None
    answers: list[Any] = field(default_factory=list)

    def run(self) -> None:
        """Measure the backends one after the other."""
        chosen = in_order(self.options.ours, self.options.against)
        quantised = self.checkpoint()
        for backend in chosen:
            reason = backend.reason_absent()
            missing = self.of(backend, quantised) if reason is None else Missing("absent", reason)
            if missing is not None:
                self.result[missing.where][backend.name] = missing.reason
                print(f"  {backend.name}: {missing.reason}", flush=True)
            self.save()

    def checkpoint(self) -> Path:
        """Return the folder of the quantised checkpoint, after creating the checkpoint of a random model."""
        if self.options.model not in checkpoints.SIZES:
            return Path(self.options.model).resolve()
        # The name contains the style, so that `--folder` does not reuse a checkpoint of another style.
        made = self.folder / f"{self.options.model}-{checkpoints.STYLE}"
        if not (made / "config.json").exists():
            self.make("random", self.options.model, made)
        return made

    def make(self, what: str, source: str, made: Path) -> None:
        """Write a checkpoint in a separate process.

        Raises:
            RuntimeError: if the process fails. The message ends with its output.
        """
        print(f"  making {made.name}", flush=True)
        begun, log = made.with_name(f"{made.name}.part"), self.folder / f"{made.name}.log"
        shutil.rmtree(begun, ignore_errors=True)
        command = ("-m", "benchmarks.engines.checkpoints", what, source, str(begun))
        error = processes.run(command, os.environ, log, self.options.timeout)
        if error:
            text = log.read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"{made.name} was not made: the process {error}\n{processes.tail(text)}")
        begun.rename(made)

    def of(self, backend: Backend, quantised: Path) -> Missing | None:
        """Measure a backend. Return the reason that it was not measured, or None."""
        model = quantised
        if backend.is_decoded:
            model = self.folder / f"{quantised.name}-decoded"
            if not (model / "config.json").exists():
                try:
                    self.make("decode", str(quantised), model)
                except RuntimeError as error:
                    return Missing("failed", str(error))
        checkpoints.read_through(model)
        plan = plan_of(self.options, model, self.folder / f"{backend.name}-profiles")
        plan = replace(plan, options={**plan.options, **backend.options})
        caches = self.folder / "caches" / backend.name
        starts: dict[str, Outcome] = {}
        if "start" in self.options.parts:
            shutil.rmtree(caches, ignore_errors=True)
            starts["cold"] = self.measured(backend, replace(plan, parts=()), "cold", caches)
            missing = self.unusable(backend, starts["cold"])
            if missing is not None:
                return missing
        before = processes.compiled(caches)
        outcome = self.measured(backend, plan, "warm", caches)
        missing = self.unusable(backend, outcome)
        if missing is not None:
            return missing
        wrong = self.judge(backend, outcome)
        self.result["weights_gib"][backend.name] = outcome.weights_gib
        if wrong:
            return Missing("failed", wrong)
        if starts:
            starts["warm"] = outcome
            if backend.is_ours:
                self.result["late_kernels"][backend.name] = processes.compiled(caches) - before
        self.report(backend, plan, outcome, starts)
        return None

    def measured(self, backend: Backend, plan: Plan, name: str, caches: Path) -> Outcome:
        """Run a plan in a process, and print its duration."""
        outcome = processes.measure(plan, self.folder, f"{backend.name}-{name}", caches, self.options.timeout)
        print(f"  {backend.name}, {name} caches: {outcome.error or 'done'}", flush=True)
        return outcome

    def unusable(self, backend: Backend, outcome: Outcome) -> Missing | None:
        """Check that a process succeeded, and that its model used the backend's kernels. Print the end of a failed
        process's log. Return the reason that the process's times are not used, or None."""
        if outcome.error:
            print(processes.tail(outcome.log), file=sys.stderr, flush=True)
            return Missing("failed", f"the engine {outcome.error}")
        (found,) = outcome.of("kernels")
        self.result["kernels"][backend.name] = found["layers"]
        reason = backend.reason_other_kernels(found["layers"])
        return None if reason is None else Missing("absent", reason)

    def judge(self, backend: Backend, outcome: Outcome) -> str | None:
        """Compare a backend's answers with the reference. The first peer that ran becomes the reference. Return the
        reason that the answers are wrong, or None."""
        groups = outcome.of("answers")
        answers = [answer for group in groups for answer in group["answers"]]
        if not self.answers:
            if not backend.is_ours:
                self.answers, self.result["reference"] = answers, backend.name
            return None
        reference = BACKENDS[self.result["reference"]]
        found = outputs.compare(answers, self.answers, backend.gap_from(reference))
        self.result["agreement"][backend.name] = asdict(found)
        print(
            f"  {backend.name}: {found.equal} of {found.answers} answers as {reference.name}, {found.wrong} wrong, "
            f"mean difference {found.mean:.4f}",
            flush=True,
        )
        return found.reason_wrong(backend.limit_from(reference))

    def report(self, backend: Backend, plan: Plan, outcome: Outcome, starts: dict[str, Outcome]) -> None:
        """Add a backend's times to the result, and print them."""
        found = list(results.times(outcome, plan))
        (start,) = outcome.of("start")
        self.result["environment"]["vllm"] = start["version"]
        for name, each in starts.items():
            (start,) = each.of("start")
            time = {"us": start["seconds"] * 1e6, "import_s": start["import_seconds"]}
            found.append(("start", f"start, {name} caches", None, time))
        for part, case, tokens, time in found:
            results.add(self.result, part, case, tokens, backend.name, time)
            unit, us = results.UNITS[part]
            print(f"    {case}: {report.number(time['us'] / us)} {unit}", flush=True)
        for each in outcome.of("profile"):
            self.result["profiles"].setdefault(str(each["batch"]), {})[backend.name] = each["kernels"]


def empty_result(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the result file's content before anything is measured."""
    is_random = options.model in checkpoints.SIZES
    plan = Plan("", {}, 0, batches=options.batch, prefills=options.prefill, repeat=options.repeat)
    settings = {
        key: value for key, value in asdict(plan).items() if key not in ("model", "options", "profiles", "parts")
    }
    versions = {name: environment.package_version(name) for name in PACKAGES}
    return {
        "engine": "vllm",
        "model": options.model if is_random else Path(options.model).resolve().name,
        "is_random": is_random,
        "environment": {**environment.collect(device), **versions},
        "settings": {**settings, "options": options.options},
        "compared": {"steps": ANSWERED, "gap": GAP * CLOSE},
        "reference": "",
        "agreement": {},
        "rows": [],
        "weights_gib": {},
        "kernels": {},
        "late_kernels": {},
        "profiles": {},
        "absent": {},
        "failed": {},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if importlib.util.find_spec("vllm") is None:
        print("python -m benchmarks vllm needs vLLM: see docs/engines.md.", file=sys.stderr)
        return NO_GPU
    if not torch.cuda.is_available():
        print("python -m benchmarks vllm needs a CUDA GPU, and torch sees none here.", file=sys.stderr)
        return NO_GPU
    return compare(options, torch.device("cuda", torch.cuda.current_device()))


def compare(options: argparse.Namespace, device: torch.device) -> int:
    """Measure the backends; write `vllm.json`, `vllm.md` and `vllm.png`; return the exit status."""
    options.output.mkdir(parents=True, exist_ok=True)
    result = empty_result(options, device)
    path = options.output / "vllm.json"

    def save() -> None:
        report.write_json(result, results.marks(result["rows"]), path)
        path.with_suffix(".md").write_text(results.markdown(result) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="vllm-benchmark-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        Comparison(options, folder, result, save).run()
    save()
    print(f"\n{results.markdown(result)}", flush=True)
    if result["rows"] and not options.no_plot:
        try:
            results.picture(result["rows"], path.with_suffix(".png"))
        except ModuleNotFoundError as missing:
            print(f"{missing.name} is missing; python -m benchmarks plots vllm draws the picture elsewhere.")
    return 1 if result["failed"] else 0
