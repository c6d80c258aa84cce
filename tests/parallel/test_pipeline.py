"""The pipeline runs the Schedule that was checked, and computes what one process computes, to the bit."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold.job.config import Job
from fivefold.layout.layout import Layout
from fivefold.layout.stages import schedule_of
from fivefold.parallel.pipeline import Pipeline
from fivefold.schedules.actions import RECEIVE_KINDS, SEND_KINDS, WEIGHT_GRAD
from fivefold.schedules.communication import with_zero
from fivefold.schedules.registry import CATALOGUE, build
from fivefold.schedules.schedule import peak_live
from fivefold.support.errors import UserError
from tests.parallel.pipelines import Meshes, Run, all_schedules, alone, job, run
from tests.ranks import run_ranks


@dataclass(frozen=True)
class Held:
    """What one rank found when it held itself against one process."""

    names: set[str]
    unequal: set[str]  # gradients that differ in a bit
    error: float  # the largest relative one
    losses: tuple[float, float]  # this rank's, the one process's
    evaluated: tuple[float, float]
    order: bool  # executed as scheduled
    peaks: tuple[int, int, int]  # live activations: as measured, as the pipeline says, as the checker says
    in_flight: tuple[int, int]  # the most posted receives of a channel, the schedule's buffers
    blocks: Counter[str]
    split: bool


def held(rank: int, case: Job, here: Run, wanted: Run) -> Held:
    layout = case.layout
    schedule = schedule_of(case.model, layout, case.data.seq)
    found, watched = here.gradients, here.watched
    pairs = {name: (gradient, wanted.gradients[name]) for name, gradient in found.items()}
    return Held(
        names=set(found),
        unequal={name for name, (a, b) in pairs.items() if a.dtype != b.dtype or not torch.equal(a, b)},
        error=max((float((a - b).abs().max() / b.abs().max()) for a, b in pairs.values()), default=0.0),
        losses=(here.loss, wanted.loss),
        evaluated=(here.evaluated, wanted.evaluated),
        order=tuple(watched.actions) == schedule.ranks[rank],
        peaks=(watched.peak, here.pipeline_peak, peak_live(schedule.ranks[rank])),
        in_flight=(watched.in_flight, schedule.buffers),
        blocks=here.blocks,
        split=schedule.count(WEIGHT_GRAD) > 0,
    )


def each(rank: int, world: int, cases: list[Job]) -> list[Held]:
    """Several jobs in one start of the ranks, which share the work of computing each alone."""
    keys = [(case.model, case.train, case.layout.microbatches, case.layout.recompute) for case in cases]
    wanted = dict(zip(keys, cases, strict=True))
    mine = {key: alone(case) for number, (key, case) in enumerate(wanted.items()) if number % world == rank}
    shared: list[Any] = [None] * world
    dist.all_gather_object(shared, {key: replace(one, watched=None) for key, one in mine.items()})
    references, meshes = {key: one for some in shared for key, one in some.items()}, Meshes()
    return [
        held(rank, case, run(case, meshes.of(case.layout, case.model.tied)), references[key])
        for key, case in zip(keys, cases, strict=True)
    ]


def by_case(cases: list[Job]) -> list[tuple[Job, list[Held]]]:
    """Every case with what each rank found."""
    found = run_ranks(cases[0].layout.pp, each, cases, timeout=120)
    return list(zip(cases, zip(*found, strict=True), strict=True))


def hold(case: Job, ranks: list[Held], tied: bool = False) -> None:
    text = f"{case.layout} in {case.train.dtype}"
    assert set().union(*(one.names for one in ranks)) == {p.name for p in case.model.parameters()}, text
    for one in ranks:
        if tied:  # an embedding at either end: two partial sums
            assert one.unequal <= {"embedding.weight"}, text
            assert one.error < 1e-10, text
        else:
            assert one.unequal == set(), text
        assert one.losses[0] == one.losses[1], text
        assert one.evaluated[0] == one.evaluated[1], text
        assert one.order, text
        measured, told, proven = one.peaks
        assert told == proven, (text, one.peaks)
        # A stage that has no layers and is no end keeps nothing.
        assert measured <= proven if 0 in case.layout.split else measured == proven, (text, one.peaks)
        assert one.in_flight[0] <= one.in_flight[1], (text, one.in_flight)


@pytest.mark.parametrize(
    ("p", "dtype", "microbatches"),
    [
        (3, "float64", (2, 6)),  # fewer than ranks, and twice as many
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [
            (4, "float64", (3, 8)), (2, "float32", (3, 4)), (2, "float64", (2, 3, 8)), (4, "float32", (2, 3, 8))]),
    ],
)  # fmt: skip
def test_every_schedule_is_executed_as_it_is_written_and_equals_one_process_to_the_bit(
    p: int, dtype: str, microbatches: tuple[int, ...]
) -> None:
    """Gradients, losses on every rank, evaluation; the order of actions, live activations, receives in flight."""
    layouts = all_schedules(p, microbatches)
    assert {one.schedule for one in layouts} == set(CATALOGUE)
    assert {one.microbatches for one in layouts} == set(microbatches)
    for case, ranks in by_case([job(layout, dtype) for layout in layouts]):
        hold(case, ranks)


SPLITS = {
    2: [("1f1b", (0, 4)), ("zb-h1", (4, 0)), ("zb-h1", (3, 1)), ("interleaved", (0, 3, 1, 0)), ("zb-v", (0, 0, 4, 0))],
    3: [("1f1b", (0, 3, 1)), ("gpipe", (4, 0, 0)), ("zb-h2", (1, 0, 3)), ("v-min", (0, 1, 0, 0, 3, 0))],
}


def split_cases(p: int) -> list[Job]:
    return [job(Layout(pp=p, schedule=name, microbatches=5, split=split), layers=4) for name, split in SPLITS[p]]


# What two ranks are asked, in one start of them.
ON_TWO = {
    "buffers": [job(Layout(pp=2, schedule=name, microbatches=8)) for name in ("gpipe", "interleaved", "zb-v")],
    "tied": [job(Layout(pp=2, schedule=name, microbatches=4), tied=True) for name in
             ("1f1b", "interleaved", "zb-h1", "zb-v")],
    "recompute": [job(Layout(pp=2, schedule=name, microbatches=4, recompute=recompute)) for recompute in
                  ("full", "selective") for name in ("1f1b", "zb-v")],
    "split": split_cases(2),
}  # fmt: skip


@pytest.fixture(scope="module")
def on_two() -> dict[str, list[tuple[Job, list[Held]]]]:
    found = iter(by_case([case for cases in ON_TWO.values() for case in cases]))
    return {name: [next(found) for _ in cases] for name, cases in ON_TWO.items()}


def test_receive_buffers_do_not_grow_with_the_microbatches(on_two: dict[str, list[tuple[Job, list[Held]]]]) -> None:
    for case, ranks in on_two["buffers"]:
        hold(case, ranks)
        assert max(one.in_flight[0] for one in ranks) == 2, str(case.layout)


def test_tied_embeddings_are_two_partial_sums(on_two: dict[str, list[tuple[Job, list[Held]]]]) -> None:
    for case, ranks in on_two["tied"]:
        hold(case, ranks, tied=True)
        ends = [one for one in ranks if "embedding.weight" in one.names]
        assert len(ends) == (1 if case.layout.schedule == "zb-v" else 2)


def test_layers_may_be_dealt_out_unevenly_and_a_stage_may_have_none(
    on_two: dict[str, list[tuple[Job, list[Held]]]],
) -> None:
    for case, ranks in [*on_two["split"], *by_case(split_cases(3))]:
        hold(case, ranks)


def test_a_block_is_recomputed_once_also_where_backward_is_split(
    on_two: dict[str, list[tuple[Job, list[Held]]]],
) -> None:
    for case, ranks in on_two["recompute"]:
        assert ranks[0].split == (case.layout.schedule != "1f1b")
        for one in ranks:
            assert one.unequal == set(), str(case.layout)
            assert set(one.blocks.values()) == {2 * 4}, str(case.layout)  # forward, and once more for backward


def test_the_actions_of_a_schedule_are_all_of_these_kinds() -> None:
    """The comparisons above would be empty if nothing were sent."""
    for layout in all_schedules(4, (8,)):
        schedule = build(layout.schedule, 4, 8, chunks=layout.chunks)
        assert schedule.count(*SEND_KINDS) == schedule.count(*RECEIVE_KINDS) == 8 * len(schedule.placement.channels) > 0


def test_a_schedule_that_gathers_reduces_or_steps_is_refused_before_it_runs() -> None:
    schedule = with_zero(build("1f1b", 1, 2), 1)
    with pytest.raises(UserError, match="schedule 1f1b has GATHER, REDUCE or STEP"):
        Pipeline(schedule, 0, {}, *[None] * 3)  # type: ignore[arg-type]
