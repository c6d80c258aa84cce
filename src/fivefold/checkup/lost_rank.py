"""The third part: a short run, and the same run with a rank that is killed. Both must end on the same loss curve."""

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from fivefold.checkup.command import CommandEnd
from fivefold.checkup.course import Course, PartEnded, failure, last_words, out_of_time
from fivefold.checkup.report import PartReport
from fivefold.checkup.tasks import LOST_AT, LOST_EVERY, LOST_STEPS
from fivefold.checkup.team import Ends
from fivefold.support.errors import UserError
from fivefold.support.text import plural
from fivefold.trainer.restart_time import RECOVERIES_FILE, RestartTime
from fivefold.trainer.result import TrainResult

WHOLE, LOST = "undisturbed", "lost-rank"  # names of the two runs
_FIRST_SHARE = 0.4  # of the limit, for the undisturbed run
_SENTENCES = 4  # that are quoted
_FOUND = re.compile(r"waited|SIGKILL|connection|gave no sign|lost|killed|ended by|has not finished|heartbeat", re.I)


def lose_a_rank(course: Course, part: PartReport) -> None:
    """Train undisturbed; then kill the last rank in mid-run, start again, and compare."""
    lost = course.team.size - 1
    common = {"kind": "lose", "layout": run_layout(course.team.size)}
    folder = course.base.folder(course.token)
    course.tell("an undisturbed run")
    if ended := failure(
        "the undisturbed run", course.run(course.task(**common, name=WHOLE), _FIRST_SHARE * course.left)
    ):
        raise ended
    expected = _losses(folder / WHOLE)
    part.data = {"layout": common["layout"], "rank": lost, "step": LOST_AT, "undisturbed": expected}
    course.tell(f"rank {lost} is killed in step {LOST_AT}")
    first = course.run(course.task(**common, name=LOST, lost=lost))
    restarted = not course.team.launched and course.team.size > 1  # then the command itself starts its ranks again
    last = first
    if not restarted:
        _check_killed(first, lost, course.team.launched)
        if not course.left:
            raise out_of_time(part, "the start after the loss")
        course.tell("starts again from the last checkpoint")
        last = course.run(course.task(**common, name=LOST, lost=lost, start=1))
    part.data["said"] = named = sentences_about(lost, first.values())
    if ended := failure("the run after the loss", last):
        raise ended
    part.data["losses"] = losses = _losses(folder / LOST)
    part.data["recovery"] = recovery = _recovery(folder / LOST)
    _judge(part, lost, named, expected, losses, alone=course.team.size == 1)
    if recovery:
        part.says.append(f"from the last step before to the first new one after: {recovery['total']:.1f} s")


def run_layout(ranks: int) -> str:
    """Every rank is a replica, as an optimizer that is sharded over all of them makes each rank's state needed."""
    return f"dp={ranks},zero=1" if ranks > 1 else "dp=1"


def _check_killed(ends: Ends, lost: int, launched: bool) -> None:
    """Raise unless the rank was killed, by the fault and by nothing else."""
    end = ends.get(lost if launched else 0)
    if end is None or end.code == 0:
        raise PartEnded("failed", f"rank {lost} should have been killed in step {LOST_AT}, and the run ended well")
    if end.code is not None and end.code > 0:
        raise PartEnded("failed", f"rank {lost} ended with code {end.code} before it was killed: {last_words(end)}")


def sentences_about(rank: int, ends: Iterable[CommandEnd]) -> list[str]:
    """What was said about a lost rank: lines that name it and say what happened to it, each once."""
    named = re.compile(rf"\brank {rank}\b")
    lines = [line.strip() for end in ends for line in (*end.err.splitlines(), *end.out.splitlines())]
    found = [line for line in lines if named.search(line) and _FOUND.search(line)]
    return list(dict.fromkeys(found))[:_SENTENCES]


def _losses(directory: Path) -> list[float]:
    """The losses of a run's steps."""
    try:
        return [float(loss) for loss in TrainResult.read(directory).losses]
    except UserError as error:
        raise PartEnded("failed", f"the run has left no metrics: {error}") from None


def _recovery(directory: Path) -> dict[str, Any] | None:
    """The parts of the restart's time, as rank 0 has measured them."""
    with suppress(OSError, msgspec.MsgspecError, IndexError):
        recovered = msgspec.json.decode((directory / RECOVERIES_FILE).read_bytes().splitlines()[-1], type=RestartTime)
        return msgspec.to_builtins(recovered) | {"total": recovered.total}
    return None


def _judge(
    part: PartReport, lost: int, named: list[str], expected: list[float], losses: list[float], *, alone: bool
) -> None:
    """Say who was named, and whether the curves are one."""
    checkpoint = (LOST_AT - 1) // LOST_EVERY * LOST_EVERY
    part.says.append(
        f"rank {lost} was killed in step {LOST_AT} of {LOST_STEPS}; the run went on after step {checkpoint}"
    )
    if named:
        part.says.append(f"who was named: {named[0]}")
    elif not alone:
        part.findings.append(f"rank {lost} was killed, and nobody named it")
    if losses == expected:
        part.says.append(
            f"the losses of all {plural(len(losses), 'step')} are those of the undisturbed run, to the bit"
        )
        return
    if len(losses) != len(expected):
        part.findings.append(f"the run ended with {len(losses)} of {len(expected)} steps")
        return
    apart = [abs(one - other) for one, other in zip(losses, expected, strict=True)]
    first = next(step for step, difference in enumerate(apart, 1) if difference)
    part.findings.append(
        f"the losses differ from step {first} on, by {max(apart):.2e} at most: the run did not go on as if undisturbed"
    )
