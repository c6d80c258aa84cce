"""A trace file read again: what every rank did in one of the traced steps, lane by lane, for a page that draws it.

lanes(Path("runs/demo/trace.json"), step=None)["ranks"][0]["lanes"]
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from fivefold.support.documents import BROKEN
from fivefold.support.errors import UserError
from fivefold.support.files import read_regular
from fivefold.trace.chrome import AXES, BESIDE, COMPUTE, SIMULATED, STEPS, WAITS

MOST = 1 << 26  # bytes of a file that is read
RANKS, SLICES = 32, 200_000  # that are shown, the first ones
_DIGITS = 18  # of a step's number


class _Event(msgspec.Struct):
    name: str
    ph: str
    pid: int = 0
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    cat: str = ""
    args: dict[str, Any] = {}


class _File(msgspec.Struct):
    traceEvents: list[_Event]
    otherData: dict[str, Any] = {}


def lanes(path: Path, step: int | None = None) -> dict[str, Any]:
    """Of one traced step, the last if none is named; times are microseconds from its first start. A sentence where the
    file is none of ours."""
    file = _read(path)
    windows = _windows(file)
    if not windows:
        raise UserError(f"{path.name} has no traced step")
    chosen = next(reversed(windows)) if step is None else step
    if chosen not in windows:
        raise UserError(f"step {chosen} is not traced; those that are: {', '.join(map(str, windows))}")
    starts = sorted(start for start, _ in windows.values())
    first, last = windows[chosen]
    later = next((start for start in starts if start > first), float("inf"))
    numbers = sorted({event.pid for event in file.traceEvents})
    mine: dict[int, list[_Event]] = {number: [] for number in numbers[:RANKS]}
    slices = 0
    for event in file.traceEvents:
        drawn = _drawn(event, first, later)
        slices += drawn and event.pid in mine
        if event.pid in mine and (event.ph == "M" or (drawn and slices <= SLICES)):
            mine[event.pid].append(event)
    found = {
        "steps": list(windows),
        "step": chosen,
        "microseconds": last - first,
        "ranks": [_rank(events, number, first) for number, events in mine.items()],
        "left_out": max(0, len(numbers) - RANKS),
        "slices_left_out": max(0, slices - SLICES),
    }
    return found | {name: file.otherData.get(name) for name in ("layout", "schedule", "summary")}


def _read(path: Path) -> _File:
    try:
        return msgspec.json.decode(read_regular(path, MOST), type=_File)
    except FileNotFoundError:
        raise UserError(f"there is no {path.name}; trace.steps=2 makes a run keep one") from None
    except OSError as error:
        raise UserError(f"{path.name} cannot be read: {error.strerror}; ui.perfetto.dev opens large ones") from None
    except BROKEN as error:
        raise UserError(f"{path.name} is no trace: {error}") from None


def _windows(file: _File) -> dict[int, tuple[float, float]]:
    """By step: from the first start on any rank to the last end."""
    found: dict[int, tuple[float, float]] = {}
    for event in file.traceEvents:
        number = event.name.removeprefix("step ")
        if event.tid == STEPS and event.ph == "X" and number.isdecimal() and len(number) <= _DIGITS:
            start, end = found.get(int(number), (event.ts, event.ts))
            found[int(number)] = min(start, event.ts), max(end, event.ts + event.dur)
    return dict(sorted(found.items()))


def _drawn(event: _Event, first: float, later: float) -> bool:
    """Whether it is a slice of a step that begins at `first`; the next one does `later`."""
    return event.ph == "X" and event.tid != STEPS and first <= event.ts < later


def _rank(events: list[_Event], number: int, first: float) -> dict[str, Any]:
    """Lanes in the viewer's order; a slice is its start, its length, its name and its category."""
    names, name, slices = dict[int, str](), f"rank {number}", defaultdict[int, list[list[Any]]](list)
    for event in events:
        if event.ph == "M" and event.name == "process_name":
            name = str(event.args.get("name", name))
        elif event.ph == "M" and event.name == "thread_name":
            names[event.tid] = str(event.args.get("name", ""))
        elif event.ph == "X":
            kind = event.args.get("kind", event.cat) if event.cat in ("compute", "simulated") else event.cat
            slices[event.tid].append([round(event.ts - first, 1), round(event.dur, 1), event.name, kind])
    made = [{"name": names.get(tid, ""), "kind": _kind(tid), "slices": slices[tid]} for tid in sorted(slices)]
    return {"rank": number, "name": name, "lanes": made}


def _kind(thread: int) -> str:
    if thread >= AXES:
        return "communication"
    return {COMPUTE: "measured", BESIDE: "measured", WAITS: "waits"}.get(
        thread, "simulated" if thread >= SIMULATED else ""
    )
