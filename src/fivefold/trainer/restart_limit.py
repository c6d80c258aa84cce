"""Ends a run that launchers restart again and again without progress.

Our own launcher knows why ranks failed, and stops earlier (`launch/local.py`); torchrun and Slurm know only that they
did. progress.json in a run's directory has the last step that any start has recorded, and how many starts there were
since.
"""

from pathlib import Path

import msgspec

from fivefold.support.errors import UserError
from fivefold.support.files import put, read_regular
from fivefold.support.parsing import PARSE_ERRORS
from fivefold.trainer.records import METRICS_FILE, Step, read

PROGRESS_FILE = "progress.json"  # in the run's directory
MAX_STARTS_WITHOUT_STEP = 5  # in a row without a new step


class Progress(msgspec.Struct, frozen=True):
    step: int = 0  # the last one that any start recorded
    starts: int = 0  # since then, without a new step


def count_start(directory: Path, *, again: bool, steps: int) -> None:
    """Counts a start of a run of so many steps; `again`: by a launcher that restarts it.

    After `MAX_STARTS_WITHOUT_STEP` starts without a new step it raises UserError and resets the count, so that a person
    who has fixed the cause can start the run.
    """
    last_step = last_recorded_step(directory)
    if last_step >= steps:
        return
    progress = _stored_progress(directory) if again else Progress(last_step)
    progress = Progress(last_step, 1) if last_step > progress.step else Progress(progress.step, progress.starts + 1)
    stuck = progress.starts > MAX_STARTS_WITHOUT_STEP
    put(directory / PROGRESS_FILE, msgspec.json.encode(Progress(progress.step) if stuck else progress).decode() + "\n")
    if stuck:
        raise UserError(
            f"{MAX_STARTS_WITHOUT_STEP} starts in a row have made no step after step {progress.step}, and this one is "
            f"not tried; the reasons are in {directory / 'logs'}, and the next start tries again",
            "run.resume.starts",
        )


def last_recorded_step(directory: Path) -> int:
    """The last step that a run has recorded; 0 if its metrics cannot be read, which writing them will report."""
    try:
        records = (record for _, record in read(directory / METRICS_FILE))
        return max((record.step for record in records if isinstance(record, Step)), default=0)
    except OSError:
        return 0


def _stored_progress(directory: Path) -> Progress:
    try:
        return msgspec.json.decode(read_regular(directory / PROGRESS_FILE, 1000), type=Progress)
    except (OSError, *PARSE_ERRORS):
        return Progress()
