"""Which ranks share a step: all of them, or with groups=2 every second one, and the other ranks do the same work again.

An answer that leaves its `group` out of a call is right where the group has all ranks, and is found where it has not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fivefold.foreign.evidence import ranks_text
from fivefold.labs.messages import DIRECT, MARKS, LabMessage

GROUPS = "groups"  # the word of a layout
ADVICE = (
    "give every call `group`, also get_rank and get_world_size; `dst` and `src` are numbers in the whole job, "
    "`group_dst` and `group_src` those in the group"
)


def groups_of(layout: Mapping[str, Any], world: int) -> list[tuple[int, ...]]:
    """The ranks of each group: those of a stride, so that hardly a rank has its own number in its group."""
    count = int(layout.get(GROUPS, 1))
    return [tuple(range(first, world, count)) for first in range(count)]


def strangers(layout: Mapping[str, Any], ranks: Sequence[Sequence[LabMessage]]) -> str:
    """A message to a rank that is not in the group; empty if there is none."""
    groups = groups_of(layout, len(ranks))
    for group in groups if len(groups) > 1 else ():
        for rank in group:
            for message in ranks[rank]:
                if text := _strange(message, group):
                    return f"rank {rank} {text}, and its `group` is {ranks_text(group)}: {ADVICE}"
    return ""


def _strange(message: LabMessage, group: Sequence[int]) -> str:
    if message.kind in MARKS:
        return ""
    if message.kind not in DIRECT:
        others = set(message.ranks) - set(group)
        return f"calls {message.article} {message.kind} of {ranks_text(message.ranks)}" if others else ""
    if message.peer is None or message.peer in group:
        return ""
    return f"{message.kind}s {'to' if message.kind == 'send' else 'from'} rank {message.peer}"


def inside(messages: Sequence[LabMessage], group: Sequence[int]) -> list[LabMessage]:
    """Messages whose peers are numbered as in the group."""
    place = {rank: index for index, rank in enumerate(group)}
    return [one._replace(peer=place.get(one.peer, one.peer) if one.peer is not None else None) for one in messages]
