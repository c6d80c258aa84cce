"""Order: within a rank, nothing runs before what it needs. RECV < F < SEND, F < I < W, RECV < I < SEND; and where two
neighbouring stages share a rank, one before the other. A joined pair runs as one: neither half may need the other. And
the orders that two readers must agree on: of weight gradients in a sum, of messages in a channel."""

from collections.abc import Iterator
from itertools import pairwise
from operator import gt

from fivefold.schedule.actions import (
    BACKWARD,
    FORWARD,
    GATHER,
    INPUT_GRAD,
    RECV_ACTIVATION,
    RECV_GRADIENT,
    REDUCE,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    STEP,
    WEIGHT_GRAD,
    Action,
)
from fivefold.schedule.check.index import ABSENT, Index, Problem, Row


def order(index: Index) -> Iterator[Problem]:
    for stage in range(index.schedule.placement.stages):
        yield from _stage(index, stage)
        yield from _neighbours(index, stage)
        yield from _collectives(index, stage)
    yield from _pairs(index)


def _stage(index: Index, stage: int) -> Iterator[Problem]:
    forward, gradient = index.places(FORWARD, stage), index.input_gradients(stage)
    received, sent = index.places(RECV_ACTIVATION, stage), index.places(SEND_ACTIVATION, stage)
    received_back, sent_back = index.places(RECV_GRADIENT, stage), index.places(SEND_GRADIENT, stage)
    halves = index.places(INPUT_GRAD, stage), index.places(WEIGHT_GRAD, stage)
    yield from _before(index, stage, received, forward, "its input is received")
    yield from _before(index, stage, forward, sent, "there is an output to send")
    yield from _before(index, stage, forward, gradient, "the forward has run")
    yield from _before(index, stage, received_back, gradient, "its gradient is received")
    yield from _before(index, stage, gradient, sent_back, "there is a gradient to send")
    yield from _before(index, stage, *halves, "the input gradient is there")


def _neighbours(index: Index, stage: int) -> Iterator[Problem]:
    """Data that stays on a rank: the next stage's forward comes after this one's, its gradient before."""
    placement = index.schedule.placement
    if stage + 1 == placement.stages or placement.crosses(stage):
        return
    forwards = index.places(FORWARD, stage), index.places(FORWARD, stage + 1)
    gradients = index.input_gradients(stage + 1), index.input_gradients(stage)
    yield from _before(index, stage, *forwards, f"stage {stage} has made its input")
    yield from _before(index, stage, *gradients, f"stage {stage + 1} has made its gradient")


def _before(index: Index, stage: int, first: Row, then: Row, cause: str) -> Iterator[Problem]:
    """A sentence for every microbatch where `then` stands before `first`; both are places in the stage's rank."""
    if not any(map(gt, first, then)):
        return
    rank = index.schedule.placement.owner[stage]
    actions = index.schedule.ranks[rank]
    for early, late in zip(then, first, strict=True):
        if early < late and early != ABSENT:
            late_place = f"{actions[late]} is {index.action(rank, late)}"
            yield Problem(f"rank {rank} has {index.named(rank, early)} before {cause}: {late_place}", rank, early)


def _collectives(index: Index, stage: int) -> Iterator[Problem]:
    """GATHER before the forwards it serves, REDUCE after the weight gradients it sums, STEP after all of them."""
    rank = index.schedule.placement.owner[stage]
    forward, weight = index.places(FORWARD, stage), index.weight_gradients(stage)
    for place in index.whole.get((GATHER, stage), []):
        if place > min(forward):
            yield Problem(f"rank {rank} has {index.named(rank, place)} after its first forward", rank, place)
    for place in index.whole.get((REDUCE, stage), []):
        if place < max(weight):
            yield Problem(f"rank {rank} has {index.named(rank, place)} before its last weight gradient", rank, place)
    yield from _before(index, stage, index.places(GATHER, stage), forward, "its parameters are gathered")
    yield from _before(index, stage, weight, index.places(REDUCE, stage), "there is a weight gradient to reduce")
    reduced = [*index.whole.get((REDUCE, stage), []), *index.places(REDUCE, stage)]
    for place in index.whole.get((STEP, stage), []):
        if place < max(*weight, *reduced):
            yield Problem(
                f"rank {rank} has {index.named(rank, place)} before the gradients of the stage are final", rank, place
            )


def _pairs(index: Index) -> Iterator[Problem]:
    for rank, actions in enumerate(index.schedule.ranks):
        for place, action in enumerate(actions):
            if not action.joined:
                continue
            name = f"rank {rank} joins {index.named(rank, place)} with"
            partner = actions[place + 1] if place + 1 < len(actions) else None
            if partner is None:
                yield Problem(f"{name} nothing: it is the last action", rank, place)
            elif (action.kind, partner.kind) != (FORWARD, BACKWARD):
                # The F comes first, because a pair holds its new activation before it gives the old one back.
                yield Problem(f"{name} {partner}; only an F and the B after it can be joined", rank, place)
            elif action[1:3] == partner[1:3]:
                yield Problem(f"{name} {partner}, which needs its result", rank, place)


def accumulate(index: Index) -> Iterator[Problem]:
    """A stage's weight gradients are added up in ascending order of microbatches, as a single device does it.

    Floating-point sums depend on their order; this is what makes a pipeline's gradients equal to the last bit.
    """
    for stage, rank in enumerate(index.schedule.placement.owner):
        for before, after in pairwise(index.weight_gradients(stage)):
            if after < before:
                yield Problem(
                    f"rank {rank} has {index.named(rank, after)} before {index.named(rank, before)}: "
                    f"the weight gradients of stage {stage} would be summed in another order than on a single device",
                    rank,
                    after,
                )


def channels(index: Index) -> Iterator[Problem]:
    """Both ends of a FIFO list the same order. NCCL pairs messages by order alone."""
    owner = index.schedule.placement.owner
    for channel in index.schedule.placement.channels:
        send, source, receive, target = channel.send, channel.source, channel.receive, channel.target
        sent, received = index.sequence[send, source], index.sequence[receive, target]
        if sent == received:
            continue
        number = next(n for n, pair in enumerate(zip(sent, received, strict=True)) if pair[0] != pair[1])
        yield Problem(
            f"message {number} of the {channel} is {Action(send, source, sent[number])} on rank {owner[source]} and "
            f"{Action(receive, target, received[number])} on rank {owner[target]}: the two ends do not list the same "
            "order",
            owner[target],
            index.places(receive, target)[received[number]],
        )
