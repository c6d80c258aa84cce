"""Who holds the same bits, and who of them differs. Pure arithmetic: every rank comes to the same end.

A lane is the axes over which a tensor is copied, such as ("zero", "tp"). The ranks that a lane joins hold the same bits
of every tensor of that lane.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from fivefold.layout.layout import Layout

Lane = tuple[str, ...]
# Whatever a tensor is: whole, or a share of ZeRO's; of a hybrid's copies; alike over tp; tied; a buffer of a stage.
_CHOICES = (("", "zero", "ezero"), ("", "replicate"), ("", "tp"), ("", "ends"))


def lane_of(axes: Sequence[str], layout: Layout) -> Lane:
    """Axes of one rank join nobody."""
    return tuple(sorted({axis for axis in axes if axis and layout.size(axis) > 1}))


def lanes(layout: Layout, experts: bool) -> list[Lane]:
    """All that a tensor can have in a layout, in an order that all ranks share."""
    choices = (axes for axes in product(*_CHOICES) if experts or "ezero" not in axes)
    found = {lane_of(axes, layout) for axes in choices} | ({lane_of(["stage"], layout)} if experts else set())
    return sorted(found - {()})


def groups(layout: Layout, lane: Lane) -> list[list[int]]:
    """The ranks that a lane joins, each once; of "ends" only those that are one."""
    first = list(range(layout.world))  # of each rank, one of its group, as far as it is known

    def root(rank: int) -> int:
        while first[rank] != rank:
            first[rank] = rank = first[first[rank]]
        return rank

    for axis in lane:
        for ranks in layout.groups(axis):
            for rank in ranks[1:]:
                first[root(rank)] = root(ranks[0])
    members = {rank for pair in layout.groups("ends") for rank in pair} if "ends" in lane else set(range(layout.world))
    found: dict[int, list[int]] = {}
    for rank in sorted(members):
        found.setdefault(root(rank), []).append(rank)
    return list(found.values())


class Odd(NamedTuple):
    """Ranks that hold other bits than the rest of their group; where no majority says who is right, all of them."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]  # empty: nobody can tell who is right


def odd_one(values: Mapping[int, Hashable]) -> Odd | None:
    """Of the ranks of a group, by what they hold; None if that is the same."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    usual, most = counts.most_common(1)[0]
    if 2 * most <= len(values):
        return Odd(tuple(values), ())
    odd = tuple(rank for rank, value in values.items() if value != usual)
    return Odd(odd, tuple(rank for rank in values if rank not in odd))
