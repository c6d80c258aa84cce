"""A rank that dies, stalls or fails in the middle of a step: the others end in time, and say who they waited for."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from fivefold.errors import PeerLost
from fivefold.layout import Layout
from fivefold.parallel.mesh import Mesh
from fivefold.prove.batches import make_batch
from fivefold.schedule.actions import Action
from fivefold.schedule.catalogue import build
from fivefold.spec import ModelSpec
from fivefold.train.config import DataConfig, Job, TrainConfig
from fivefold.train.engine import Engine
from tests.ranks import RankEnd, RankFailure, run_ranks

TIMEOUT = 2.0  # of messages and collectives
SPEC = ModelSpec(layers=8, hidden=16, heads=2, ffn=16, vocab=32)
SENTENCE = re.compile(
    r"PeerLost: rank (?P<rank>\d+) \((?P<place>[^)]+)\): (?P<what>.+?) (?:waited (?P<seconds>[\d.]+) s for|found) "
    r"(?P<whom>.+): (?P<why>the connection is closed|it gave no sign)"
)
PEERS = re.compile(r"\(rank (\d+)\)|for ranks? ([\d, ]+) along")


def step(rank: int, world: int, layout: str, victim: int, moment: str, how: str) -> None:
    """One step in which rank `victim` is lost when it comes to the action `moment`."""

    @contextmanager
    def watch(action: Action) -> Iterator[None]:
        if rank == victim and str(action) == moment:
            if how == "raise":
                raise ValueError("a broken stage")
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stall": signal.SIGSTOP}[how])
        yield

    parsed = Layout.parse(layout)
    batch = 2 * parsed.dp * parsed.microbatches
    job = Job(model=SPEC, layout=parsed, data=DataConfig(seq=8), train=TrainConfig(batch=batch, device="cpu"))
    engine = Engine(job, Mesh.of(job.layout, torch.device("cpu"), TIMEOUT), watch)
    engine.accumulate(make_batch(job, 0))


def nothing(rank: int, world: int) -> None:
    pass


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """Its start takes seconds, which are nobody's waiting."""
    run_ranks(1, nothing)


def lose(layout: str, victim: int, moment: str, how: str) -> tuple[RankFailure, float]:
    """What became of the ranks, and after how many seconds."""
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(Layout.parse(layout).world, step, layout, victim, moment, how, timeout=30, grace=3 * TIMEOUT)
    return failure.value, time.monotonic() - start


def middle(schedule: str, p: int, m: int, rank: int, kind: str) -> str:
    """An action of the kind in the middle of a rank's order."""
    found = [str(action) for action in build(schedule, p, m).compute(rank) if action.kind == kind]
    return found[len(found) // 2]


def waited_for(end: RankEnd) -> set[int]:
    """The ranks that a survivor's sentence names, which must be its own and whole."""
    said = SENTENCE.fullmatch(end.error)
    assert said is not None, f"rank {end.rank} {end.kind}: {end.error}\n{end.stack}"
    assert int(said["rank"]) == end.rank
    assert said["seconds"] is None or float(said["seconds"]) < TIMEOUT + 1
    return {int(rank) for one, several in PEERS.findall(end.error) for rank in (one or several).split(",")}


def survivors_point_at(victim: int, failure: RankFailure) -> None:
    """All others ended by themselves; each names a rank that it waited for, and so on to the one that was lost."""
    names = {end.rank: waited_for(end) for end in failure.ends if end.rank != victim}
    assert any(victim in peers for peers in names.values())
    for rank in names:
        reached, new = {rank}, {rank}
        while new:
            new = {peer for one in new for peer in names.get(one, set())} - reached
            reached |= new
        assert victim in reached, f"rank {rank} does not lead to {victim}: {names}"


SCHEDULES = {"1f1b": "B", "zb-v": "I"}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("p", "victim"), [(2, 0), (2, 1), (4, 2)])
def test_a_killed_rank_is_named_by_those_who_waited_for_it(schedule: str, p: int, victim: int) -> None:
    moment = middle(schedule, p, 8, victim, SCHEDULES[schedule])
    failure, seconds = lose(f"pp={p},schedule={schedule},microbatches=8", victim, moment, "kill")
    assert (failure.rank, failure.kind, failure.error) == (victim, "died", "SIGKILL")
    survivors_point_at(victim, failure)
    assert seconds < 4 * TIMEOUT  # a closed connection is seen at once; no timeout has to pass


@pytest.mark.parametrize(("schedule", "p", "victim"), [("1f1b", 4, 2), ("zb-v", 2, 1), ("zb-v", 4, 2)])
def test_a_stalled_rank_is_named_within_the_timeout(schedule: str, p: int, victim: int) -> None:
    moment = middle(schedule, p, 8, victim, "F")
    failure, seconds = lose(f"pp={p},schedule={schedule},microbatches=8", victim, moment, "stall")
    assert failure.ends[victim].kind == "stopped"  # it never came back; the others have raised
    survivors_point_at(victim, failure)
    assert any("it gave no sign" in end.error for end in failure.ends)
    assert seconds < 10 * TIMEOUT


def test_an_exception_keeps_its_type_and_says_in_which_action_it_came() -> None:
    moment = middle("1f1b", 4, 8, 2, "F")
    failure, _ = lose("pp=4,microbatches=8", 2, moment, "raise")
    assert (failure.rank, failure.error) == (2, "ValueError: a broken stage")
    assert f"rank 2 (pp 2) was at {moment}" in failure.stack
    survivors_point_at(2, failure)
