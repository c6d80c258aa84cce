"""Faults on purpose: FIVEFOLD_FAULT=kill@rank=1,step=4 ends rank 1 in step 4, as a broken machine would.

    kill      SIGKILL to this process            raise   an exception
    stop      SIGSTOP: alive, and silent         term    SIGTERM, as a cluster's scheduler sends it
    segv      a read of address 0                usr1    SIGUSR1, as Slurm's --signal sends it
    nan       poisons a gradient                 hup     SIGHUP, as a terminal sends that is closed
    hang      a wait that never ends             slow    a quarter of a second more
    cut       closes its connections             full    a disk that has no room (at=write)
    lose      SIGKILL, and its device answers no more until step `until` (`DevicePool` in launch/local.py)
    spike     a loss and gradients 100 times too large
    flip      a bit that flips in memory
    skip      leaves out its next all_reduce          shape   enters it with one number too many
              (at a step, that of the gradient norm)

The words after @ say where: `rank`, `step`, `until` (each from `step` to it), and `at`, one of the places
that call `strike`: step (the default: after the gradients of a step, before its update), batch (the same, and `step` is
the number of the batch in the data order, which no rollback brings back; the default of spike), forward and backward of
each microbatch, optimizer, write, commit, retain and read of a checkpoint, memory (before a snapshot there counts),
matmul, disk and link of what `fivefold doctor` measures, and where bits flip: weight (of the model, after the update of
a step; the default of flip), shard (of the optimizer's states, likewise), compute (in the first microbatch of a step).
It happens in the first start of a run only, not in those after a failure; `starts=3` has it happen in three, and
`start=2` in the third alone. Several faults are separated by semicolons. Tests inject with it what docs/faults.md
promises to survive; without the variable nothing happens.
"""

import ctypes
import errno
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from fivefold.launch.world import rank_here, starts_before
from fivefold.support.errors import UserError

_SIGNALS = {name: getattr(signal, f"SIG{name.upper()}") for name in ("kill", "stop", "term", "usr1", "hup")}
POISON_KINDS = ("nan", "spike", "flip")  # kinds that the caller of `strike` carries out on its own tensors
FAULT_KINDS = (*_SIGNALS, "lose", "raise", "segv", "hang", "slow", "cut", "full", "skip", "shape", *POISON_KINDS)
FLIP_PLACES = ("weight", "shard", "compute")
_OF_STEPS = ("step", "batch", "forward", "backward", "optimizer")
_OF_STATE = ("write", "commit", "retain", "memory", "read")
FAULT_PLACES = (*_OF_STEPS, *_OF_STATE, "matmul", "disk", "link", *FLIP_PLACES)
_DEFAULT_PLACE = {"spike": "batch", "flip": "weight"}  # the default place of a kind; "step" for all others
_SLOW_SECONDS = 0.25  # seconds
SPIKE_FACTOR = 100.0


class Fault(NamedTuple):
    kind: str
    at: str = "step"
    rank: int | None = None
    step: int | None = None
    until: int | None = None  # the last step of several
    starts: int = 1  # it happens in so many starts of the run
    start: int | None = None  # or in this start alone, counted from 0

    def due(self, at: str, step: int | None) -> bool:
        """Whether it happens on this rank, at this place, in this step and start."""
        before = starts_before()
        if self.at != at or (before >= self.starts if self.start is None else before != self.start):
            return False
        if self.rank not in (None, rank_here()):
            return False
        last = self.step if self.kind == "lose" else self.until or self.step
        return step is None or self.step is None or self.step <= step <= (last or step)


@cache
def parse(text: str) -> tuple[Fault, ...]:
    """The faults that the value of FIVEFOLD_FAULT asks for."""
    return tuple(_parse_fault(word.strip(), text) for word in text.split(";") if word.strip())


def _parse_fault(word: str, text: str) -> Fault:
    kind, _, rest = word.partition("@")
    settings = dict(part.partition("=")[::2] for part in rest.split(",") if part)
    try:
        at = settings.pop("at", _DEFAULT_PLACE.get(kind, "step"))
        fault = Fault(kind, at, **{name: int(value) for name, value in settings.items()})
        if kind not in FAULT_KINDS or at not in ((*FLIP_PLACES, "read") if kind == "flip" else FAULT_PLACES):
            raise ValueError
    except (ValueError, TypeError):  # no number, or no such word
        raise UserError(
            f"FIVEFOLD_FAULT={text!r} is not KIND@rank=R,step=S,until=S,at=PLACE,starts=N,start=N, or several with ; "
            f"between them, with KIND of {', '.join(FAULT_KINDS)} and PLACE of {', '.join(FAULT_PLACES)}",
            "environment.fault",
        ) from None
    return fault


def strike(at: str, step: int | None = None) -> str:
    """Carry out the faults that are due at this place and step. Returns the kind of a poison, for the caller to apply
    to its own tensors; else an empty string."""
    due = [fault for fault in parse(os.environ.get("FIVEFOLD_FAULT", "")) if fault.due(at, step)]
    for fault in due:
        _note(fault)
        _happen(fault.kind)
    return next((fault.kind for fault in due if fault.kind in POISON_KINDS), "")


def _note(fault: Fault) -> None:
    """Write down that a fault happens, where the environment names a file for it."""
    if path := os.environ.get("FIVEFOLD_FAULTS_SEEN"):
        with open(path, "a") as file:  # at once: the process may end in the next line
            file.write(f"{fault.kind}@at={fault.at},rank={rank_here()},step={fault.step},start={starts_before()}\n")


def counts_as_lost(place: int, step: int) -> bool:
    """Whether a fault has this device of the machine count as lost, for a run that has come to `step`."""
    faults = parse(os.environ.get("FIVEFOLD_FAULT", ""))
    return any(fault.kind == "lose" and fault.rank == place and step < (fault.until or sys.maxsize) for fault in faults)


def _happen(kind: str) -> None:
    if kind == "raise":
        raise RuntimeError(f"FIVEFOLD_FAULT={os.environ['FIVEFOLD_FAULT']} was asked for, and happens")
    if kind == "segv":
        ctypes.string_at(0)
    if kind == "hang":
        threading.Event().wait()
    if kind == "slow":
        time.sleep(_SLOW_SECONDS)
    if kind == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if kind == "cut":
        _cut()
    if kind in ("skip", "shape"):
        _disagree(kind)
    if kind in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[kind])
    if kind == "lose":
        os.kill(os.getpid(), signal.SIGKILL)


def _disagree(kind: str) -> None:
    """Make the next all_reduce of this rank differ from its peers'."""
    import torch
    import torch.distributed as dist

    all_reduce = dist.all_reduce

    def wrong_once(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        dist.all_reduce = all_reduce
        if kind == "shape":
            return all_reduce(tensor.new_zeros(tensor.numel() + 1), *args, **options)
        return None

    dist.all_reduce = wrong_once


def _cut() -> None:
    """Shut down every TCP connection of this process, as if its link were cut."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.shutdown(socket.SHUT_RDWR)
