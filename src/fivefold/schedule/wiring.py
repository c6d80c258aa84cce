"""From compute orders to a whole schedule: put every SEND and RECV where the executor should meet it.

A builder only says in which order each rank computes. What crosses ranks follows from the placement:

* a SEND stands right behind its producer;
* a RECV is posted early. The first `buffers` receives of a channel stand at the head of the list, and receive n stands
  right behind the consumer of message n - buffers, which has just freed a buffer.

A joined pair counts as one action: what it needs is posted before it, what it makes is sent after it. GATHER, REDUCE
and STEP are carried along where they stand.
"""

from collections.abc import Iterable
from itertools import islice

from fivefold.schedule.actions import (
    COLLECTIVES,
    COMPUTE,
    FORWARD,
    GRADIENT_MAKERS,
    RECV_ACTIVATION,
    RECV_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    Action,
    Kind,
)
from fivefold.schedule.schedule import NOTHING, Placement, Promise, Schedule

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
    ends = _ends(placement)
    ranks = tuple(tuple(_wire_rank(list(order), ends, buffers)) for order in orders)
    return Schedule(name, placement, microbatches, ranks, buffers, promise)


Ends = dict[tuple[Kind, int], tuple[Kind | None, Kind | None]]


_action = tuple.__new__  # a NamedTuple's own constructor takes three times as long, and most actions are made here


def _ends(placement: Placement) -> Ends:
    """By kind and stage: how an action's input is received and its result sent; None where it stays on the rank."""
    silent = COMPUTE | COLLECTIVES
    ends: Ends = {(kind, stage): (None, None) for kind in silent for stage in range(placement.stages)}
    for stage in range(placement.stages):
        comes = stage > 0 and placement.crosses(stage - 1)
        goes = stage + 1 < placement.stages and placement.crosses(stage)
        ends[FORWARD, stage] = RECV_ACTIVATION if comes else None, SEND_ACTIVATION if goes else None
        for kind in GRADIENT_MAKERS:
            ends[kind, stage] = RECV_GRADIENT if goes else None, SEND_GRADIENT if comes else None
    return ends


def _wire_rank(order: Order, ends: Ends, buffers: int) -> Order:
    channels = _receives(order, ends)
    wired = [receive for queue in channels.values() for receive in queue[:buffers]]
    unposted = {channel: iter(queue[buffers:]) for channel, queue in channels.items()}

    posts: Order = []
    sends: Order = []
    for action in order:
        kind, stage, microbatch, joined = action
        wired.append(action)
        receive, send = ends[kind, stage]
        if receive is not None:
            posts += islice(unposted[receive, stage], 1)
        if send is not None:
            sends.append(_action(Action, (send, stage, microbatch, False)))
        if not joined:
            # Posting never waits and sending may, so the posts go first.
            wired += posts
            wired += sends
            posts.clear()
            sends.clear()
    return wired


def _receives(order: Order, ends: Ends) -> dict[tuple[Kind, int], Order]:
    """The receives of each channel in the order their messages are consumed; channels in the order of first use."""
    channels: dict[tuple[Kind, int], Order] = {}
    for kind, stage, microbatch, _ in order:
        receive = ends[kind, stage][0]
        if receive is not None:
            channels.setdefault((receive, stage), []).append(_action(Action, (receive, stage, microbatch, False)))
    return channels
