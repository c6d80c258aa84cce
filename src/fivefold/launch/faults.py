"""Faults on purpose: FIVEFOLD_FAULT=kill@rank=1,step=4 ends rank 1 in step 4, as a broken machine would.

    kill      SIGKILL to this process            raise   an exception
    stop      SIGSTOP: alive, and silent         term    SIGTERM, as a cluster's scheduler sends it
    segv      a read of address 0                usr1    SIGUSR1, as Slurm's --signal sends it
    nan       poisons a gradient                 hup     SIGHUP, as a terminal sends that is closed
    hang      a wait that never ends             slow    a quarter of a second more

The words after @ say where: `rank`, `step`, and `at`, one of the places that call `strike`: step (the default: after
the gradients of a step, before its update), write, commit, retain and read of a checkpoint, and matmul, disk and link
of what `fivefold doctor` measures. It happens in the first start of a run only, not in those after a failure;
`starts=3` has it happen in three. Tests inject with it what docs/faults.md promises to survive; without the variable
nothing happens.
"""

import ctypes
import os
import signal
import threading
import time
from functools import cache
from typing import NamedTuple

from fivefold.launch.world import rank_here, starts_before
from fivefold.support.errors import UserError

_SIGNALS = {name: getattr(signal, f"SIG{name.upper()}") for name in ("kill", "stop", "term", "usr1", "hup")}
KINDS = (*_SIGNALS, "raise", "segv", "hang", "nan", "slow")
PLACES = ("step", "write", "commit", "retain", "read", "matmul", "disk", "link")
_SLOW = 0.25  # seconds


class Fault(NamedTuple):
    kind: str
    at: str = "step"
    rank: int | None = None
    step: int | None = None
    starts: int = 1


@cache
def parse(text: str) -> Fault | None:
    if not text:
        return None
    kind, _, rest = text.partition("@")
    words = dict(word.partition("=")[::2] for word in rest.split(",") if word)
    try:
        fault = Fault(kind, words.pop("at", "step"), **{word: int(value) for word, value in words.items()})
        if kind not in KINDS or fault.at not in PLACES:
            raise ValueError
    except (ValueError, TypeError):  # no number, or no such word
        raise UserError(
            f"FIVEFOLD_FAULT={text!r} is not KIND@rank=R,step=S,at=PLACE,starts=N, with KIND of {', '.join(KINDS)} and "
            f"PLACE of {', '.join(PLACES)}"
        ) from None
    return fault


def strike(at: str, step: int | None = None) -> bool:
    """Called where a fault may happen; True where the caller is to poison something."""
    fault = parse(os.environ.get("FIVEFOLD_FAULT", ""))
    if fault is None or fault.at != at or starts_before() >= fault.starts:
        return False
    elsewhere = fault.rank not in (None, rank_here())
    if elsewhere or (step is not None and fault.step not in (None, step)):
        return False
    if fault.kind == "raise":
        raise RuntimeError(f"FIVEFOLD_FAULT={os.environ['FIVEFOLD_FAULT']} was asked for, and happens")
    if fault.kind == "segv":
        ctypes.string_at(0)
    if fault.kind == "hang":
        threading.Event().wait()
    if fault.kind == "slow":
        time.sleep(_SLOW)
    if fault.kind in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[fault.kind])
    return fault.kind == "nan"
