"""A trace as Chrome's JSON, for ui.perfetto.dev: one process per rank, with one lane per kind of event.

    steps       the loop's steps
    compute     F, B, I, W with stage and microbatch, in them dispatch and combine of experts, and the optimizer
    beside      the second halves of joined pairs, where the two halves of a pair run alternately
    simulated   the same schedule on the simulator, with the medians of the measured durations
    waits       the rank's waits for messages between stages and for collectives
    dp, tp ...  the communication along each axis, with kind and bytes; overlapping calls have more than one lane

An arrow leads from a message's send to the action that consumes it.
"""

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fivefold.schedules.actions import SEND_KINDS, Action
from fivefold.schedules.clock import BusySpan
from fivefold.schedules.simulate import Simulation
from fivefold.support.errors import UserError
from fivefold.support.files import read_regular
from fivefold.support.parsing import PARSE_ERRORS
from fivefold.tracing.records import Flight, NamedSpan, RankTrace, StepWindow, Wait, partners
from fivefold.tracing.summary import TraceSummary

Event = dict[str, Any]
T = TypeVar("T", StepWindow, Flight)
STEPS, COMPUTE, BESIDE, SIMULATED, WAITS, AXES = 1, 2, 3, 4, 100, 200  # thread numbers: the order of the lanes
_PER_AXIS = 100  # lanes that an axis may have
_COLOURS = {"dispatch": "good", "combine": "bad"}  # Chrome's names of green and orange; others have a colour by name


def write(summary: TraceSummary, path: Path, figures: dict[str, Any] | None = None) -> None:
    """Writes the file atomically, with the `figures` of the summary, if they are given."""
    trace, painter = summary.trace, _LanePainter(summary)
    facts: dict[str, Any] = {
        "layout": trace.layout,
        "schedule": trace.schedule.name,
        "clock_error_us": round(1e6 * max(rank.clock_error for rank in trace.ranks), 3),
    }
    facts |= {"summary": figures} if figures else {}
    events = [event for rank in trace.ranks for event in painter.rank(rank)]
    document = {"displayTimeUnit": "ms", "otherData": facts, "traceEvents": events}
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, separators=(",", ":")) + "\n")
    part.replace(path)


class _LanePainter:
    """Makes the events of each rank."""

    def __init__(self, summary: TraceSummary):
        self.summary, self.trace = summary, summary.trace
        self.origin = min(rank.steps[0].start for rank in self.trace.ranks)

    def rank(self, rank: RankTrace) -> Iterator[Event]:
        yield _metadata(rank, 0, "process_name", name=f"rank {rank.rank}" + (f"  {rank.name}" if rank.name else ""))
        yield _metadata(rank, 0, "process_sort_index", sort_index=rank.rank)
        second = self.second_halves(rank)
        with_arrow = set[tuple[int, Action]]()  # (step, action): the first span of an action ends an arrow
        lanes = {STEPS: "steps", COMPUTE: "compute"} | ({BESIDE: "beside"} if second else {}) | {WAITS: "waits"}
        for number, name in lanes.items():
            yield from _lane(rank, number, name)
        for window in rank.steps:
            yield self.slice(rank, STEPS, f"step {window.step}", window, "step")
        for span in rank.actions:
            lane = BESIDE if span.action in second else COMPUTE
            yield self.action(rank, lane, span, "compute")
            if (key := (self.step(rank, span.start), span.action)) not in with_arrow:
                with_arrow.add(key)
                yield from self.arrow_end(rank, lane, span)
        for update in rank.updates:
            yield self.slice(rank, COMPUTE, update.name, update, "optimizer")
        starts = [span.start for span in rank.actions]
        for part in rank.parts:  # in the lanes of their actions
            index = bisect_right(starts, part.start) - 1
            lane = BESIDE if index >= 0 and rank.actions[index].action in second else COMPUTE
            yield self.slice(rank, lane, part.name, part, part.name) | {"cname": _COLOURS[part.name]}
        yield from self.simulated(rank)
        for wait in rank.waits:
            name = f"{wait.during} waits: {wait.axis} {wait.what}" if wait.during else f"{wait.axis} {wait.what}"
            yield self.slice(rank, WAITS, name, wait, "message" if wait.message else wait.axis)
        yield from self.flights(rank)

    def second_halves(self, rank: RankTrace) -> set[Action]:
        """The second actions of joined pairs, if pairs run alternately: then an action has several spans."""
        span_counts = Counter((self.step(rank, span.start), span.action) for span in rank.actions)
        return set(partners(self.trace.schedule).values()) if any(n > 1 for n in span_counts.values()) else set()

    def step(self, rank: RankTrace, time: float) -> int:
        return next((window.step for window in rank.steps if window.start <= time < window.end), 0)

    def simulated(self, rank: RankTrace) -> Iterator[Event]:
        """Each simulated run begins with the measured one; it may end later, and overlap with the next one."""
        number = self.summary.pipeline_of[rank.rank]
        simulation, pipeline = self.summary.simulations[number], self.trace.pipelines[number]
        timeline = _sequential_spans(simulation, rank.pp_rank)
        measured = [self.trace.run(pipeline, step) for step in range(self.trace.step_count)]
        windows = [run._replace(end=run.start + simulation.makespan) for run in measured]
        for thread, runs in enumerate(_without_overlaps(windows), start=SIMULATED):
            yield from _lane(rank, thread, "simulated")
            for run in runs:
                for span in timeline:
                    moved = span._replace(start=run.start + span.start, end=run.start + span.end)
                    yield self.action(rank, thread, moved, "simulated")

    def flights(self, rank: RankTrace) -> Iterator[Event]:
        for index, axis in enumerate(self.summary.axes):
            on_axis = [flight for flight in rank.flights if flight.axis == axis]
            ordered = sorted(on_axis, key=lambda flight: flight.start)
            for thread, flights in enumerate(_without_overlaps(ordered), start=AXES + index * _PER_AXIS):
                yield from _lane(rank, thread, axis)
                for flight in flights:
                    args: dict[str, Any] = {"axis": axis, "kind": flight.kind, "bytes": flight.payload}
                    if flight.during is not None:
                        args["during"] = str(flight.during)
                    yield self.slice(rank, thread, f"{axis} {flight.kind}", flight, axis) | {"args": args}
                    yield from self.arrow_start(rank, thread, flight)

    # ---- arrows --------------------------------------------------------------------------------------------------

    def arrow_start(self, rank: RankTrace, thread: int, flight: Flight) -> Iterator[Event]:
        if flight.during is not None and flight.during.kind in SEND_KINDS:
            yield self.arrow(rank, thread, "s", flight.start, flight.during)

    def arrow_end(self, rank: RankTrace, lane: int, span: BusySpan) -> Iterator[Event]:
        if span.action[:2] in self.trace.schedule.placement.channel_of:
            yield self.arrow(rank, lane, "f", span.start, span.action) | {"bp": "e"}

    def arrow(self, rank: RankTrace, thread: int, phase: str, time: float, action: Action) -> Event:
        """One end of the arrow of a message, which the action sends or uses; its id is the same at both ends."""
        channel = self.trace.schedule.placement.channel_of[action[:2]]
        kind, step = "g" if channel.gradients else "a", self.step(rank, time)
        message_id = f"{rank.pipeline}/{step}/{kind}{channel.target}.{action.microbatch}"
        place = {"ts": self.microseconds(time), "pid": rank.rank, "tid": thread}
        return {"name": "message", "cat": "message", "ph": phase, "id": message_id, **place}

    # ---- slices --------------------------------------------------------------------------------------------------

    def action(self, rank: RankTrace, thread: int, span: BusySpan, category: str) -> Event:
        args = {"kind": str(span.action.kind), "stage": span.action.stage, "microbatch": span.action.microbatch}
        return self.slice(rank, thread, str(span.action), span, category) | {"args": args}

    def slice(
        self,
        rank: RankTrace,
        thread: int,
        name: str,
        time: StepWindow | BusySpan | NamedSpan | Wait | Flight,
        category: str,
    ) -> Event:
        start = self.microseconds(time.start)
        place = {"ts": start, "pid": rank.rank, "tid": thread}
        duration = max(0.0, round(self.microseconds(time.end) - start, 3))
        return {"name": name, "cat": category, "ph": "X", **place, "dur": duration}

    def microseconds(self, time: float) -> float:
        return round(1e6 * (time - self.origin), 3)


def _metadata(rank: RankTrace, thread: int, name: str, /, **args: Any) -> Event:
    return {"name": name, "ph": "M", "ts": 0, "pid": rank.rank, "tid": thread, "args": args}


def _lane(rank: RankTrace, thread: int, name: str) -> Iterator[Event]:
    yield _metadata(rank, thread, "thread_name", name=name)
    yield _metadata(rank, thread, "thread_sort_index", sort_index=thread)


def _without_overlaps(spans: Sequence[T]) -> list[list[T]]:
    """Divides spans, which are in the order of their starts, into as few lanes without overlaps as possible."""
    lanes: list[list[T]] = []
    for span in spans:
        free = next((lane for lane in lanes if lane[-1].end <= span.start), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _sequential_spans(simulation: Simulation, place: int) -> list[BusySpan]:
    """A rank's simulated spans without overlaps: the two actions of a joined pair, which have the same time, divide it
    by their durations."""
    spans: list[BusySpan] = []
    for span in simulation.timeline[place]:
        if spans and spans[-1].action.joined:
            forward, backward = simulation.costs.f[spans[-1].action.stage], simulation.costs.b[span.action.stage]
            middle = span.start + (span.end - span.start) * forward / ((forward + backward) or 1.0)
            spans[-1], span = spans[-1]._replace(end=middle), span._replace(start=middle)
        spans.append(span)
    return spans


# ---- lanes ----------------------------------------------------------------------------------------------------------
# Reads a trace file: the lanes of every rank in one of the traced steps, for a page that draws them.
#
# lanes(Path("runs/demo/trace.json"), step=None)["ranks"][0]["lanes"]


MOST = 1 << 26  # bytes of a file that are read at most
RANKS, SLICES = 32, 200_000  # the first ones are shown
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


def lanes(path: Path, step: int | None = None) -> dict[str, Any]:
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
    numbers = sorted({event.pid for event in file.traceEvents})
    by_rank: dict[int, list[_Event]] = {number: [] for number in numbers[:RANKS]}
    slices = 0
    for event in file.traceEvents:
        in_step = _is_slice_of(event, step_start, next_start)
        slices += in_step and event.pid in by_rank
        if event.pid in by_rank and (event.ph == "M" or (in_step and slices <= SLICES)):
            by_rank[event.pid].append(event)
    view = {
        "steps": list(windows),
        "step": step,
        "microseconds": step_end - step_start,
        "ranks": [_rank_lanes(events, number, step_start) for number, events in by_rank.items()],
        "left_out": max(0, len(numbers) - RANKS),
        "slices_left_out": max(0, slices - SLICES),
    }
    return view | {name: file.otherData.get(name) for name in ("layout", "schedule", "summary")}


def _read(path: Path) -> _File:
    try:
        return msgspec.json.decode(read_regular(path, MOST), type=_File)
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
        if event.tid == STEPS and event.ph == "X" and number.isdecimal() and len(number) <= _MAX_DIGITS:
            start, end = windows.get(int(number), (event.ts, event.ts))
            windows[int(number)] = min(start, event.ts), max(end, event.ts + event.dur)
    return dict(sorted(windows.items()))


def _is_slice_of(event: _Event, step_start: float, next_start: float) -> bool:
    """Whether it is a slice of the step between two starts."""
    return event.ph == "X" and event.tid != STEPS and step_start <= event.ts < next_start


def _rank_lanes(events: list[_Event], number: int, step_start: float) -> dict[str, Any]:
    """The lanes of a rank in the viewer's order; a slice is [start, duration, name, category]."""
    names, name, slices = dict[int, str](), f"rank {number}", defaultdict[int, list[list[Any]]](list)
    for event in events:
        if event.ph == "M" and event.name == "process_name":
            name = str(event.args.get("name", name))
        elif event.ph == "M" and event.name == "thread_name":
            names[event.tid] = str(event.args.get("name", ""))
        elif event.ph == "X":
            kind = event.args.get("kind", event.cat) if event.cat in ("compute", "simulated") else event.cat
            slices[event.tid].append([round(event.ts - step_start, 1), round(event.dur, 1), event.name, kind])
    rank_lanes = [{"name": names.get(tid, ""), "kind": _kind(tid), "slices": slices[tid]} for tid in sorted(slices)]
    return {"rank": number, "name": name, "lanes": rank_lanes}


def _kind(thread: int) -> str:
    if thread >= AXES:
        return "communication"
    return {COMPUTE: "measured", BESIDE: "measured", WAITS: "waits"}.get(
        thread, "simulated" if thread >= SIMULATED else ""
    )
