"""What dropout leaves: masks that differ where they should not, and are the same where they need not be.

Ranks that hold the same activation must leave the same elements; so must a backward pass that computes it again. Of
unlike activations of one rank, as those of two microbatches, each has a mask of its own. Ranks of dp may share a mask:
that is how most frameworks seed them, and one process would not; so it is said, and is no difference.
"""

from collections.abc import Mapping

from fivefold.foreign.evidence import RANDOMNESS, REPORTS, Cause, spans
from fivefold.foreign.measurement import Drop, Observation

_CHANCE = 8  # dropped elements: masks of fewer may be the same by chance


def unlike_masks(traces: Mapping[int, Observation]) -> list[Cause]:
    """Everything that is wrong with masks."""
    return [*_of_one_activation(traces), *_computed_again(traces), *_used_twice(traces)]


def _of_one_activation(traces: Mapping[int, Observation]) -> list[Cause]:
    """Ranks that hold the same activation in the same call of dropout, and leave other elements."""
    calls: dict[tuple[str, int, str], dict[str, list[int]]] = {}
    for rank, trace in traces.items():
        for number, drop in _numbered(trace):
            calls.setdefault((drop.place, number, drop.entered), {}).setdefault(drop.kept, []).append(rank)
    places: dict[str, set[int]] = {}
    for (place, _, _), masks in calls.items():
        if len(masks) > 1:
            places.setdefault(place, set()).update(rank for ranks in masks.values() for rank in ranks)
    if not places:
        return []
    ranks = sorted(set().union(*places.values()))
    text = f"dropout at {', '.join(places)}: ranks {ranks} hold the same activation and draw different masks"
    return [Cause(text, "the random state of tensor parallel ranks differs where they hold the same values", REPORTS)]


def _computed_again(traces: Mapping[int, Observation]) -> list[Cause]:
    wrong: dict[str, set[int]] = {}
    for rank, trace in traces.items():
        forward = {(drop.place, drop.entered): drop.kept for drop in trace.drops if not drop.again}
        for drop in trace.drops:
            if drop.again and forward.get((drop.place, drop.entered), drop.kept) != drop.kept:
                wrong.setdefault(drop.place, set()).add(rank)
    return [
        Cause(
            f"dropout at {place}: what is computed again in the backward pass has another mask, on ranks "
            f"{spans(sorted(ranks))}",
            "recomputation does not restore the random state of the forward pass",
            RANDOMNESS,
        )
        for place, ranks in wrong.items()
    ]


def _used_twice(traces: Mapping[int, Observation]) -> list[Cause]:
    """One rank, two activations, one mask."""
    wrong: dict[str, set[int]] = {}
    for rank, trace in traces.items():
        entered: dict[tuple[str, str], set[str]] = {}
        for drop in trace.drops:
            if not drop.again and drop.dropped >= _CHANCE:
                entered.setdefault((drop.place, drop.kept), set()).add(drop.entered)
        for (place, _), activations in entered.items():
            if len(activations) > 1:
                wrong.setdefault(place, set()).add(rank)
    return [
        Cause(
            f"dropout at {place}: unlike activations have the same mask on rank {spans(sorted(ranks))}",
            "the random state is set back between microbatches or layers",
            RANDOMNESS,
        )
        for place, ranks in wrong.items()
    ]


def same_masks(traces: Mapping[int, Observation]) -> list[str]:
    """Ranks that have unlike activations and the same masks."""
    calls: dict[tuple[str, int, str], dict[str, int]] = {}
    for rank, trace in traces.items():
        for number, drop in _numbered(trace):
            if drop.dropped >= _CHANCE:
                calls.setdefault((drop.place, number, drop.kept), {}).setdefault(drop.entered, rank)
    ranks = sorted({rank for own in calls.values() if len(own) > 1 for rank in own.values()})
    if not ranks:
        return []
    return [f"Ranks {spans(ranks)} have unlike data and draw the same masks of dropout; all ranks have one seed here."]


def _numbered(trace: Observation) -> list[tuple[int, Drop]]:
    """The calls of the forward pass, with how many there were before in the same place."""
    seen: dict[str, int] = {}
    found = []
    for drop in trace.drops:
        if not drop.again:
            number = seen[drop.place] = seen.get(drop.place, -1) + 1
            found.append((number, drop))
    return found
