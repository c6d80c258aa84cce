"""Whether a failure is tried again, and after how long."""

import pytest

from fivefold.launch.exits import End
from fivefold.launch.local import LONGEST, Arrangement, Launcher, Restarts
from fivefold.support.errors import PeerLost


def failure(step: int, error: str = "SIGKILL", rank: int = 1) -> End:
    return End(rank, "died", error, code=-9, place=f"step {step}")


@pytest.mark.parametrize(
    ("steps", "errors", "starts"),
    [
        ("44", "aa", 1),
        ("3456", "aaaa", 4),  # there was progress
        ("454", "aaa", 3),  # which forgets what came before
        ("4566", "aaaa", 3),
        ("3444", "abbb", 2),
        ("3333", "abcd", 4),  # other failures
        ("333", "aba", 2),  # two causes that take turns
    ],
)
def test_the_same_failure_in_the_same_step_is_tried_once_more_and_then_no_more(
    steps: str, errors: str, starts: int
) -> None:
    policy = Restarts(9)
    found = [policy.after(failure(int(step), error)) for step, error in zip(steps, errors, strict=True)]
    assert [one.again for one in found[: starts + 1]] == [True] * starts + [False] * (starts < len(steps))
    assert [one.why for one in found[:starts]] == [f"{number + 1} of 9" for number in range(starts)]
    assert found[0].pause == 0
    assert len(set(steps)) < len(steps) or [one.pause for one in found] == [0.0] * len(steps)
    assert starts == len(steps) or found[starts].why == (
        "the same failure came twice without progress: it is not tried again"
    )


def test_starts_without_progress_wait_longer_and_longer() -> None:
    policy = Restarts(99)
    pauses = [policy.after(failure(4, str(number * 1000) and "x" * number)).pause for number in range(1, 12)]
    assert pauses[:5] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert max(pauses) == LONGEST


def test_no_more_than_were_allowed() -> None:
    policy = Restarts(1)
    assert policy.after(failure(1)).again
    assert policy.after(failure(2)) == (False, "all 1 restarts are used up", 0.0)
    assert Restarts(0).after(failure(1)) == (False, "", 0.0)


def test_places_are_tried_of_ranks_that_no_peer_explains() -> None:
    """A GPU that is gone shows as an exception or as silence more often than as a signal."""
    gone = [
        End(0, "died", "SIGKILL", code=-9),
        End(1, "died", "exit code 1", code=1),
        End(2, "hung", stack='most recent call first):\n  File "train.py", line 3'),
        End(3, "stopped", paused=True),
    ]
    assert all(end.accused for end in gone)
    explained = [End(4, "returned"), End(5, "died", "exit code 3", code=3), End(6, "died", "exit code 2", code=2)]
    assert not any(end.accused for end in [*explained, End(7, "died", "exit code 143", code=143)])


def outcome(*ends: End) -> tuple[list[str], tuple[int, End | None]]:
    said: list[str] = []
    arrangement = Arrangement(len(ends), lambda rank: f"dp {rank}")
    launcher = Launcher("module:function", arrangement, "stopping", say=said.append)
    return said, launcher._outcome(list(ends))


def test_where_all_ranks_only_waited_each_says_for_what_and_none_is_blamed() -> None:
    """As after a collective that one of them left out: its call is another one, and neither is known to be wrong."""
    silent = "rank 0 has not moved for 15 s in step 3; NCCL has not finished all_reduce of [3] Double, call 5"
    lost = repr(PeerLost("step 3: rank 1 (dp 1): the loss waited 12.0 s for rank 0 (dp): it gave no sign"))
    waits = 'most recent call first):\n  File "/x/torch/distributed/distributed_c10d.py", line 3 in barrier'
    ended = {"error": "exit code 3", "code": PeerLost.code, "place": "step 3"}
    ends = [End(0, "died", cause=silent, **ended), End(1, "died", cause=lost, **ended)]
    said, (code, failure) = outcome(*ends, End(2, "stopped", stack=waits, last="it last moved 17 s ago, in step 3"))
    assert said == [
        "all ranks only waited for others, so none is to blame by itself",
        f"rank 0 (dp 0) waited: {silent}",
        "rank 1 (dp 1) waited: step 3: rank 1 (dp 1): the loss waited 12.0 s for rank 0 (dp): it gave no sign",
        "rank 2 (dp 2) did not end with the others; it last moved 17 s ago, in step 3; "
        "it is in /x/torch/distributed/distributed_c10d.py, line 3",
    ]
    assert code == 1
    assert failure is not None  # another start may help
    one = End(2, "died", "exit code 1", code=1, place="step 3")
    assert outcome(*ends, one)[0] == ["rank 2 (dp 2) failed with exit code 1 in step 3"]
