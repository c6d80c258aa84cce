"""DualPipeV: DeepSeek's DualPipe cut in half; forwards and backwards of different microbatches run overlapped.

V placement. In the steady state every forward is joined with a whole backward of the other chunk (F&B), so that
communication inside one (an all-to-all of experts, say) can hide under the compute of the other. The trainer runs the
two one after the other, and the planner times them so; `--times fb=` says how long an overlapped pair takes. Deferred
weight gradients wait in a FIFO queue.
"""

from collections import Counter, deque

from fivefold.schedule.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Kind
from fivefold.schedule.record import Record, vee
from fivefold.schedule.schedule import Placement, Promise, Schedule
from fivefold.schedule.wiring import Order, wire
from fivefold.support.errors import UserError


def dualpipe_v(p: int, m: int) -> Schedule:
    """A rank holds 2p + 1 chunk activations; the bubble is (p - 1)(F&B + B - 3W) in chunk times."""
    least = DUALPIPE_V.least * p
    if m < least:
        raise UserError(
            f"dualpipe-v needs at least 2p={least} microbatches to have forwards and backwards to pair, and there are "
            f"{m}; use zb-v, or at least {least} microbatches"
        )
    orders = [_Rank(p, m, rank).order() for rank in range(p)]
    promise = Promise((min(2 * m, 2 * p + 1),) * p, slots=6 * m + 2 * (p - 1))
    return wire("dualpipe-v", Placement.vee(p), m, orders, promise=promise)


class _Rank:
    """Writes one rank's order, phase by phase."""

    def __init__(self, p: int, m: int, rank: int) -> None:
        self.p, self.m, self.rank = p, m, rank
        self.forwards: Counter[int] = Counter()  # chunk -> microbatches begun
        self.backwards: Counter[int] = Counter()
        self.deferred: deque[Action] = deque()
        self.written: Order = []

    def order(self) -> Order:
        """DeepSeek's eight phases."""
        p, r = self.p, self.rank
        # 1: F0 until the first activation has reached the last rank.
        for _ in range(2 * (p - r - 1)):
            self.forward(0)
        # 2: F0 F1, as the first microbatches come up again.
        for _ in range(r + 1):
            self.forward(0)
            self.forward(1)
        # 3: I1 W1 F1: the first gradients, split, so that the rank above has its own soon.
        for _ in range(p - r - 1):
            self.input_grad(1)
            self.weight_grad()
            self.forward(1)
        # 4, the steady state: F0&B1 F1&B0.
        self.steady(self.m - 2 * p + r + 1)
        # 5: B1 F1&B0, as no new microbatch comes in.
        for _ in range(p - r - 1):
            self.backward(1)
            self.pair(1, 0)
        # 6: B1 B0; after the first half only their I, with the W deferred to fill the tail.
        for step in range(2 * (r + 1)):
            (self.backward if step < r + 1 else self.input_grad)(1 - step % 2)
        # 7: W I0: deferred weight gradients fill the gaps.
        for _ in range(p - r - 1):
            self.weight_grad()
            self.input_grad(0)
        # 8: the weight gradients that are left.
        for _ in range(r + 1):
            self.weight_grad()
        return self.written

    def steady(self, rounds: int) -> None:
        for turn in range(rounds):
            if turn == 0 and self.rank == self.p - 1:
                # The last rank feeds itself: this backward needs the forward right before it, so they cannot overlap.
                self.forward(0)
                self.backward(1)
            else:
                self.pair(0, 1)
            self.pair(1, 0)

    def forward(self, chunk: int, joined: bool = False) -> None:
        self.write(FORWARD, chunk, self.forwards, joined)

    def backward(self, chunk: int) -> None:
        self.write(BACKWARD, chunk, self.backwards)

    def pair(self, forward: int, backward: int) -> None:
        self.forward(forward, joined=True)
        self.backward(backward)

    def input_grad(self, chunk: int) -> None:
        self.write(INPUT_GRAD, chunk, self.backwards)
        _, stage, microbatch, _ = self.written[-1]
        self.deferred.append(Action(WEIGHT_GRAD, stage, microbatch))

    def weight_grad(self) -> None:
        self.written.append(self.deferred.popleft())

    def write(self, kind: Kind, chunk: int, counter: Counter[int], joined: bool = False) -> None:
        stage = self.rank if chunk == 0 else 2 * self.p - 1 - self.rank
        self.written.append(Action(kind, stage, counter[chunk], joined))
        counter[chunk] += 1


DUALPIPE_V = Record(
    "dualpipe-v",
    lambda r: dualpipe_v(r.p, r.m),
    vee,
    chunks=2,
    splits=True,
    least=2,
    bubble="(p-1)(F&B+B-3W)/2",
    fill=0.7,
    live=lambda p, m, v: p + 1.0,
    planned=(2,),
)
