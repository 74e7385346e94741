"""A simulated device for tests of the timing method."""

from dataclasses import dataclass, field


@dataclass
class FakeDevice:
    """Device with a simulated clock. ``costs`` lists each variant's time per call, in µs, in the order of capture."""

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
            self.log.append(chr(ord("A") + index))
            self.now += self.costs[index] * calls

        return replay

    def mark(self):
        return self.now

    def elapsed_us(self, start, end):
        return end - start

    def synchronize(self):
        self.log.append("|")
