"""Reads a trace file: the lanes of every rank in one of the traced steps, for a page that draws them.

read_lanes(Path("runs/demo/trace.json"), step=None)["ranks"][0]["lanes"]
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from fivefold.support.errors import UserError
from fivefold.support.files import read_regular
from fivefold.support.parsing import PARSE_ERRORS
from fivefold.tracing.chrome import LaneNumber

_MAX_BYTES = 1 << 26  # of a file
_MAX_RANKS = 32  # the first ones are shown
_MAX_SLICES = 200_000  # the first ones are shown
_MAX_DIGITS = 18  # of a step's number


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


def read_lanes(path: Path, step: int | None = None) -> dict[str, Any]:
    """The lanes of a traced step, by default the last; times are microseconds from its first start.

    Raises UserError for a file that is not such a trace.
    """
    file = _read(path)
    windows = _windows(file)
    if not windows:
        raise UserError(f"{path.name} has no traced step", "trace.step")
    step = next(reversed(windows)) if step is None else step
    if step not in windows:
        raise UserError(f"step {step} is not traced; those that are: {', '.join(map(str, windows))}", "trace.step")
    starts = sorted(start for start, _ in windows.values())
    step_start, step_end = windows[step]
    next_start = next((start for start in starts if start > step_start), float("inf"))
    ranks = sorted({event.pid for event in file.traceEvents})
    by_rank: dict[int, list[_Event]] = {rank: [] for rank in ranks[:_MAX_RANKS]}
    slice_count = 0
    for event in file.traceEvents:
        in_step = _is_slice_of(event, step_start, next_start)
        slice_count += in_step and event.pid in by_rank
        if event.pid in by_rank and (event.ph == "M" or (in_step and slice_count <= _MAX_SLICES)):
            by_rank[event.pid].append(event)
    view = {
        "steps": list(windows),
        "step": step,
        "microseconds": step_end - step_start,
        "ranks": [_rank_lanes(events, rank, step_start) for rank, events in by_rank.items()],
        "left_out": max(0, len(ranks) - _MAX_RANKS),
        "slices_left_out": max(0, slice_count - _MAX_SLICES),
    }
    return view | {name: file.otherData.get(name) for name in ("layout", "schedule", "summary")}


def _read(path: Path) -> _File:
    try:
        return msgspec.json.decode(read_regular(path, _MAX_BYTES), type=_File)
    except FileNotFoundError:
        raise UserError(f"there is no {path.name}; trace.steps=2 makes a run keep one", "trace.missing") from None
    except OSError as error:
        raise UserError(
            f"{path.name} cannot be read: {error.strerror}; ui.perfetto.dev opens large ones", "file.read"
        ) from None
    except PARSE_ERRORS as error:
        raise UserError(f"{path.name} is not a trace: {error}", "file.syntax") from None


def _windows(file: _File) -> dict[int, tuple[float, float]]:
    """{step: (the first start on any rank, the last end)}."""
    windows: dict[int, tuple[float, float]] = {}
    for event in file.traceEvents:
        number = event.name.removeprefix("step ")
        if event.tid == LaneNumber.STEPS and event.ph == "X" and number.isdecimal() and len(number) <= _MAX_DIGITS:
            start, end = windows.get(int(number), (event.ts, event.ts))
            windows[int(number)] = min(start, event.ts), max(end, event.ts + event.dur)
    return dict(sorted(windows.items()))


def _is_slice_of(event: _Event, step_start: float, next_start: float) -> bool:
    """Whether it is a slice of the step between two starts."""
    return event.ph == "X" and event.tid != LaneNumber.STEPS and step_start <= event.ts < next_start


def _rank_lanes(events: list[_Event], rank: int, step_start: float) -> dict[str, Any]:
    """The lanes of a rank in the viewer's order; a slice is [start, duration, name, category]."""
    rank_name, lane_names = f"rank {rank}", dict[int, str]()
    slices: dict[int, list[list[Any]]] = defaultdict(list)
    for event in events:
        if event.ph == "M" and event.name == "process_name":
            rank_name = str(event.args.get("name", rank_name))
        elif event.ph == "M" and event.name == "thread_name":
            lane_names[event.tid] = str(event.args.get("name", ""))
        elif event.ph == "X":
            kind = event.args.get("kind", event.cat) if event.cat in ("compute", "simulated") else event.cat
            slices[event.tid].append([round(event.ts - step_start, 1), round(event.dur, 1), event.name, kind])
    lanes = [
        {"name": lane_names.get(tid, ""), "kind": _lane_kind(tid), "slices": slices[tid]} for tid in sorted(slices)
    ]
    return {"rank": rank, "name": rank_name, "lanes": lanes}


def _lane_kind(thread: int) -> str:
    if thread >= LaneNumber.AXES:
        return "communication"
    if thread == LaneNumber.WAITS:
        return "waits"
    if thread in (LaneNumber.COMPUTE, LaneNumber.BESIDE):
        return "measured"
    return "simulated" if thread >= LaneNumber.SIMULATED else ""
