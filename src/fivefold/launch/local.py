"""`--nproc N`: N ranks of this machine that train. Clusters use torchrun or Slurm instead.

Our own, because torchrun answers Ctrl-C and a lost rank with pages of its own: here the first rank to fail is named in
one line, the others get a moment to say what they know, and none is left behind.
"""

import os
import runpy
import secrets
import signal
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from fivefold.launch import logs
from fivefold.launch.cores import cores
from fivefold.launch.ends import INTERRUPTED, STOPPING, TERMINATED, End, say, say_ended, signal_name
from fivefold.launch.processes import Processes
from fivefold.launch.secret import SECRET
from fivefold.launch.world import RESTARTS, RUN, STORE
from fivefold.support.errors import PeerLost

_GRACE = 8.0  # seconds for the others to end after a first failure or Ctrl-C; then they are ended
_SAVING = 600.0  # seconds for a last checkpoint after a signal to stop, if no rank fails


def launch(
    nproc: int,
    arguments: list[str],
    place: Callable[[int], str] = lambda rank: "",
    restarts: int = 0,
    interrupted: str = "stopping; Ctrl-C again ends at once",
) -> int:
    """Run `python -m ARGUMENTS` as `nproc` ranks, and up to `restarts` times again if a rank fails.

    `place` says where a rank stands in the layout. Signals to stop are handed on to the ranks, which save before they
    end. The result is 0, the first failure's exit code, 130 after Ctrl-C, which is answered with the sentence
    `interrupted` and a second time by ending all, or 143 after another signal and a checkpoint.
    A failure that comes twice in a row in the same step would come again, and so there is no third start.
    """
    starts, code, before = _Starts(nproc, arguments, place, interrupted), 1, None
    with starts.signals_handed_on():
        for start in range(restarts + 1):
            if start:
                say(f"starting again from the last checkpoint: {start} of {restarts}")
            code, failure = starts.once(start)
            if failure is None:
                break
            if before and before.signature == failure.signature and start < restarts:
                say("the same failure came twice in a row, without progress: it is not tried again")
                break
            before = failure
    return code


class _Starts:
    """The starts of one run."""

    def __init__(self, nproc: int, arguments: list[str], place: Callable[[int], str], interrupted: str):
        self.nproc, self.arguments, self.place, self.interrupted = nproc, arguments, place, interrupted
        self.run = os.environ.get(RUN, uuid.uuid4().hex)
        self.threads = None if "OMP_NUM_THREADS" in os.environ else max(1, cores() // nproc)
        self.told = 0  # the signal to stop, if there was one
        self.ranks: Processes | None = None  # of the start under way

    @contextmanager
    def signals_handed_on(self) -> Iterator[None]:
        """To the ranks; signals that are ignored, as SIGHUP is under nohup, stay so."""

        launcher = os.getpid()

        def hand_on(number: int, _: object) -> None:
            if os.getpid() != launcher:  # a rank that has just been forked
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            if number == self.told == signal.SIGINT:
                raise KeyboardInterrupt
            self.told = number
            if number == signal.SIGINT and not (self.ranks and self.ranks.board.place(0)):
                say(self.interrupted)  # else rank 0 does, which may be drawing on the terminal
            if self.ranks:
                self.ranks.tell(number)

        heard = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, hand_on) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def once(self, start: int) -> tuple[int, End | None]:
        """The exit code of one start, and what failed, if another start may help."""
        with tempfile.TemporaryDirectory(prefix="fivefold-") as home:  # private to this user: no port is opened
            added = {RUN: self.run, RESTARTS: str(start), STORE: f"{home}/store", SECRET: secrets.token_hex(32)}
            added[logs.LIVES] = f"{home}/logging"
            env = {"OMP_NUM_THREADS": str(self.threads), **os.environ, **added}
            ranks = self.ranks = Processes(self.nproc, Path(home), attached=True)
            try:
                ranks.start(f"{__name__}:run_module", self.arguments, env=env, threads=self.threads)
                if self.told:
                    ranks.tell(self.told)  # those that it was too early for
                ends = ranks.watch(self._grace)
            except KeyboardInterrupt:  # the second
                say_ended()
                return INTERRUPTED, None
            finally:
                self.ranks = None
                ranks.kill()
                logs.wait_for(Path(added[logs.LIVES]))  # the ranks' last words come before what is said of them
        return self._judged(ends)

    def _grace(self, end: End) -> float:
        """Seconds for the others after an end. Ranks that a signal ended before they could answer it leave no hope."""
        return (
            _SAVING
            if end.code in (INTERRUPTED, TERMINATED)
            else 1.0
            if self.told and end.code == -self.told
            else _GRACE
        )

    def _judged(self, ends: list[End]) -> tuple[int, End | None]:
        first = min(ends, key=lambda end: end.blame)
        if first.kind == "returned":
            return 0, None
        if any(end.code in (INTERRUPTED, TERMINATED) for end in ends):  # which a rank says when all have saved
            return INTERRUPTED if self.told == signal.SIGINT else TERMINATED, None
        if self.told:
            say(f"stopped by {signal_name(self.told)}; no step was saved since")
        said = first.code in (-self.told, 2)  # by the lines above, or by the rank: bad input
        silent = [end for end in ends if end.kind == first.kind]
        for end in silent if first.kind in ("hung", "stopped") else [first] if not said else []:
            where = f" ({self.place(end.rank)})" if self.place(end.rank) else ""
            say(f"rank {end.rank}{where} {end.how}")
            if end.crash:
                say(end.crash)
        code = next((end.code for end in ends if end.code > 0 and end.code != PeerLost.code), 1)
        code = INTERRUPTED if self.told == signal.SIGINT and said else code
        return code, None if self.told or code == 2 else first


def run_module(rank: int, world: int, arguments: list[str]) -> NoReturn:
    """`python -m ARGUMENTS` in this process."""
    sys.argv = arguments
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except Exception:
        traceback.print_exc()  # multiprocessing would put a line of its own before it
        sys.exit(1)
    finally:
        logs.end()  # while its peers do not know yet: what it says explains what they will say
    sys.exit(0)
