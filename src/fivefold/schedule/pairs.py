"""How long a joined pair takes whose two halves run beside each other's messages, by the rule that executes it.

    forward = [Segment(2.0, message=1.0, beside=0.5), Segment(1.0, message=1.0), Segment(0.5)]
    play(forward, backward).together

A pass is a list of segments. In each it computes, then issues a message (experts' tokens on their way, or what came of
them), computes what it can `beside` it, and waits until the message is there. The two halves of a pair hold one baton,
and only who holds it computes. The forward pass goes first; a half hands the baton over before each wait, and takes up
its wait when it has the baton again; when one half ends, the other keeps it. So the order of all messages is a function
of the two lists, never of who is quicker. Both halves' messages share one link: two at a time take twice as long each.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple


class Segment(NamedTuple):
    """Seconds, or any unit of time: of `compute`, then of a `message`, with so much compute `beside` it."""

    compute: float
    message: float = 0.0
    beside: float = 0.0


Segments = tuple[Segment, ...]


class Pair(NamedTuple):
    """How long each half takes by itself, and both as a pair."""

    forward: float
    backward: float
    together: float

    @property
    def hidden(self) -> float:
        """What the pair saves against one half after the other."""
        return self.forward + self.backward - self.together


def scaled(segments: Segments, factor: float) -> Segments:
    """The same pass on a machine that takes `factor` times as long."""
    return tuple(Segment(*(factor * part for part in one)) for one in segments)


def one_block(forward: float, backward: float, messages: float) -> tuple[Segments, Segments]:
    """A stage of which no more is known than how long its passes take, and its experts' messages in either of them.

    One block: half of the compute comes before the dispatch, and half is the experts'; backward is the mirror of it.
    """
    half, message, back = (forward - messages) / 2, messages / 2, (backward - messages) / 2
    return (
        (Segment(half, message), Segment(half, message)),
        (Segment(0.0, message), Segment(back, message), Segment(back)),
    )


def alone(segments: Iterable[Segment]) -> float:
    """How long a pass takes by itself: only what it computes beside a message hides any of it."""
    return sum(compute + max(message, beside) for compute, message, beside in segments)


def play(forward: Iterable[Segment], backward: Iterable[Segment]) -> Pair:
    """The two halves of a pair, each by itself and both together."""
    return _played(tuple(forward), tuple(backward))


@lru_cache(maxsize=4096)
def _played(forward: Segments, backward: Segments) -> Pair:
    each = alone(forward), alone(backward)
    # A half only waits while the link carries something, so a pair takes no longer than both in turn, but for rounding.
    return Pair(*each, min(_Baton((forward, backward)).run(), sum(each)))


class _Baton:
    """A pair on its way: the time, where each half is, and what is left of its message."""

    def __init__(self, halves: tuple[Segments, Segments]) -> None:
        self.halves, self.next = halves, [0, 0]
        self.left = [0.0, 0.0]
        self.now = 0.0

    def run(self) -> float:
        holder = 0
        while True:
            ended = self.turn(holder)
            if not self.over(1 - holder):
                holder = 1 - holder
            elif ended:
                return self.now

    def over(self, half: int) -> bool:
        return self.next[half] == len(self.halves[half]) and not self.left[half]

    def turn(self, half: int) -> bool:
        """Go on to where this half waits next, or to its end; whether it is at its end."""
        while self.left[half]:
            self.advance(self.next_arrival)
        while self.next[half] < len(self.halves[half]):
            compute, message, beside = self.halves[half][self.next[half]]
            self.next[half] += 1
            self.advance(compute)
            self.left[half] = message
            self.advance(beside)
            if message:
                return False
        return True

    @property
    def next_arrival(self) -> float:
        """How long until one of the messages on their way is there."""
        flying = [one for one in self.left if one]
        return min(flying) * len(flying) if flying else math.inf

    def advance(self, seconds: float) -> None:
        """Let time pass: messages travel, two of them at half the pace."""
        self.now += seconds
        while seconds and any(self.left):
            least, share, until = min(filter(None, self.left)), sum(map(bool, self.left)), self.next_arrival
            if seconds < until:
                self.left = [max(0.0, one - seconds / share) for one in self.left]
                return
            self.left = [one - least if one > least else 0.0 for one in self.left]
            seconds -= until
