"""What the watchers of a run cost, by name, as a share of its steps' time.

account = Account()
with account.of("spikes"):
    ...                      # a watcher at work
account.step(seconds)        # a step is over
print(account)               # watchers  0.084% of the steps' time: spikes 0.001%, slow ranks 0.083%
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Account:
    """Of one rank. On a GPU these are the host's seconds: what a watcher leaves to the device, it waits for inside."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.steps = 0.0  # seconds of steps

    @contextmanager
    def of(self, watcher: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(watcher, time.perf_counter() - start)

    def add(self, watcher: str, seconds: float) -> None:
        self.seconds[watcher] = self.seconds.get(watcher, 0.0) + seconds

    def step(self, seconds: float) -> None:
        self.steps += seconds

    def shares(self) -> dict[str, float]:
        """By watcher, of the steps' time."""
        return {name: seconds / self.steps for name, seconds in self.seconds.items()} if self.steps else {}

    def __str__(self) -> str:
        shares = self.shares()
        each = ", ".join(f"{name} {share:.3%}" for name, share in shares.items())
        return f"{sum(shares.values()):.3%} of the steps' time: {each}" if shares else "none at work"
