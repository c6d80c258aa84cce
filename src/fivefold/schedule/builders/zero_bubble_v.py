"""ZB-V: zero bubble in 1F1B's memory, by placing stages in a V (Qi et al. 2023).

Rank r owns stages r and 2p-1-r, so that the last rank of the way down is the first of the way up, and rank 0 sees the
loss of a microbatch as soon as it is there.
"""

from collections import Counter

from fivefold.schedule.actions import Action, Kind
from fivefold.schedule.record import Record, vee
from fivefold.schedule.schedule import Placement, Promise, Schedule
from fivefold.schedule.wiring import Order, wire


def zb_v(p: int, m: int) -> Schedule:
    """Every rank holds p whole activations; no bubble in any rank's span when F = I = W and m >= 2p - 1."""
    orders = [_Rank(p, m, rank).order() for rank in range(p)]
    promise = Promise((min(2 * m, 2 * p),) * p, slots=6 * m + p - 1 if m >= 2 * p - 1 else None)
    return wire("zb-v", Placement.vee(p), m, orders, promise=promise)


class _Rank:
    """Writes one rank's order: `do("F1")` appends the next forward of chunk 1."""

    def __init__(self, p: int, m: int, rank: int) -> None:
        self.p, self.m, self.rank = p, m, rank
        self.n = max(m, 2 * p - 1)  # the pattern needs this many microbatches; those beyond m are left out again
        self.done: Counter[str] = Counter()
        self.written: Order = []

    def order(self) -> Order:
        """The paper's phases: warm-up, steady state, cool-down."""
        p, r, n, done = self.p, self.rank, self.n, self.done
        # Warm-up: down the V, then down and up in turn, then the first gradients.
        self.do("F0", times=2 * (p - r) - 1)
        self.do("F1", "F0", times=r)
        self.do("F1", "I1", "W1", times=p - r)
        # Steady state: every gradient makes room for a forward.
        while done["F1"] < done["F0"] or done["F0"] < n:
            if done["F0"] < n:
                self.do("F0")
            self.do("I0", "W0", "F1", "I1", "W1")
        # Cool-down: input gradients first, because other ranks wait for them; then the weight gradients that are left.
        self.do("I0", "I1", times=r)
        self.do("I0", "W0", times=p - r)
        self.do("W1", times=n - done["W1"])
        self.do("W0", times=n - done["W0"])
        return [action for action in self.written if action.microbatch < self.m]

    def do(self, *words: str, times: int = 1) -> None:
        for _ in range(times):
            for word in words:
                kind, chunk = Kind(word[0]), word[1]
                stage = self.rank if chunk == "0" else 2 * self.p - 1 - self.rank
                self.written.append(Action(kind, stage, self.done[word]))
                self.done[word] += 1


ZB_V = Record(
    "zb-v",
    lambda r: zb_v(r.p, r.m),
    vee,
    chunks=2,
    splits=True,
    bubble="span 0 if F=I=W",
    fill=0.3,
    planned=(2,),
)
