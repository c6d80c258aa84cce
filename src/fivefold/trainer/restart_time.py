"""The time that a restart takes: the seconds from the last step before it to the first new one after it, by part.

    notice    until ranks were started again: peers time out, launchers agree on who is left
    re-plan   the choice of a layout
    start     imports, rendezvous, the model
    load      the newest checkpoint
    repeat    the steps after that checkpoint, up to the first that had not been done before

recovery = Recovery.after_restart(directory, planned=0.05, apart=False)    # rank 0, before the metrics are trimmed
recovery.loads(); recovery.loaded(done); ...; recovery.on_step(record)
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from fivefold.support.files import open_regular
from fivefold.trainer.records import METRICS_FILE, Evaluation, Step
from fivefold.trainer.restart_limit import last_recorded_step

RECOVERIES_FILE = "recoveries.jsonl"
_CLOCK_FILES = "/proc/uptime", "/proc/self/stat"


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """One restart, in seconds."""

    step: int  # the last one that was done before
    resumed: int  # the step of the state that was loaded
    ranks: int
    layout: str
    notice: float
    replan: float
    start: float
    load: float
    repeat: float

    @property
    def total(self) -> float:
        return self.notice + self.replan + self.start + self.load + self.repeat

    def __str__(self) -> str:
        parts = f"notice {self.notice:.1f}, re-plan {self.replan:.1f}, start {self.start:.1f}, load {self.load:.1f}"
        again = self.step - self.resumed
        steps = f"{again} step{'s' * (again != 1)} again" if again else "no step again"
        return (
            f"{self.total:.1f} s from step {self.step} to step {self.step + 1}: {parts}, repeat {self.repeat:.1f} "
            f"({steps}); {self.ranks} ranks, {self.layout}"
        )


class Recovery:
    """A listener of rank 0 that prints once how long the restart took, and adds it to recoveries.jsonl."""

    def __init__(self, step: int, lost: float, planned: float, apart: bool, say: Callable[[str], None]):
        """`lost`: when the last `step` was done; `planned`: seconds that the choice of a layout took, in this process
        where ranks are `apart`, else before it began. Times are seconds since 1970."""
        self.step, self.planned, self.say = step, planned, say
        process_start = process_start_time()
        self.begun = process_start + planned if apart else process_start
        self.notice = max(0.0, process_start - lost - (0.0 if apart else planned))
        self.directory, self.ranks, self.layout = Path(), 1, ""
        self.load_start = self.load_end = process_start
        self.resumed = 0

    @classmethod
    def after_restart(
        cls, directory: Path, planned: float, apart: bool, say: Callable[[str], None]
    ) -> "Recovery | None":
        """The recovery of a run that had made steps; None if its metrics have none."""
        last = last_recorded_step(directory)
        if not last:
            return None
        recovery = cls(last, (directory / METRICS_FILE).stat().st_mtime, planned, apart, say)
        recovery.directory = directory
        return recovery

    def loads(self) -> None:
        self.load_start = time.time()

    def loaded(self, step: int, ranks: int, layout: str) -> None:
        self.load_end, self.resumed, self.ranks, self.layout = time.time(), step, ranks, layout

    def on_step(self, record: Step) -> None:
        if record.step != self.step + 1:
            return
        now = time.time()
        recovered = Recovered(
            step=self.step,
            resumed=self.resumed,
            ranks=self.ranks,
            layout=self.layout,
            notice=self.notice,
            replan=self.planned,
            start=max(0.0, self.load_start - self.begun),
            load=self.load_end - self.load_start,
            repeat=now - self.load_end,
        )
        self.say(f"recovered in {recovered}")
        try:
            with open_regular(self.directory / RECOVERIES_FILE, append=True) as file:
                file.write(msgspec.json.encode(recovered) + b"\n")
        except OSError as error:
            self.say(f"{RECOVERIES_FILE} cannot be written: {error.strerror}; training continues without it")

    def on_evaluation(self, record: Evaluation) -> None:
        pass

    def close(self) -> None:
        pass


def process_start_time() -> float:
    """When this process began, in seconds since 1970; now, where the system does not say."""
    try:
        uptime, stat = (Path(file).read_text() for file in _CLOCK_FILES)
        ticks = int(stat.rpartition(") ")[2].split()[19])
        return time.time() - (float(uptime.split()[0]) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.time()
