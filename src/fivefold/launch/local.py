"""`--nproc N`: N ranks of this machine that train. Clusters use torchrun or Slurm instead.

Our own, because torchrun answers Ctrl-C and a lost rank with pages of its own: here the first rank to fail is named in
one line, the others get a moment to say what they know, and none is left behind.
"""

import os
import re
import runpy
import secrets
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

from fivefold.launch import logs
from fivefold.launch.cores import cores
from fivefold.launch.ends import INTERRUPTED, STOPPING, TERMINATED, End, say, say_ended, signal_name
from fivefold.launch.processes import Processes
from fivefold.launch.restarts import Restarts
from fivefold.launch.roster import Roster
from fivefold.launch.secret import SECRET
from fivefold.launch.statement import ranks_text
from fivefold.launch.world import PLANNED, RESTARTS, RUN, STORE
from fivefold.support.errors import PeerLost, UserError

_GRACE = 8.0  # seconds for the others to end after a first failure or Ctrl-C; then they are ended
_SAVING = 600.0  # seconds for a last checkpoint after a signal to stop, if no rank fails


class Arrangement(NamedTuple):
    """How ranks are started."""

    ranks: int
    place: Callable[[int], str] = lambda rank: ""  # where a rank stands in the layout
    words: Sequence[str] = ()  # of the command line, after those that every start has
    said: str = ""
    took: float = 0.0  # seconds to find it


class Elastic(NamedTuple):
    """What a run does about ranks that are lost."""

    arrange: Callable[[int], Arrangement]  # for a number of ranks; UserError if there is none
    gpus: int = 0  # of this machine, if ranks compute on them
    every: float = 30.0  # seconds between looks for ranks that are lost


def launch(
    nproc: int,
    arguments: list[str],
    place: Callable[[int], str] = lambda rank: "",
    restarts: int = 0,
    interrupted: str = "stopping; Ctrl-C again ends at once",
    elastic: Elastic | None = None,
) -> int:
    """Run `python -m ARGUMENTS` as `nproc` ranks, and up to `restarts` times again if a rank fails.

    `place` says where a rank stands in the layout. Signals to stop are handed on to the ranks, which save before they
    end. The result is 0, the first failure's exit code, 130 after Ctrl-C, which is answered with the sentence
    `interrupted` and a second time by ending all, or 143 after another signal and a checkpoint.
    A failure that comes twice in the same step would come again, and so there is no third start (`restarts.py`). An
    `elastic` run goes on without ranks that are lost, and with them when they are back (`roster.py`).
    """
    starts = _Starts(nproc, arguments, place, interrupted, elastic)
    with starts.signals_handed_on():
        return starts.all(Restarts(restarts))


class _Starts:
    """The starts of one run."""

    def __init__(
        self,
        nproc: int,
        arguments: list[str],
        place: Callable[[int], str],
        interrupted: str,
        elastic: Elastic | None = None,
    ):
        self.arguments, self.interrupted, self.elastic = arguments, interrupted, elastic
        self.run = os.environ.get(RUN, uuid.uuid4().hex)
        self.told = 0  # the signal to stop, if there was one
        self.ranks: Processes | None = None  # of the start under way
        self.roster = Roster(nproc, elastic.gpus if elastic else 0, self._step)
        self.now = elastic.arrange(nproc) if elastic else Arrangement(nproc, place)
        self.growing = False  # the start under way was told to stop, because ranks are back
        self.back: list[int] = []  # those
        self.furthest = 0  # step that a start has come to

    def all(self, policy: Restarts) -> int:
        """Start after start, until one ends well, or another would not help; the exit code."""
        start = 0
        while True:
            if self.elastic and self.now.said:
                say(self.now.said)
            code, failure, dead = self.once(start)
            start += 1
            if self.growing and code == TERMINATED and not self.told:
                self._arrange("are back", self.back)
            elif failure is None or not self._again(policy, failure, dead):
                return code

    def _again(self, policy: Restarts, failure: End, dead: list[int]) -> bool:
        """After a failure: wait, and arrange another start, if one may help."""
        if self.elastic:
            here = self.roster.here
            if lost := self.roster.lose([here[rank] for rank in dead]):
                return self._arrange("do not answer", lost)
        verdict = policy.after(failure)
        if not verdict.again:
            if verdict.why:
                say(verdict.why)
            return False
        pause = f" in {verdict.pause:.0f} s" if verdict.pause else ""
        say(f"starting again from the last checkpoint{pause}: {verdict.why}")
        time.sleep(verdict.pause)  # a signal to stop raises nothing, and is handed on to the next start
        return not self.told

    def _arrange(self, what: str, ranks: list[int]) -> bool:
        """Another number of ranks, if the job takes it."""
        assert self.elastic is not None
        one = "is" if len(ranks) == 1 else "are"
        said = what.replace("are", one).replace("do not", "does not" if len(ranks) == 1 else "do not")
        say(f"{ranks_text(ranks)} {said}: {len(self.roster.here)} of {self.roster.ranks} are here")
        try:
            self.now = self.elastic.arrange(len(self.roster.here))
        except UserError as error:
            for problem in error.problems:
                say(f"error: {problem}")
            return False
        return True

    def _step(self) -> int:
        """That the run has come to."""
        place = self.ranks.board.place(0) if self.ranks else ""
        step = re.match(r"step (\d+)", place)
        self.furthest = max(self.furthest, int(step[1]) if step else 0)
        return self.furthest

    def _look(self) -> None:
        """While ranks work: if lost ones are back, and more of them are of use, have all save and stop."""
        assert self.elastic is not None
        if self.growing or self.told or not self._step():  # before the first step there is nobody to tell
            return
        if back := self.roster.look(self.elastic.every):
            try:
                more = self.elastic.arrange(len(self.roster.here))
            except UserError:
                return
            if more.words != self.now.words and self.ranks:
                self.growing, self.back = True, back
                self.ranks.tell(signal.SIGUSR1)
            else:
                say(f"{ranks_text(back)} answer{'s' * (len(back) == 1)} again; the layout stays what it is")

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

    def once(self, start: int) -> tuple[int, End | None, list[int]]:
        """The exit code of one start; what failed, if another start may help; and the ranks that died by themselves."""
        nproc, self.growing = self.now.ranks, False
        threads = None if "OMP_NUM_THREADS" in os.environ else max(1, cores() // nproc)
        with tempfile.TemporaryDirectory(prefix="fivefold-") as home:  # private to this user: no port is opened
            added = {RUN: self.run, RESTARTS: str(start), STORE: f"{home}/store", SECRET: secrets.token_hex(32)}
            added[logs.LIVES] = f"{home}/logging"
            added |= self.roster.environment(os.environ) | ({PLANNED: f"{self.now.took:.3f}"} if start else {})
            env = {"OMP_NUM_THREADS": str(threads), **os.environ, **added}
            ranks = self.ranks = Processes(nproc, Path(home), attached=True)
            try:
                words = [*self.arguments, *self.now.words]
                ranks.start(f"{__name__}:run_module", words, env=env, threads=threads)
                if self.told:
                    ranks.tell(self.told)  # those that it was too early for
                ends = ranks.watch(self._grace, each=self._look if self.elastic else None)
            except KeyboardInterrupt:  # the second
                say_ended()
                return INTERRUPTED, None, []
            finally:
                self._step()
                self.ranks = None
                ranks.kill()
                logs.wait_for(Path(added[logs.LIVES]))  # the ranks' last words come before what is said of them
        return *self._judged(ends), [end.rank for end in ends if end.kind == "died" and end.code < 0]

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
            where = f" ({self.now.place(end.rank)})" if self.now.place(end.rank) else ""
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
