"""Ranks make sure of each other before they train together: every kind of odd one is named, and none trains.

The ranks are threads here that meet at a file; what they do is what processes do.
"""

import math
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed import FileStore, PrefixStore, Store

from fivefold.job.reading import read_job
from fivefold.launch import handshake
from fivefold.launch.handshake import (
    Facts,
    Hello,
    Roll,
    RollCall,
    Statement,
    Welcome,
    code_digest,
    meet,
    odd_ones,
    ranks_text,
    seal,
    settings_of,
    short,
    unseal,
)
from fivefold.launch.rendezvous import Rendezvous
from fivefold.schedules.registry import build
from fivefold.schedules.text import save
from fivefold.support.errors import PeerLost, UserError
from tests.launch.test_meeting import free_port

SECRET = secrets.token_bytes(32)
FACTS = Facts(4, "run", 0, "2.13.0", "c" * 32, "d" * 32, "j" * 32)
CLAIM = Hello(FACTS, {"train.seed": "0", "train.steps": "6"}, SECRET)
PATIENCE = 30.0


def other(**facts: Any) -> Hello:
    return replace(CLAIM, facts=msgspec.structs.replace(FACTS, **facts))


OTHER_JOB = replace(other(job="k" * 32), settings=CLAIM.settings | {"train.seed": "1"})


class Meetings:
    """Ranks that meet at one file, each in a thread, and what became of them."""

    def __init__(self, file: Path):
        self.meeting = Rendezvous(str(file), alone=True)
        self.ends: list[Any] = []
        self._threads: list[threading.Thread] = []

    def start(self, rank: int, claim: Hello = CLAIM, timeout: float = PATIENCE) -> None:
        place = len(self.ends)
        self.ends.append(None)

        def run() -> None:
            try:
                self.ends[place] = meet(self.meeting, rank, claim, timeout)
            except Exception as error:
                self.ends[place] = error

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def finish(self) -> list[Any]:
        for thread in self._threads:
            thread.join(2 * PATIENCE)
        return self.ends

    @property
    def store(self) -> Store:
        return FileStore(self.meeting.file, 4)

    def called(self, number: int = 1) -> PrefixStore:
        """The part of the store in which a call is answered, when it is there."""
        wait_until(lambda: self.store.check(["now"]) and int(self.store.get("now")) >= number)
        return PrefixStore(f"world {number}", self.store)


@pytest.fixture
def meetings(tmp_path: Path) -> Meetings:
    return Meetings(tmp_path / "store")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """For worlds that are never complete: rank 0 decides as soon as one rank is odd."""
    monkeypatch.setattr(handshake, "_ODD_RANKS_WAIT", 0.0)
    monkeypatch.setattr(handshake, "_REFUSAL_WAIT", 0.1)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def intrude(part: Store, data: bytes) -> int:
    """What a process does that writes into the store by itself; its place."""
    place = part.add("arrived", 1) - 1
    part.set(f"statement {place}", data)  # type: ignore[arg-type]
    return place


def test_ranks_that_are_alike_meet(meetings: Meetings) -> None:
    for rank in (2, 0, 3, 1):
        meetings.start(rank)
    stores = meetings.finish()
    stores[0].set("key", "value")
    assert [store.get("key") for store in stores] == [b"value"] * 4


def test_a_world_of_one_meets_itself(meetings: Meetings) -> None:
    meetings.start(0, other(world=1))
    assert isinstance(meetings.finish()[0], Store)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (OTHER_JOB, "runs another job: train.seed is 1 there and 0 elsewhere"),
        (other(code="e" * 32), "runs another version of fivefold: its source files have digest eeeeeeee"),
        (other(data="e" * 32), "reads other data: its fingerprint is eeeeeeee, and the others' dddddddd"),
        (other(torch="2.11.0"), "has torch 2.11.0, and the others 2.13.0"),
        (other(plugins="e" * 32), "has other plugins: their files have digest eeeeeeee, and the others' none"),
        (other(world=8), "is one of 8 ranks, and the others are of a world of 4"),
        (other(run="another"), "belongs to another run, another, and the others to run"),
        (other(start=1), "is of start 1 of the run, and the others are of start 0"),
    ],
)
def test_the_odd_rank_is_named_to_rank_0_and_to_itself(meetings: Meetings, odd: Hello, said: str) -> None:
    for rank in range(4):
        meetings.start(rank, odd if rank == 2 else CLAIM)
    ends = meetings.finish()
    assert [type(end) for end in ends] == [UserError] * 4
    assert ends[0].problems == ends[2].problems
    assert ends[0].problems[0].startswith("rank 2 on ")
    assert said in ends[0].problems[0]
    assert ends[1].problems == ends[3].problems == []  # they end alike, and leave it to those


def test_rank_0_may_be_the_odd_one(meetings: Meetings) -> None:
    for rank in range(4):
        meetings.start(rank, CLAIM if rank == 0 else OTHER_JOB)
    ends = meetings.finish()
    assert "rank 0 on " in str(ends[0])
    assert "train.seed is 0 there and 1 elsewhere" in str(ends[0])
    assert [end.problems for end in ends[1:]] == [[]] * 3


def test_a_rank_that_exists_in_no_world_of_this_size_is_refused_though_the_others_are_complete(
    meetings: Meetings,
) -> None:
    for rank in (0, 5):
        meetings.start(rank, other(world=2) if rank == 0 else other(world=8))
    ends = meetings.finish()
    assert [type(end) for end in ends] == [UserError] * 2
    assert "rank 5" in str(ends[0])
    assert "is one of 8 ranks, and the others are of a world of 2" in str(ends[0])


def test_a_rank_that_comes_twice_is_named(meetings: Meetings) -> None:
    for rank in (0, 1, 1):
        meetings.start(rank)
    ends = meetings.finish()
    assert [type(end) for end in ends] == [UserError] * 3
    assert all("2 processes claim rank 1: pid " in str(end) for end in ends)


def test_rank_0_that_comes_twice_is_named(meetings: Meetings) -> None:
    meetings.start(0)
    meetings.called()
    meetings.start(0, timeout=0.1)
    ends = meetings.finish()
    assert "two processes claim rank 0" in str(ends[0])
    assert isinstance(ends[1], PeerLost)


def test_absent_ranks_are_named_to_all_that_are_here(meetings: Meetings) -> None:
    for rank in (0, 2):
        meetings.start(rank, timeout=0.5)
    ends = meetings.finish()
    assert [type(end) for end in ends] == [PeerLost] * 2
    for end in ends:
        assert str(end).startswith("ranks 1, 3 have not joined within 0.5 s; 2 of 4 are here (")


def test_an_absent_rank_0_is_named(meetings: Meetings) -> None:
    meetings.start(1, timeout=0.2)
    (end,) = meetings.finish()
    assert isinstance(end, PeerLost)
    assert str(end).startswith("rank 0 has not joined within 0.2 s")


@pytest.mark.usefixtures("hasty")
def test_who_does_not_know_the_secret_is_refused_and_says_so(meetings: Meetings) -> None:
    for rank in (0, 1):
        meetings.start(rank, replace(CLAIM, secret=secrets.token_bytes(32)) if rank else CLAIM)
    first, second = meetings.finish()
    assert isinstance(first, UserError)
    assert isinstance(second, UserError)
    assert "a process that says it is rank 1 on " in str(first)
    assert "does not know this run's secret, and is refused" in str(first)
    assert "who answers as rank 0" in str(second)
    assert "FIVEFOLD_SECRET" in str(second)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode([1] * 1000), b"\x91" * 100_000])
def test_what_is_no_statement_is_refused(meetings: Meetings, data: bytes) -> None:
    meetings.start(0)
    part = meetings.called()
    place = intrude(part, data)
    (end,) = meetings.finish()
    assert end.problems == [
        f"a process has sent {len(data)} bytes that are not a valid statement of a rank, and is refused"
    ]
    assert part.get(f"answer {place}") == b""


@pytest.mark.usefixtures("hasty")
def test_a_statement_without_a_proof_is_refused(meetings: Meetings) -> None:
    meetings.start(0)
    part = meetings.called()
    call, _ = unseal(part.get("call"), RollCall, b"")
    assert call is not None
    sealed = msgspec.msgpack.decode(seal(Statement(call.nonce, 1, FACTS), SECRET))
    intrude(part, msgspec.msgpack.encode(sealed | {"proof": b""}))
    assert "does not know this run's secret" in str(meetings.finish()[0])


@pytest.mark.usefixtures("hasty")
def test_an_old_statement_is_refused(meetings: Meetings) -> None:
    for rank in range(4):
        meetings.start(rank)
    meetings.finish()
    recorded = meetings.called(1).get("statement 0")
    meetings.start(0)
    intrude(meetings.called(2), recorded)
    assert "was sent once more, and is refused" in str(meetings.finish()[-1])


def test_an_old_rank_0_is_not_believed(meetings: Meetings) -> None:
    """What it said to others once is said again by a process that does not know the secret."""
    for rank in range(4):
        meetings.start(rank)
    meetings.finish()
    before = meetings.called(1)
    now = PrefixStore("world 2", meetings.store)
    now.set("call", before.get("call"))  # type: ignore[arg-type]
    now.set("answer 0", before.get("answer 0"))  # type: ignore[arg-type]
    meetings.store.set("now", "2")
    meetings.start(1)
    assert "who answers as rank 0" in str(meetings.finish()[-1])


def test_a_message_of_one_kind_is_none_of_another() -> None:
    answer = Welcome(b"nonce")
    assert unseal(seal(answer, SECRET), Welcome, SECRET) == (answer, True)
    assert unseal(seal(answer, SECRET), Welcome, b"another") == (answer, False)
    assert unseal(seal(answer, SECRET), Statement, SECRET) == (None, False)


def test_a_store_that_outlives_its_ranks_serves_the_next_ones(meetings: Meetings) -> None:
    """torchrun's does: a rank of the second start may come before its rank 0, and find the call of the first one."""
    for rank in range(4):
        meetings.start(rank)
    meetings.finish()[0].set("key", "value")
    for rank in (1, 2, 3):
        meetings.start(rank)
    wait_until(lambda: int(meetings.called(1).get("arrived")) == 6)
    meetings.start(0)
    stores = meetings.finish()[4:]
    assert not any(store.check(["key"]) for store in stores)


def test_the_store_of_ranks_that_end_gives_way_to_that_of_the_next_ones() -> None:
    """Two commands one after the other in a Slurm step: rank 1 may come to the second while rank 0 ends the first."""
    meetings = Meetings(Path())
    meetings.meeting = Rendezvous("", "127.0.0.1", free_port(), alone=True)
    pair = other(world=2)
    for rank in (0, 1):
        meetings.start(rank, pair)
    first = meetings.finish()[0]
    meetings.start(1, pair)
    wait_until(lambda: int(meetings.meeting.store(1, 2, math.inf).get("world 1/arrived")) == 2)
    del first
    meetings.ends[:2] = [None, None]
    meetings.start(0, pair)
    second, third = meetings.finish()[2:]
    second.set("key", "value")
    assert third.get("key") == b"value"


@pytest.mark.parametrize(("key", "value"), [("now", "abc"), ("world 1/arrived", "abc"), ("world 1/arrived", "9" * 15)])
def test_what_strangers_write_into_the_store_is_an_error_of_one_sentence(
    meetings: Meetings, key: str, value: str
) -> None:
    meetings.start(0, timeout=1.0)
    meetings.called()
    meetings.store.set(key, value)
    (end,) = meetings.finish()
    assert isinstance(end, UserError if value == "abc" else PeerLost)
    assert "another program writes into the store" in str(end) or "have not joined" in str(end)


@pytest.mark.usefixtures("hasty")
def test_who_comes_after_the_others_have_begun_is_told(meetings: Meetings) -> None:
    for rank in range(4):
        meetings.start(rank)
    meetings.finish()
    meetings.start(1, timeout=0.2)
    late = meetings.finish()[-1]
    assert isinstance(late, PeerLost)
    assert "have begun without this one" in str(late)


def test_a_store_that_falls_silent_is_no_hang(meetings: Meetings, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    class Silent:
        """As that of a rank 0 that is stopped: torch's calls wait for it without a limit."""

        def check(self, keys: list[str]) -> bool:
            return released.wait(PATIENCE)

    monkeypatch.setattr(handshake, "_STORE_TIMEOUT", 0.2)
    monkeypatch.setattr(Rendezvous, "store", lambda *args: Silent())
    meetings.start(1)
    assert "has given no answer for" in str(meetings.finish()[0])
    released.set()


def test_the_roll_of_a_large_world_takes_time_in_proportion() -> None:
    size = 16_384
    claim = other(world=size)
    mine = Statement(b"call", 0, claim.facts)
    sent = [seal(Statement(b"call", rank, claim.facts, host=f"node{rank // 8}"), SECRET) for rank in range(1, size)]
    begin, roll = time.perf_counter(), Roll(mine, claim)
    for place in roll.pending(size - 2):  # the last one is late
        roll.take(place, sent[place])
    assert roll.absent(60) == "rank 16383 has not joined within 60 s; 16383 of 16384 are here"
    assert roll.pending(size - 1) == [size - 2]
    roll.take(size - 2, sent[-1])
    assert roll.complete
    assert not roll.problems()
    assert time.perf_counter() - begin < 20  # a second; in proportion to the square it would be minutes


def test_a_rank_that_dies_before_it_has_spoken_does_not_hide_the_others(meetings: Meetings) -> None:
    meetings.start(0, timeout=2.0)
    meetings.called().add("arrived", 1)
    meetings.start(2)
    assert str(meetings.finish()[0]).startswith("ranks 1, 3 have not joined within 2 s; 2 of 4 are here")


def test_odd_ranks_are_counted_when_they_are_many() -> None:
    jobs = ["j" if rank < 30 else "k" for rank in range(50)]
    statements = [Statement(b"", rank, other(world=50, job=job).facts) for rank, job in enumerate(jobs)]
    problems = odd_ones(statements)
    assert sorted(problems) == list(range(30, 50))
    assert len(handshake._shorten(dict(problems))) == 9


def test_text_of_strangers_is_short_and_printable() -> None:
    assert short("\x1b[31mnode\n7") == "?[31mnode?7"
    assert len(short("x" * 1000)) == 40


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([1, 5], "ranks 1, 5"), ([1, 2], "ranks 1, 2"), ([0, *range(8, 16), 17], "ranks 0, 8-15, 17")],
)
def test_ranks_are_listed_in_short(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_many_ranges_of_ranks_are_cut() -> None:
    assert ranks_text(range(0, 100, 2)).endswith(", 30 and 34 more")


def test_settings_are_those_that_make_a_run_and_not_where_its_files_are(tmp_path: Path) -> None:
    one, two = (read_job(None, [f"data.path={place}", "layout.pp=2", "layout.microbatches=2"]) for place in "ab")
    assert settings_of(one) == settings_of(two)
    assert settings_of(one)["train.seed"] == "0"
    assert settings_of(read_job(None, ["train.seed=1"]))["train.seed"] == "1"
    for name in ("one.txt", "same.txt"):
        save(build("1f1b", 2, 2), tmp_path / name)
    save(build("gpipe", 2, 2), tmp_path / "other.txt")
    one, same, third = (
        settings_of(read_job(None, ["layout.pp=2", "layout.microbatches=2", f"layout.schedule={tmp_path / name}.txt"]))
        for name in ("one", "same", "other")
    )
    assert one == same != third


def test_the_digest_of_the_code_is_found_once_and_quickly() -> None:
    assert code_digest() is code_digest()
    assert len(code_digest()) == 32
