"""Choose a backend and tactic by timing the candidates on this GPU, and remember the choice for later calls.

The tuner is independent of ops, and times nothing outside an ``autotune`` block (``tuning.py``). A ``TuningTask``
provides the candidates with their estimated times, and functions that check and time them. Choices are kept in memory
and in a file (``tuning_file.py``). With ``torch.distributed``, all ranks make the same choice (``agreement.py``).
"""

import functools
import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from torch_cute_ops.runtime import agreement, settings, tuning
from torch_cute_ops.runtime.provenance import source_digest, text_digest
from torch_cute_ops.runtime.toolchain import compiler_versions
from torch_cute_ops.runtime.tuning_file import FORMAT, Candidate, Key, Tuned, TuningFile, canonical

__all__ = ["Candidate", "Key", "TuningTask", "canonical", "lookup", "tune", "versions"]

log = logging.getLogger("torch_cute_ops")

HOPELESS: Final = 4.0
"""Largest ratio of a candidate's estimate to the shortest estimate. Candidates above this ratio are not timed."""


@dataclass(frozen=True)
class TuningTask:
    """Candidates for one choice, with functions that check and time them.

    Attributes:
        op: name of the op, for messages.
        key: key of the choice.
        estimates: estimated duration of a call with each candidate, seconds. Infinity marks a candidate that is correct
            but never fastest.
        check: function that returns a description of a candidate's wrong result, or None if the result is correct.
        time: function that measures the duration of a call with each given candidate, seconds.
    """

    op: str
    key: Key
    estimates: Mapping[Candidate, float]
    check: Callable[[Candidate], str | None]
    time: Callable[[Sequence[Candidate]], Mapping[Candidate, float]]

    @property
    def untuned(self) -> Candidate:
        """Candidate with the shortest estimate."""
        return min(self.estimates, key=self.estimates.__getitem__)


class _Choices:
    """Choices of this process: read from the file at the start, then extended by tuning."""

    def __init__(self, file: TuningFile | None) -> None:
        self.file = file
        self.tuned = {key: tuned.candidate for key, tuned in file.read().items()} if file is not None else {}
        # Choices that the ranks agreed on by estimate because tuning had failed. This process uses these choices, but
        # does not write them to the file.
        self.untuned: dict[Key, Candidate] = {}
        self.agreed: set[Key] = set()
        self.attempts: dict[Key, int] = {}


# Held during timing, because kernels that two threads time at once disturb each other. Released while this rank waits
# for other ranks.
_timing = threading.Lock()


def lookup(key: Key) -> Candidate | None:
    """Return the choice for ``key`` that this or an earlier process made, or None.

    The caller checks that the backend still offers the candidate.
    """
    choices = _choices()
    return choices.tuned.get(key) or choices.untuned.get(key)


def tune(problem: TuningTask) -> None:
    """Inside an ``autotune`` block, tune the problem, so that ``lookup`` then finds a choice for the problem's key.

    Each key is tuned once per block. Does nothing outside a block, while a stream captures, or if there is only one
    candidate.

    Raises:
        RuntimeError: if the store of ``torch.distributed`` cannot be reached.
    """
    block = tuning.block()
    if block is None or problem.key in block.settled or len(problem.estimates) < 2:
        return
    if torch.cuda.is_current_stream_capturing():
        return
    block.settled.add(problem.key)
    choices, ranks = _choices(), agreement.ranks()
    if ranks is None:
        _adopt(problem, _decide(problem, {0: _vote(problem)}))
        return
    if problem.key in choices.agreed:
        return
    # All ranks enter the same blocks, so their attempt counts agree, and the names of their decisions agree too.
    attempt = choices.attempts[problem.key] = choices.attempts.get(problem.key, 0) + 1
    name = _name(problem.key, attempt)
    try:
        vote = _vote(problem)
    except BaseException as error:  # also interrupts: this rank must still vote, or the other ranks would wait for it
        ranks.post(name, canonical({"failed": _line(error)}))
        raise
    decision = agreement.agree(ranks, name, vote, lambda votes: _decide(problem, votes), block.timeout_s, block.absent)
    _adopt(problem, decision)
    if json.loads(decision)["tuned"]:
        choices.agreed.add(problem.key)


def forget() -> None:
    """Forget the choices in memory. The next ``lookup`` reads the file again."""
    _load.cache_clear()
    tuning.changed()


@functools.cache
def versions() -> str:
    """Return the versions of torch, CUDA, the compiler and this package's sources, as canonical JSON.

    A choice is valid only for these versions.
    """
    return canonical(
        {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "compiler": compiler_versions(),
            "sources": source_digest(),
        }
    )


def path() -> Path | None:
    """Return the path of the file that stores choices, or None if the cache on disk is off.

    The path is ``TORCH_CUTE_OPS_TUNING``, or else a file next to the compiled kernels.
    """
    if settings.TUNING is not None:
        return settings.TUNING
    folder = settings.cache_folder() if settings.CACHE else None
    return folder / f"tuning-v{FORMAT}.json" if folder is not None else None


# A rank's vote is JSON: {"have": candidate}, {"times": [[candidate, seconds], ...]} or {"failed": reason}.


def _vote(problem: TuningTask) -> str:
    """Return this rank's vote: an existing choice, measured times, or the reason of a failure."""
    have = _choices().tuned.get(problem.key)
    if have in problem.estimates:
        return canonical({"have": have})
    try:
        with _timing:
            times = _times(problem)
    except Exception as error:  # any error of a backend, the DSL or CUDA
        return canonical({"failed": _line(error)})
    if not times:
        return canonical({"failed": "no candidate gives a correct result"})
    return canonical({"times": list(times.items())})


def _times(problem: TuningTask) -> dict[Candidate, float | None]:
    """Time the correct candidates. Slow candidates are tried only if no faster candidate is correct.

    Returns:
        Duration of each timed candidate, seconds. None if only one candidate is left, which needs no timing.
    """
    for group in shortlists(problem.estimates):
        right = [candidate for candidate in group if _is_right(problem, candidate)]
        if len(right) == 1:
            return {right[0]: None}
        if right:
            return {**problem.time(right)}
    return {}


def shortlists(estimates: Mapping[Candidate, float]) -> Iterator[list[Candidate]]:
    """Yield the list of candidates worth timing, then each other candidate alone. A caller uses the first list that
    contains a correct candidate."""
    ordered = sorted(estimates, key=estimates.__getitem__)
    least = estimates[ordered[0]]
    first = [candidate for candidate in ordered if estimates[candidate] <= HOPELESS * least]
    yield first
    yield from ([candidate] for candidate in ordered[len(first) :])


def _is_right(problem: TuningTask, candidate: Candidate) -> bool:
    try:
        wrong = problem.check(candidate)
    except Exception as error:  # any error of a backend, the DSL or CUDA
        wrong = f"fails: {_line(error)}"
    if wrong is not None:
        log.warning("cute::%s: backend %r, tactic %s is not used: %s", problem.op, *_shown(candidate), wrong)
    return wrong is None


def _decide(problem: TuningTask, votes: Mapping[int, str]) -> str:
    """Choose the candidate with the shortest total time over all ranks. Return JSON with the candidate, a flag that is
    true if the candidate was tuned, and the candidate's mean duration in seconds."""
    parsed = {rank: json.loads(vote) for rank, vote in sorted(votes.items())}
    for rank, vote in parsed.items():
        if "failed" in vote:
            where = f" on rank {rank}" if len(votes) > 1 else ""
            log.warning("cute::%s: tuning failed%s: %s", problem.op, where, vote["failed"])
    for vote in parsed.values():
        if "have" in vote:
            return _decision(_candidate(vote["have"]), True, None)
    timed = [{_candidate(name): seconds for name, seconds in v["times"]} for v in parsed.values() if "times" in v]
    # Candidates are sorted by estimate, and min() takes the first of several minima: the estimate breaks ties.
    common = [candidate for candidate in timed[0] if all(candidate in times for times in timed)] if timed else []
    if not common:
        log.warning("cute::%s: nothing is tuned; calls use the estimated best, %s", problem.op, problem.untuned)
        return _decision(problem.untuned, False, None)
    known = {c: [s for times in timed if (s := times[c]) is not None] for c in common}
    best = min(common, key=lambda c: sum(known[c]) if len(known[c]) == len(timed) else math.inf)
    return _decision(best, True, sum(known[best]) / len(known[best]) if known[best] else None)


def _decision(candidate: Candidate, tuned: bool, seconds: float | None) -> str:
    return canonical({"candidate": candidate, "tuned": tuned, "seconds": seconds})


def _adopt(problem: TuningTask, text: str) -> None:
    """Use the ranks' decision in this process, and write it to the file if it was tuned."""
    decision = json.loads(text)
    candidate, seconds = _candidate(decision["candidate"]), decision["seconds"]
    choices = _choices()
    if not decision["tuned"]:
        choices.untuned[problem.key] = candidate
    elif choices.tuned.get(problem.key) != candidate:
        choices.tuned[problem.key] = candidate
        took = "" if seconds is None else f", {seconds * 1e6:.2f} µs"
        log.info("cute::%s: tuned for %s rows: %s%s", problem.op, problem.key.bucket, candidate, took)
        if choices.file is not None:
            choices.file.add(problem.key, Tuned(candidate, seconds))
    tuning.changed()


def _name(key: Key, attempt: int) -> str:
    """Return the name under which the ranks vote. The name omits the GPU, so that ranks with different GPUs choose
    alike."""
    return f"tune/{key.family}/{text_digest(key.static)}/{key.bucket}/{attempt}"


def _candidate(value: Any) -> Candidate:
    backend, tactic = value
    return Candidate(backend, tuple(tactic))


def _shown(candidate: Candidate) -> tuple[str, list[int | str]]:
    return candidate.backend, list(candidate.tactic)


def _line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _choices() -> _Choices:
    return _load(path())


@functools.lru_cache(maxsize=1)
def _load(file: Path | None) -> _Choices:
    return _Choices(TuningFile(file) if file is not None else None)
