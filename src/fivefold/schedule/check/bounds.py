"""Bounds: live activations within the promised peak, posted receives within the buffers, slots within the promise."""

from collections.abc import Iterator
from itertools import chain
from operator import lt

from fivefold.schedule.actions import FORWARD, RECV_ACTIVATION, RECV_GRADIENT
from fivefold.schedule.check.index import ABSENT, Index, Problem, Row
from fivefold.schedule.schedule import live_counts


def bounds(index: Index) -> Iterator[Problem]:
    for rank in range(index.schedule.p):
        yield from _activations(index, rank)
        yield from _receives(index, rank)
    yield from _slots(index)


def _activations(index: Index, rank: int) -> Iterator[Problem]:
    promised = index.schedule.promise.peak
    if promised is None:
        return
    stages = index.schedule.placement.of_rank[rank]
    taken = [index.places(FORWARD, stage) for stage in stages]
    freed = [index.weight_gradients(stage) for stage in stages]
    if _overflows(taken, freed, promised[rank]):
        counts = live_counts(index.schedule.ranks[rank])
        place = next(place for place, live in enumerate(counts) if live > promised[rank])
        held = f"{counts[place]} stage activations from {index.named(rank, place)} on, {max(counts)} at most"
        yield Problem(f"rank {rank} holds {held}, and {promised[rank]} are promised", rank, place)


def _receives(index: Index, rank: int) -> Iterator[Problem]:
    buffers = index.schedule.buffers
    for stage in index.schedule.placement.of_rank[rank]:
        consumers = {RECV_ACTIVATION: index.places(FORWARD, stage), RECV_GRADIENT: index.input_gradients(stage)}
        for kind, consumed in consumers.items():
            posted = index.places(kind, stage)
            if ABSENT not in posted and _overflows([posted], [consumed], buffers):
                posts = f"posts more than {buffers} receives {kind}{stage} before their messages are consumed"
                yield Problem(f"rank {rank} {posts}, and the schedule has {buffers} buffers per channel", rank)


def _overflows(taken: list[Row], freed: list[Row], most: int) -> bool:
    """Whether more than `most` are ever held: the n-th is taken before the one `most` earlier is freed."""
    takes, frees = sorted(chain(*taken)), sorted(chain(*freed))
    return any(map(lt, takes[most:], frees))


def _slots(index: Index) -> Iterator[Problem]:
    promised = index.schedule.promise.slots
    if promised is None or index.run.blocks:
        return
    slots = index.run.makespan
    if slots > promised:
        last = max(range(index.schedule.p), key=lambda rank: index.run.lanes[rank].last)
        action = index.run.lanes[last].actions[-1]
        yield Problem(
            f"rank {last} ends with {action} after {slots:g} slots, and {promised} are promised: the bubble is "
            f"{slots - promised:g} slots larger than it should be",
            last,
            len(index.schedule.ranks[last]) - 1,
        )
