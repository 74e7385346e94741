"""A made-up device, and the repository's root on the path: `benchmarks` is no part of the installed package."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@dataclass
class FakeBackend:
    """A device whose calls last as long as `costs` says (µs, by the order in which variants are captured)."""

    costs: list[float]
    now: float = 0.0
    log: list[str] = field(default_factory=list)
    captured: int = 0

    def capture(self, call, n_sets, calls):
        index = self.captured % len(self.costs)
        self.captured += 1
        for k in range(n_sets):
            call(k)

        def replay():
            self.log.append("ABCDEFGH"[index])
            self.now += self.costs[index] * calls

        return replay

    def mark(self):
        return self.now

    def elapsed_us(self, start, end):
        return end - start

    def synchronize(self):
        self.log.append("|")


@pytest.fixture
def fake_backend():
    """The class of the made-up device."""
    return FakeBackend
