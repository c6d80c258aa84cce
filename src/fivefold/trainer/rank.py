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
from fivefold.launch import rank_log
from fivefold.launch.exits import INTERRUPTED, STOP_SIGNALS, TERMINATED, say, say_ended, signal_name
from fivefold.launch.world import World, current_world
from fivefold.support.errors import TrainingError, UserError
from fivefold.support.plugins import options
from fivefold.trainer.records import Listener
from fivefold.trainer.report import Failed, Finished, RefusedInput, ReportedOutput, ReportWriter
from fivefold.trainer.resuming import Start

_SECOND_CTRL_C_WAIT = 1.0  # seconds for a second Ctrl-C to end in an orderly way


class RankEnd(NamedTuple):
    code: int  # the exit code
    directory: Path | None = None  # of the run, if all its steps are done
    why: str = ""  # a sentence, if not


def run_rank(
    job: Job,
    sources: Splits,
    world: World,
    start: Start,
    console: Console,
    tell: Callable[[str], None] = say,
    listeners: Sequence[Listener] = (),
) -> RankEnd:
    """Trains as one rank, in this process; handles signals to stop from here on.

    `tell` prints the answer to a first Ctrl-C; `listeners` of rank 0 get the records of steps.
    """
    second_ends = not world.joined or bool(world.meeting.file)  # other launchers handle a second Ctrl-C themselves
    stop = _StopSignal(
        stopping_text(job, second_ends=second_ends), world, tell
    )  # before torch is imported, which takes seconds
    from fivefold.trainer.loop import Stopped
    from fivefold.trainer.run import run_job

    if not faulthandler.is_enabled():  # our own launcher enables it
        faulthandler.enable()
    try:
        return RankEnd(0, run_job(job, sources, world, console, start, lambda: bool(stop.signal), listeners))
    except Stopped as stopped:
        by = signal_name(stop.signal) if stop.signal else "a signal to another rank"
        command = f"'fivefold train {stopped.directory}{options(job.plugins)}'" if start.fresh else "the same command"
        outcome = "nothing is saved: checkpoint.save=false"
        if job.checkpoint.save:
            outcome = f"its checkpoint is saved, and {command} resumes from it"
        why = f"stopped by {by} after step {stopped.step}; {outcome}"
        console.print(why, soft_wrap=True)
        code = INTERRUPTED if stop.signal == signal.SIGINT else TERMINATED if job.checkpoint.save else 1
        return RankEnd(code, why=why)
    except KeyboardInterrupt:
        return RankEnd(INTERRUPTED)


def stopping_text(job: Job, *, second_ends: bool = True) -> str:
    """The answer to a first Ctrl-C; `second_ends`: whether a second one ends the run at once."""
    saving = " and its checkpoint" if job.checkpoint.save else ""
    return f"stopping after this step{saving}" + ("; Ctrl-C again ends at once" if second_ends else "")


class _StopSignal:
    """Notes a signal to stop after the step. A first Ctrl-C prints `sentence`; a second one ends the process at once.

    Ranks of a launcher leave the second to it: one Ctrl-C may reach them twice, from the terminal and the launcher.
    """

    def __init__(self, sentence: str, world: World, tell: Callable[[str], None]) -> None:
        self.signal, self.sentence, self.alone, self.tell = 0, sentence, not world.joined, tell
        for number in STOP_SIGNALS:
            if (
                signal.getsignal(number) is not signal.SIG_IGN
            ):  # SIGINT is ignored in the background, SIGHUP under nohup
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
                threading.Timer(_SECOND_CTRL_C_WAIT, os._exit, [INTERRUPTED]).start()
                say_ended()
                return


# ---- of ff.train ----------------------------------------------------------------------------------------------------


def train_rank(rank: int, ranks: int, job: Job, start: Start, path: Path) -> None:
    """One rank of `ff.train`: writes messages into the file at `path`, and exits as the process of a command would."""
    report = ReportWriter(path)
    try:
        world = current_world() if ranks > 1 else World()  # one rank joins no rendezvous
        console = Console(
            file=cast(IO[str], ReportedOutput(report)), highlight=False, quiet=rank > 0,
            force_terminal=False, force_jupyter=False,
        )  # fmt: skip
        end = run_rank(job, preflight(job, ranks), world, start, console, report.say, [report])
        if rank == 0:
            report.send(Failed(end.why) if end.code else Finished(str(end.directory)))
        if end.code:
            sys.exit(end.code)
    except UserError as error:
        report.send(RefusedInput(error.problems, [getattr(problem, "code", "") for problem in error.coded]))
        sys.exit(2)
    except TrainingError as error:
        report.send(Failed(str(error)))
        sys.exit(error.code)
    except Exception as error:
        traceback.print_exc()
        report.send(Failed(f"{type(error).__name__}: {error}"))
        sys.exit(1)
    finally:
        rank_log.stop()  # before the peers notice: this rank's error explains theirs
