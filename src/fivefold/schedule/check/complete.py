"""Complete: each (stage, microbatch) has one F and one B, or one I and one W, where the stage lives; and each message
that crosses ranks has one SEND and one RECV. Where a schedule also takes care of parameters, every stage is reduced and
stepped once, and gathered if any is."""

from collections.abc import Iterator

from fivefold.schedule.actions import ALL, BACKWARD, COLLECTIVES, FORWARD, GATHER, HALVES, MESSAGES, STEP, Action, Kind
from fivefold.schedule.check.index import ABSENT, Index, Problem


def complete(index: Index) -> Iterator[Problem]:
    yield from _shape(index)
    yield from _strays(index)
    for stage in range(index.schedule.placement.stages):
        yield from _compute(index, stage)
    yield from _messages(index)
    yield from _parameters(index)


def _shape(index: Index) -> Iterator[Problem]:
    schedule = index.schedule
    peak = schedule.promise.peak
    if schedule.p != schedule.placement.ranks:
        yield Problem(f"there are action lists for {schedule.p} ranks, and stages on {schedule.placement.ranks}")
    if schedule.m < 1 or schedule.buffers < 1:
        yield Problem(f"{schedule.m} microbatches and {schedule.buffers} buffers: both must be at least 1")
    if peak is not None and len(peak) != schedule.p:
        yield Problem(f"a peak is promised for {len(peak)} ranks, and there are {schedule.p}")
    for rank, stages in enumerate(schedule.placement.of_rank):
        if not stages:
            yield Problem(f"rank {rank} owns no stage", rank)


def _strays(index: Index) -> Iterator[Problem]:
    """Actions on the wrong rank, of stages or microbatches that do not exist, or for a second time."""
    schedule = index.schedule
    owner = schedule.placement.owner
    for rank, place, action in index.strays:
        name = f"rank {rank} has {index.named(rank, place)}"
        if not 0 <= action.stage < len(owner):
            yield Problem(f"{name}, and there are {len(owner)} stages, 0 to {len(owner) - 1}", rank, place)
        elif owner[action.stage] != rank:
            yield Problem(f"{name}, and stage {action.stage} lives on rank {owner[action.stage]}", rank, place)
        elif action.microbatch == ALL:
            yield Problem(f"{name} without a microbatch, and {action.kind} needs one: {action}.0", rank, place)
        elif not 0 <= action.microbatch < schedule.m:
            yield Problem(f"{name}, and there are {schedule.m} microbatches, 0 to {schedule.m - 1}", rank, place)
        else:
            first = index.places(action.kind, action.stage)[action.microbatch]
            yield Problem(f"{name} for the second time; the first is {index.action(rank, first)}", rank, place)


def _compute(index: Index, stage: int) -> Iterator[Problem]:
    rank = index.schedule.placement.owner[stage]
    forward, backward = index.places(FORWARD, stage), index.places(BACKWARD, stage)
    halves = {kind: index.places(kind, stage) for kind in HALVES}
    for k in range(index.schedule.m):
        if forward[k] == ABSENT:
            yield Problem(f"rank {rank} never runs {Action(FORWARD, stage, k)}", rank)
        present = [kind for kind, row in halves.items() if row[k] != ABSENT]
        if backward[k] != ABSENT:
            why = "a backward is whole or in two halves, not both"
            for kind in present:
                both = f"{Action(BACKWARD, stage, k)} and also {Action(kind, stage, k)}"
                yield Problem(f"rank {rank} runs {both}: {why}", rank, halves[kind][k])
        elif not present:
            why = f"never runs a backward of {Action(FORWARD, stage, k)}: neither B nor I and W"
            yield Problem(f"rank {rank} {why}", rank, forward[k])
        elif len(present) == 1:
            missing = next(kind for kind in HALVES if kind not in present)
            why = f"runs {Action(present[0], stage, k)} but never {Action(missing, stage, k)}"
            yield Problem(f"rank {rank} {why}", rank, halves[present[0]][k])


def _messages(index: Index) -> Iterator[Problem]:
    """One of each message per microbatch where the neighbouring stage is on another rank, none where it is not."""
    owner, channel_of = index.schedule.placement.owner, index.schedule.placement.channel_of
    for stage, rank in enumerate(owner):
        for kind in MESSAGES:
            places = index.places(kind, stage)
            if channel := channel_of.get((kind, stage)):
                other, does = (channel.target, "waits for") if kind is channel.send else (channel.source, "sends")
                why = f"stage {other} on rank {owner[other]} {does} it"
                for k in range(index.schedule.m):
                    if places[k] == ABSENT:
                        yield Problem(f"rank {rank} never has {Action(kind, stage, k)}, and {why}", rank)
            else:
                why = f"there is no other rank at that end of stage {stage}"
                for k in index.sequence.get((kind, stage), ()):
                    yield Problem(f"rank {rank} has {Action(kind, stage, k)}, and {why}", rank, places[k])


def _parameters(index: Index) -> Iterator[Problem]:
    """Where any stage has one of GATHER, REDUCE and STEP, each is reduced and stepped; and gathered, if any is."""
    present = {kind for kind, _ in (*index.whole, *index.sequence) if kind in COLLECTIVES}
    due = [kind for kind in COLLECTIVES if kind is not GATHER or kind in present]
    for stage in range(index.schedule.placement.stages if present else 0):
        for kind in due:
            yield from _once(index, kind, stage)


def _once(index: Index, kind: Kind, stage: int) -> Iterator[Problem]:
    """One for all microbatches, or (but not for STEP) one for each."""
    rank, action = index.schedule.placement.owner[stage], Action(kind, stage)
    whole, single = index.whole.get((kind, stage), []), index.sequence.get((kind, stage), [])
    if len(whole) > 1:
        first, second = whole[:2]
        again = f"rank {rank} has {index.named(rank, second)} a second time"
        yield Problem(f"{again}; the first is {index.action(rank, first)}", rank, second)
    elif single and (whole or kind is STEP):
        place = index.places(kind, stage)[single[0]]
        why = f"also {action} for all microbatches" if whole else f"{kind} is for all microbatches: {action}"
        yield Problem(f"rank {rank} has {index.named(rank, place)}, and {why}", rank, place)
    elif not whole and not single:
        yield Problem(f"rank {rank} never has {action}, and the schedule takes care of parameters elsewhere", rank)
    elif single and len(single) < index.schedule.m:
        missing = index.places(kind, stage).index(ABSENT)
        yield Problem(f"rank {rank} has {action}.{single[0]}, but never {action}.{missing}", rank)
