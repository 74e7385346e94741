"""Program that starts vLLM with one backend, and measures it: `python -m benchmarks.engines.engine PLAN RESULTS`.

PLAN is a JSON file with the fields of `Plan`. The program appends each result to the file RESULTS, as one line with a
JSON object with the key "event". It does not print the results, because vLLM's processes write to the standard output.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .kernels import added, kernels_of
from .outputs import kernel_times

ANSWERED, LIKELIEST = 8, 20
"""Number of tokens of an answer that is compared, and number of log probabilities per token.

20 is the largest number that vLLM allows by default. Five are too few for random weights: the log probability of
Marlin's fifth token was sometimes only 0.06 below the first, so a token outside the list was not necessarily wrong."""
SHORT, LONG = 32, 2048
"""Lengths of the prompts whose answers are compared: in a batch, and for one prompt with many rows in its prefill."""
TRACE_SECONDS = 60.0
"""Longest wait for a trace, in seconds."""
FIRST_TOKEN = 4
"""Smallest token id in random prompts; smaller ids are special tokens."""


@dataclass(frozen=True)
class Plan:
    """Measurements of one process.

    Attributes:
        model: folder of the checkpoint.
        options: arguments of ``vllm.LLM``.
        vocabulary: number of tokens in the vocabulary.
        parts: measurements: "answers", "decode", "prefill", "requests", "profile". The start is always timed.
        batches: batch sizes of decode steps.
        prompt: number of tokens of a prompt of a decode step.
        new: number of new tokens from which a decode step's time is derived.
        prefills: numbers of tokens of a prefill.
        requests: number of requests that are sent at once.
        request_prompt: number of tokens of a request's prompt.
        request_new: number of tokens of a request's answer.
        repeat: number of times that each measurement is repeated.
        profiles: folder of the profiler's traces.
    """

    model: str
    options: Mapping[str, Any]
    vocabulary: int
    parts: Sequence[str] = ()
    batches: Sequence[int] = (1, 16, 64, 128)
    prompt: int = 128
    new: int = 129
    prefills: Sequence[int] = (8192,)
    requests: int = 256
    request_prompt: int = 512
    request_new: int = 128
    repeat: int = 3
    profiles: str = ""

    @property
    def compared(self) -> list[tuple[int, int]]:
        """Number and length of the prompts of each group of compared answers. The long prompt is at most as long as the
        longest prefill."""
        groups = [(batch, SHORT) for batch in self.batches]
        return [*groups, (1, min(LONG, max(self.prefills)))] if self.prefills else groups

    def write(self, path: Path) -> None:
        """Write the plan to a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read a plan from a file."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def prompts(count: int, length: int, vocabulary: int) -> list[dict[str, list[int]]]:
    """Return random prompts in vLLM's form. Calls with equal arguments return equal prompts."""
    generator = torch.Generator().manual_seed(1000 * count + length)
    ids = torch.randint(FIRST_TOKEN, vocabulary, (count, length), generator=generator)
    return [{"prompt_token_ids": row} for row in ids.tolist()]


@dataclass
class Engine:
    """Measurements of a started engine.

    Attributes:
        llm: vLLM's engine.
        sampling: class of vLLM's sampling parameters.
        plan: measurements.
        tell: function that writes a result.
        clock: function that returns a time in seconds.
    """

    llm: Any
    sampling: Any
    plan: Plan
    tell: Callable[..., None]
    clock: Callable[[], float] = field(default=time.perf_counter)

    def run(self) -> None:
        """Report the kernels of the model's layers, then run the plan's parts in their order."""
        self.tell("kernels", layers=added(self.llm.apply_model(kernels_of)))
        for part in self.plan.parts:
            getattr(self, part)()

    def ask(self, given: Sequence[Mapping[str, Any]], new: int, **more: Any) -> list[Any]:
        """Return vLLM's greedy answers with `new` tokens each."""
        parameters = self.sampling(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, **more)
        answers: list[Any] = self.llm.generate(list(given), parameters, use_tqdm=False)
        return answers

    def timed(self, given: Sequence[Mapping[str, Any]], new: int) -> float:
        """Return the time of greedy answers in seconds."""
        start = self.clock()
        self.ask(given, new)
        return self.clock() - start

    def answers(self) -> None:
        """Answer the compared prompts, with log probabilities."""
        for count, length in self.plan.compared:
            told = []
            for output in self.ask(prompts(count, length, self.plan.vocabulary), ANSWERED, logprobs=LIKELIEST):
                said = output.outputs[0]
                steps = [{str(token): each.logprob for token, each in step.items()} for step in said.logprobs]
                told.append({"tokens": list(said.token_ids), "logprobs": steps})
            self.tell("answers", count=count, length=length, answers=told)

    def decode(self) -> None:
        """Time answers with `new` tokens and with one token, for each batch size."""
        for batch in self.plan.batches:
            given = prompts(batch, self.plan.prompt, self.plan.vocabulary)
            for new in (self.plan.new, 1):
                self.timed(given, new)
            long = [self.timed(given, self.plan.new) for _ in range(self.plan.repeat)]
            short = [self.timed(given, 1) for _ in range(self.plan.repeat)]
            self.tell("decode", batch=batch, long=long, short=short)

    def prefill(self) -> None:
        """Time an answer with one token to a long prompt."""
        for length in self.plan.prefills:
            given = prompts(1, length, self.plan.vocabulary)
            self.timed(given, 1)
            self.tell("prefill", tokens=length, seconds=[self.timed(given, 1) for _ in range(self.plan.repeat)])

    def requests(self) -> None:
        """Time requests that are sent at once."""
        given = prompts(self.plan.requests, self.plan.request_prompt, self.plan.vocabulary)
        self.timed(given[: max(self.plan.batches)], 2)
        seconds = [self.timed(given, self.plan.request_new) for _ in range(self.plan.repeat)]
        self.tell("requests", count=len(given), seconds=seconds)

    def profile(self) -> None:
        """Sum the GPU's time by kernel while each batch generates `ANSWERED` tokens."""
        for batch in self.plan.batches:
            known = set(traces(self.plan.profiles))
            self.llm.start_profile()
            self.ask(prompts(batch, SHORT, self.plan.vocabulary), ANSWERED)
            self.llm.stop_profile()
            kernels: dict[str, tuple[int, float]] = {}
            for path in new_traces(self.plan.profiles, known):
                with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
                    kernels |= kernel_times(json.load(file)["traceEvents"])
            self.tell("profile", batch=batch, tokens=ANSWERED, kernels=dict(list(kernels.items())[:24]))


def new_traces(folder: str, known: set[Path]) -> set[Path]:
    """Wait until vLLM's workers have written traces, and return those that are not in `known`."""
    end = time.monotonic() + TRACE_SECONDS
    while not set(traces(folder)) - known and time.monotonic() < end:
        time.sleep(0.5)
    time.sleep(1)  # until the file is complete
    return set(traces(folder)) - known


def traces(folder: str) -> list[Path]:
    """Return the traces of vLLM's workers in a folder."""
    return [path for path in Path(folder).glob("*.json*") if "async_llm" not in path.name]


def main(arguments: Sequence[str]) -> int:
    plan, results = Plan.read(Path(arguments[0])), Path(arguments[1])

    def tell(event: str, **values: Any) -> None:
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")

    begin = time.perf_counter()
    import vllm

    imported = time.perf_counter()
    llm = vllm.LLM(plan.model, **plan.options)
    seconds = time.perf_counter() - imported
    tell("start", seconds=seconds, import_seconds=imported - begin, version=vllm.__version__)
    Engine(llm, vllm.SamplingParams, plan, tell).run()
    tell("end")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
