"""One rank of a run, from its first signal to its exit code; in a command's own process, or in one of `ff.train`'s."""

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

from rich.console import Console

from fivefold.data.rows import Splits
from fivefold.job.config import Job
from fivefold.job.preflight import preflight
from fivefold.launch import logs
from fivefold.launch.exits import INTERRUPTED, STOPPING, TERMINATED, say, say_ended, signal_name
from fivefold.launch.world import World, current_world
from fivefold.support.errors import TrainingError, UserError
from fivefold.support.plugins import options
from fivefold.trainer.records import Listener
from fivefold.trainer.report import Failed, Finished, RefusedInput, ReportedOutput, ReportWriter
from fivefold.trainer.resuming import Start

_PATIENCE = 1.0  # seconds for a second Ctrl-C to end in an orderly way


class RankEnd(NamedTuple):
    code: int  # as of a process
    directory: Path | None = None  # of the run, if no step of it is left
    why: str = ""  # else


def run_rank(
    job: Job,
    sources: Splits,
    world: World,
    start: Start,
    console: Console,
    tell: Callable[[str], None] = say,
    listeners: Sequence[Listener] = (),
) -> RankEnd:
    """Train as the rank that this process is; signals to stop are heard from here on. `tell` gets what a first Ctrl-C
    is answered with, and `listeners` of rank 0 the steps."""
    again = not world.joined or bool(world.meeting.file)  # other launchers decide about it
    stop = _StopSignal(stopping_text(job, again), world, tell)  # before torch is imported, which takes seconds
    from fivefold.trainer.loop import Stopped
    from fivefold.trainer.run import run_job

    if not faulthandler.is_enabled():  # by our own launcher
        faulthandler.enable()
    try:
        return RankEnd(0, run_job(job, sources, world, console, start, lambda: bool(stop.signal), listeners))
    except Stopped as stopped:
        by = signal_name(stop.signal) if stop.signal else "a signal to another rank"
        command = f"'fivefold train {stopped.directory}{options(job.plugins)}'" if start.fresh else "the same command"
        saved = f"its checkpoint is saved, and {command} resumes from it"
        how = saved if job.checkpoint.save else "nothing is saved: checkpoint.save=false"
        why = f"stopped by {by} after step {stopped.step}; {how}"
        console.print(why, soft_wrap=True)
        code = INTERRUPTED if stop.signal == signal.SIGINT else TERMINATED if job.checkpoint.save else 1
        return RankEnd(code, why=why)
    except KeyboardInterrupt:
        return RankEnd(INTERRUPTED)


def stopping_text(job: Job, again: bool = True) -> str:
    """What a first Ctrl-C is answered with, where it may be pressed `again`."""
    saving = " and its checkpoint" if job.checkpoint.save else ""
    return f"stopping after this step{saving}" + ("; Ctrl-C again ends at once" if again else "")


class _StopSignal:
    """The signal to stop, which waits for a step; Ctrl-C says `sentence` first, and a second one waits for nothing.

    Ranks of a launcher leave the second to it: one Ctrl-C may reach them twice, from the terminal and from there.
    """

    def __init__(self, sentence: str, world: World, tell: Callable[[str], None]) -> None:
        self.signal, self.sentence, self.alone, self.tell = 0, sentence, not world.joined, tell
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGINT is in the background, and SIGHUP under nohup
                signal.signal(number, self._end)
        if world.rank == 0:
            # Handlers wait until the main thread is out of a kernel, a compiler or a read; this thread does not.
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(reading,), daemon=True).start()

    def _end(self, number: int, _: object) -> None:
        if self.alone and number == self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    def _listen(self, pipe: int) -> None:
        pressed = 0
        while True:
            pressed += os.read(pipe, 1) == bytes([signal.SIGINT])
            if pressed == 1 and self.sentence:
                self.tell(self.sentence)
                self.sentence = ""
            if pressed == 2 and self.alone:
                threading.Timer(_PATIENCE, os._exit, [INTERRUPTED]).start()
                say_ended()
                return


# ---- of ff.train ----------------------------------------------------------------------------------------------------


def train_rank(rank: int, ranks: int, job: Job, start: Start, path: Path) -> None:
    """One rank of `ff.train`, which reports into a file and ends as the process of a command would."""
    report = ReportWriter(path)
    try:
        world = current_world() if ranks > 1 else World()  # one has nobody to join
        console = Console(
            file=cast(IO[str], ReportedOutput(report)), highlight=False, quiet=rank > 0, force_terminal=False
        )
        end = run_rank(job, preflight(job, ranks), world, start, console, report.say, [report])
        if rank == 0:
            report.send(Failed(end.why) if end.code else Finished(str(end.directory)))
        if end.code:
            sys.exit(end.code)
    except UserError as error:
        report.send(RefusedInput(error.problems, error.codes))
        sys.exit(2)
    except TrainingError as error:
        report.send(Failed(str(error)))
        sys.exit(error.code)
    except Exception as error:
        traceback.print_exc()
        report.send(Failed(f"{type(error).__name__}: {error}"))
        sys.exit(1)
    finally:
        logs.end()  # while its peers do not know yet: what it says explains what they will say
