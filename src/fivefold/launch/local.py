"""Launches the N ranks of a run on this machine, for `--nproc N` and `ff.train`. Clusters use torchrun or Slurm.

It replaces torchrun, which answers Ctrl-C and a lost rank with pages of text: here the first rank to fail is named in
one line, the others get a moment to print what they know, and none is left behind.
"""

import math
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
from fivefold.launch import faults, rank_log
from fivefold.launch.exits import ENDED_AT_ONCE, INTERRUPTED, STOP_SIGNALS, TERMINATED, End, say, say_ended, signal_name
from fivefold.launch.handshake import ranks_text
from fivefold.launch.host import cores
from fivefold.launch.rendezvous import SECRET_ENV
from fivefold.launch.supervisor import Supervisor
from fivefold.launch.world import PLANNED_ENV, RESTARTS_ENV, RUN_ID_ENV, STORE_ENV
from fivefold.support.errors import PeerLost, Problem, UserError

# ---- restarts -------------------------------------------------------------------------------------------------------
# Whether to start again after a failure, and after how long. A failure that comes twice in the same place ends the run.
#
# policy = Restarts(3)
# policy.after(failure)      # RestartVerdict(again=True, why="1 of 3", pause=0.0)
# policy.after(failure)      # RestartVerdict(again=False, why="the same failure came twice ...")


FIRST, LONGEST = 1.0, 60.0  # seconds of pause after a start without progress; each further one pauses twice as long
_STEP = re.compile(r"\bstep (\d+)")


class RestartVerdict(NamedTuple):
    again: bool
    why: str
    pause: float = 0.0  # seconds before the next start


class Restarts:
    """The failures of one run. Progress, to a later step than any before, clears those that came earlier."""

    def __init__(self, allowed: int):
        self.allowed, self.done = allowed, 0
        self.furthest = -1  # step
        self.seen: set[tuple[int, str, str, str]] = set()  # signatures of failures since the last progress
        self.without_progress = 0  # starts since then

    def after(self, failure: End) -> RestartVerdict:
        step = _STEP.search(failure.place)
        if step and int(step[1]) > self.furthest:
            self.furthest, self.without_progress = int(step[1]), 0
            self.seen.clear()
        if self.done >= self.allowed:
            return RestartVerdict(again=False, why=f"all {self.allowed} restarts are used up" if self.allowed else "")
        if failure.signature in self.seen:
            return RestartVerdict(
                again=False, why="the same failure came twice without progress: it is not tried again"
            )
        self.seen.add(failure.signature)
        pause = min(LONGEST, FIRST * 2 ** (self.without_progress - 1)) if self.without_progress else 0.0
        self.done, self.without_progress = self.done + 1, self.without_progress + 1
        return RestartVerdict(again=True, why=f"{self.done} of {self.allowed}", pause=pause)


# ---- devices --------------------------------------------------------------------------------------------------------
# The slots of this machine in which ranks can be started: GPUs, or shares of the CPU.
#
# After a failure the slots of the ranks that died are tried. If a slot answers, its failure has passed; if it does not,
# it is lost, and tried again from time to time until it answers.


_SLOT_TIMEOUT = 60.0  # seconds for a slot to answer
_GPUS_DIR = Path("/proc/driver/nvidia/gpus")
SHARED_GPU_HOST_PREFIX = "fivefold-rank-"  # how the NCCL_HOSTID of ranks that share a GPU begins
# Whether a GPU computes, asked in a process of its own: a driver that hangs blocks the process that calls it.
_GPU_TRIAL = "import torch; x = torch.ones(256, 256, device='cuda'); assert float((x @ x).sum()) == 256**3"


class DevicePool:
    def __init__(self, ranks: int, gpus: int, step: Callable[[], int] = lambda: 0):
        """`gpus` of this machine, which ranks share if they are more; with 0, ranks compute on the CPU. `step` returns
        the step that the run has come to, for faults that are injected."""
        self.ranks, self.gpus, self.step = ranks, gpus, step
        self.lost: set[int] = set()
        self.last_trial = time.monotonic()
        self.trials: dict[int, subprocess.Popen[bytes]] = {}  # of lost slots, by slot

    @property
    def here(self) -> list[int]:
        """The slots that are not lost."""
        return [slot for slot in range(self.ranks) if slot not in self.lost]

    def __str__(self) -> str:
        return f"{len(self.here)} of {self.ranks} are here"

    def lose(self, slots: Sequence[int], stopping: Callable[[], bool] = lambda: False) -> list[int]:
        """Try some slots, and return those that do not answer, which are lost. Once `stopping` returns True, it does
        not wait for answers."""
        trials = {slot: self._trial(slot) for slot in slots}
        deadline = time.monotonic() + _SLOT_TIMEOUT
        while any(trial.poll() is None for trial in trials.values()) and time.monotonic() < deadline and not stopping():
            time.sleep(0.01)
        deadline = 0.0 if stopping() else deadline
        silent = [slot for slot, trial in trials.items() if not self._answers(slot, trial, deadline)]
        self.lost.update(silent)
        self.last_trial = time.monotonic()
        return silent

    def look(self, every: float) -> list[int]:
        """Try the lost slots once in `every` seconds, without waiting for them; called again and again while ranks
        work. Returns the slots that answer by now, which are no longer lost."""
        if self.lost and not self.trials and time.monotonic() - self.last_trial >= every:
            self.last_trial = time.monotonic()
            self.trials = {slot: self._trial(slot) for slot in self.lost}
        if not self.trials:
            return []
        running = any(trial.poll() is None for trial in self.trials.values())
        if running and time.monotonic() - self.last_trial < _SLOT_TIMEOUT:
            return []
        trials, self.trials = self.trials, {}
        back = [slot for slot, trial in trials.items() if self._answers(slot, trial, 0.0)]
        self.lost.difference_update(back)
        return back

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """The variables that keep ranks off the lost slots."""
        if not self.gpus or not self.lost:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(self._device(slot, env) for slot in self.here))}

    def _device(self, slot: int, env: Mapping[str, str] = os.environ) -> str:
        """The slot's GPU, as CUDA_VISIBLE_DEVICES names it."""
        visible = [word for word in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
        return visible[slot % len(visible)] if visible else str(slot % self.gpus)

    def _trial(self, slot: int) -> "subprocess.Popen[bytes]":
        """Start a process that exits with 0 if the slot's device computes."""
        env = {**os.environ, **({"CUDA_VISIBLE_DEVICES": self._device(slot)} if self.gpus else {})}
        command = [sys.executable, "-c", _GPU_TRIAL if self.gpus else "pass"]
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _answers(self, slot: int, trial: "subprocess.Popen[bytes]", deadline: float) -> bool:
        try:
            code = trial.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            trial.kill()
            with suppress(subprocess.TimeoutExpired):  # a process that waits for a driver cannot be ended
                trial.wait(1)
            return False
        return code == 0 and not faults.counts_as_lost(slot, self.step())


def gpus_here() -> list[str]:
    """The GPUs of this machine that its driver lists, by name: 'NVIDIA H200'. No torch, and no CUDA, is needed."""
    models = []
    for file in sorted(_GPUS_DIR.glob("*/information")):
        with suppress(OSError):
            model = re.search(r"^Model:\s*(.+?)\s*$", file.read_text(errors="replace"), re.MULTILINE)
            models.append(model[1] if model else "")
    return models


def visible_gpus(env: Mapping[str, str] = os.environ, gpus: int | None = None) -> int:
    """How many of this machine's `gpus` CUDA will show to a process."""
    total, visible = len(gpus_here()) if gpus is None else gpus, env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return total
    names = [name.strip() for name in visible.split(",")]
    # CUDA shows those before the first that is no GPU: "-1", "NoDevFiles" (which Slurm sets), "" or "9" of eight. If
    # one comes twice, it shows none.
    ends = (n for n, name in enumerate(names) if not (name.startswith(("GPU-", "MIG-")) or _index(name) < total))
    shown = names[: next(ends, len(names))]
    return min(total, len(shown)) if len(set(shown)) == len(shown) else 0


def _index(name: str) -> float:
    return int(name) if name.isascii() and name.isdecimal() else math.inf


def gpus_to_share(config: TrainConfig) -> int:
    """How many GPUs of this machine ranks can have. Where its driver lists none (in some containers), torch is asked in
    a process of its own, since this one may have to fork the ranks: it takes seconds."""
    if config.device == "cpu":
        return 0
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        ask = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
        return visible_gpus() or int(subprocess.run(ask, capture_output=True, text=True, timeout=_SLOT_TIMEOUT).stdout)
    return 0


_SHARING_HINT = "train.share_gpu=nccl lets ranks of one machine share its GPUs"


def sharing_problem(config: TrainConfig, gpus: int, local_ranks: int, *, apart: bool = False) -> Problem | None:
    """Why `train.share_gpu=nccl` cannot be, with so many GPUs for the ranks of a node; None when it can."""
    if config.share_gpu != "nccl":
        return None
    if apart:
        slow = "these may be on several machines, between which it would slow NCCL down; leave it out"
        return Problem("train.share_gpu.machines", f"{_SHARING_HINT}, and {slow}")
    if local_ranks == 1:
        return None
    if config.device == "mixed":
        beyond = "with train.device=mixed those beyond the GPUs compute on the CPU; nearest: train.device=cuda"
        return Problem("train.share_gpu.mixed", f"{_SHARING_HINT}, and {beyond}")
    if not gpus:
        cpu = "these compute on the CPU; nearest: train.share_gpu=gloo"
        return Problem("train.share_gpu.cpu", f"{_SHARING_HINT}, and {cpu}")
    return owning_problem(local_ranks, gpus) if local_ranks <= gpus else None


def owning_problem(ranks: int, gpus: int) -> Problem:
    """What is wrong with `train.share_gpu=nccl` where no rank shares its GPU."""
    why = "it makes each rank a host of its own for NCCL, without NVLink and shared memory"
    own = f"each of these {ranks} has one of its own ({gpus} here): {why}; leave it out"
    return Problem("train.share_gpu.own", f"{_SHARING_HINT}, and {own}")


def check_sharing(config: TrainConfig, ranks: int) -> None:
    """Raises UserError if so many ranks, started here, cannot share this machine's GPUs as the job asks."""
    if config.share_gpu == "nccl" and ranks > 1 and (p := sharing_problem(config, gpus_to_share(config), ranks)):
        raise UserError(p)


# ---- local ----------------------------------------------------------------------------------------------------------


_END_GRACE = 8.0  # seconds for the other ranks to end after a first failure or Ctrl-C; then they are killed
_SAVE_GRACE = 600.0  # seconds for a last checkpoint after a signal to stop, if no rank fails


class Arrangement(NamedTuple):
    """How ranks are started."""

    ranks: int
    place: Callable[[int], str] = lambda rank: ""  # where a rank stands in the layout
    args: tuple[Any, ...] = ()  # of the function that the ranks call, after their number and how many they are
    note: str = ""  # a sentence about it, to print before the start
    seconds: float = 0.0  # that it took to choose it


class Elastic(NamedTuple):
    """How a run goes on without ranks that are lost."""

    arrange: Callable[[int], Arrangement]  # for a number of ranks; UserError if there is none
    gpus: int = 0  # of this machine, if ranks compute on them
    every: float = 30.0  # seconds between trials of lost ranks


def launch(
    nproc: int,
    arguments: list[str],
    place: Callable[[int], str] = lambda rank: "",
    restarts: int = 0,
    interrupted: str = "stopping; Ctrl-C again ends at once",
    elastic: Elastic | None = None,
) -> int:
    """Run `python -m ARGUMENTS` as `nproc` ranks, and up to `restarts` times again if a rank fails.

    `place` says where a rank stands in the layout. Signals to stop are passed on to the ranks, which save before they
    end. The first Ctrl-C prints the sentence `interrupted`, a second one ends all ranks at once. Returns 0, the first
    failure's exit code, 130 after Ctrl-C, or 143 after another signal and a checkpoint.
    A failure that comes twice in the same step would come again, so there is no third start. An `elastic` run goes on
    without ranks that are lost, and with them when they are back.
    """
    arrangement = Arrangement(nproc, place, (arguments,))
    return Launcher(f"{__name__}:run_module", arrangement, interrupted, elastic).run(restarts)


class Launcher:
    """The starts of one run, in which each rank calls `function(rank, ranks, *args)`, named "module:function".

    Ranks that are not `attached` to this process's terminal leave it to the caller to show their output, as a notebook
    does: `say` gets the launcher's own sentences, perhaps from a signal handler, and `look` is called several times a
    second, and once more when the ranks of a start have ended.
    """

    def __init__(
        self,
        function: str,
        arrangement: Arrangement,
        interrupted: str,
        elastic: Elastic | None = None,
        *,
        attached: bool = True,
        say: Callable[[str], None] = say,
        look: Callable[[], None] = lambda: None,
    ):
        self.function, self.interrupted, self.elastic = function, interrupted, elastic
        self.attached, self.say, self.look = attached, say, look
        self.run_id = os.environ.get(RUN_ID_ENV, uuid.uuid4().hex)
        self.stop_signal = 0  # that this process got; 0: none yet
        self.supervisor: Supervisor | None = None  # of the start under way
        self.devices = DevicePool(arrangement.ranks, elastic.gpus if elastic else 0, self._step)
        self.arrangement = elastic.arrange(arrangement.ranks) if elastic else arrangement
        self.growing = False  # the ranks of the start under way were asked to stop, because lost ranks are back
        self.slots: list[int] = []  # of the ranks of that start
        self.furthest = 0  # step that a start has come to

    def run(self, restarts: int = 0) -> int:
        """Run all starts, up to `restarts` of them after failures; returns the exit code, as `launch` does."""
        with self.passing_signals_on():
            try:
                return self.run_all(Restarts(restarts))
            except KeyboardInterrupt:  # the second, between two starts
                return self._end_at_once()

    def _end_at_once(self) -> int:
        """Report a second Ctrl-C; returns the exit code."""
        if self.attached:
            say_ended()
        else:
            self.say(ENDED_AT_ONCE)
        return INTERRUPTED

    def run_all(self, policy: Restarts) -> int:
        """Run start after start until one succeeds, or another would not help; returns the exit code."""
        start = 0
        while True:
            if self.elastic and self.arrangement.note:
                self.say(self.arrangement.note)
            code, failure, failed_ranks = self.run_once(start)
            start += 1
            if self.growing and code == TERMINATED and not self.stop_signal:
                self._rearrange()
            elif failure is None or not self._prepare_restart(policy, failure, failed_ranks):
                return code
            if self.stop_signal:
                self.say(f"stopped by {signal_name(self.stop_signal)} between two starts; no step was saved since")
                return INTERRUPTED if self.stop_signal == signal.SIGINT else code

    def _prepare_restart(self, policy: Restarts, failure: End, failed_ranks: list[int]) -> bool:
        """After a failure: if another start may help, wait and arrange it. Returns whether it may."""
        slots = [self.slots[rank] for rank in failed_ranks]
        if self.elastic and (lost := self.devices.lose(slots, lambda: bool(self.stop_signal))):
            self.say(f"{ranks_text(lost)} {'does' if len(lost) == 1 else 'do'} not answer: {self.devices}")
            return self._rearrange()
        verdict = policy.after(failure)
        if not verdict.again:
            if verdict.why:
                self.say(verdict.why)
            return False
        pause = f" in {verdict.pause:.0f} s" if verdict.pause else ""
        self.say(f"starting again from the last checkpoint{pause}: {verdict.why}")
        end = time.monotonic() + verdict.pause
        while not self.stop_signal and time.monotonic() < end:
            time.sleep(0.1)
        return not self.elastic or self._rearrange()  # ranks may have come back in the start that failed

    def _rearrange(self) -> bool:
        """Arrange the job on the ranks that are here. Returns False if it cannot run on so many."""
        assert self.elastic is not None
        try:
            self.arrangement = self.elastic.arrange(len(self.devices.here))
        except UserError as error:
            for problem in error.problems:
                self.say(f"error: {problem}")
            return False
        return True

    def _step(self) -> int:
        """The step that the run has come to."""
        self.furthest = max(self.furthest, self._step_now())
        return self.furthest

    def _step_now(self) -> int:
        """The step that the start under way is in; 0 if its ranks have not begun one."""
        step = re.match(r"step (\d+)", self.supervisor.board.place(0) if self.supervisor else "")
        return int(step[1]) if step else 0

    def _while_ranks_work(self) -> None:
        """Called while ranks work: if lost ranks are back, and a layout can use them, have all save and stop."""
        self.look()
        # Before its first step no rank answers the signal.
        if not self.elastic or self.growing or self.stop_signal or not self._step_now():
            return
        if back := self.devices.look(self.elastic.every):
            with suppress(UserError):
                self.growing = self.elastic.arrange(len(self.devices.here)).args != self.arrangement.args
            alone = len(back) == 1
            if self.growing and self.supervisor:
                self.say(f"{ranks_text(back)} {'is' if alone else 'are'} back: {self.devices}")
                self.supervisor.send_signal(signal.SIGUSR1)
            else:
                self.say(f"{ranks_text(back)} answer{'s' * alone} again; the layout stays what it is")

    @contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """Pass signals to stop on to the ranks. Ignored signals, as SIGHUP is under nohup, stay ignored. Python runs
        signal handlers in the main thread alone, so in another thread this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        launcher = os.getpid()

        def pass_on(number: int, _: object) -> None:
            if os.getpid() != launcher:  # a rank that has just been forked
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            if number == self.stop_signal == signal.SIGINT:
                raise KeyboardInterrupt
            self.stop_signal = number
            if number == signal.SIGINT and not (self.supervisor and self.supervisor.board.place(0)):
                self.say(self.interrupted)  # else rank 0 prints it, which may be drawing on the terminal
            if self.supervisor:
                self.supervisor.send_signal(number)

        handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, pass_on) for number in handled}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def run_once(self, start: int) -> tuple[int, End | None, list[int]]:
        """Run one start. Returns its exit code, the failure if another start may help, and the ranks whose failure no
        peer explains."""
        nproc, self.growing = self.arrangement.ranks, False
        self.slots = self.devices.here[:nproc]
        threads = None if "OMP_NUM_THREADS" in os.environ else max(1, cores() // nproc)
        with tempfile.TemporaryDirectory(prefix="fivefold-") as home:  # private to this user: no port is opened
            added = {
                RUN_ID_ENV: self.run_id,
                RESTARTS_ENV: str(start),
                STORE_ENV: f"{home}/store",
                SECRET_ENV: secrets.token_hex(32),
            }
            added[rank_log.LOCK_FILE] = f"{home}/log-lock"
            added |= self.devices.environment(os.environ)
            if start:
                added[PLANNED_ENV] = f"{self.arrangement.seconds:.3f}"
            env = {"OMP_NUM_THREADS": str(threads), **os.environ, **added}
            supervisor = self.supervisor = Supervisor(nproc, Path(home), attached=self.attached)
            try:
                supervisor.start(self.function, *self.arrangement.args, env=env, threads=threads)
                if self.stop_signal:
                    supervisor.send_signal(self.stop_signal)  # it came before all ranks had started
                ends = supervisor.watch(self._grace, on_check=self._while_ranks_work)
            except KeyboardInterrupt:  # the second
                return self._end_at_once(), None, []
            finally:
                self._step()
                self.supervisor = None
                supervisor.kill()
                # The ranks' last lines come before the launcher's about them.
                rank_log.wait_until_written(Path(added[rank_log.LOCK_FILE]))
                self.look()
        return *self._outcome(ends), [end.rank for end in ends if end.accused]

    def _grace(self, end: End) -> float:
        """The seconds that the other ranks have after one has ended."""
        if end.code in (INTERRUPTED, TERMINATED):
            return _SAVE_GRACE
        if self.stop_signal and end.code == -self.stop_signal:
            return 1.0  # the signal came before the rank handled it, so no checkpoint can come of it
        return _END_GRACE

    def _outcome(self, ends: list[End]) -> tuple[int, End | None]:
        """Report how the ranks of a start ended. Returns the exit code, and the failure if another start may help."""
        first = min(ends, key=lambda end: end.blame)
        if first.kind == "returned":
            return 0, None
        if any(end.code in (INTERRUPTED, TERMINATED) for end in ends):  # a rank's code after all have saved
            return INTERRUPTED if self.stop_signal == signal.SIGINT else TERMINATED, None
        if self.stop_signal:
            self.say(f"stopped by {signal_name(self.stop_signal)}; no step was saved since")
        # In the line above, or by the rank itself: bad input.
        reported = first.code == 2 or (self.stop_signal > 0 and first.code == -self.stop_signal)
        to_report = [] if reported else [first]
        only_waited = len(ends) > 1 and all(end.doubt == 3 for end in ends)
        if only_waited:
            self.say("all ranks only waited for others, so none is to blame by itself")
            to_report = ends
        elif first.kind in ("hung", "stopped"):
            to_report = [end for end in ends if (end.kind, end.doubt) == (first.kind, first.doubt)]
        for end in to_report:
            where = f" ({self.arrangement.place(end.rank)})" if self.arrangement.place(end.rank) else ""
            self.say(f"rank {end.rank}{where} {end.waited if only_waited else end.how}")
            if end.crash:
                self.say(end.crash)
        code = next((end.code for end in ends if end.code > 0 and end.code != PeerLost.code), 1)
        if self.stop_signal == signal.SIGINT and reported:
            code = INTERRUPTED
        return code, None if self.stop_signal or code == 2 else first


def run_module(rank: int, world: int, arguments: list[str]) -> NoReturn:
    """Run `python -m ARGUMENTS` in this process."""
    sys.argv = arguments
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except Exception:
        traceback.print_exc()  # multiprocessing would put a line of its own before it
        sys.exit(1)
    finally:
        rank_log.stop()  # before its peers notice the end: this rank's lines explain theirs
    sys.exit(0)
