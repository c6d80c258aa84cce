"""Faults on purpose: FIVEFOLD_FAULT=kill@rank=1,step=4 ends rank 1 in step 4, as a broken machine would.

    kill      SIGKILL to this process            raise   an exception
    stop      SIGSTOP: alive, and silent         term    SIGTERM, as a cluster's scheduler sends it
    nan       poisons a gradient

The words after @ say where: `rank`, `step`, and `at`, one of the places that call `strike`: step (the default: after
the gradients of a step, before its update), write, commit and retain of a checkpoint. It happens in the first start
of a run only, not in those after a failure. Tests inject with it what docs/faults.md promises to survive; without the
variable nothing happens.
"""

import os
import signal
from functools import cache
from typing import NamedTuple

from fivefold.launch.world import RESTARTS
from fivefold.support.errors import UserError

KINDS = ("kill", "stop", "raise", "term", "nan")
PLACES = ("step", "write", "commit", "retain")


class Fault(NamedTuple):
    kind: str
    at: str = "step"
    rank: int | None = None
    step: int | None = None


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
            f"FIVEFOLD_FAULT={text!r} is not KIND@rank=R,step=S,at=PLACE, with KIND of {', '.join(KINDS)} and PLACE of "
            f"{', '.join(PLACES)}"
        ) from None
    return fault


def strike(at: str, step: int | None = None) -> bool:
    """Called where a fault may happen; True where the caller is to poison something."""
    fault = parse(os.environ.get("FIVEFOLD_FAULT", ""))
    if fault is None or fault.at != at or os.environ.get(RESTARTS, "0") != "0":
        return False
    elsewhere = fault.rank not in (None, int(os.environ.get("RANK", "0")))
    if elsewhere or (step is not None and fault.step not in (None, step)):
        return False
    if fault.kind == "raise":
        raise RuntimeError(f"FIVEFOLD_FAULT={os.environ['FIVEFOLD_FAULT']} was asked for, and happens")
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
    if fault.kind in signals:
        os.kill(os.getpid(), signals[fault.kind])
    return fault.kind == "nan"
