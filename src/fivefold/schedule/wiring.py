"""From compute orders to a whole schedule: put every SEND and RECV where the executor should meet it.

A builder only says in which order each rank computes. What crosses ranks follows from the placement, and from one
sequence of all actions of all ranks, by the time at which they end on a clock (`_TIMES`; a joined pair is one action):

* a message belongs right behind its producer in that sequence, and so does its SEND in the sender's list;
* its RECV stands where that is in the receiver's list: before the first action that ends after the producer;
* of several messages between two actions, both their ranks list them in the sequence's order.

So all lists are parts of one sequence, a message being one event of both its ranks, and ranks cannot wait for each
other in a circle: not even if a message holds up everything that its two ranks do until both have come to it. On NCCL
it may: a receive is a kernel that spins on the device, and whatever waits for the whole device (the first use of a
kernel, an allocation, a compilation) waits for the peer. Any clock gives such a sequence, so real durations do not
matter, nor does who wrote the order; `check.rendezvous` proves it without knowing of clocks.

That the action under way when a message is made has its receive before it, and not behind it, lets the message travel
beside that action: on catalogue orders this costs no time against receives posted as early as buffers allow.
"""

from collections.abc import Iterable
from dataclasses import replace

from fivefold.schedule.actions import (
    ALL,
    BACKWARD,
    COMPUTE,
    FORWARD,
    GATHER,
    INPUT_GRAD,
    LAST_READERS,
    RECEIVES,
    REDUCE,
    STEP,
    WEIGHT_GRAD,
    Action,
    Kind,
)
from fivefold.schedule.schedule import NOTHING, Placement, Promise, Schedule
from fivefold.support.errors import UserError

Order = list[Action]
Ends = dict[tuple[Kind, int], int]  # by kind and stage: the channel (a number) that an action needs, or feeds
Moment = tuple[int, int]  # a time, and the rank, which tells actions apart that end at the same time
Event = tuple[Moment, int, int, Action]  # when its producer ends, its channel and microbatch; the SEND or RECV
# Whole numbers, so that sums are exact. A joined pair takes the sum of its two.
_TIMES: dict[Kind, int] = {FORWARD: 20, BACKWARD: 40, INPUT_GRAD: 20, WEIGHT_GRAD: 20}
_MESSAGE = 1
_NEVER: Moment = (1 << 62, 0)
_action = tuple.__new__  # a NamedTuple's own constructor takes three times as long, and most actions are made here


def wire(
    name: str,
    placement: Placement,
    microbatches: int,
    orders: Iterable[Iterable[Action]],
    *,
    buffers: int = 2,
    promise: Promise = NOTHING,
) -> Schedule:
    """The schedule that computes in these orders. It has at least so many `buffers`, and as many as its receives take.

    Of orders in which ranks wait for each other for ever, what never runs has its messages beside it. GATHER, REDUCE
    and STEP are carried along where they stand.
    """
    wiring = _Wiring(placement, [list(order) for order in orders])
    ranks = tuple(tuple(wiring.rank(rank)) for rank in range(len(wiring.orders)))
    return Schedule(name, placement, microbatches, ranks, max(buffers, wiring.most), promise)


class _Wiring:
    def __init__(self, placement: Placement, orders: list[Order]) -> None:
        self.orders, self.channels = orders, placement.channels
        numbered = list(enumerate(self.channels))
        self.needs: Ends = {(kind, to.target): number for number, to in numbered for kind in to.compute}
        self.feeds: Ends = {(kind, to.source): number for number, to in numbered for kind in to.compute}
        self.made: list[dict[int, Moment]] = [{} for _ in numbered]  # by channel and microbatch: when its producer ends
        self.ends: list[list[Moment]] = [[] for _ in orders]  # by rank and place
        self.most = 1  # receives that are posted at once, of one channel
        self._run()

    def _run(self) -> None:
        """The clock. Whoever waits is woken by the message, so each action is looked at once, and once more."""
        waiting: dict[tuple[int, int], int] = {}
        clocks, ready = [0] * len(self.orders), list(range(len(self.orders)))
        needs, feeds, made = self.needs, self.feeds, self.made
        while ready:
            rank = ready.pop()
            order, ends, now = self.orders[rank], self.ends[rank], clocks[rank]
            first = place = len(ends)
            while place < len(order):
                kind, stage, microbatch, joined = order[place]
                channel = needs.get((kind, stage))
                if channel is not None:
                    message = made[channel].get(microbatch)
                    if message is None:
                        waiting[channel, microbatch] = rank
                        break
                    now = max(now, message[0] + _MESSAGE)
                place += 1
                if joined and place < len(order):
                    continue  # they begin together
                now += sum(_TIMES.get(action[0], 0) for action in order[first:place])
                for kind, stage, microbatch, _ in order[first:place]:
                    ends.append((now, rank))
                    channel = feeds.get((kind, stage))
                    if channel is not None:
                        made[channel][microbatch] = now, rank
                        if (channel, microbatch) in waiting:
                            ready.append(waiting.pop((channel, microbatch)))
                first = place
            clocks[rank] = now
        for order, ends in zip(self.orders, self.ends, strict=True):
            ends += [_NEVER] * (len(order) - len(ends))

    def rank(self, rank: int) -> Order:
        """The list of one rank, messages included."""
        order, ends = self.orders[rank], self.ends[rank]
        due = sorted((event for action in order if (event := self._receive(action))), reverse=True)
        held = dict.fromkeys(self.needs.values(), 0)
        wired: Order = []
        sent: list[Event] = []

        def put(place: int) -> None:
            """What stands before the computation that comes at `place` or later."""
            while place < len(order) and order[place].kind not in COMPUTE:
                place += 1
            if place < len(order) and order[place].joined:
                place += 1  # both halves end with the pair
            until, between = ends[place] if place < len(order) else _NEVER, sent.copy()
            sent.clear()
            while due and due[-1][0] < until:
                between.append(due.pop())
            for _, channel, _, action in sorted(between):
                wired.append(action)
                if action[0] in RECEIVES:
                    held[channel] += 1
                    self.most = max(self.most, held[channel])

        put(0)
        for place, action in enumerate(order):
            kind, stage, microbatch, joined = action
            channel = self.needs.get((kind, stage))
            if channel is not None:
                held[channel] -= 1
                if microbatch not in self.made[channel]:
                    wired.append(_action(Action, (self.channels[channel].receive, stage, microbatch, False)))
            wired.append(action)
            channel = self.feeds.get((kind, stage))
            if channel is not None:
                send = _action(Action, (self.channels[channel].send, stage, microbatch, False))
                sent.append((ends[place], channel, microbatch, send))
            if kind in COMPUTE and not joined:
                put(place + 1)
        put(len(order))
        return wired

    def _receive(self, action: Action) -> Event | None:
        """The receive of what an action needs, if anybody makes it."""
        kind, stage, microbatch, _ = action
        channel = self.needs.get((kind, stage))
        made = None if channel is None else self.made[channel].get(microbatch)
        if channel is None or made is None:
            return None
        return made, channel, microbatch, _action(Action, (self.channels[channel].receive, stage, microbatch, False))


# Data parallelism's part of a step: gather parameters, reduce gradients, step the optimizer, each where it is due. A
# pipeline schedule ends with the last weight gradient; what follows depends on how the data-parallel group shares
# parameters, gradients and optimizer state (ZeRO stages 0 to 2; stage 3 gathers inside blocks, not between actions).


def with_zero(schedule: Schedule, zero: int) -> Schedule:
    """The same schedule with REDUCE once a gradient is final, STEP at the end and, from stage 1 on, GATHER at first."""
    if zero not in (0, 1, 2):
        raise UserError(
            f"zero={zero} cannot be written into a schedule; use 0, 1 or 2 (stage 3 gathers block by block)"
        )
    return replace(schedule, ranks=tuple(tuple(_extend(list(order), zero)) for order in schedule.ranks))


def _extend(order: Order, zero: int) -> Order:
    last = {action.stage: place for place, action in enumerate(order) if action.kind in LAST_READERS}
    gathered = set() if zero else set(last)
    extended: Order = []
    late: Order = []  # what is due before the rank computes on: behind the pair it belongs to, and behind its sends
    for place, action in enumerate(order):
        if late and action.kind in COMPUTE and not extended[-1].joined:
            extended += late
            late.clear()
        if action.kind is FORWARD and action.stage not in gathered:
            gathered.add(action.stage)
            extended.append(Action(GATHER, action.stage))
        extended.append(action)
        if action.kind in LAST_READERS and (zero == 2 or place == last[action.stage]):
            late.append(Action(REDUCE, action.stage, action.microbatch if zero == 2 else ALL))
    return extended + late + [Action(STEP, stage) for stage in sorted(last)]
