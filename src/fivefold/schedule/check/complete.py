"""Complete: each (stage, microbatch) has one F and one B, or one I and one W, where the stage lives; and each message
that crosses ranks has one SEND and one RECV. Where a schedule also takes care of parameters, every stage is reduced and
stepped once, and gathered if any is."""

from collections.abc import Iterator

from fivefold.schedule.actions import (
    ALL,
    BACKWARD,
    COLLECTIVES,
    FORWARD,
    GATHER,
    INPUT_GRAD,
    RECV_ACTIVATION,
    RECV_GRADIENT,
    REDUCE,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    SENDS,
    STEP,
    WEIGHT_GRAD,
    Action,
    Kind,
)
from fivefold.schedule.check.index import ABSENT, Index
from fivefold.schedule.check.problem import Problem


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
    halves = {kind: index.places(kind, stage) for kind in (INPUT_GRAD, WEIGHT_GRAD)}
    for k in range(index.schedule.m):
        if forward[k] == ABSENT:
            yield Problem(f"rank {rank} never runs {Action(FORWARD, stage, k)}", rank)
        present = [kind for kind, row in halves.items() if row[k] != ABSENT]
        if backward[k] != ABSENT:
            for kind in present:
                yield Problem(
                    f"rank {rank} runs {Action(BACKWARD, stage, k)} and also {Action(kind, stage, k)}: a backward is "
                    "whole or in two halves, not both",
                    rank,
                    halves[kind][k],
                )
        elif not present:
            yield Problem(
                f"rank {rank} never runs a backward of {Action(FORWARD, stage, k)}: neither B nor I and W",
                rank,
                forward[k],
            )
        elif len(present) == 1:
            missing = WEIGHT_GRAD if present[0] is INPUT_GRAD else INPUT_GRAD
            yield Problem(
                f"rank {rank} runs {Action(present[0], stage, k)} but never {Action(missing, stage, k)}",
                rank,
                halves[present[0]][k],
            )


def _messages(index: Index) -> Iterator[Problem]:
    """One of each message per microbatch where the neighbouring stage is on another rank, none where it is not."""
    owner = index.schedule.placement.owner
    for stage, rank in enumerate(owner):
        for kind, step in _NEIGHBOURS.items():
            other = stage + step
            if 0 <= other < len(owner) and owner[other] != rank:
                yield from _missing(index, kind, stage, other)
            else:
                yield from _pointless(index, kind, stage)


_NEIGHBOURS = {RECV_ACTIVATION: -1, SEND_ACTIVATION: 1, RECV_GRADIENT: 1, SEND_GRADIENT: -1}


def _missing(index: Index, kind: Kind, stage: int, other: int) -> Iterator[Problem]:
    owner = index.schedule.placement.owner
    for k, place in enumerate(index.places(kind, stage)):
        if place == ABSENT:
            why = f"stage {other} on rank {owner[other]} {'waits for it' if kind in SENDS else 'sends it'}"
            yield Problem(f"rank {owner[stage]} never has {Action(kind, stage, k)}, and {why}", owner[stage])


def _pointless(index: Index, kind: Kind, stage: int) -> Iterator[Problem]:
    rank = index.schedule.placement.owner[stage]
    for k in index.sequence.get((kind, stage), ()):
        yield Problem(
            f"rank {rank} has {Action(kind, stage, k)}, and there is no other rank at that end of stage {stage}",
            rank,
            index.places(kind, stage)[k],
        )


def _parameters(index: Index) -> Iterator[Problem]:
    """Where any stage has one of GATHER, REDUCE and STEP, each is reduced and stepped; and gathered, if any is."""
    present = {kind for kind, _ in (*index.whole, *index.sequence) if kind in COLLECTIVES}
    due = [kind for kind in (GATHER, REDUCE, STEP) if kind is not GATHER or kind in present]
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
        yield Problem(
            f"rank {rank} has {index.named(rank, place)}, and "
            + (f"also {action} for all microbatches" if whole else f"{kind} is for all microbatches: {action}"),
            rank,
            place,
        )
    elif not whole and not single:
        yield Problem(f"rank {rank} never has {action}, and the schedule takes care of parameters elsewhere", rank)
    elif single and len(single) < index.schedule.m:
        missing = index.places(kind, stage).index(ABSENT)
        yield Problem(f"rank {rank} has {action}.{single[0]}, but never {action}.{missing}", rank)
