"""ZB-V and DualPipeV: stages in a V, so that rank r owns stages r and 2p-1-r, its chunks 0 and 1.

The last rank of the way down is the first of the way up, and rank 0 sees the loss of a microbatch as soon as it is
there. A rank's order is written in words (`OrderWriter`). p is the number of ranks, m of microbatches.
"""

from collections import Counter

from fivefold.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Kind
from fivefold.schedules.communication import Order, wire
from fivefold.schedules.info import ScheduleInfo, vee
from fivefold.schedules.schedule import Bounds, Placement, Schedule
from fivefold.support.errors import UserError


class OrderWriter:
    """`do("F0", "I1", "F1&B0")`: the next forward of chunk 0, the next input gradient of chunk 1, and a joined pair."""

    def __init__(self, p: int, rank: int) -> None:
        self.stages = rank, 2 * p - 1 - rank
        self.done: Counter[tuple[Kind, int]] = Counter()  # kind and chunk -> microbatches written
        self.written: Order = []

    def do(self, *words: str, times: int = 1) -> None:
        """Append the words, in this order and so many times."""
        for word in words * times:
            first, *partner = word.split("&")
            self.write(first, joined=bool(partner))
            for second in partner:
                self.write(second)

    def write(self, word: str, *, joined: bool = False) -> None:
        """Append the next action of a kind and chunk; `joined` with the one that follows it."""
        kind, chunk = Kind(word[0]), int(word[1])
        kinds = (INPUT_GRAD, WEIGHT_GRAD) if kind is BACKWARD else (kind,)  # a backward counts as both halves
        self.written.append(Action(kind, self.stages[chunk], self.done[kinds[0], chunk], joined))
        for half in kinds:
            self.done[half, chunk] += 1

    def forwards(self, chunk: int) -> int:
        """How many forwards of a chunk have been written."""
        return self.done[FORWARD, chunk]

    def weight_grads(self, chunk: int) -> int:
        return self.done[WEIGHT_GRAD, chunk]


# ---- ZB-V -----------------------------------------------------------------------------------------------------------
# Zero bubble in 1F1B's memory (Qi et al. 2023).


def zb_v(p: int, m: int) -> Schedule:
    """Every rank holds p whole activations; no bubble in any rank's span when F = I = W and m >= 2p - 1."""
    orders = [_zb_v_order(p, m, rank) for rank in range(p)]
    promise = Bounds((min(2 * m, 2 * p),) * p, slots=6 * m + p - 1 if m >= 2 * p - 1 else None)
    return wire("zb-v", Placement.vee(p), m, orders, promise=promise)


def _zb_v_order(p: int, m: int, r: int) -> Order:
    """The paper's phases: warm-up, steady state, cool-down."""
    rank = OrderWriter(p, r)
    n = max(m, 2 * p - 1)  # the pattern needs this many microbatches; those beyond m are left out again
    # Warm-up: down the V, then down and up in turn, then the first gradients.
    rank.do("F0", times=2 * (p - r) - 1)
    rank.do("F1", "F0", times=r)
    rank.do("F1", "I1", "W1", times=p - r)
    # Steady state: every gradient makes room for a forward.
    while rank.forwards(1) < rank.forwards(0) or rank.forwards(0) < n:
        if rank.forwards(0) < n:
            rank.do("F0")
        rank.do("I0", "W0", "F1", "I1", "W1")
    # Cool-down: input gradients first, because other ranks wait for them; then the weight gradients that are left.
    rank.do("I0", "I1", times=r)
    rank.do("I0", "W0", times=p - r)
    rank.do("W1", times=n - rank.weight_grads(1))
    rank.do("W0", times=n - rank.weight_grads(0))
    return [action for action in rank.written if action.microbatch < m]


ZB_V = ScheduleInfo(
    "zb-v",
    lambda r: zb_v(r.p, r.m),
    vee,
    chunks=2,
    splits=True,
    bubble="span 0 if F=I=W",
    fill=0.3,
    waits=True,
    planned=(2,),
)


# ---- DualPipeV ------------------------------------------------------------------------------------------------------
# DeepSeek's DualPipe cut in half; forwards and backwards of different microbatches run overlapped.
#
# In the steady state every forward is joined with a whole backward of the other chunk (F&B), so that the
# messages of experts inside one hide under the compute of the other (`costs.py` has the rule); `--times fb=` says how
# long an overlapped pair takes. Deferred weight gradients wait in a FIFO queue.


def dualpipe_v(p: int, m: int) -> Schedule:
    """A rank holds 2p + 1 chunk activations; the bubble is (p - 1)(F&B + B - 3W) in chunk times."""
    least = DUALPIPE_V.least * p
    if m < least:
        raise UserError(
            f"dualpipe-v needs at least 2p={least} microbatches to have forwards and backwards to pair, and there are "
            f"{m}; use zb-v, or at least {least} microbatches",
            "layout.microbatches.schedule",
        )
    orders = [_dualpipe_v_order(p, m, rank) for rank in range(p)]
    promise = Bounds((min(2 * m, 2 * p + 1),) * p, slots=6 * m + 2 * (p - 1))
    return wire("dualpipe-v", Placement.vee(p), m, orders, promise=promise)


def _dualpipe_v_order(p: int, m: int, r: int) -> Order:
    """DeepSeek's eight phases."""
    rank, below = OrderWriter(p, r), p - r - 1
    # 1: F0 until the first activation has reached the last rank.
    rank.do("F0", times=2 * below)
    # 2: F0 F1, as the first microbatches come up again.
    rank.do("F0", "F1", times=r + 1)
    # 3: I1 W1 F1: the first gradients, split, so that the rank above has its own soon.
    rank.do("I1", "W1", "F1", times=below)
    # 4, the steady state: F0&B1 F1&B0. The last rank feeds itself: its first backward needs the forward right before
    # it, so they cannot overlap.
    first = ("F0&B1",) if below else ("F0", "B1")
    rank.do(*first, "F1&B0")
    rank.do("F0&B1", "F1&B0", times=m - 2 * p + r)
    # 5: B1 F1&B0, as no new microbatch comes in.
    rank.do("B1", "F1&B0", times=below)
    # 6: B1 B0; after the first half only their I, with the W deferred to fill the tail.
    gradients = [f"{'B' if step <= r else 'I'}{1 - step % 2}" for step in range(2 * (r + 1))]
    rank.do(*gradients)
    # 7: W I0: deferred weight gradients fill the gaps, the one that has waited longest first.
    deferred = [f"W{word[1]}" for word in gradients if word[0] == "I"] + ["W0"] * below
    for word in deferred[:below]:
        rank.do(word, "I0")
    # 8: the weight gradients that are left.
    rank.do(*deferred[below:])
    return rank.written


DUALPIPE_V = ScheduleInfo(
    "dualpipe-v",
    lambda r: dualpipe_v(r.p, r.m),
    vee,
    chunks=2,
    splits=True,
    least=2,
    bubble="(p-1)(F&B+B-3W)/2",
    joins=True,
    fill=0.7,
    live=lambda p, m, v: p + 1.0,
    planned=(2,),
)
