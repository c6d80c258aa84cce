"""The seconds that a restart takes, from the last step before it to the first new step after it, by part.

notice    until ranks were started again: peers time out, launchers agree on who is left
re-plan   the choice of a layout
start     imports, rendezvous, the model
load      the newest checkpoint
repeat    the steps after that checkpoint, up to the first that had not been done before

timer = RestartTimer.of_run(directory, replan=0.05, replanned_here=False, say=print)   # on rank 0
timer.start_load()
timer.end_load(step, ranks, layout)
timer.on_step(record)                                                                  # as a listener
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
_PROC_UPTIME, _PROC_STAT = "/proc/uptime", "/proc/self/stat"
_START_TICKS = 19  # index of field 22 of _PROC_STAT, counted after the process's name, which may have spaces in it


class RestartTime(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the recoveries file: one restart; the parts are in seconds."""

    step: int  # the last step before the restart
    resumed: int  # the step of the checkpoint that was loaded
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
        repeated = self.step - self.resumed
        steps = f"{repeated} step{'s' * (repeated != 1)} again" if repeated else "no step again"
        return (
            f"{self.total:.1f} s from step {self.step} to step {self.step + 1}: {parts}, repeat {self.repeat:.1f} "
            f"({steps}); {self.ranks} ranks, {self.layout}"
        )


class RestartTimer:
    """A listener of rank 0: at the first new step it prints the times of the restart, and adds them to the file."""

    def __init__(self, directory: Path, step: int, replan: float, *, replanned_here: bool, say: Callable[[str], None]):
        """`step` is the last one before the restart. `replan` are the seconds that the choice of a layout took: in this
        process if `replanned_here`, else in the launcher, before this process began.

        Metrics must not be trimmed yet: their file's last change tells when the last step was done.
        """
        self.directory, self.step, self.replan, self.say = directory, step, replan, say
        last_step_end = (directory / METRICS_FILE).stat().st_mtime  # seconds since 1970, as all times here
        process_start = process_start_time()
        self.notice = max(0.0, process_start - last_step_end - (0.0 if replanned_here else replan))
        self.replan_end = process_start + (replan if replanned_here else 0.0)
        self.load_start = self.load_end = process_start
        self.resumed, self.ranks, self.layout = 0, 1, ""

    @classmethod
    def of_run(
        cls, directory: Path, replan: float, *, replanned_here: bool, say: Callable[[str], None]
    ) -> "RestartTimer | None":
        """The timer of a restarted run; None if its metrics have no step."""
        step = last_recorded_step(directory)
        return cls(directory, step, replan, replanned_here=replanned_here, say=say) if step else None

    def start_load(self) -> None:
        self.load_start = time.time()

    def end_load(self, step: int, ranks: int, layout: str) -> None:
        """`step` is that of the checkpoint."""
        self.load_end, self.resumed, self.ranks, self.layout = time.time(), step, ranks, layout

    def on_step(self, record: Step) -> None:
        if record.step != self.step + 1:
            return
        restart = RestartTime(
            step=self.step,
            resumed=self.resumed,
            ranks=self.ranks,
            layout=self.layout,
            notice=self.notice,
            replan=self.replan,
            start=max(0.0, self.load_start - self.replan_end),
            load=self.load_end - self.load_start,
            repeat=time.time() - self.load_end,
        )
        self.say(f"recovered in {restart}")
        try:
            with open_regular(self.directory / RECOVERIES_FILE, append=True) as file:
                file.write(msgspec.json.encode(restart) + b"\n")
        except OSError as error:
            self.say(f"{RECOVERIES_FILE} cannot be written: {error.strerror}; training continues without it")

    def on_evaluation(self, record: Evaluation) -> None:
        pass

    def close(self) -> None:
        pass


def process_start_time() -> float:
    """When this process began, in seconds since 1970; where the system does not tell, the time now."""
    try:
        uptime = float(Path(_PROC_UPTIME).read_text().split()[0])
        start_ticks = int(Path(_PROC_STAT).read_text().rpartition(") ")[2].split()[_START_TICKS])
        return time.time() - (uptime - start_ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.time()
