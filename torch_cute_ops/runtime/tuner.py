"""Choose among ways to compute by timing them on this GPU, where the user asks for it; and remember the choice.

Nothing here knows an op, and nothing happens outside of an ``autotune`` block (``tuning.py``). A ``Problem``
brings candidates with their estimates, and the functions that check and time them (``mm_backends/_tune.py`` makes those
of the products). What was chosen is kept in memory and in a file (``tuning_file.py``); with ``torch.distributed`` all
ranks choose the same (``agreement.py``).
"""

import functools
import hashlib
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
from torch_cute_ops.runtime.compiler import compiler_versions
from torch_cute_ops.runtime.provenance import source_digest
from torch_cute_ops.runtime.tuning_file import FORMAT, Candidate, Key, Tuned, TuningFile, canonical

__all__ = ["Candidate", "Key", "Problem", "canonical", "lookup", "tune", "versions"]

log = logging.getLogger("torch_cute_ops")

HOPELESS: Final = 4.0
"""Candidates whose estimate is so many times the least one are not tried."""


@dataclass(frozen=True)
class Problem:
    """What there is to choose from.

    Attributes:
        op: the op's name, for messages.
        key: what the choice is for.
        estimates: the candidates, and the seconds that a call is thought to take; infinite for one that is right and
            never the best.
        check: how wrong a candidate's result is, in words; ``None``: it is right.
        time: seconds that a call of each of these candidates takes.
    """

    op: str
    key: Key
    estimates: Mapping[Candidate, float]
    check: Callable[[Candidate], str | None]
    time: Callable[[Sequence[Candidate]], Mapping[Candidate, float]]

    @property
    def untuned(self) -> Candidate:
        """The candidate with the least estimate."""
        return min(self.estimates, key=self.estimates.__getitem__)


class _Choices:
    """What is chosen in this process, read from the file at first."""

    def __init__(self, file: TuningFile | None) -> None:
        self.file = file
        self.tuned = {key: tuned.candidate for key, tuned in file.read().items()} if file is not None else {}
        # Chosen with the other ranks where tuning failed: for as long as this process lives.
        self.untuned: dict[Key, Candidate] = {}
        self.agreed: set[Key] = set()
        self.attempts: dict[Key, int] = {}


# Two threads that time at once would time each other. Not held while waiting for other ranks.
_timing = threading.Lock()


def lookup(key: Key) -> Candidate | None:
    """What was chosen for ``key``, by this process or one before; ``None``: nothing was.

    The caller sees to it that it is still possible.
    """
    choices = _choices()
    return choices.tuned.get(key) or choices.untuned.get(key)


def tune(problem: Problem) -> None:
    """Inside an ``autotune`` block, see to it that ``lookup`` answers for the problem's key.

    Does so once for each key and block; does nothing outside of a block, while a stream captures, and where there is
    one candidate only.

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
    # Every rank enters the same blocks, so they count alike.
    attempt = choices.attempts[problem.key] = choices.attempts.get(problem.key, 0) + 1
    name = _name(problem.key, attempt)
    try:
        vote = _vote(problem)
    except BaseException as error:  # such as an interrupt: the others need not wait for this rank
        ranks.post(name, canonical({"failed": _line(error)}))
        raise
    decision = agreement.agree(ranks, name, vote, lambda votes: _decide(problem, votes), block.timeout_s, block.absent)
    _adopt(problem, decision)
    if json.loads(decision)["tuned"]:
        choices.agreed.add(problem.key)


def forget() -> None:
    """Forget every choice in memory; what is in the file is read again."""
    _load.cache_clear()
    tuning.changed()


@functools.cache
def versions() -> str:
    """Of torch, CUDA, the compiler and this package's sources, as canonical JSON: a choice is for these."""
    return canonical(
        {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "compiler": compiler_versions(),
            "sources": source_digest(),
        }
    )


def path() -> Path | None:
    """The file with choices: the one that ``TORCH_CUTE_OPS_TUNING`` names, or the usual one beside the compiled
    kernels; ``None`` if nothing is kept on disk."""
    if settings.TUNING is not None:
        return settings.TUNING
    return settings.cache_folder() / f"tuning-v{FORMAT}.json" if settings.CACHE else None


# Votes: JSON of either {"have": candidate}, {"times": [[candidate, seconds], ...]} or {"failed": why}.


def _vote(problem: Problem) -> str:
    """What this process has to say: the choice that it has, its times, or how it failed."""
    have = _choices().tuned.get(problem.key)
    if have in problem.estimates:
        return canonical({"have": have})
    try:
        with _timing:
            times = _times(problem)
    except Exception as error:  # of any backend, the DSL or CUDA
        return canonical({"failed": _line(error)})
    if not times:
        return canonical({"failed": "no candidate gives the right result"})
    return canonical({"times": list(times.items())})


def _times(problem: Problem) -> dict[Candidate, float | None]:
    """Seconds of those candidates that are right, of the first group that has any; ``None`` if there is but one."""
    for group in shortlists(problem.estimates):
        right = [candidate for candidate in group if _is_right(problem, candidate)]
        if len(right) == 1:
            return {right[0]: None}
        if right:
            return {**problem.time(right)}
    return {}


def shortlists(estimates: Mapping[Candidate, float]) -> Iterator[list[Candidate]]:
    """Candidates that are worth trying; then, for where none of them is right, each other, the most promising first."""
    ordered = sorted(estimates, key=estimates.__getitem__)
    least = estimates[ordered[0]]
    first = [candidate for candidate in ordered if estimates[candidate] <= HOPELESS * least]
    yield first
    yield from ([candidate] for candidate in ordered[len(first) :])


def _is_right(problem: Problem, candidate: Candidate) -> bool:
    try:
        wrong = problem.check(candidate)
    except Exception as error:  # of any backend, the DSL or CUDA
        wrong = f"fails: {_line(error)}"
    if wrong is not None:
        log.warning("cute::%s: backend %r, tactic %s is not used: %s", problem.op, *_shown(candidate), wrong)
    return wrong is None


def _decide(problem: Problem, votes: Mapping[int, str]) -> str:
    """What the ranks' votes come to: JSON of the candidate, whether it is tuned, and the mean of its seconds."""
    parsed = {rank: json.loads(vote) for rank, vote in sorted(votes.items())}
    for rank, vote in parsed.items():
        if "failed" in vote:
            where = f" on rank {rank}" if len(votes) > 1 else ""
            log.warning("cute::%s: tuning failed%s: %s", problem.op, where, vote["failed"])
    for vote in parsed.values():
        if "have" in vote:
            return _decision(_candidate(vote["have"]), True, None)
    timed = [{_candidate(name): seconds for name, seconds in v["times"]} for v in parsed.values() if "times" in v]
    # In the order of the first, which is that of the estimates: those that are as fast go by it.
    common = [candidate for candidate in timed[0] if all(candidate in times for times in timed)] if timed else []
    if not common:
        log.warning("cute::%s: nothing is tuned; calls use %s, as estimated", problem.op, problem.untuned)
        return _decision(problem.untuned, False, None)
    known = {c: [s for times in timed if (s := times[c]) is not None] for c in common}
    best = min(common, key=lambda c: sum(known[c]) if len(known[c]) == len(timed) else math.inf)
    return _decision(best, True, sum(known[best]) / len(known[best]) if known[best] else None)


def _decision(candidate: Candidate, tuned: bool, seconds: float | None) -> str:
    return canonical({"candidate": candidate, "tuned": tuned, "seconds": seconds})


def _adopt(problem: Problem, text: str) -> None:
    """Choose what was decided, and keep it where it is worth that."""
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
    """Of a decision among ranks. The GPU is not in it: the ranks of a job with several kinds choose alike, too."""
    digest = hashlib.sha256(key.static.encode()).hexdigest()
    return f"tune/{key.family}/{digest}/{key.bucket}/{attempt}"


def _candidate(value: Any) -> Candidate:
    backend, tactic = value
    return Candidate(backend, tuple(tactic))


def _shown(candidate: Candidate) -> tuple[str, list[int | str]]:
    return candidate.backend, list(candidate.tactic)


def _line(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _choices() -> _Choices:
    return _load(path())


@functools.lru_cache(maxsize=1)
def _load(file: Path | None) -> _Choices:
    return _Choices(TuningFile(file) if file is not None else None)
