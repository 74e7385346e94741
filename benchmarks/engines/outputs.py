"""Formulas of `python -m benchmarks vllm`, and the comparison of answers. Nothing here imports vLLM."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WRONG_SHARE = 0.01
"""Largest accepted fraction of wrong answers."""

Answer = Mapping[str, Any]
"""Answer to one prompt: "tokens", the greedy tokens, and "logprobs", a dict for each token with the log probabilities
of the likeliest tokens, keyed by token id as text."""


def step_seconds(long: Sequence[float], short: Sequence[float], new: int) -> float:
    """Return the time of one decode step in seconds.

    Args:
        long: times of answers with `new` tokens, in seconds.
        short: times of answers with one token, in seconds: the prefill alone.
        new: number of tokens of a long answer. The prefill computes the first token.
    """
    return (statistics.median(long) - statistics.median(short)) / (new - 1)


@dataclass(frozen=True)
class Agreement:
    """Comparison of answers with the answers of a reference.

    Attributes:
        answers: number of compared answers.
        equal: number of answers with the same tokens.
        wrong: number of answers whose first different token is less likely by more than `gap` in the reference.
        mean: mean difference of the log probabilities.
        largest: largest difference of the log probabilities.
        gap: largest difference between the reference's log probabilities of two tokens at which both tokens count as
            right.
    """

    answers: int
    equal: int
    wrong: int
    mean: float
    largest: float
    gap: float

    def reason_wrong(self, limit: float | None) -> str | None:
        """Return the reason that the answers are wrong, or None. A limit of None accepts all answers."""
        if limit is None:
            return None
        if not self.mean <= limit:
            return f"log probabilities differ from the reference by {self.mean:.3f} on average; expected {limit:g}"
        if self.wrong > WRONG_SHARE * self.answers:
            return f"{self.wrong} of {self.answers} answers have a token that is unlikely in the reference"
        return None


def compare(given: Sequence[Answer], reference: Sequence[Answer], gap: float) -> Agreement:
    """Compare answers to the same prompts.

    After the first different token, the two engines continue different texts. So an answer is compared up to and
    including the step of its first different token.

    Args:
        given: answers to judge.
        reference: answers of the reference.
        gap: as in `Agreement`.

    Raises:
        ValueError: for different numbers of answers, or without answers.
    """
    if len(given) != len(reference) or not given:
        raise ValueError(f"{len(given)} answers cannot be compared with {len(reference)} answers")
    equal = wrong = 0
    apart: list[float] = []
    for ours, theirs in zip(given, reference, strict=True):
        pairs = list(zip(ours["tokens"], theirs["tokens"], strict=True))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        equal += first == len(pairs)
        for mine, known in zip(ours["logprobs"][: first + 1], theirs["logprobs"][: first + 1], strict=True):
            apart += [abs(mine[token] - known[token]) for token in mine.keys() & known.keys()]
        if first < len(pairs):
            token, known = str(pairs[first][0]), theirs["logprobs"][first]
            wrong += token not in known or max(known.values()) - known[token] > gap
    mean = statistics.fmean(apart) if apart else float("nan")
    return Agreement(len(given), equal, wrong, mean, max(apart, default=float("nan")), gap)


def weights_gib(log: str) -> float | None:
    """Return the memory of the model's weights in GiB that vLLM's log states, or None if the log does not state it."""
    found = re.findall(r"Model loading took ([\d.]+) GiB", log)
    return float(found[-1]) if found else None


def kernel_times(events: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, float]]:
    """Sum the events of a trace of `torch.profiler` by kernel.

    Args:
        events: "traceEvents" of the trace's JSON file.

    Returns:
        Number of launches and sum of the durations in µs for each kernel, longest sum first. Names are cut at the first
        template argument.
    """
    sums: dict[str, tuple[int, float]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event:
            name = re.sub(r"<.*", "", event["name"])[:80]
            count, us = sums.get(name, (0, 0.0))
            sums[name] = count + 1, us + event["dur"]
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))
