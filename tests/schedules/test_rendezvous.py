"""Messages that hold up both their ranks until they have met, as NCCL's may: no list that is wired waits in a circle,
a list that would is refused, and posting receives early would buy no time."""

import random
from collections.abc import Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import pairwise, product
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.schedules.actions import (
    BACKWARD,
    COMPUTE_KINDS,
    FORWARD,
    INPUT_GRAD,
    LAST_READERS,
    MESSAGE_KINDS,
    WEIGHT_GRAD,
    Action,
    Kind,
    parse_token,
)
from fivefold.schedules.check import check
from fivefold.schedules.communication import wire
from fivefold.schedules.costs import Costs, MessageLink
from fivefold.schedules.registry import CATALOGUE, build
from fivefold.schedules.schedule import Placement, Schedule
from fivefold.schedules.simulate import simulate
from fivefold.schedules.text import load, save, to_text
from fivefold.support.errors import UserError
from tests.schedules.brute import trouble
from tests.schedules.early import posted_early
from tests.schedules.mutations import find, move

# ---- what is wired -------------------------------------------------------------------------------------------------

MICROBATCHES = (*range(1, 10), 12, 16)


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("ranks", [(2, 3, 4), pytest.param((8,), marks=pytest.mark.slow)], ids=["few", "many"])
def test_no_schedule_of_the_catalogue_waits_in_a_circle(name: str, ranks: tuple[int, ...]) -> None:
    record, counts = CATALOGUE[name], (1, 2, 3) if CATALOGUE[name].any_chunks else (CATALOGUE[name].chunks,)
    for p, m, chunks in product(ranks, MICROBATCHES, counts):
        if m >= record.least * p:
            schedule = build(name, p, m, chunks=chunks)
            assert check(schedule) == [], (p, m, chunks)
            assert trouble(schedule, seeds=1, meetings=True) is None, (p, m, chunks)


class Script:
    """Compute orders made by chance: of everything that could run next, on any rank, one thing or a pair is drawn.

    Each stage's weight gradients are summed in ascending order, as `check` asks; all else may come in any order.
    """

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        p, self.m = chance.randint(2, 4), chance.randint(1, 6)
        loops = Placement.looped(p, chance.randint(2, 3))
        self.placement = chance.choice([Placement.single(p), loops, Placement.vee(p)])
        self.orders: list[list[Action]] = [[] for _ in range(p)]
        self.speeds = [chance.choice([1, 1, 4, 16]) for _ in range(p)]  # a fast rank comes first more often
        split, self.joined = chance.choice([0.0, 0.5, 1.0]), chance.choice([0.0, 0.9])
        self.needs: dict[Action, set[Action]] = {}
        for stage in range(self.placement.stages):
            for k in range(self.m):
                halves = chance.random() < split
                for kind in (FORWARD, *((INPUT_GRAD, WEIGHT_GRAD) if halves else (BACKWARD,))):
                    self.needs[Action(kind, stage, k)] = set(needed(kind, stage, k))
        self.feeds: dict[Action, list[Action]] = {action: [] for action in self.needs}
        for action, needs in self.needs.items():
            needs.intersection_update(self.needs)
            for need in needs:
                self.feeds[need].append(action)
        self.able: list[tuple[float, Action]] = []  # by lot
        for action in self.needs:
            self.offer(action)
        while self.able:
            self.draw()

    def offer(self, action: Action) -> None:
        if not self.needs[action]:
            lot = self.chance.random() / self.speeds[self.placement.owner[action.stage]]
            heappush(self.able, (lot, action))

    def draw(self) -> None:
        _, action = heappop(self.able)
        rank, group = self.placement.owner[action.stage], [action]
        own = [one for one in self.able if self.placement.owner[one[1].stage] == rank]
        mates = [one for one in own if {action.kind, one[1].kind} == {FORWARD, BACKWARD}]
        if mates and self.chance.random() < self.joined:
            # Both could run before either has, so neither needs the other.
            mate = self.chance.choice(mates)
            self.able.remove(mate)
            heapify(self.able)
            group = sorted([action, mate[1]], key=lambda one: one.kind is BACKWARD)
        self.orders[rank] += [one._replace(joined=one is not group[-1]) for one in group]
        for one in group:
            for follower in self.feeds[one]:
                self.needs[follower].remove(one)
                self.offer(follower)

    def schedule(self) -> Schedule:
        return wire("by chance", self.placement, self.m, self.orders)


def needed(kind: Kind, stage: int, k: int) -> Iterator[Action]:
    """What must have run before, in one way or another."""
    if kind is FORWARD:
        yield Action(FORWARD, stage - 1, k)
    elif kind is WEIGHT_GRAD:
        yield Action(INPUT_GRAD, stage, k)
    else:
        yield from (Action(FORWARD, stage, k), Action(BACKWARD, stage + 1, k), Action(INPUT_GRAD, stage + 1, k))
    if kind in LAST_READERS:
        yield from (Action(reader, stage, k - 1) for reader in LAST_READERS)


@pytest.mark.parametrize("many", [120, pytest.param(1000, marks=pytest.mark.slow)])
def test_orders_made_by_chance_are_wired_so_that_every_proof_holds(many: int) -> None:
    wired = [Script(seed).schedule() for seed in range(many)]
    for schedule in wired:
        assert check(schedule) == [], to_text(schedule)
        assert trouble(schedule, seeds=1) is None, to_text(schedule)
        assert trouble(schedule, seeds=1, meetings=True) is None, to_text(schedule)
    # They are of all kinds, and receives posted as early as two buffers allow would be the end of nearly all of them.
    assert {schedule.placement.chunks for schedule in wired} == {1, 2, 3}
    assert sum(any(action.joined for order in one.ranks for action in order) for one in wired) > many / 10
    assert sum(one.splits and one.count(BACKWARD) > 0 for one in wired) > many / 10
    assert sum(one.buffers > 2 for one in wired) > many / 10
    assert sum(bool(check(posted_early(one, 2))) for one in wired) > 0.9 * many


def test_a_receive_stands_before_the_first_action_that_ends_after_its_message_is_made() -> None:
    texts = [" ".join(map(str, order)) for order in build("1f1b", 3, 3).ranks]
    assert texts == [
        "F0.0 SEND_A0.0 F0.1 SEND_A0.1 F0.2 SEND_A0.2 RECV_G0.0 B0.0 RECV_G0.1 B0.1 RECV_G0.2 B0.2",
        # While F1.0 runs, F0.1 ends: its activation travels beside it.
        "RECV_A1.0 RECV_A1.1 F1.0 SEND_A1.0 RECV_A1.2 F1.1 SEND_A1.1 RECV_G1.0 B1.0 SEND_G1.0 RECV_G1.1 F1.2 "
        "SEND_A1.2 B1.1 SEND_G1.1 RECV_G1.2 B1.2 SEND_G1.2",
        "RECV_A2.0 RECV_A2.1 F2.0 B2.0 SEND_G2.0 F2.1 B2.1 SEND_G2.1 RECV_A2.2 F2.2 B2.2 SEND_G2.2",
    ]


def test_a_send_stands_right_behind_its_producer_or_the_pair_it_is_in() -> None:
    for name in CATALOGUE:
        for order in build(name, 4, 8).ranks:
            last: list[Action] = []
            for before, action in pairwise(order):
                if before.kind in COMPUTE_KINDS:
                    last = [*(last if last and last[-1].joined else []), before]
                if action.kind in MESSAGE_KINDS and action.kind.startswith("SEND"):
                    assert before.kind not in MESSAGE_KINDS or before.kind.startswith("SEND")
                    assert action[1:3] in [one[1:3] for one in last]


def test_there_are_as_many_buffers_as_receives_are_posted_at_once_and_no_fewer_than_asked_for() -> None:
    for name, p, m in (("bfs", 2, 8), ("1f1b", 4, 8), ("interleaved", 4, 8)):
        schedule = build(name, p, m)
        orders = [schedule.compute(rank) for rank in range(p)]
        least = wire(name, schedule.placement, m, orders, buffers=1)
        assert check(least) == []
        if least.buffers > 1:
            assert "posts more than" in str(check(replace(least, buffers=least.buffers - 1)))
        assert wire(name, schedule.placement, m, orders, buffers=50).buffers == 50


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (("F0.0 F0.1&B0.0 B0.1", "F1.0 F1.1 B1.0 B1.1"),
         "deadlock: rank 0 waits at B0.0 for message 0 of the gradients of stage 1 to stage 0"),
        (("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 B1.1"), "complete: rank 1 never runs F1.1"),
    ],
)  # fmt: skip
def test_a_circle_of_computations_and_a_missing_one_are_wired_too_and_all_that_is_said(
    texts: tuple[str, str], said: str
) -> None:
    orders = [[action for token in text.split() for action in parse_token(token)] for text in texts]
    (problem,) = check(wire("odd", Placement.single(2), 2, orders))
    assert str(problem).startswith(said)


# ---- what is listed by hand ----------------------------------------------------------------------------------------

CIRCLE = (
    "rank 0 waits at RECV_G0.0 for message 0 of the gradients of stage 1 to stage 0 from rank 1; "
    "rank 1 waits at RECV_A1.0 for message 0 of the activations of stage 0 to stage 1 from rank 0; "
    "that is a circle of 2, and nobody in it can move; "
)
CURE = "leave out SEND and RECV, and write the line 'messages implied'"


def early() -> Schedule:
    """1F1B on two ranks, the first gradient's receive posted before anything else."""
    schedule = build("1f1b", 2, 4)
    return move(schedule, *find(schedule, "RECV_G0.0"), 0)


def test_an_early_receive_is_refused_and_the_circle_is_named() -> None:
    assert trouble(early()) is None
    assert trouble(early(), meetings=True) == "deadlock"
    (problem,) = check(early())
    assert (problem.obligation, problem.rank, problem.place) == ("rendezvous", 0, 0)
    assert problem.sentence.startswith(CIRCLE)
    assert "on NCCL a posted message may hold up all that its rank does after it" in problem.sentence
    assert CURE in problem.sentence


def test_two_sends_that_wait_for_each_other_are_refused_too() -> None:
    schedule = build("1f1b", 2, 2)
    late = move(schedule, *find(schedule, "RECV_A1.1"), find(schedule, "SEND_G1.0")[1])
    assert trouble(late) is None
    assert trouble(late, meetings=True) == "deadlock"
    (problem,) = check(late)
    assert problem.obligation == "rendezvous"
    assert problem.sentence.startswith(
        "rank 0 waits at SEND_A0.1 until rank 1 posts the receive of message 1 of the activations of stage 0 to stage "
        "1; rank 1 waits at SEND_G1.0 until rank 0 posts the receive of message 0 of the gradients of stage 1 to stage "
        "0; that is a circle of 2, and nobody in it can move; "
    )


def test_a_circle_of_three_ranks_is_named_whole() -> None:
    schedule = build("bfs", 3, 1)
    (problem,) = check(move(schedule, *find(schedule, "RECV_A3.0"), 0))
    assert problem.obligation == "rendezvous"
    waits = ["rank 0 waits at RECV_A3.0 for", "rank 2 waits at RECV_A2.0 for", "rank 1 waits at RECV_A1.0 for"]
    places = [problem.sentence.find(one) for one in waits]
    assert -1 < places[0] < places[1] < places[2]
    assert "a circle of 3" in problem.sentence


@pytest.mark.parametrize("suffix", ["txt", "json"])
def test_a_file_with_an_early_receive_is_refused_with_its_line_and_the_cure(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mine.{suffix}"
    save(early(), path)
    where = "line 8" if suffix == "txt" else "ranks[0][0]"
    sentence = f"{path}, {where}: rendezvous: {CIRCLE}"
    layout = f"pp=2,schedule={path},microbatches=4"
    for command in (f"draw {path}", f"plan llama3-8b --batch 4 --layout {layout}"):
        result = CliRunner().invoke(app, command.split())
        assert isinstance(result.exception, UserError)
        assert str(result.exception).startswith(sentence)
        assert CURE in str(result.exception)


def test_with_implied_messages_the_same_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    save(early(), path)
    with pytest.raises(UserError, match="rendezvous"):
        load(path)
    lines = [
        " ".join(word for word in line.split(" ") if not word.startswith(("SEND", "RECV")))
        for line in path.read_text().splitlines()
    ]
    path.write_text("\n".join(["messages implied", *lines]))
    assert load(path) == build("1f1b", 2, 4)


# ---- what early receives would buy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize(
    "sizes", [((2, 4), (3, 7), (4, 8)), pytest.param(((4, 16), (8, 16), (8, 32)), marks=pytest.mark.slow)]
)
def test_posting_receives_as_early_as_buffers_allow_buys_nothing(name: str, sizes: tuple[tuple[int, int], ...]) -> None:
    for (p, m), latency in product(sizes, (0.02, 0.05)):
        schedule = build(name, p, m)
        costs = Costs.even(schedule.placement, link=MessageLink(latency=latency))
        reference = posted_early(schedule, buffers=max(2, m // 2) if name == "bfs" else 2)
        assert simulate(schedule, costs).makespan <= 1.005 * simulate(reference, costs).makespan, (p, m)


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize(("p", "m"), [(4, 8), pytest.param(8, 32, marks=pytest.mark.slow)])
def test_of_a_slow_rank_receives_may_come_late_and_that_costs_little(name: str, p: int, m: int) -> None:
    placement = CATALOGUE[name].placement(p)
    for (latency, share), slow in product(((0.02, 0.01), (0.05, 0.025)), (0, p // 2, p - 2)):
        costs = Costs.even(placement, link=MessageLink(latency=latency)).slowed(placement, {slow: 1.5})
        schedule = build(name, p, m, costs=costs)
        reference = posted_early(schedule, buffers=m)
        assert simulate(schedule, costs).makespan <= (1 + share) * simulate(reference, costs).makespan, (latency, slow)
