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
from contextlib import contextmanager, suppress
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
        try:
            return starts.all(Restarts(restarts))
        except KeyboardInterrupt:  # the second, between two starts
            say_ended()
            return INTERRUPTED


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
        self.places: list[int] = []  # of the ranks of that start
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
                self._arrange()
            elif failure is None or not self._again(policy, failure, dead):
                return code
            if self.told:
                say(f"stopped by {signal_name(self.told)} between two starts; no step was saved since")
                return INTERRUPTED if self.told == signal.SIGINT else code

    def _again(self, policy: Restarts, failure: End, dead: list[int]) -> bool:
        """After a failure: wait, and arrange another start, if one may help."""
        if self.elastic and (lost := self.roster.lose([self.places[rank] for rank in dead], lambda: bool(self.told))):
            say(f"{ranks_text(lost)} {'does' if len(lost) == 1 else 'do'} not answer: {self.roster}")
            return self._arrange()
        verdict = policy.after(failure)
        if not verdict.again:
            if verdict.why:
                say(verdict.why)
            return False
        pause = f" in {verdict.pause:.0f} s" if verdict.pause else ""
        say(f"starting again from the last checkpoint{pause}: {verdict.why}")
        end = time.monotonic() + verdict.pause
        while not self.told and time.monotonic() < end:
            time.sleep(0.1)
        return not self.elastic or self._arrange()  # ranks may have come back in the start that failed

    def _arrange(self) -> bool:
        """For the ranks that are here, if the job takes so many."""
        assert self.elastic is not None
        try:
            self.now = self.elastic.arrange(len(self.roster.here))
        except UserError as error:
            for problem in error.problems:
                say(f"error: {problem}")
            return False
        return True

    def _step(self) -> int:
        """That the run has come to."""
        self.furthest = max(self.furthest, self._step_now())
        return self.furthest

    def _step_now(self) -> int:
        """That the start under way is in; 0 if its ranks have not begun one."""
        step = re.match(r"step (\d+)", self.ranks.board.place(0) if self.ranks else "")
        return int(step[1]) if step else 0

    def _look(self) -> None:
        """While ranks work: if lost ones are back, and more of them are of use, have all save and stop."""
        assert self.elastic is not None
        if self.growing or self.told or not self._step_now():  # a rank that is in no step does not listen yet
            return
        if back := self.roster.look(self.elastic.every):
            with suppress(UserError):
                self.growing = self.elastic.arrange(len(self.roster.here)).words != self.now.words
            one = len(back) == 1
            if self.growing and self.ranks:
                say(f"{ranks_text(back)} {'is' if one else 'are'} back: {self.roster}")
                self.ranks.tell(signal.SIGUSR1)
            else:
                say(f"{ranks_text(back)} answer{'s' * one} again; the layout stays what it is")

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
        """The exit code of one start; what failed, if another start may help; and the ranks that no peer explains."""
        nproc, self.growing = self.now.ranks, False
        self.places = self.roster.here[:nproc]
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
        return *self._judged(ends), [end.rank for end in ends if end.accused]

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
        silent = [end for end in ends if (end.kind, end.doubt) == (first.kind, first.doubt)]
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
