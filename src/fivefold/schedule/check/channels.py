"""Channels: both ends of a FIFO list the same order. NCCL pairs messages by order alone."""

from collections.abc import Iterator

from fivefold.schedule.actions import Action
from fivefold.schedule.check.index import Index, Problem


def channels(index: Index) -> Iterator[Problem]:
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
