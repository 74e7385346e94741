"""Tuner: candidates that are timed, and choices, with simulated clocks."""

import threading

import pytest
import torch
from support.tuner_model import ESTIMATES, LAST, A, B, C, Clock, empty_file, key_of, warnings_in

from torch_cute_ops.runtime import tuner, tuning

file = pytest.fixture(autouse=True)(empty_file)


def test_the_fastest_wins():
    clock = Clock({A: 3.0, B: 2.0, C: 5.0})
    assert clock.tune() == B
    assert clock.timed == [[A, B, C]] and LAST not in clock.checked


def test_nothing_is_tuned_outside_a_block():
    clock = Clock({A: 1.0})
    tuner.tune(clock.problem)
    assert tuner.lookup(clock.problem.key) is None and not clock.checked
    assert not tuning.is_on()


def test_a_key_is_tuned_once():
    """Check that a tuned key is not timed again in a later block, and that a key whose tuning failed is tried once in
    each block."""
    clock = Clock({A: 3.0, B: 2.0, C: 5.0})
    for _ in range(2):
        with tuning.autotune():
            tuner.tune(clock.problem)
            tuner.tune(clock.problem)
    assert len(clock.timed) == 1
    failing = Clock(RuntimeError("out of memory"), bucket=16)
    for block in (1, 2):
        with tuning.autotune():
            tuner.tune(failing.problem)
            tuner.tune(failing.problem)
        assert len(failing.timed) == block


def test_hopeless_candidates_are_not_tried():
    """Check that candidates whose estimate exceeds four times the best estimate are tried only if all better candidates
    give wrong results."""
    estimates = {A: 1.0, B: 4.0, C: 4.1, LAST: float("inf")}
    seconds = {A: 4.0, B: 3.0, C: 1.0, LAST: 1.0}
    clock = Clock(seconds, estimates=estimates)
    assert clock.tune() == B and clock.checked == [A, B]
    clock = Clock(seconds, wrong=[A, B], estimates=estimates, bucket=16)
    assert clock.tune() == C and clock.checked == [A, B, C] and clock.timed == []
    clock = Clock(seconds, wrong=[A, B, C], estimates=estimates, bucket=24)
    assert clock.tune() == LAST
    assert list(tuner.shortlists({LAST: float("inf")})) == [[LAST]]


def test_one_candidate_needs_no_choice():
    clock = Clock({LAST: 1.0}, estimates={LAST: float("inf")})
    assert clock.tune() is None and not clock.checked


def test_a_wrong_candidate_is_excluded_and_reported(caplog):
    """Check that a fast candidate whose result is wrong, or that raises, is not used, and is reported."""
    clock = Clock({A: 3.0, B: 0.1, C: 0.1}, wrong={B: "9 of 64 sums are off", C: RuntimeError("no\nkernel")})
    assert clock.tune() == A
    assert warnings_in(caplog) == [
        "cute::some_op: backend 'a', tactic [2, 'x'] is not used: 9 of 64 sums are off",
        "cute::some_op: backend 'b', tactic [] is not used: fails: RuntimeError: no",
    ]


def test_failed_tuning(caplog, file):
    """Check that, if tuning fails, calls use the candidate with the best estimate, and nothing is written."""
    assert Clock(RuntimeError("out of memory")).tune() == A
    assert warnings_in(caplog) == [
        "cute::some_op: tuning failed: RuntimeError: out of memory",
        "cute::some_op: nothing is tuned; calls use the estimated best, a [1]",
    ]
    caplog.clear()
    assert Clock({}, wrong=ESTIMATES, bucket=16).tune() == A
    assert "no candidate gives a correct result" in caplog.text
    assert not file.exists()


def test_nothing_is_tuned_in_a_capture(monkeypatch):
    """Check that a key is not tuned in a capture, but after it in the same block."""
    clock = Clock({A: 3.0, B: 2.0, C: 5.0})
    with tuning.autotune():
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            tuner.tune(clock.problem)
        assert not clock.checked and tuner.lookup(clock.problem.key) is None
        tuner.tune(clock.problem)
    assert tuner.lookup(clock.problem.key) == B


def test_other_threads_are_not_tuned():
    clock, on = Clock({A: 1.0, B: 2.0, C: 3.0}), []
    with tuning.autotune():
        thread = threading.Thread(target=lambda: (on.append(tuning.is_on()), tuner.tune(clock.problem)))
        thread.start()
        thread.join()
        assert tuning.is_on()
    assert on == [False] and not clock.checked


def test_the_generation_changes():
    """Check that the tuner's generation number changes with each block and each choice, so that callers look up their
    choices again."""
    seen = [tuning.generation]
    with tuning.autotune():
        seen.append(tuning.generation)
        tuner.tune(Clock({A: 3.0, B: 2.0, C: 5.0}).problem)
        seen.append(tuning.generation)
    tuner.forget()
    seen.append(tuning.generation)
    assert len(set(seen)) == 4
    tuner.lookup(key_of())
    assert tuning.generation == seen[-1]


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_wrong_timeouts(seconds):
    with pytest.raises(ValueError, match=r"timeout_s=.*; use a number of seconds"), tuning.autotune(timeout_s=seconds):
        pass
