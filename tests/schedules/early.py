"""Receives posted as early as buffers allow: what `wire` is held against, and what NCCL must not be given."""

from dataclasses import replace
from itertools import islice

from fivefold.schedules.actions import MESSAGE_KINDS, Action, Channel
from fivefold.schedules.schedule import NO_BOUNDS, Schedule


def posted_early(schedule: Schedule, buffers: int) -> Schedule:
    """The same compute orders. A channel's first `buffers` receives stand at the head of the list, receive n right
    behind the consumer of message n - buffers, and sends right behind their producers. Nothing is promised."""
    ranks = tuple(_wired(schedule, rank, buffers) for rank in range(schedule.p))
    return replace(schedule, ranks=ranks, buffers=buffers, promise=NO_BOUNDS)


def _wired(schedule: Schedule, rank: int, buffers: int) -> tuple[Action, ...]:
    order = [action for action in schedule.ranks[rank] if action.kind not in MESSAGE_KINDS]
    needs = {(kind, channel.target): channel for channel in schedule.placement.channels for kind in channel.compute}
    feeds = {(kind, channel.source): channel for channel in schedule.placement.channels for kind in channel.compute}
    queues: dict[Channel, list[Action]] = {}
    for action in order:
        if channel := needs.get((action.kind, action.stage)):
            queues.setdefault(channel, []).append(Action(channel.receive, action.stage, action.microbatch))
    wired = [receive for queue in queues.values() for receive in queue[:buffers]]
    later = {channel: iter(queue[buffers:]) for channel, queue in queues.items()}
    posts: list[Action] = []
    sends: list[Action] = []
    for action in order:
        wired.append(action)
        if channel := needs.get((action.kind, action.stage)):
            posts += islice(later[channel], 1)
        if channel := feeds.get((action.kind, action.stage)):
            sends.append(Action(channel.send, action.stage, action.microbatch))
        if not action.joined:
            wired += [*posts, *sends]
            posts, sends = [], []
    return tuple(wired)
