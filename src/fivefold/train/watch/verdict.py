"""Who computed wrongly, of ranks that have computed the same microbatch. Pure arithmetic, alike on all ranks.

In an audited step every rank also computes the first microbatch of its neighbour along dp. Where the two disagree, both
compute it once more: a rank that disagrees with itself, or with what the other three runs say, is named.
"""

import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from fivefold.layout.layout import Layout


def neighbours(layout: Layout) -> dict[int, int]:
    """By rank, whose microbatch it computes once more: the next one's along dp that has the same experts. Where there
    is none, its own."""
    together = layout.cp * layout.tp
    step = layout.ep // math.gcd(layout.ep, together)  # dp ranks whose tokens meet at experts
    found = {}
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        found[rank] = layout.rank(**at | {"dp": (at["dp"] + step) % layout.dp})
    return found


class Runs(NamedTuple):
    """What each rank made of a microbatch: of its own in the step, of its neighbour's before it, and once more."""

    own: Mapping[int, Hashable]
    others: Mapping[int, Hashable]
    own_again: Mapping[int, Hashable] = {}
    others_again: Mapping[int, Hashable] = {}


class Verdict(NamedTuple):
    once: tuple[int, ...]  # ranks that computed wrongly, and not always
    always: tuple[int, ...]  # that compute otherwise than others, each time the same
    undecided: tuple[int, ...]  # as those before, but nobody can tell who of them


def disagreements(of: Mapping[int, int], runs: Runs) -> list[tuple[int, int]]:
    """(who computed it too, whose it was), where the two found other gradients."""
    return [(rank, other) for rank, other in of.items() if runs.others[rank] != runs.own[other]]


def verdict(of: Mapping[int, int], runs: Runs) -> Verdict:
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
        twice = {one for one in pair if sum(one in other for other in lasting) > 1}
        always |= twice if len(twice) == 1 else set()
        undecided |= set(pair) if len(twice) != 1 else set()
    return Verdict(*(tuple(sorted(ranks)) for ranks in (once, always, undecided - always)))
