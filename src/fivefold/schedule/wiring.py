"""From compute orders to a whole schedule: put every SEND and RECV where the executor should meet it.

A builder only says in which order each rank computes. What crosses ranks follows from the placement:

* a SEND stands right behind its producer;
* a RECV is posted early. The first `buffers` receives of a channel stand at the head of the list, and receive n stands
  right behind the consumer of message n - buffers, which has just freed a buffer.

A joined pair counts as one action: what it needs is posted before it, what it makes is sent after it.
"""

from collections.abc import Iterable, Sequence

from fivefold.schedule.actions import (
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
    orders: Sequence[Iterable[Action]],
    *,
    buffers: int = 2,
    promise: Promise = NOTHING,
) -> Schedule:
    """The schedule that computes in these orders."""
    ranks = tuple(tuple(_wire_rank(list(order), placement.owner, buffers)) for order in orders)
    return Schedule(name, placement, microbatches, ranks, buffers, promise)


def _wire_rank(order: Order, owner: tuple[int, ...], buffers: int) -> Order:
    receives = [_receive_for(action, owner) for action in order]
    queues: dict[tuple[Kind, int], Order] = {}  # one per channel, in the order of consumption
    for receive in receives:
        if receive is not None:
            queues.setdefault(receive[:2], []).append(receive)
    wired = [receive for queue in queues.values() for receive in queue[:buffers]]
    posted = dict.fromkeys(queues, buffers)

    posts: Order = []
    sends: Order = []
    for action, receive in zip(order, receives, strict=True):
        wired.append(action)
        if receive is not None:
            channel = receive[:2]
            posts += queues[channel][posted[channel] : posted[channel] + 1]
            posted[channel] += 1
        send = _send_of(action, owner)
        if send is not None:
            sends.append(send)
        if not action.joined:
            # Posting never waits and sending may, so the posts go first.
            wired += posts
            wired += sends
            posts.clear()
            sends.clear()
    return wired


def _receive_for(action: Action, owner: tuple[int, ...]) -> Action | None:
    kind, stage, microbatch, _ = action
    if kind is FORWARD:
        if stage > 0 and owner[stage - 1] != owner[stage]:
            return Action(RECV_ACTIVATION, stage, microbatch)
    elif kind in GRADIENT_MAKERS and stage + 1 < len(owner) and owner[stage + 1] != owner[stage]:
        return Action(RECV_GRADIENT, stage, microbatch)
    return None


def _send_of(action: Action, owner: tuple[int, ...]) -> Action | None:
    kind, stage, microbatch, _ = action
    if kind is FORWARD:
        if stage + 1 < len(owner) and owner[stage + 1] != owner[stage]:
            return Action(SEND_ACTIVATION, stage, microbatch)
    elif kind in GRADIENT_MAKERS and stage > 0 and owner[stage - 1] != owner[stage]:
        return Action(SEND_GRADIENT, stage, microbatch)
    return None
