"""Who holds the same bits, and who of them differs. Pure arithmetic: every rank comes to the same end.

A lane is the axes over which a tensor is copied, such as ("fsdp", "tp"). The ranks that a lane joins hold the same bits
of every tensor of that lane.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from fivefold.layout.layout import Layout

Lane = tuple[str, ...]
# Whatever a tensor is: whole, or a share of ZeRO's; of a hybrid's copies; alike over tp; tied; a buffer of a stage.
_CHOICES = (("", "fsdp", "efsdp"), ("", "replicate"), ("", "tp"), ("", "embedding"))


def lane_of(axes: Sequence[str], layout: Layout) -> Lane:
    """Axes of one rank join nobody."""
    return tuple(sorted({axis for axis in axes if axis and layout.size(axis) > 1}))


def lanes(layout: Layout, experts: bool) -> list[Lane]:
    """All that a tensor can have in a layout, in an order that all ranks share."""
    choices = (axes for axes in product(*_CHOICES) if experts or "efsdp" not in axes)
    distinct = {lane_of(axes, layout) for axes in choices} | ({lane_of(["stage"], layout)} if experts else set())
    return sorted(distinct - {()})


def groups(layout: Layout, lane: Lane) -> list[list[int]]:
    """The ranks that a lane joins, each once; of "embedding" only those that are one."""
    first = list(range(layout.world))  # of each rank, one of its group, as far as it is known

    def root(rank: int) -> int:
        while first[rank] != rank:
            first[rank] = rank = first[first[rank]]
        return rank

    for axis in lane:
        for ranks in layout.groups(axis):
            for rank in ranks[1:]:
                first[root(rank)] = root(ranks[0])
    members = set(range(layout.world))
    if "embedding" in lane:
        members = {rank for pair in layout.groups("embedding") for rank in pair}
    groups_by_root: dict[int, list[int]] = {}
    for rank in sorted(members):
        groups_by_root.setdefault(root(rank), []).append(rank)
    return list(groups_by_root.values())


class Disagreement(NamedTuple):
    """Ranks that hold different bits than the rest of their group; where no majority says who is right, all of them."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]  # empty: nobody can tell who is right


def find_disagreement(values: Mapping[int, Hashable]) -> Disagreement | None:
    """Of the ranks of a group, by what they hold; None if that is the same."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    usual, most = counts.most_common(1)[0]
    if 2 * most <= len(values):
        return Disagreement(tuple(values), ())
    odd = tuple(rank for rank, value in values.items() if value != usual)
    return Disagreement(odd, tuple(rank for rank in values if rank not in odd))


# ---- verdict --------------------------------------------------------------------------------------------------------
# Who computed wrongly, of ranks that have computed the same microbatch. Pure arithmetic, alike on all ranks.
#
# In an audited step every rank also computes the first microbatch of its neighbour along dp. Where the two disagree,
# both compute it once more: a rank that disagrees with itself, or with what the other three runs say, is named.


def neighbours(layout: Layout) -> dict[int, int]:
    """By rank, whose microbatch it computes once more: the next one's along dp that has the same experts. Where there
    is none, its own."""
    together = layout.cp * layout.tp
    step = layout.ep // math.gcd(layout.ep, together)  # dp ranks whose tokens meet at experts
    partners = {}
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        partners[rank] = layout.rank(**at | {"dp": (at["dp"] + step) % layout.dp})
    return partners


class Runs(NamedTuple):
    """What each rank made of a microbatch: of its own in the step, of its neighbour's before it, and once more."""

    own: Mapping[int, Hashable]
    others: Mapping[int, Hashable]
    own_again: Mapping[int, Hashable] = {}
    others_again: Mapping[int, Hashable] = {}


class CorruptionVerdict(NamedTuple):
    once: tuple[int, ...]  # ranks that computed wrongly, and not always
    always: tuple[int, ...]  # that compute otherwise than others, each time the same
    undecided: tuple[int, ...]  # as those before, but nobody can tell who of them


def disagreements(of: Mapping[int, int], runs: Runs) -> list[tuple[int, int]]:
    """(who computed it too, whose it was), where the two found other gradients."""
    return [(rank, other) for rank, other in of.items() if runs.others[rank] != runs.own[other]]


def verdict(of: Mapping[int, int], runs: Runs) -> CorruptionVerdict:
    """Of ranks `of` which others have computed the microbatch; where all agree, there is nobody to name."""
    once: set[int] = set()
    lasting: list[tuple[int, int]] = []
    for rank, other in disagreements(of, runs):
        first, second = runs.own[other], runs.own_again[other]
        theirs, again = runs.others[rank], runs.others_again[rank]
        once |= {other} if first != second else set()
        once |= {rank} if theirs != again else set()
        if first == second and theirs == again:
            lasting.append((rank, other))
    always: set[int] = set()
    undecided: set[int] = set()
    for pair in lasting:
        twice = {rank for rank in pair if sum(rank in other for other in lasting) > 1}
        always |= twice if len(twice) == 1 else set()
        undecided |= set(pair) if len(twice) != 1 else set()
    return CorruptionVerdict(*(tuple(sorted(ranks)) for ranks in (once, always, undecided - always)))


# ---- words ----------------------------------------------------------------------------------------------------------
# What is said of ranks whose bits are wrong. No torch.


_NAMED = 4  # tensors or ranks in a sentence


def place(layout: Layout, rank: int) -> str:
    at = layout.place(rank)
    return f"rank {rank} ({at})" if at else f"rank {rank}"


def listed(names: Sequence[str], between: str = ", ") -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return between.join(names[:_NAMED]) + more


def ranks_of(layout: Layout, ranks: Sequence[int]) -> str:
    return listed([place(layout, rank) for rank in ranks], " and ")


def differ(layout: Layout, found: Disagreement, names: list[str]) -> str:
    ranks, verb = ranks_of(layout, found.ranks), "hold" if len(found.ranks) > 1 else "holds"
    if found.others:
        others = ("ranks " if len(found.others) > 1 else "rank ") + listed([str(rank) for rank in found.others])
        return f"{ranks} {verb} different bits than {others} of {listed(names)}"
    return f"{ranks} should hold the same bits of {listed(names)}, but do not; no majority tells who is right"


def computed(layout: Layout, culprits: CorruptionVerdict) -> str:
    ends = {
        culprits.once: "got different gradients for the same microbatch in two runs",
        culprits.always: "consistently gets different gradients for the same microbatches than two others",
        culprits.undecided: "consistently get different gradients for the same microbatch; which is right is unknown",
    }
    said = "; ".join(f"{ranks_of(layout, ranks)} {end}" for ranks, end in ends.items() if ranks)
    together = layout.tp * layout.cp * layout.pp * layout.ep > 1
    return said + ("; an error of one rank in a group reaches all that compute with it" if together else "")
