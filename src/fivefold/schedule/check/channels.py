"""Channels: both ends of a FIFO list the same order. NCCL pairs messages by order alone."""

from collections.abc import Iterator

from fivefold.schedule.actions import (
    RECV_ACTIVATION,
    RECV_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    Action,
    Channel,
)
from fivefold.schedule.check.index import Index
from fivefold.schedule.check.problem import Problem


def channels(index: Index) -> Iterator[Problem]:
    for channel in index.schedule.placement.channels:
        yield from _same_order(index, channel)


def _same_order(index: Index, channel: Channel) -> Iterator[Problem]:
    send, receive = (SEND_GRADIENT, RECV_GRADIENT) if channel.gradients else (SEND_ACTIVATION, RECV_ACTIVATION)
    sent, received = index.sequence[send, channel.source], index.sequence[receive, channel.target]
    if sent == received:
        return
    number = next(n for n, pair in enumerate(zip(sent, received, strict=True)) if pair[0] != pair[1])
    owner = index.schedule.placement.owner
    yield Problem(
        f"message {number} of the {channel} is {Action(send, channel.source, sent[number])} on rank "
        f"{owner[channel.source]} and {Action(receive, channel.target, received[number])} on rank "
        f"{owner[channel.target]}: the two ends do not list the same order",
        owner[channel.target],
        index.places(receive, channel.target)[received[number]],
    )
