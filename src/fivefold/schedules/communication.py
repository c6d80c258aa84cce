"""From compute orders to a whole schedule: put every SEND and RECV where the executor should reach it.

A builder only says in which order each rank computes. What crosses ranks follows from the placement, and from one
sequence of all actions of all ranks, by the time at which they end on a clock (`_ACTION_TIMES`; a joined pair is one
action). A message comes right behind its producer, and into the lists of both its ranks:

* its SEND stands right behind the producer;
* its RECV stands before the first action of the receiver that ends after the producer;
* of several messages between two actions, both their ranks list them in the sequence's order.

So all lists are parts of one sequence, a message being one event of both its ranks, and ranks cannot wait for each
other in a circle: not even if a message holds up everything that its two ranks do until both have come to it. On
NCCL it may: a receive is a kernel that spins on the device, and whatever waits for the whole device (the first use
of a kernel, an allocation, a compilation) waits for the peer. Any clock gives such a sequence, so real durations do
not matter, nor does who wrote the order; `deadlock.rendezvous` proves it without knowing of clocks.

That the action under way when a message is made has its receive before it, and not behind it, lets the message
travel beside that action. Where stages take the same time, schedules of the catalogue lose nothing against receives
posted as early as buffers allow; where they do not, a message may be made before this clock has it, and wait for its
receive.
"""

from collections.abc import Iterable
from dataclasses import replace
from heapq import heappop, heappush
from itertools import product

from fivefold.schedules.actions import (
    ALL_MICROBATCHES,
    BACKWARD,
    COMPUTE_KINDS,
    FORWARD,
    GATHER,
    INPUT_GRAD,
    LAST_READERS,
    REDUCE,
    STEP,
    WEIGHT_GRAD,
    Action,
    Channel,
    Kind,
)
from fivefold.schedules.schedule import NO_BOUNDS, Bounds, Placement, Schedule
from fivefold.support.errors import UserError

Order = list[Action]
# Whole numbers, so that sums are exact. A joined pair takes the sum of its two.
_ACTION_TIMES: dict[Kind, int] = {FORWARD: 20, BACKWARD: 40, INPUT_GRAD: 20, WEIGHT_GRAD: 20}
_MESSAGE_TIME = 1
_action = tuple.__new__  # a NamedTuple's own constructor takes three times as long, and most actions are made here


def wire(
    name: str,
    placement: Placement,
    microbatches: int,
    orders: Iterable[Iterable[Action]],
    *,
    buffers: int = 2,
    promise: Bounds = NO_BOUNDS,
) -> Schedule:
    """The schedule that computes in these orders, with at least so many `buffers`, or as many as its receives need.

    GATHER, REDUCE and STEP keep their places. Orders that deadlock get all their messages too, so that `check` can say
    who waits for whom.
    """
    sequence = _Sequence(placement, orders)
    sequence.run()
    ranks = tuple(map(tuple, sequence.lists[: len(sequence.groups)]))
    return Schedule(name, placement, microbatches, ranks, max(buffers, sequence.most_held), promise)


class _Wire:
    """A channel and the state of its messages, which are known by their microbatches."""

    def __init__(self, channel: Channel, receiver: Order) -> None:
        self.send, self.receive, self.target = channel.send, channel.receive, channel.target
        self.receiver = receiver  # the list of the rank that receives
        self.sent_at: dict[int, int] = {}  # microbatch -> when the action that produces the message ended
        self.waiting: dict[int, list[int]] = {}  # microbatch -> the ranks that cannot go on without the message
        self.unconsumed = 0  # messages received and not consumed yet


# How long an action takes, the wire whose message it needs, and the wire that it feeds.
TimeAndWires = tuple[int, _Wire | None, _Wire | None]
_NOTHING: TimeAndWires = (0, None, None)


class _Sequence:
    """Simulates all ranks. Whatever ends next is appended: an action to its rank's list, its message to both ranks'."""

    def __init__(self, placement: Placement, orders: Iterable[Iterable[Action]]) -> None:
        self.groups = [_groups(order) for order in orders]  # by rank: the groups left to run, the next one last
        self.lists: list[Order] = [[] for _ in range(max(len(self.groups), placement.ranks))]
        wires = {channel: _Wire(channel, self.lists[placement.owner[channel.target]]) for channel in placement.channels}
        needs = {(kind, channel.target): wire for channel, wire in wires.items() for kind in channel.compute}
        feeds = {(kind, channel.source): wire for channel, wire in wires.items() for kind in channel.compute}
        self.times_and_wires: dict[tuple[Kind, int], TimeAndWires] = {
            (kind, stage): (time, needs.get((kind, stage)), feeds.get((kind, stage)))
            for (kind, time), stage in product(_ACTION_TIMES.items(), range(placement.stages))
        }
        self.clocks = [0] * len(self.groups)  # by rank: when its last group ended
        self.ending: list[tuple[int, int]] = []  # a heap: when the group that a rank runs will end, and the rank
        self.most_held = 0  # the most messages of one channel that are received and not consumed

    def run(self) -> None:
        for rank in range(len(self.groups)):
            self._begin(rank)
        while self.ending or self._break_deadlock():
            self._end(*heappop(self.ending))

    def _begin(self, rank: int) -> None:
        """Begin the next group of a rank, unless it waits for a message."""
        if not self.groups[rank]:
            return
        start, duration = self.clocks[rank], 0
        for kind, stage, microbatch, _ in self.groups[rank][-1]:
            time, need, _ = self.times_and_wires.get((kind, stage), _NOTHING)
            duration += time
            if need is not None:
                sent = need.sent_at.get(microbatch)
                if sent is None:
                    need.waiting.setdefault(microbatch, []).append(rank)
                    return
                if sent + _MESSAGE_TIME > start:
                    start = sent + _MESSAGE_TIME
        heappush(self.ending, (start + duration, rank))

    def _end(self, now: int, rank: int) -> None:
        self.clocks[rank] = now
        order, group = self.lists[rank], self.groups[rank].pop()
        order += group
        for kind, stage, microbatch, _ in group:
            _, need, feed = self.times_and_wires.get((kind, stage), _NOTHING)
            if need is not None:
                need.unconsumed -= 1
            if feed is not None:
                order.append(_action(Action, (feed.send, stage, microbatch, False)))
                if microbatch not in feed.sent_at:
                    self._receive(feed, microbatch, now)
        self._begin(rank)

    def _receive(self, wire: _Wire, microbatch: int, now: int) -> None:
        wire.receiver.append(_action(Action, (wire.receive, wire.target, microbatch, False)))
        wire.sent_at[microbatch] = now
        wire.unconsumed += 1
        if wire.unconsumed > self.most_held:
            self.most_held = wire.unconsumed
        for rank in wire.waiting.pop(microbatch, ()):
            self._begin(rank)

    def _break_deadlock(self) -> bool:
        """All ranks left are deadlocked: let the first of them receive what it waits for. False if none is left."""
        rank = next((rank for rank, groups in enumerate(self.groups) if groups), None)
        if rank is None:
            return False
        for kind, stage, microbatch, _ in self.groups[rank][-1]:
            _, need, _ = self.times_and_wires.get((kind, stage), _NOTHING)
            if need is not None and microbatch not in need.sent_at:
                self._receive(need, microbatch, self.clocks[rank])
        return True


def _groups(order: Iterable[Action]) -> list[Order]:
    """Splits a rank's order into groups that end at one time, the last group first: a computation or a joined pair,
    with the collectives before it."""
    groups: list[Order] = [[]]
    for action in order:
        groups[-1].append(action)
        if action[0] in COMPUTE_KINDS and not action[3]:
            groups.append([])
    if not groups[-1]:
        groups.pop()
    return groups[::-1]


def with_zero(schedule: Schedule, zero: int) -> Schedule:
    """The same schedule with REDUCE once a gradient is final, STEP at the end and, from stage 1 on, GATHER at first."""
    if zero not in (0, 1, 2):
        raise UserError(
            f"zero={zero} cannot be written into a schedule; use 0, 1 or 2 (stage 3 gathers block by block)",
            "schedule.zero",
        )
    return replace(schedule, ranks=tuple(tuple(_extend(list(order), zero)) for order in schedule.ranks))


def _extend(order: Order, zero: int) -> Order:
    """A rank's order with the collectives and optimizer steps of its stages."""
    last = {action.stage: place for place, action in enumerate(order) if action.kind in LAST_READERS}
    gathered = set() if zero else set(last)
    extended: Order = []
    due: Order = []  # REDUCEs to insert before the next computation: not inside a joined pair, nor before its sends
    for place, action in enumerate(order):
        if due and action.kind in COMPUTE_KINDS and not extended[-1].joined:
            extended += due
            due.clear()
        if action.kind is FORWARD and action.stage not in gathered:
            gathered.add(action.stage)
            extended.append(Action(GATHER, action.stage))
        extended.append(action)
        if action.kind in LAST_READERS and (zero == 2 or place == last[action.stage]):
            due.append(Action(REDUCE, action.stage, action.microbatch if zero == 2 else ALL_MICROBATCHES))
    return extended + due + [Action(STEP, stage) for stage in sorted(last)]
