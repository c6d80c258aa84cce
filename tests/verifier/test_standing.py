"""Ranks that stay up from layout to layout: what they yield, and what becomes of the rest when one breaks."""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from fivefold.job.config import Job
from fivefold.launch import processes
from fivefold.verifier import rank as measure
from fivefold.verifier.verify import Judge, verify
from tests.verifier.cases import job, slow


def counting(rank: processes.Rank, dies: int, after: bool) -> Generator[int]:
    """Numbers; rank 1 dies before number `dies`, or, `after`, when it has been asked for more than that."""
    for number in range(3):
        if rank.number == 1 and number == dies and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        yield 10 * rank.number + number
        if rank.number == 1 and number == dies and after:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("dies", "after", "heard"), [(9, False, 3), (1, False, 1), (2, True, 3)])
def test_values_come_in_order_until_a_rank_dies(dies: int, after: bool, heard: int) -> None:
    found: list[list[int]] = []
    name = f"{__name__}:{counting.__name__}"
    if dies == 9:
        processes.run(2, name, dies, after, timeout=60, each=found.append)
    else:
        with pytest.raises(processes.RankError) as failure:
            processes.run(2, name, dies, after, timeout=60, each=found.append)
        assert (failure.value.rank, failure.value.error) == (1, "SIGKILL")
    assert found == [[number, 10 + number] for number in range(heard)]


def break_the_second() -> None:
    """Rank 1 dies in its second layout, when it leaves the process group."""
    usual, calls = measure._forget_groups, list[int]()

    def forget() -> None:
        calls.append(0)
        if len(calls) == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        usual()

    measure._forget_groups = forget  # type: ignore[assignment]


def test_each_repeat_is_proven_and_ranks_stay_up() -> None:
    told: list[tuple[int, int, str]] = []
    found = verify("dp=2,zero=1", steps=1, repeat=3, progress=lambda *one: told.append(one))
    assert [verdict.passed for _, verdict in found.verdicts] == [True] * 3
    assert [done for done, _, _ in told] == [0, 1, 2, 3]


@pytest.mark.parametrize(("repeat", "passed"), [(3, [True, False, True]), (2, [True, False])])
def test_after_a_layout_that_breaks_the_ranks_others_go_on(repeat: int, passed: list[bool]) -> None:
    """What breaks is the one whose ranks died, also in its last moment, and also if it is the last of all."""
    found = verify("dp=2", steps=1, repeat=repeat, hook=f"{__name__}:{break_the_second.__name__}")
    assert [verdict.passed for _, verdict in found.verdicts] == passed
    assert "rank 1 was ended by SIGKILL" in found.verdicts[1][1].broken


def loops(rank: processes.Rank, jobs: list[Job], references: list[Path]) -> list[int]:
    """Threads of gloo's that are left after each of them."""
    found = []
    for _ in measure.measure_each(rank, jobs, references):
        tasks = [Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir()]
        found.append(sum(comm.startswith("gloo_tcp_loop") for comm in tasks))
    return found


@pytest.mark.parametrize("layout", ["dp=2,zero=3", *slow(["dp=2", "tp=2"])])
def test_groups_of_the_layout_before_have_no_threads(layout: str) -> None:
    """Those of a group that others have left run without end: after a hundred layouts nothing else would."""
    one = job(layout)
    with Judge(60) as judge:
        reference, _ = judge._reference(one)
        for first, *later in processes.run(2, f"{__name__}:{loops.__name__}", [one] * 3, [reference] * 3, timeout=60):
            assert later == [first, first]


def test_ctrl_c_ends_repeats_at_once() -> None:
    def interrupt(done: int, total: int, following: str) -> None:
        assert done < 3
        if done == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        verify("dp=2", steps=1, repeat=500, progress=interrupt)
