"""From compute orders to a whole schedule: put every SEND and RECV where the executor should meet it.

A builder only says in which order each rank computes. What crosses ranks follows from the placement:

* a SEND stands right behind its producer;
* a RECV is posted early. The first `buffers` receives of a channel stand at the head of the list, and receive n stands
  right behind the consumer of message n - buffers, which has just freed a buffer.

A joined pair counts as one action: what it needs is posted before it, what it makes is sent after it. GATHER, REDUCE
and STEP are carried along where they stand.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from fivefold.schedule.actions import ALL, COMPUTE, FORWARD, GATHER, LAST_READERS, REDUCE, STEP, Action, Kind
from fivefold.schedule.schedule import NOTHING, Placement, Promise, Schedule
from fivefold.support.errors import UserError

Order = list[Action]


def wire(
    name: str,
    placement: Placement,
    microbatches: int,
    orders: Iterable[Iterable[Action]],
    *,
    buffers: int = 2,
    promise: Promise = NOTHING,
) -> Schedule:
    """The schedule that computes in these orders."""
    receives: Ends = {(kind, to.target): to.receive for to in placement.channels for kind in to.compute}
    sends: Ends = {(kind, to.source): to.send for to in placement.channels for kind in to.compute}
    ranks = tuple(tuple(_wire_rank(list(order), receives, sends, buffers)) for order in orders)
    return Schedule(name, placement, microbatches, ranks, buffers, promise)


Ends = dict[tuple[Kind, int], Kind]  # by kind and stage, how an action's input is received or its result sent
_action = tuple.__new__  # a NamedTuple's own constructor takes three times as long, and most actions are made here


def _wire_rank(order: Order, receives: Ends, sends: Ends, buffers: int) -> Order:
    # The receives of each channel in the order their messages are consumed; channels in the order of first use.
    channels: dict[tuple[Kind, int], Order] = {}
    for kind, stage, microbatch, _ in order:
        receive = receives.get((kind, stage))
        if receive is not None:
            channels.setdefault((receive, stage), []).append(_action(Action, (receive, stage, microbatch, False)))
    wired = [receive for queue in channels.values() for receive in queue[:buffers]]
    unposted = {channel: iter(queue[buffers:]) for channel, queue in channels.items()}

    posts: Order = []
    sent: Order = []
    for action in order:
        kind, stage, microbatch, joined = action
        wired.append(action)
        receive, send = receives.get((kind, stage)), sends.get((kind, stage))
        if receive is not None:
            posts += islice(unposted[receive, stage], 1)
        if send is not None:
            sent.append(_action(Action, (send, stage, microbatch, False)))
        if not joined:
            # Posting never waits and sending may, so the posts go first.
            wired += posts
            wired += sent
            posts.clear()
            sent.clear()
    return wired


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
