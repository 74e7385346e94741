"""Simulated candidates for tests of the tuner, with a simulated clock, and an empty tuning file."""

import logging

import torch

from torch_cute_ops.runtime import settings, tuner, tuning
from torch_cute_ops.runtime.tuner import Candidate, Key, TuningTask

A, B, C, LAST = Candidate("a", (1,)), Candidate("a", (2, "x")), Candidate("b", ()), Candidate("last", ())
ESTIMATES = {A: 1.0, B: 2.0, C: 4.0, LAST: float("inf")}


def key_of(bucket=8, static='{"n":64}', device="GPU", versions='{"torch":"2"}'):
    return Key("family", static, bucket, device, versions)


class Clock:
    """Candidates whose calls take ``seconds`` on a simulated clock. The calls are recorded."""

    def __init__(self, seconds, wrong=(), estimates=ESTIMATES, **key):
        self.seconds, self.wrong = seconds, dict.fromkeys(wrong, "off by 3") if not isinstance(wrong, dict) else wrong
        self.checked, self.timed = [], []
        self.problem = TuningTask("some_op", key_of(**key), estimates, self.check, self.time)

    def check(self, candidate):
        self.checked.append(candidate)
        answer = self.wrong.get(candidate)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def time(self, candidates):
        self.timed.append(list(candidates))
        if isinstance(self.seconds, BaseException):
            raise self.seconds
        return {candidate: self.seconds[candidate] for candidate in candidates}

    def tune(self, **block):
        with tuning.autotune(**block):
            tuner.tune(self.problem)
        return tuner.lookup(self.problem.key)


def empty_file(request, tmp_path, monkeypatch):
    """Start every test of a module with an empty tuning file, and without asking CUDA whether a stream is capturing."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    path = tmp_path / "tuning.json"
    monkeypatch.setattr(settings, "TUNING", path)
    tuner.forget()
    yield path
    tuner.forget()


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
