"""Whether starts of a run get anywhere: launchers that restart for ever are stopped by the run itself.

Our own launcher knows why ranks failed, and stops earlier (`launch/restarts.py`); torchrun and Slurm know only that
they did. A run's directory has the furthest step that any start has recorded, and how many have begun since.
"""

from pathlib import Path

import msgspec

from fivefold.support.documents import BROKEN
from fivefold.support.errors import UserError
from fivefold.support.files import put, read_regular
from fivefold.train.metrics import read
from fivefold.train.records import Step

FILE = "progress.json"
MOST = 5  # starts in a row without a new step


class Progress(msgspec.Struct, frozen=True):
    step: int = 0  # the furthest that was recorded
    starts: int = 0  # that have begun since


def begin(directory: Path, again: bool, steps: int) -> None:
    """Count a start of a run of so many steps. UserError if a launcher starts it `again`, and several starts have made
    no new step; with that the count begins anew, so that a person who has mended the cause is not refused."""
    if (here := reached(directory)) >= steps:
        return
    before = _stored(directory) if again else Progress(here)
    now = Progress(here, 1) if here > before.step else Progress(before.step, before.starts + 1)
    tired = now.starts > MOST
    put(directory / FILE, msgspec.json.encode(Progress(now.step) if tired else now).decode() + "\n")
    if tired:
        raise UserError(
            f"{MOST} starts in a row have made no step after step {now.step}, and this one is not tried; the reasons "
            f"are in {directory / 'logs'}, and the next start tries again"
        )


def reached(directory: Path) -> int:
    """The last step that a run has recorded; none, where that cannot be read: who writes there says why."""
    try:
        records = (record for _, record in read(directory / "metrics.jsonl"))
        return max((record.step for record in records if isinstance(record, Step)), default=0)
    except OSError:
        return 0


def _stored(directory: Path) -> Progress:
    try:
        return msgspec.json.decode(read_regular(directory / FILE, 1000), type=Progress)
    except (OSError, *BROKEN):
        return Progress()
