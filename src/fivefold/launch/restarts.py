"""Whether to start again after a failure, and after how long: the same failure in the same place is not tried for ever.

policy = Restarts(3)
policy.after(failure)      # Verdict(again=True, pause=0.0, why="1 of 3")
policy.after(failure)      # Verdict(again=False, ..., why="the same failure came twice ...")
"""

import re
from typing import NamedTuple

from fivefold.launch.ends import End

FIRST, LONGEST = 1.0, 60.0  # seconds before a start that follows a start without progress; each time twice as long
_STEP = re.compile(r"\bstep (\d+)")


class Verdict(NamedTuple):
    again: bool
    pause: float  # seconds
    why: str


class Restarts:
    """The failures of one run. Progress, a later step than any before, forgets what came earlier."""

    def __init__(self, allowed: int):
        self.allowed, self.done = allowed, 0
        self.furthest = -1
        self.seen: set[tuple[int, str, str, str]] = set()  # failures since there was progress
        self.still = 0  # starts since then

    def after(self, failure: End) -> Verdict:
        step = _STEP.search(failure.place)
        if step and int(step[1]) > self.furthest:
            self.furthest, self.still = int(step[1]), 0
            self.seen.clear()
        if self.done >= self.allowed:
            return Verdict(False, 0.0, f"all {self.allowed} restarts are used up" if self.allowed else "")
        if failure.signature in self.seen:
            return Verdict(False, 0.0, "the same failure came twice without progress: it is not tried again")
        self.seen.add(failure.signature)
        pause = min(LONGEST, FIRST * 2 ** (self.still - 1)) if self.still else 0.0
        self.done, self.still = self.done + 1, self.still + 1
        return Verdict(True, pause, f"{self.done} of {self.allowed}")
