"""Whether a failure is tried again, and after how long."""

import pytest

from fivefold.launch.exits import End
from fivefold.launch.local import LONGEST, Restarts


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
    assert policy.after(failure(2)) == (False, 0.0, "all 1 restarts are used up")
    assert Restarts(0).after(failure(1)) == (False, 0.0, "")


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
