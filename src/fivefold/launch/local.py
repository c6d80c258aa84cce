"""N ranks of this machine that train: of `--nproc N`, and of `ff.train`. Clusters use torchrun or Slurm instead.

Our own, because torchrun answers Ctrl-C and a lost rank with pages of its own: here the first rank to fail is named in
one line, the others get a moment to say what they know, and none is left behind.
"""

import os
import re
import runpy
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fivefold.job.config import TrainConfig
from fivefold.launch import faults, logs
from fivefold.launch.exits import ENDED, INTERRUPTED, STOPPING, TERMINATED, End, say, say_ended, signal_name
from fivefold.launch.handshake import ranks_text
from fivefold.launch.host import cores
from fivefold.launch.processes import Processes
from fivefold.launch.rendezvous import SECRET
from fivefold.launch.world import PLANNED, RESTARTS, RUN, STORE
from fivefold.support.errors import PeerLost, Problem, UserError

# ---- restarts -------------------------------------------------------------------------------------------------------
# Whether to start again after a failure, and after how long: the same failure in the same place is not tried for ever.
#
# policy = Restarts(3)
# policy.after(failure)      # Verdict(again=True, pause=0.0, why="1 of 3")
# policy.after(failure)      # Verdict(again=False, ..., why="the same failure came twice ...")


FIRST, LONGEST = 1.0, 60.0  # seconds before a start that follows a start without progress; each time twice as long
_STEP = re.compile(r"\bstep (\d+)")


class RestartVerdict(NamedTuple):
    again: bool
    pause: float  # seconds
    why: str


class Restarts:
    """The failures of one run. Progress, a later step than any before, forgets what came earlier."""

    def __init__(self, allowed: int):
        self.allowed, self.done = allowed, 0
        self.furthest = -1
        self.seen: set[tuple[int, str, str, str]] = set()  # failures since there was progress
        self.still = 0  # starts since then

    def after(self, failure: End) -> RestartVerdict:
        step = _STEP.search(failure.place)
        if step and int(step[1]) > self.furthest:
            self.furthest, self.still = int(step[1]), 0
            self.seen.clear()
        if self.done >= self.allowed:
            return RestartVerdict(False, 0.0, f"all {self.allowed} restarts are used up" if self.allowed else "")
        if failure.signature in self.seen:
            return RestartVerdict(False, 0.0, "the same failure came twice without progress: it is not tried again")
        self.seen.add(failure.signature)
        pause = min(LONGEST, FIRST * 2 ** (self.still - 1)) if self.still else 0.0
        self.done, self.still = self.done + 1, self.still + 1
        return RestartVerdict(True, pause, f"{self.done} of {self.allowed}")


# ---- roster ---------------------------------------------------------------------------------------------------------
# Which ranks of this machine can be started: those that are lost are looked for again and again.
#
# A rank has a place in which a process is started: a GPU, or a share of the CPU. After a failure the places of the
# ranks that died are tried. One that answers had a passing failure; one that does not is lost until it answers.


_PATIENCE = 60.0  # seconds for a place to answer
_GPUS = Path("/proc/driver/nvidia/gpus")
SHARING = "fivefold-rank-"  # of the NCCL_HOSTID that ranks have which share a GPU
# Does a GPU compute? In a process of its own: a driver that hangs holds whoever asks.
_TRIAL = "import torch; x = torch.ones(256, 256, device='cuda'); assert float((x @ x).sum()) == 256**3"


class DevicePool:
    def __init__(self, ranks: int, gpus: int, step: Callable[[], int] = lambda: 0):
        """`gpus` of this machine, which ranks share if they are more; none: ranks compute on the CPU. `step` says how
        far the run is, for faults that are planted."""
        self.ranks, self.gpus, self.step = ranks, gpus, step
        self.lost: set[int] = set()
        self.looked = time.monotonic()
        self.trials: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def here(self) -> list[int]:
        return [place for place in range(self.ranks) if place not in self.lost]

    def __str__(self) -> str:
        return f"{len(self.here)} of {self.ranks} are here"

    def lose(self, places: Sequence[int], stopping: Callable[[], bool] = lambda: False) -> list[int]:
        """Try some places, and return those that do not answer; if it is `stopping`, none is waited for."""
        trials = {place: self._trial(place) for place in places}
        deadline = time.monotonic() + _PATIENCE
        while any(trial.poll() is None for trial in trials.values()) and time.monotonic() < deadline and not stopping():
            time.sleep(0.01)
        deadline = 0.0 if stopping() else deadline
        gone = [place for place, trial in trials.items() if not self._answers(place, trial, deadline)]
        self.lost.update(gone)
        self.looked = time.monotonic()
        return gone

    def look(self, every: float) -> list[int]:
        """Called again and again while others work: the lost places that answer by now, tried `every` so many seconds
        and without waiting."""
        if self.lost and not self.trials and time.monotonic() - self.looked >= every:
            self.looked = time.monotonic()
            self.trials = {place: self._trial(place) for place in self.lost}
        if not self.trials:
            return []
        if any(trial.poll() is None for trial in self.trials.values()) and time.monotonic() - self.looked < _PATIENCE:
            return []
        trials, self.trials = self.trials, {}
        back = [place for place, trial in trials.items() if self._answers(place, trial, 0.0)]
        self.lost.difference_update(back)
        return back

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """For ranks that are to leave the lost places alone."""
        if not self.gpus or not self.lost:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(self._device(place, env) for place in self.here))}

    def _device(self, place: int, env: Mapping[str, str] = os.environ) -> str:
        visible = [word for word in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
        return visible[place % len(visible)] if visible else str(place % self.gpus)

    def _trial(self, place: int) -> "subprocess.Popen[bytes]":
        env = {**os.environ, **({"CUDA_VISIBLE_DEVICES": self._device(place)} if self.gpus else {})}
        command = [sys.executable, "-c", _TRIAL if self.gpus else "pass"]
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _answers(self, place: int, trial: "subprocess.Popen[bytes]", deadline: float) -> bool:
        try:
            code = trial.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            trial.kill()
            with suppress(subprocess.TimeoutExpired):  # a process that waits for a driver cannot be ended
                trial.wait(1)
            return False
        return code == 0 and not faults.lost(place, self.step())


def gpus_here() -> list[str]:
    """The GPUs of this machine that its driver lists, by name: 'NVIDIA H200'. No torch, and no CUDA, is needed."""
    models = []
    for file in sorted(_GPUS.glob("*/information")):
        with suppress(OSError):
            model = re.search(r"^Model:\s*(.+?)\s*$", file.read_text(errors="replace"), re.MULTILINE)
            models.append(model[1] if model else "")
    return models


def visible_gpus(env: Mapping[str, str] = os.environ, gpus: int | None = None) -> int:
    """How many of this machine's `gpus` CUDA will show to a process."""
    here, visible = len(gpus_here()) if gpus is None else gpus, env.get("CUDA_VISIBLE_DEVICES")
    return here if visible is None else min(here, len(list(filter(None, visible.split(",")))))


def sharing_problem(config: TrainConfig, gpus: int, local_ranks: int, apart: bool = False) -> str | None:
    """Why `train.share_gpu=nccl` cannot be, with so many GPUs for the ranks of a node; None when it can."""
    if config.share_gpu != "nccl" or local_ranks == 1:
        return None
    what = "train.share_gpu=nccl lets ranks of one machine share its GPUs"
    if not gpus:
        return Problem("train.share_gpu.cpu", f"{what}, and these compute on the CPU; nearest: train.share_gpu=gloo")
    if apart:
        slow = "these may be on several machines, between which it would slow NCCL down; leave it out"
        return Problem("train.share_gpu.machines", f"{what}, and {slow}")
    if local_ranks <= gpus:
        why = "it makes each rank a host of its own for NCCL, without NVLink and shared memory"
        own = f"each of these {local_ranks} has one of its own ({gpus} here): {why}; leave it out"
        return Problem("train.share_gpu.own", f"{what}, and {own}")
    return None


# ---- local ----------------------------------------------------------------------------------------------------------


_GRACE = 8.0  # seconds for the others to end after a first failure or Ctrl-C; then they are ended
_SAVING = 600.0  # seconds for a last checkpoint after a signal to stop, if no rank fails


class Arrangement(NamedTuple):
    """How ranks are started."""

    ranks: int
    place: Callable[[int], str] = lambda rank: ""  # where a rank stands in the layout
    args: tuple[Any, ...] = ()  # of the function that the ranks call, after their number and how many they are
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
    A failure that comes twice in the same step would come again, and so there is no third start. An
    `elastic` run goes on without ranks that are lost, and with them when they are back.
    """
    asked = Arrangement(nproc, place, (arguments,))
    return Launcher(f"{__name__}:run_module", asked, interrupted, elastic).run(restarts)


class Launcher:
    """The starts of one run, in which each rank calls `function(rank, ranks, *args)`, named "module:function".

    Ranks that are not `attached` to this process's terminal leave it to the caller to show what they say, as a notebook
    does: `say` gets the launcher's own sentences, perhaps from a handler of signals, and `look` is called several times
    a second, and once more when the ranks of a start have ended.
    """

    def __init__(
        self,
        function: str,
        asked: Arrangement,
        interrupted: str,
        elastic: Elastic | None = None,
        *,
        attached: bool = True,
        say: Callable[[str], None] = say,
        look: Callable[[], None] = lambda: None,
    ):
        self.function, self.interrupted, self.elastic = function, interrupted, elastic
        self.attached, self.say, self.look = attached, say, look
        self.run_id = os.environ.get(RUN, uuid.uuid4().hex)
        self.told = 0  # the signal to stop, if there was one
        self.ranks: Processes | None = None  # of the start under way
        self.roster = DevicePool(asked.ranks, elastic.gpus if elastic else 0, self._step)
        self.now = elastic.arrange(asked.ranks) if elastic else asked
        self.growing = False  # the start under way was told to stop, because ranks are back
        self.places: list[int] = []  # of the ranks of that start
        self.furthest = 0  # step that a start has come to

    def run(self, restarts: int = 0) -> int:
        """All starts, with up to so many after failures; the exit code, as `launch` has it."""
        with self.signals_handed_on():
            try:
                return self.all(Restarts(restarts))
            except KeyboardInterrupt:  # the second, between two starts
                return self._ended()

    def _ended(self) -> int:
        """By a second Ctrl-C."""
        if self.attached:
            say_ended()
        else:
            self.say(ENDED)
        return INTERRUPTED

    def all(self, policy: Restarts) -> int:
        """Start after start, until one ends well, or another would not help; the exit code."""
        start = 0
        while True:
            if self.elastic and self.now.said:
                self.say(self.now.said)
            code, failure, dead = self.once(start)
            start += 1
            if self.growing and code == TERMINATED and not self.told:
                self._arrange()
            elif failure is None or not self._again(policy, failure, dead):
                return code
            if self.told:
                self.say(f"stopped by {signal_name(self.told)} between two starts; no step was saved since")
                return INTERRUPTED if self.told == signal.SIGINT else code

    def _again(self, policy: Restarts, failure: End, dead: list[int]) -> bool:
        """After a failure: wait, and arrange another start, if one may help."""
        if self.elastic and (lost := self.roster.lose([self.places[rank] for rank in dead], lambda: bool(self.told))):
            self.say(f"{ranks_text(lost)} {'does' if len(lost) == 1 else 'do'} not answer: {self.roster}")
            return self._arrange()
        verdict = policy.after(failure)
        if not verdict.again:
            if verdict.why:
                self.say(verdict.why)
            return False
        pause = f" in {verdict.pause:.0f} s" if verdict.pause else ""
        self.say(f"starting again from the last checkpoint{pause}: {verdict.why}")
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
                self.say(f"error: {problem}")
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

    def _while_ranks_work(self) -> None:
        """While ranks work: if lost ones are back, and more of them are of use, have all save and stop."""
        self.look()
        if not self.elastic or self.growing or self.told or not self._step_now():  # no rank listens before its steps
            return
        if back := self.roster.look(self.elastic.every):
            with suppress(UserError):
                self.growing = self.elastic.arrange(len(self.roster.here)).args != self.now.args
            alone = len(back) == 1
            if self.growing and self.ranks:
                self.say(f"{ranks_text(back)} {'is' if alone else 'are'} back: {self.roster}")
                self.ranks.tell(signal.SIGUSR1)
            else:
                self.say(f"{ranks_text(back)} answer{'s' * alone} again; the layout stays what it is")

    @contextmanager
    def signals_handed_on(self) -> Iterator[None]:
        """To the ranks; signals that are ignored, as SIGHUP is under nohup, stay so. Only a main thread hears any."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        launcher = os.getpid()

        def hand_on(number: int, _: object) -> None:
            if os.getpid() != launcher:  # a rank that has just been forked
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            if number == self.told == signal.SIGINT:
                raise KeyboardInterrupt
            self.told = number
            if number == signal.SIGINT and not (self.ranks and self.ranks.board.place(0)):
                self.say(self.interrupted)  # else rank 0 does, which may be drawing on the terminal
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
            added = {RUN: self.run_id, RESTARTS: str(start), STORE: f"{home}/store", SECRET: secrets.token_hex(32)}
            added[logs.LIVES] = f"{home}/logging"
            added |= self.roster.environment(os.environ) | ({PLANNED: f"{self.now.took:.3f}"} if start else {})
            env = {"OMP_NUM_THREADS": str(threads), **os.environ, **added}
            ranks = self.ranks = Processes(nproc, Path(home), attached=self.attached)
            try:
                ranks.start(self.function, *self.now.args, env=env, threads=threads)
                if self.told:
                    ranks.tell(self.told)  # those that it was too early for
                ends = ranks.watch(self._grace, each=self._while_ranks_work)
            except KeyboardInterrupt:  # the second
                return self._ended(), None, []
            finally:
                self._step()
                self.ranks = None
                ranks.kill()
                logs.wait_for(Path(added[logs.LIVES]))  # the ranks' last words come before what is said of them
                self.look()
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
            self.say(f"stopped by {signal_name(self.told)}; no step was saved since")
        said = first.code in (-self.told, 2)  # by the lines above, or by the rank: bad input
        silent = [end for end in ends if (end.kind, end.doubt) == (first.kind, first.doubt)]
        for end in silent if first.kind in ("hung", "stopped") else [first] if not said else []:
            where = f" ({self.now.place(end.rank)})" if self.now.place(end.rank) else ""
            self.say(f"rank {end.rank}{where} {end.how}")
            if end.crash:
                self.say(end.crash)
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
