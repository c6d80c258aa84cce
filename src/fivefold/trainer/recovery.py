"""What a restart costs: the seconds from the last step before it to the first new one after it, by part.

    notice    until ranks were started again: peers time out, launchers agree on who is left
    re-plan   the choice of a layout
    start     imports, ranks that meet, the model
    load      the newest state
    repeat    steps that had been done since that state, and the first that had not

recovery = Recovery.seen(directory, planned=0.05, apart=False)    # rank 0, before the metrics are trimmed
recovery.loads(); recovery.loaded(done); ...; recovery.on_step(record)
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from fivefold.support.files import open_regular
from fivefold.trainer.records import METRICS, Evaluation, Step
from fivefold.trainer.resuming import reached

FILE = "recoveries.jsonl"
_CLOCK = "/proc/uptime", "/proc/self/stat"


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
    """A listener of rank 0 that says once what the restart has cost."""

    def __init__(self, step: int, lost: float, planned: float, apart: bool, say: Callable[[str], None]):
        """`lost`: when the last step was done; `planned`: seconds that the choice of a layout took, in this process
        where ranks are `apart`, else before it began. Times are seconds since 1970."""
        self.step, self.lost, self.planned, self.say = step, lost, planned, say
        begun = began()
        self.begun = begun + planned if apart else begun
        self.notice = max(0.0, begun - lost - (0.0 if apart else planned))
        self.directory, self.ranks, self.layout = Path(), 1, ""
        self.loading = self.done_loading = begun
        self.resumed = 0

    @classmethod
    def seen(cls, directory: Path, planned: float, apart: bool, say: Callable[[str], None]) -> "Recovery | None":
        """Of a run that had come somewhere; None if its metrics say nothing."""
        last = reached(directory)
        if not last:
            return None
        recovery = cls(last, (directory / METRICS).stat().st_mtime, planned, apart, say)
        recovery.directory = directory
        return recovery

    def loads(self) -> None:
        self.loading = time.time()

    def loaded(self, step: int, ranks: int, layout: str) -> None:
        self.done_loading, self.resumed, self.ranks, self.layout = time.time(), step, ranks, layout

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
            start=max(0.0, self.loading - self.begun),
            load=self.done_loading - self.loading,
            repeat=now - self.done_loading,
        )
        self.say(f"recovered in {recovered}")
        try:
            with open_regular(self.directory / FILE, append=True) as file:
                file.write(msgspec.json.encode(recovered) + b"\n")
        except OSError as error:
            self.say(f"{FILE} cannot be written: {error.strerror}; training continues without it")

    def on_evaluation(self, record: Evaluation) -> None:
        pass

    def close(self) -> None:
        pass


def began() -> float:
    """When this process did, in seconds since 1970; where the system does not say, now."""
    try:
        up, stat = (Path(file).read_text() for file in _CLOCK)
        ticks = int(stat.rpartition(") ")[2].split()[19])
        return time.time() - (float(up.split()[0]) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.time()
